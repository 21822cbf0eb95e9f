"""`python -m weightwire` is the `weightwire` command."""

from inference_plugin.cli import main

if __name__ == "__main__":
    main()

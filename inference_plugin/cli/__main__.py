"""`python -m inference_plugin.cli` is the `weightwire` command."""

from inference_plugin.cli import main

if __name__ == "__main__":
    main()

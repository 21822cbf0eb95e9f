"""`python -m inference_plugin.engines.sglang`: SGLang's server, all its arguments, with the extension."""

from __future__ import annotations

import os
import sys

from inference_plugin.engines.sglang import register, run_scheduler


def main() -> None:
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    register()
    load_plugins()
    try:
        launch_server(prepare_server_args(sys.argv[1:]), run_scheduler_process_func=run_scheduler)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()

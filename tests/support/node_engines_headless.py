"""`vllm serve --headless` on a host without an engine core, given its arguments as JSON. (The command `vllm` does not start in
the wheel for CPUs.)"""

from __future__ import annotations

import json
import sys

import tests.support.torchvision_here  # noqa: F401 -- before vLLM looks at a model
from tests.support.engines import flags_of


def main() -> None:
    from vllm.entrypoints.cli.serve import run_headless
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    flags = flags_of(json.loads(sys.argv[1]))
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(["--headless", *flags])
    arguments.api_server_count = 0
    run_headless(arguments)


if __name__ == "__main__":
    main()

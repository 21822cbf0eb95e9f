"""`torchrun` whose ranks are forked from a process that has imported torch already.

Usage: forked.py RANKS OUT_DIRECTORY PROGRAM [ARGUMENTS]. When all ranks have ended well, there is a file `WELL` in the directory.

`tests.support.preloaded` runs it. It is torchrun's own agent and rendezvous (`torchrun --standalone`); only the interpreters
of the ranks are not started anew, which takes ten seconds of CPU each.
"""

from __future__ import annotations

import runpy
import sys
import uuid
from pathlib import Path

WELL = "all-ranks-ended-well"


def main(ranks: int, out: Path, program: str, arguments: list[str]) -> None:
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # An event is named by `inspect.stack`, which looks through all of the thousands of modules that are imported.
    dynamic_rendezvous.get_method_name = lambda depth=2: "unnamed"
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="fork",
    )
    elastic_launch(config, run)(program, arguments)  # raises if a rank fails
    (out / WELL).touch()


def run(program: str, arguments: list[str]) -> None:
    """One rank."""
    sys.argv = [program, *arguments]
    sys.path.insert(0, str(Path(program).parent))
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4:])

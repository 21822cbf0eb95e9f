"""In SGLang's schedulers: grammars whose compilation waits until the test lets it end.

`WEIGHTWIRE_TEST_GRAMMARS` names a file, which lets them end; a file beside it, `.asked`, says that one has begun.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

__all__ = ["VARIABLE", "give"]

VARIABLE = "WEIGHTWIRE_TEST_GRAMMARS"


def give() -> None:
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend

    compile_regex, end = XGrammarGrammarBackend.dispatch_regex, Path(os.environ[VARIABLE])

    def held(self: Any, regex: str) -> Any:
        end.with_suffix(".asked").touch()
        while not end.exists():
            time.sleep(0.01)
        return compile_regex(self, regex)

    XGrammarGrammarBackend.dispatch_regex = held

"""SGLang's application with our middleware, for the processes of a server with several (`--tokenizer-worker-num`): they load no
plug-ins. SGLang imports this module there, and nobody else does."""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.entrypoints import http_server

from inference_plugin.engines.monkeypatch import contained
from inference_plugin.engines.sglang.api import SglangMiddleware

__all__ = ["app"]

app: Any = http_server.app
with contained("adding the middleware", logging.getLogger("sglang.weightwire")):
    app.add_middleware(SglangMiddleware)

"""The server's process: middleware that tells clients about its replicas."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from inference_plugin.engines.control import UNKNOWN_VERSION
from inference_plugin.engines.http import ReplicaMiddleware, replicas_here
from inference_plugin.engines.monkeypatch import contained, wrap
from inference_plugin.net.records import record_of
from inference_plugin.wire.groups import DRAFT

__all__ = ["hook_api", "name_application"]

logger = logging.getLogger("sglang.weightwire")

_SERVER = "sglang.srt.entrypoints.http_server"


def hook_api() -> None:
    """Adds the middleware to SGLang's application, which is made when its module is imported; that takes long, and only the
    server's process does it. If the module is not imported yet, wraps a function that the module calls with the application,
    which SGLang has from 0.5.23 on."""
    server = sys.modules.get(_SERVER)
    if (app := getattr(server, "app", None)) is not None:
        app.add_middleware(SglangMiddleware)
        return
    try:
        from sglang.srt.observability import http_request_metrics
    except ImportError:
        return

    @wrap(http_request_metrics, "add_http_request_metrics_middleware")
    def add_middleware(original: Callable[..., Any], app: Any) -> Any:
        result = original(app)
        with contained("adding the middleware", logger):
            app.add_middleware(SglangMiddleware)
        return result


def name_application() -> None:
    """Has the processes of a server with several (`--tokenizer-worker-num`) import the application with the middleware. A user's
    own application stays."""
    os.environ.setdefault("SGLANG_HTTP_SERVER_APP_PATH", "inference_plugin.engines.sglang.app:app")


class SglangMiddleware(ReplicaMiddleware):
    """Also has `/model_info` say the version that was committed: SGLang's server learns of its own updates only."""

    logger = logger
    told: str | None = None
    """What it had SGLang say last, if anything."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] in ("/model_info", "/get_model_info"):
            with contained("telling the server the weights' version", logger):
                version = await asyncio.to_thread(last_committed)
                manager = sys.modules[_SERVER]._global_state.tokenizer_manager
                said = manager.config_value("weight_version")
                before = manager.server_args.weight_version if self.told is None else self.told
                named = version == UNKNOWN_VERSION and said != before  # by whoever loaded the weights
                if version not in (None, said) and not named:
                    manager.record_config_updates("weightwire", weight_version=version)
                    self.told = version
        await super().__call__(scope, receive, send)


def last_committed() -> str | None:
    """The version with which this server's replicas stamp their answers, `UNKNOWN_VERSION` where somebody else has loaded others;
    None if they have committed none."""
    groups = [item for card in replicas_here() for item in record_of(card).groups.items()]
    records = [record for group, record in groups if group != DRAFT]  # no answer has the draft's stamp
    done = [record for record in records if record.version is not None]
    if not done:
        return UNKNOWN_VERSION if any(record.commits for record in records) else None
    return str(max(done, key=lambda record: record.committed_at_unix_s).version)

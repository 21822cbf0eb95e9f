"""SGLang's KV events find the name of a request's adapter without the namespace of a version.

SGLang keeps a name for each key of a request as long as it lives, because a cache may publish long after the request. With the
namespace in the key, each update that does not flush would leave another name for each adapter.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from inference_plugin.engines.monkeypatch import wrap

__all__ = ["hook_kv_events", "in_namespace"]

_NAMESPACE = re.compile(r"weightwire=\d+\|")


def in_namespace(namespace: str, own: str | None) -> str | None:
    """A request's key in a namespace of ours, "" for none. SGLang before 0.5.23 finds an adapter's name by the end of the key."""
    return "|".join(filter(None, [namespace, own])) or own


def hook_kv_events() -> None:
    names = getattr(importlib.import_module("sglang.srt.mem_cache.events"), "KvEventLoraNames", None)
    if names is None:
        return

    @wrap(names, "register")
    def register(
        original: Callable[..., Any], self: Any, req: Any = None, lora_name: str | None = None, **adapter: Any
    ) -> Any:
        if req is not None:
            req = SimpleNamespace(lora_id=req.lora_id, extra_key=_own(req.extra_key))
        return original(self, req, lora_name, **adapter)

    @wrap(names, "get")
    def get(original: Callable[..., Any], self: Any, extra_key: str | None) -> Any:
        return original(self, _own(extra_key))

    @wrap(names, "resolve")
    def resolve(original: Callable[..., Any], self: Any, extra_key: str | None) -> Any:
        return original(self, _own(extra_key))


def _own(key: str | None) -> str | None:
    found = _NAMESPACE.match(key) if key else None
    return key[found.end() :] if key and found else key

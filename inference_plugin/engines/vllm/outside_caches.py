"""Caches beside vLLM's own that outlive an update: those of KV connectors and of encoder connectors; and queries kept for scores.

A connector that finds keys and values by the hashes of vLLM's blocks finds none of an older version, because these hashes begin
at another root after each commit (`CoreCaches.turn_root`). One that hashes tokens itself (LMCache, for instance) would give
new requests what the old weights computed, unless it can be told to forget.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["forget", "keeps_queries", "why_stale"]

BETWEEN_ENGINES = frozenset(
    {
        *("NixlConnector", "NixlPullConnector", "NixlPushConnector", "MooncakeConnector", "MoRIIOConnector"),
        *("DecodeBenchConnector", "ExampleHiddenStatesConnector"),
    }
)
"""Connectors that bring one request's keys and values from the engine that the request names, and keep none for another one."""


def why_stale(config: Any) -> str | None:
    """Why requests after an update could find what weights before it computed, in an engine of this configuration of vLLM's;
    None if they can't."""
    if config.kv_transfer_config is not None and config.kv_transfer_config.is_kv_consumer:
        for connector in _connectors(config.kv_transfer_config):
            if (why := _why_kept(connector)) is not None:
                return why
    encoder = getattr(config, "ec_transfer_config", None)
    if encoder is not None and encoder.is_ec_consumer:
        return f"the encoder connector {encoder.ec_connector} finds what the old weights made of an image or of sound"
    return None


def keeps_queries(model_config: Any, tasks: Iterable[str]) -> bool:
    """Whether vLLM's API server may have workers keep what they made of a query until its documents come: late interaction, by
    which models such as ColBERT answer `/score` and `/rerank`. `tasks`: what the model can do.

    An update in between drops it, and a worker that misses it raises, which ends the engine; or a document is scored against a
    query of older weights. vLLM ends no single pooling request with an error, so there is no other way out.
    """
    pooler = model_config.pooler_config
    if pooler is None or not getattr(pooler, "enable_flash_late_interaction", True):
        return False
    ask = getattr(model_config, "get_pooling_task", None)
    return ask is not None and ask(tuple(tasks)) == "token_embed" and model_config.architecture != "JinaForRanking"


def forget(scheduler: Any) -> str | None:
    """Between two steps: has the KV connector, if there is one, forget what it holds. Returns why it did not; None if it did."""
    try:
        return None if scheduler.reset_connector_cache() else "the connector says so"
    except AssertionError:
        # vLLM's OffloadingConnector asserts that a step was taken since it last forgot. Where none was, it holds nothing new.
        return None
    except Exception as error:  # noqa: BLE001 -- whatever a connector raises, the caller decides what follows
        return f"{type(error).__name__}: {error}"


def _why_kept(transfer: Any) -> str | None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    name = transfer.kv_connector
    if name in BETWEEN_ENGINES:
        return None
    if transfer.kv_connector_extra_config.get("secondary_tiers"):
        return f"the secondary tiers of the KV connector {name} keep what the old weights computed"
    forget = getattr(KVConnectorFactory.get_connector_class(transfer), "reset_cache", None)
    if forget is None or forget is getattr(KVConnectorBase_V1, "reset_cache", None):
        return f"the KV connector {name} cannot be told to forget what the old weights computed (it has no reset_cache)"
    return None


def _connectors(transfer: Any) -> Iterator[Any]:
    """The connector of this configuration, or those that it joins."""
    if transfer.kv_connector != "MultiConnector":
        yield transfer
        return
    for part in transfer.kv_connector_extra_config.get("connectors", ()):
        yield from _connectors(type(transfer)(**part))

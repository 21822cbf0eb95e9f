"""Caches outside vLLM that an update can't empty: which connectors an engine may have."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig, ModelConfig, PoolerConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from inference_plugin.engines.vllm.outside_caches import forget, keeps_queries, why_stale


def told(transfer: dict[str, Any] | None, encoder: Any = None) -> str | None:
    held = None if transfer is None else KVTransferConfig(**({"kv_role": "kv_both"} | transfer))
    return why_stale(SimpleNamespace(kv_transfer_config=held, ec_transfer_config=encoder))


TIERS = {"secondary_tiers": [{"type": "fs"}]}
JOINED = {
    "connectors": [{"kv_connector": name, "kv_role": "kv_both"} for name in ("NixlConnector", "ExampleConnector")]
}


@pytest.mark.parametrize(
    ("transfer", "named"),
    [
        ({"kv_connector": "ExampleConnector"}, "ExampleConnector"),
        ({"kv_connector": "FlexKVConnectorV1"}, "FlexKVConnectorV1"),
        ({"kv_connector": "MultiConnector", "kv_connector_extra_config": JOINED}, "ExampleConnector"),
        ({"kv_connector": "OffloadingConnector", "kv_connector_extra_config": TIERS}, "secondary tiers"),
        ({"kv_connector": "Silent", "kv_connector_module_path": "connectors_of_a_user"}, "Silent"),
    ],
)
def test_a_connector_that_cannot_forget_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, transfer: dict[str, Any], named: str
) -> None:
    users: Any = ModuleType("connectors_of_a_user")
    users.Silent = type("Silent", (KVConnectorBase_V1,), {})
    monkeypatch.setitem(sys.modules, users.__name__, users)
    assert named in (told(transfer) or "")


@pytest.mark.parametrize(
    "transfer",
    [
        None,
        {"kv_connector": "NixlConnector"},
        {"kv_connector": "OffloadingConnector"},
        {"kv_connector": "SimpleCPUOffloadConnector"},
        {"kv_connector": "ExampleConnector", "kv_role": "kv_producer"},
    ],
)
def test_a_connector_that_forgets_or_gives_nobody_anothers_keys_is_served(transfer: dict[str, Any] | None) -> None:
    assert told(transfer) is None


def test_an_encoder_connector_is_refused_where_it_reads() -> None:
    reads = SimpleNamespace(ec_connector="ECExampleConnector", is_ec_consumer=True)
    assert "ECExampleConnector" in (told(None, reads) or "")
    assert told(None, SimpleNamespace(ec_connector="ECExampleConnector", is_ec_consumer=False)) is None


def test_a_connector_that_fails_to_forget_says_why() -> None:
    def lost() -> bool:
        raise OSError("the store is gone")

    def twice_without_a_step() -> bool:
        raise AssertionError

    assert forget(SimpleNamespace(reset_connector_cache=lost)) == "OSError: the store is gone"
    assert forget(SimpleNamespace(reset_connector_cache=lambda: False)) == "the connector says so"
    assert forget(SimpleNamespace(reset_connector_cache=lambda: True)) is None
    assert forget(SimpleNamespace(reset_connector_cache=twice_without_a_step)) is None


@pytest.mark.parametrize(
    ("pooler", "tasks", "kept"),
    [
        (PoolerConfig(), ("token_embed",), True),  # ColBERT
        (PoolerConfig(task="token_embed"), ("embed", "token_embed"), True),
        (PoolerConfig(enable_flash_late_interaction=False), ("token_embed",), False),
        (PoolerConfig(), ("embed", "token_embed"), False),
        (PoolerConfig(), ("classify",), False),
        (None, ("generate",), False),
    ],
)
def test_an_engine_that_keeps_queries_for_documents_that_come_later_is_known(
    pooler: PoolerConfig | None, tasks: tuple[str, ...], kept: bool
) -> None:
    config: Any = SimpleNamespace(pooler_config=pooler, architectures=["HF_ColBERT"], architecture="HF_ColBERT")
    config.get_pooling_task = lambda supported: ModelConfig.get_pooling_task(config, supported)
    assert keeps_queries(config, tasks) is kept

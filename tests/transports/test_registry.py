"""The registry: what there is, what third parties add, and why something can't be used."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import pytest

from inference_plugin import plugins as hooks
from inference_plugin.transports import collective, cuda_ipc, delta, nixl, registry, shm, store, stream, zmq, zone
from inference_plugin.transports.base import Receiver, Sender, Staging, Transport
from inference_plugin.wire.errors import TransportUnavailable
from tests.support.rig import ROOT


def third_party(name: str, **fields: object) -> Transport:
    return dataclasses.replace(zmq.TRANSPORT, name=name, summary="a test", **fields)  # type: ignore[arg-type]


class Adds:
    """A plug-in, found by its name: `tests.transports.test_registry:adds_pigeons`."""

    def __init__(self, *transports: Transport) -> None:
        self.transports = transports

    @hooks.hookimpl
    def weightwire_transports(self) -> Sequence[Transport]:
        return self.transports


adds_pigeons = Adds(third_party("pigeon", preference=1), third_party("smoke", why_not=lambda: "no fire here"))
HERE = "tests.transports.test_registry:"


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Plug-ins are loaded anew in the test, and once more after it."""
    monkeypatch.delenv("WEIGHTWIRE_PLUGINS", raising=False)
    hooks.plugin_manager.cache_clear()
    yield monkeypatch
    hooks.plugin_manager.cache_clear()


def test_auto_prefers_shared_memory_and_falls_back_to_sockets(plugins: pytest.MonkeyPatch) -> None:
    assert [transport.name for transport in registry.available_transports()] == [
        "zone",
        "shm",
        "zmq",
        "delta",
        "collective",
        "stream",
    ]
    for each in (zone, shm):
        plugins.setattr(each, "TRANSPORT", dataclasses.replace(each.TRANSPORT, why_not=lambda: "no memfd"))
    assert [transport.name for transport in registry.available_transports()] == [
        "zmq",
        "delta",
        "collective",
        "stream",
    ]


def test_an_unknown_name_lists_what_there_is_and_why_the_others_are_not(plugins: pytest.MonkeyPatch) -> None:
    plugins.setenv("WEIGHTWIRE_PLUGINS", f"{HERE}adds_pigeons, no.such.module:plugin,{HERE}not_there")
    with pytest.raises(TransportUnavailable, match="no transport is named 'carrot'") as raised:
        registry.transport_named("carrot")
    hint = raised.value.hint
    why = f"cuda_ipc: {cuda_ipc.TRANSPORT.why_not()}; smoke: no fire here; "
    assert hint.startswith(
        f"available: pigeon, zone, shm, zmq, delta, nixl, store, collective, stream; not available: {why}"
    )
    assert "plug-in no.such.module:plugin: ModuleNotFoundError: No module named 'no'" in hint
    assert f"plug-in {HERE}not_there: AttributeError" in hint


def test_a_transport_that_cannot_be_used_here_gives_its_reason(plugins: pytest.MonkeyPatch) -> None:
    plugins.setenv("WEIGHTWIRE_PLUGINS", f"{HERE}adds_pigeons")
    with pytest.raises(TransportUnavailable, match="'smoke' can't be used here: no fire here") as raised:
        registry.transport_named("smoke")
    assert "available: pigeon, zone, shm, zmq, delta, nixl, store, collective" in raised.value.hint


def test_looking_up_and_listing_agree(plugins: pytest.MonkeyPatch) -> None:
    plugins.setenv("WEIGHTWIRE_PLUGINS", f"{HERE}adds_pigeons")
    for transport in registry.available_transports():
        assert registry.transport_named(transport.name) is transport


def test_a_plugin_that_cannot_be_imported_breaks_nothing(plugins: pytest.MonkeyPatch) -> None:
    plugins.setenv("WEIGHTWIRE_PLUGINS", "no.such.module:plugin")
    assert [transport.name for transport in registry.available_transports()] == [
        "zone",
        "shm",
        "zmq",
        "delta",
        "collective",
        "stream",
    ]
    assert list(hooks.plugin_manager().broken) == ["no.such.module:plugin"]


@pytest.mark.parametrize(
    "name", ["cuda_ipc", "zone", "shm", "zmq", "delta", "nixl", "store", "collective", "stream", "auto"]
)
def test_a_name_that_is_taken_is_refused(plugins: pytest.MonkeyPatch, name: str) -> None:
    hooks.plugin_manager().register(Adds(third_party(name)))
    with pytest.raises(TransportUnavailable, match=f"the transport name '{name}' is taken") as raised:
        registry.transports()
    assert "rename" in raised.value.hint


def test_without_any_transport_every_reason_is_told(plugins: pytest.MonkeyPatch) -> None:
    for module, why in (
        (cuda_ipc, "no GPU"),
        (zone, "no swap"),
        (shm, "no memfd"),
        (zmq, "no sockets"),
        (delta, "no memory"),
        (nixl, "no NIXL"),
        (store, "no fsspec"),
        (collective, "no gloo"),
        (stream, "no standing"),
    ):
        plugins.setattr(module, "TRANSPORT", dataclasses.replace(module.TRANSPORT, why_not=lambda why=why: why))
    with pytest.raises(TransportUnavailable, match="no transport can be used here") as raised:
        registry.available_transports()
    assert (
        "available: none; not available: cuda_ipc: no GPU; zone: no swap; shm: no memfd; zmq: no sockets; delta: no memory; "
        "nixl: no NIXL; store: no fsspec; collective: no gloo; stream: no standing" in raised.value.hint
    )


@pytest.mark.parametrize("kind", [Sender, Receiver, Staging])
def test_an_incomplete_transport_cannot_be_made(kind: type) -> None:
    assert kind.__abstractmethods__
    for missing in kind.__abstractmethods__:
        others = {name: lambda self: None for name in kind.__abstractmethods__ if name != missing}
        with pytest.raises(TypeError, match=missing):
            type("Incomplete", (kind,), others)()
    type("Complete", (kind,), {name: lambda self: None for name in kind.__abstractmethods__})()


def test_no_module_of_ours_imports_pickle_or_unpickles() -> None:
    words = ("import pickle", "pickle.load", "recv_pyobj", "send_pyobj", "all_gather_object", "torch.load(")
    found = [
        f"{path.relative_to(ROOT)}: {word}"
        for package in ("inference_plugin", "trainer_adapters")
        for path in (ROOT / package).rglob("*.py")
        for word in words
        if word in path.read_text()
    ]
    assert found == []

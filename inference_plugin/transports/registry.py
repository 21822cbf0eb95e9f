"""The transports: ours, those that third parties add through pluggy, and why any of them can't be used."""

from __future__ import annotations

from collections.abc import Sequence

from inference_plugin.plugins import plugin_manager
from inference_plugin.transports import collective, cuda_ipc, delta, nixl, shm, store, stream, zmq, zone
from inference_plugin.transports.base import Transport
from inference_plugin.wire.errors import TransportUnavailable

__all__ = ["available_transports", "transport_named", "transports"]


def transports() -> dict[str, Transport]:
    """All known transports by name, in order of preference.

    Raises `TransportUnavailable` if two plug-ins give different transports one name.
    """
    known: dict[str, Transport] = {}
    offered: Sequence[Sequence[Transport]] = plugin_manager().hook.weightwire_transports()
    ours = [each.TRANSPORT for each in (cuda_ipc, zone, shm, zmq, delta, nixl, store, collective, stream)]
    for transport in [*ours, *(t for several in offered for t in several)]:
        if transport.name == Transport.AUTO or known.setdefault(transport.name, transport) is not transport:
            raise TransportUnavailable(
                f"the transport name {transport.name!r} is taken",
                hint="rename the one that your plug-in adds",
            )
    return dict(sorted(known.items(), key=lambda entry: entry[1].preference))


def transport_named(name: str) -> Transport:
    """The transport of that name. Raises `TransportUnavailable`, listing the transports and why any can't be used."""
    known = transports()
    transport = next((each for own, each in known.items() if own == name), None)  # a user may give a list
    if transport is None:
        raise TransportUnavailable(f"no transport is named {name!r}", hint=_what_there_is(known))
    if (why := transport.why_not()) is not None:
        raise TransportUnavailable(f"transport {name!r} can't be used here: {why}", hint=_what_there_is(known))
    return transport


def available_transports() -> list[Transport]:
    """The transports that can be used here, in the order in which `auto` tries them. Raises `TransportUnavailable` if there is
    none."""
    known = transports()
    usable = [each for each in known.values() if not each.named_only and each.why_not() is None]
    if not usable:
        raise TransportUnavailable("no transport can be used here", hint=_what_there_is(known))
    return usable


def _what_there_is(known: dict[str, Transport]) -> str:
    usable = [name for name, transport in known.items() if transport.why_not() is None]
    unusable = [f"{name}: {why}" for name, t in known.items() if (why := t.why_not()) is not None]
    unusable += [f"plug-in {name}: {why}" for name, why in plugin_manager().broken.items()]
    text = f"available: {', '.join(usable) or 'none'}"
    return f"{text}; not available: {'; '.join(unusable)}" if unusable else text

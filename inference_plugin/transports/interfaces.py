"""Where `collective` meets between hosts: a store on one network interface, which the user names and so declares trusted."""

from __future__ import annotations

import socket
from typing import Any

import torch.distributed as dist

from inference_plugin.wire.config import Config, variable_of
from inference_plugin.wire.errors import TransportUnavailable

__all__ = ["INTERFACE", "own_interface", "serve_store"]

INTERFACE = variable_of("collective_interface")


def own_interface(config: Config) -> str:
    """The interface that this process uses. Raises `TransportUnavailable` where none is named."""
    if config.collective_interface is None:
        raise TransportUnavailable(
            f"collective: the trainer's first rank names a network interface, and this process has no {INTERFACE}",
            hint="set it for every trainer rank and engine, each to its own interface of that network, or for none",
        )
    return config.collective_interface


def serve_store(interface: str) -> tuple[Any, tuple[str, int]]:
    """A `TCPStore` that listens on `interface` only, and its address and port. It ends when the object goes.

    Raises `TransportUnavailable` where the interface is unknown, has no address, or can't be listened on.
    """
    family, address = _address_of(interface)
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.bind((address, 0))
        listening.listen(128)
        port = listening.getsockname()[1]
        store = dist.TCPStore(  # type: ignore[attr-defined]
            address, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
    except (OSError, RuntimeError) as error:  # torch's own errors are of the second kind
        raise TransportUnavailable(
            f"collective: nothing can listen on interface {interface!r}: {error}",
            hint=f"name an interface of this host that is up, in {INTERFACE}",
            phase="agree",
        ) from error
    finally:
        listening.close()
    return store, (address, port)


def _address_of(interface: str) -> tuple[socket.AddressFamily, str]:
    import psutil  # type: ignore[import-untyped]  # takes long to import, and is needed here only

    known = psutil.net_if_addrs()
    for family in (socket.AF_INET, socket.AF_INET6):
        for one in known.get(interface, []):
            if one.family == family:
                return family, one.address
    raise TransportUnavailable(
        f"collective: interface {interface!r} {'has no address' if interface in known else 'is unknown'}",
        hint=f"{INTERFACE} names a network interface of this host; there are: {', '.join(sorted(known))}",
    )

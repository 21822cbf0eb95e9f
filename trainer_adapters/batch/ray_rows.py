"""Rows in Ray's object store, as their consumers see them.

    entry -> directory actor (named in the owner's address) -> ObjectRef -> numpy view of the node's shared memory -> part

Ray moves an object to the consumer's node where it is not there yet, counts references, and keeps the memory for as long as a
view of it lives, so there are no leases. Every object is checked: it must be an array of
bytes that has the size and the digest of its entry.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from inference_plugin.wire.digest import digest_bytes
from inference_plugin.wire.errors import PeerLost, ProtocolError, SyncTimeout, TransportUnavailable, WeightwireError
from trainer_adapters.batch.backends import Until
from trainer_adapters.batch.exchanges import LATE, Arrivals
from trainer_adapters.batch.ray_directory import Wanted
from trainer_adapters.batch.records import Entry, Owner

__all__ = ["NAMESPACE", "bytes_of", "clear", "fetch", "ray_errors", "ray_library", "wanted"]

NAMESPACE = "weightwire"
"""Ray's namespace of the directory actors: they are found from every job of the cluster."""

SCHEME = "ray://"

GET_S = 5.0
"""Longest wait for an object that Ray says is on this node."""


def fetch(wanted_of: Sequence[tuple[Owner, Sequence[Entry]]], arrivals: Arrivals, until: Until) -> None:
    """Asks every directory at once; waits for answers and objects together, so that no owner keeps the others waiting."""
    ray = ray_library()
    answers: dict[Any, tuple[Owner, Sequence[Entry]]] = {}
    objects: dict[Any, tuple[Owner, Entry]] = {}
    for owner, entries in wanted_of:
        with _failing(owner, entries, arrivals):
            answers[_directory(ray, owner).find.remote([wanted(entry) for entry in entries])] = owner, entries
    while (answers or objects) and until.left_s():
        for reference in _ready(ray, [*answers, *objects], until):
            if reference in answers:
                owner, entries = answers.pop(reference)
                with _failing(owner, entries, arrivals):
                    objects |= _found(owner, entries, ray.get(reference, timeout=GET_S), arrivals)
                continue
            owner, entry = objects.pop(reference)
            with _failing(owner, (entry,), arrivals):
                data = bytes_of(ray.get(reference, timeout=GET_S), entry)
                if not until.left_s():
                    raise SyncTimeout("the deadline passed before it was checked", hint=LATE)
                arrivals.keep(entry, _tensor(data), digest_bytes(data))


def clear(asked: Sequence[tuple[Owner, Sequence[str]]], until: Until) -> list[Sequence[str] | WeightwireError]:
    """Has directories drop tasks: all are asked before any is waited for."""
    ray = ray_library()
    results: list[Sequence[str] | WeightwireError] = [
        SyncTimeout("the store's directory did not answer in time", replica=owner.id) for owner, _ in asked
    ]
    answers: dict[Any, int] = {}
    for i, (owner, task_ids) in enumerate(asked):
        try:
            with ray_errors(owner):
                answers[_directory(ray, owner).clear.remote(list(task_ids))] = i
        except WeightwireError as error:
            results[i] = error
    while answers and until.left_s():
        for answer in _ready(ray, list(answers), until):
            i = answers.pop(answer)
            try:
                with ray_errors(asked[i][0]):
                    results[i] = ray.get(answer, timeout=GET_S)
            except WeightwireError as error:
                results[i] = error
    return results


def ray_library() -> Any:
    """The module `ray`, in a process that has joined a cluster. Raises `TransportUnavailable`; it never starts a cluster."""
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise TransportUnavailable(
            f"these rows lie in Ray's object store, and Ray can't be imported: {error}",
            hint="pip install '.[ray]' in a checkout of weightwire",
        ) from error
    if not ray.is_initialized():
        raise TransportUnavailable(
            "this process has joined no Ray cluster",
            hint="call ray.init(address='auto') first, or run it as a Ray actor",
        )
    return ray


@contextmanager
def ray_errors(owner: Owner) -> Iterator[None]:
    """Turns Ray's errors into ours, for rows of `owner`."""
    from ray import exceptions

    try:
        yield
    except exceptions.GetTimeoutError as error:
        raise SyncTimeout(f"Ray did not deliver in time: {error}", hint=LATE, replica=owner.id) from error
    except (exceptions.RayActorError, exceptions.ObjectLostError, exceptions.NodeDiedError) as error:
        raise _lost(owner, error) from error
    except exceptions.RayTaskError as error:
        raise ProtocolError(f"the directory of {owner.id} failed: {error}", side="owner", replica=owner.id) from error
    except exceptions.RayError as error:
        raise TransportUnavailable(f"Ray failed: {type(error).__name__}: {error}", replica=owner.id) from error


def wanted(entry: Entry) -> Wanted:
    return Wanted(entry.shard.task_id, entry.shard.key, entry.nbytes, entry.digest)


def bytes_of(value: Any, entry: Entry) -> npt.NDArray[np.uint8]:
    """What Ray gave for a shard, if it is the bytes of one; else `ProtocolError`."""
    if not (
        isinstance(value, np.ndarray)
        and value.dtype == np.uint8
        and value.shape == (entry.nbytes,)
        and value.flags.c_contiguous
    ):
        raise ProtocolError(
            f"Ray holds a {type(value).__name__} {getattr(value, 'shape', '')} for shard {entry.shard}, "
            f"not its {entry.nbytes} bytes"
        )
    return value


def _directory(ray: Any, owner: Owner) -> Any:
    try:
        return ray.get_actor(owner.address.removeprefix(SCHEME), namespace=NAMESPACE)
    except ValueError as error:  # Ray's answer for a name that no living actor has
        raise _lost(owner, error) from error


def _lost(owner: Owner, error: Exception) -> PeerLost:
    return PeerLost(f"the store {owner.id} has ended: {type(error).__name__}", side="owner", replica=owner.id)


def _found(
    owner: Owner, entries: Sequence[Entry], answer: tuple[Sequence[str], Sequence[Any]], arrivals: Arrivals
) -> dict[Any, tuple[Owner, Entry]]:
    """The objects that a directory named."""
    whys, references = answer
    objects: dict[Any, tuple[Owner, Entry]] = {}
    for entry, why, reference in zip(entries, whys, references, strict=True):
        if why:
            arrivals.refuse(entry, why)
        elif reference is None:
            arrivals.keep(entry, torch.empty(0, dtype=torch.uint8, device="cpu"), digest_bytes(b""))
        else:
            objects[reference] = owner, entry
    return objects


def _ready(ray: Any, references: list[Any], until: Until) -> list[Any]:
    """Those of `references` that are on this node; waits for the first, at most until the next look at `until`."""
    if not ray.wait(references, num_returns=1, timeout=until.left_s(), fetch_local=True)[0]:
        return []
    ready: list[Any] = ray.wait(references, num_returns=len(references), timeout=0, fetch_local=True)[0]
    return ready


def _tensor(data: npt.NDArray[np.uint8]) -> torch.Tensor:
    """The same memory as a tensor. Ray's arrays are read-only; torch has no read-only tensors, and would warn."""
    return torch.from_numpy(np.asarray(_Writable(data)))


class _Writable:
    """An array's memory, offered as writable. It keeps the array, and with it Ray's reference."""

    def __init__(self, data: npt.NDArray[np.uint8]) -> None:
        self._data = data
        self.__array_interface__ = data.__array_interface__ | {"data": (data.ctypes.data, False)}


@contextmanager
def _failing(owner: Owner, entries: Sequence[Entry], arrivals: Arrivals) -> Iterator[None]:
    try:
        with ray_errors(owner):
            yield
    except WeightwireError as error:
        arrivals.fail(entries, error)

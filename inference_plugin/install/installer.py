"""The installer of one group on one worker: agrees on a manifest, chooses a policy, and installs by that policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from inference_plugin.install.agreement import Agreement
from inference_plugin.install.contract import EngineModel, InstallTerms, Throttle
from inference_plugin.install.loader import LoaderInstaller, PartLoaderInstaller
from inference_plugin.install.memory import without_full_collections
from inference_plugin.install.negotiation import agree
from inference_plugin.install.policies import (
    CopyInstaller,
    PolicyInstaller,
    StandbyInstaller,
    WayBack,
)
from inference_plugin.install.staged import StagedInstaller
from inference_plugin.install.streaming import StreamingInstaller
from inference_plugin.install.verify import live_digests
from inference_plugin.install.zones import zone_installer, zone_layout
from inference_plugin.wire.errors import EngineUnsupported, ManifestMismatch, first_few
from inference_plugin.wire.geometry import Box
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.messages import BoxDigest

__all__ = ["LastProof", "ModelInstaller"]

STANDBY_MEMORY_FACTOR = 2.0
"""`auto` takes `standby` if the free memory is at least this many times the shard: packing needs more than a second set."""


class LastProof:
    """The last agreement that was proven for a model's groups and is not in force yet.

    It outlives the group: a trainer whose zone is refused opens a new group again at once with another transport, and needs no
    second proof.
    """

    def __init__(self) -> None:
        self.agreement: Agreement | None = None


class ModelInstaller:
    """`contract.Installer` for groups of the engine's own weights; see `contract` for who calls what on which thread."""

    def __init__(self, model: EngineModel, last_proof: LastProof | None = None) -> None:
        self._served = model
        self._agreement: Agreement | None = None
        self._last_proof = last_proof or LastProof()
        self._way_back = WayBack()
        self._policy: PolicyInstaller

    def open(
        self, manifest: Manifest, policy: str, *, partial: bool, zone: bool = False, sharing: int = 1
    ) -> InstallTerms:
        """Raises as `agree` does, and `EngineUnsupported` if the policy does not fit. The earlier terms then stay in force."""
        agreement = self._agree(manifest, partial, sharing)
        has_second, layout = self._agreement is not None and self._policy.holds_second_set, None
        kind, why = _choose(agreement, policy, has_second=has_second, sharing=sharing)
        if zone:
            layout, kind = zone_layout(agreement, kind), zone_installer(kind)
        chosen = self._policy if agreement is self._agreement else None
        if type(chosen) is not kind:
            # A second set of other terms may hold old bytes in places that the new terms leave alone.
            chosen = kind(agreement, self._way_back)
        chosen.discard()
        chosen.forget_segments()  # replays are bound to storages that a swap may have replaced
        self._agreement, self._policy, self._last_proof.agreement = agreement, chosen, None
        unfilled = ""
        if agreement.unfilled:
            unfilled = (
                f"no checkpoint fills these, so they stay as the engine made them: {first_few(agreement.unfilled)}"
            )
        device = agreement.model.device.type
        takes_second = chosen.install_policy == "standby" and device == "cpu" and not has_second
        return InstallTerms(
            needs=agreement.needs,
            mechanism=chosen.mechanism,
            install=chosen.install_policy,
            why="; ".join(filter(None, [agreement.why_loader, why, unfilled, agreement.model.leaves_out])),
            derived=agreement.layout.derived,
            untouched=agreement.layout.untouched,
            passed_over=agreement.passed_over,
            zone=layout,
            device=device,
            takes_bytes=agreement.layout.nbytes if takes_second else 0,
        )

    def _agree(self, manifest: Manifest, partial: bool, sharing: int) -> Agreement:
        """The agreement on a manifest."""
        model = self._served.for_names([*manifest.index, *manifest.tied])
        asked = manifest, partial, model.expert_places()
        for known in (self._agreement, self._last_proof.agreement):
            if known is None or known.model is not model or not known.layout.is_current():
                continue
            # Another group may have written what this one leaves to the engine.
            left = all(map(known.layout.leaves, known.unfilled))
            if left and (known.manifest, known.partial, known.expert_places) == asked:
                return known
        with model.lock, without_full_collections():
            proven = self._last_proof.agreement = agree(model, manifest, partial=partial, sharing=sharing)
        return proven

    def check_terms(self) -> None:
        self._served.check_caches()
        if self._agreement is not None:
            self._agreement.layout.check_current()
        if self._agreement is not None and self._agreement.expert_places != self._agreement.model.expert_places():
            raise ManifestMismatch(
                "the engine has moved its experts since the group was opened",
                hint="the next update opens the group again by itself",
            )

    def check_model(self) -> None:
        if self._agreement is not None:
            self._agreement.layout.check_references()
            self._policy.check_made()

    def prepare(self, segment: torch.Tensor, throttle: Throttle) -> int:
        self._policy.check(segment)
        assert self._agreement is not None
        nbytes = self._policy.prepare(segment, throttle)
        self._agreement.layout.look_at_references()
        return nbytes

    def place(self, box: Box, tensor: torch.Tensor) -> None:
        self._policy.place(box, tensor)

    def share(self) -> bytes:
        return self._policy.share()

    def install(self, segment: torch.Tensor, shares: Sequence[bytes] = ()) -> None:
        self._policy.install(segment, shares)

    def undo(self, previous: torch.Tensor | None) -> None:
        self._policy.undo(previous)

    def finish(self) -> None:
        self._policy.finish()

    def read_back(self) -> Iterator[BoxDigest | tuple[str, str]]:
        if self._agreement is not None:
            agreement = self._agreement
            agreement.layout.check_current()
            yield from live_digests(agreement.manifest, agreement.layout, agreement.unreadable)

    def discard(self) -> None:
        if self._agreement is not None:
            self._policy.discard()

    def free_kept(self) -> None:
        if self._agreement is not None:
            self._policy.forget_segments()
            self._policy.drop_second_set()

    def close(self) -> None:
        if self._agreement is not None:
            self._policy.close()

    @property
    def claims(self) -> frozenset[str]:
        if self._agreement is None:
            return frozenset()
        return frozenset(f"{self._agreement.model.prefix}{key}" for key in self._agreement.layout.written)

    @property
    def scales_cache(self) -> bool:
        if self._agreement is None or not (scales := self._agreement.model.cache_scales):
            return False
        layout = self._agreement.layout
        return any(name.rpartition(".")[2] in scales for name in (*layout.derived, *layout.written))

    @property
    def needs_previous(self) -> bool:
        return self._policy.install_policy == "copy"


def _choose(agreement: Agreement, policy: str, *, has_second: bool, sharing: int) -> tuple[type[PolicyInstaller], str]:
    """The class of the installer, and why `auto` took it or why it is not the requested one. `has_second`: memory for a second
    set is held already. `sharing`: number of replicas that share the free memory. Raises `EngineUnsupported` if the requested
    policy does not fit."""
    model, shard = agreement.model, agreement.layout.nbytes
    if policy == "streaming":
        return StreamingInstaller, ""
    if agreement.why_loader:
        if agreement.parts:
            return PartLoaderInstaller, "the engine's own loader fills these in a second set, part by part"
        return LoaderInstaller, "the engine's own loader fills a second set"
    free = model.free_share_bytes(sharing) + (shard if has_second else 0)
    copy = StagedInstaller if model.device.type != "cpu" and free >= shard else CopyInstaller
    if policy == "copy":
        return copy, ""
    if model.fixed_addresses:
        return copy, "captured graphs or sleep mode hold the parameters' addresses, which must stay"
    if policy == "standby":
        if free < shard:
            raise EngineUnsupported(
                f"a second set of {shard >> 20} MiB does not fit: {free >> 20} MiB are free for this rank",
                hint="install='copy' needs no second set",
                phase="open",
            )
        return StandbyInstaller, ""
    if free < STANDBY_MEMORY_FACTOR * shard:
        return copy, f"{free >> 20} MiB are free for this rank, too few for a second set of {shard >> 20} MiB"
    return StandbyInstaller, f"{free >> 20} MiB are free for this rank"

"""What vLLM's core computed with its weights and keeps: prefix blocks, encodings of images and sound, a KV connector's store.

A commit either drops what the old weights computed, or sees to it that no request that starts from then on finds it.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from inference_plugin.engines.vllm.outside_caches import forget
from inference_plugin.wire.errors import CommitFailed
from inference_plugin.wire.messages import InFlight

__all__ = ["CoreCaches"]

logger = logging.getLogger("vllm.weightwire")


class CoreCaches:
    """The caches of one EngineCore. To be used on its own thread; `hash_anew` also on the thread that takes requests in."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self.root_epoch = 0
        """How often the root of prefix hashes was turned."""
        self.some_keep = False
        """Whether a request has named a conversation that keeps its cache: from then on commits drop no cached block."""

    def reset(self) -> None:
        """Drops what the old weights computed: KV blocks, and the encodings of images and sound.

        vLLM's own `_reset_caches` also drops the inputs of the encoders, which no weights made. The API server has a cache of
        the same inputs and would go on sending only their hashes, on which the core fails.
        """
        try:
            self._core.reset_prefix_cache(reset_running_requests=True, reset_connector=False)
        except RuntimeError as error:
            raise CommitFailed(
                f"vLLM could not empty its cache: {error}",
                hint="a session of streaming input holds blocks of it, or a request whose keys and values a KV connector loads: "
                "in_flight='keep' lets them go on, 'abort' ends them",
                phase="commit",
            ) from error
        if (why := forget(self._core.scheduler)) is not None:
            raise CommitFailed(f"the KV connector's cache could not be reset: {why}")
        self._core.reset_encoder_cache()

    def turn_root(self, txn: str, in_flight: InFlight) -> None:
        """No request that starts from here on finds a block that an older version computed.

        Prefix hashes are chains that begin at one root. A new root separates them. It is a function of the old one and of the
        transaction: the replicas of one update agree, and the same version of another training run has another root, whose blocks
        may lie in one store outside the engine; blocks of requests in flight stay theirs and age out. The chains of
        conversations that keep their cache have another root, which stays.
        """
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.request import RequestStatus

        core = self._core
        caches = core.request_block_hasher is not None
        drops = caches and not self.some_keep
        # Under the other policies the connector has forgotten before the installation.
        if drops and in_flight == "keep" and (why := forget(core.scheduler)) is not None:
            # All ranks hold the new version already. What the connector keeps is found by hashes that begin at the old root.
            logger.warning("weightwire: the KV connector's cache could not be reset after an update: %s", why)
        if drops and core.scheduler.reset_prefix_cache(reset_running_requests=False, reset_connector=False):
            if self._encodes:
                core.reset_encoder_cache()
            if self.connector is None:
                return  # nobody held a block, or an encoding: all are gone
        if caches:
            hash_fn = get_hash_fn_by_name(core.vllm_config.cache_config.prefix_caching_hash_algo)
            root = (kv_cache_utils.NONE_HASH, f"weightwire:{txn}")
            kv_cache_utils.NONE_HASH = kv_cache_utils.BlockHash(hash_fn(root))
        elif not self._encodes:
            return  # there is nothing to find
        self.root_epoch += 1
        for request in core.scheduler.requests.values():
            if request.status != RequestStatus.RUNNING and request.num_computed_tokens == 0:
                self.hash_anew(request)
            elif not request.block_hashes or request.streaming_queue is not None:
                # Its first block is part old, part new: nobody else may find it. A session of streaming input hashes that block
                # anew with its next chunk, if the block's last token was sampled and never computed.
                request.cache_salt = f"{request.cache_salt or ''}weightwire:{request.request_id}"
                request.weightwire_epoch = self.root_epoch

    def hash_anew(self, request: Any) -> None:
        """Computes a request's prefix hashes from the present root, and has it find no encoding that an older version made.

        If it was preempted its encodings stay its own, like those of other requests in flight: workers keep their names.
        """
        from vllm.v1.request import RequestStatus

        epoch = self.root_epoch  # where it turns meanwhile, `add_request` finds another one and calls this again
        if request.mm_features and request.status != RequestStatus.PREEMPTED:
            request.mm_features = [_renamed(feature, epoch) for feature in request.mm_features]
        request.block_hashes.clear()
        if self._core.request_block_hasher is not None:
            request.update_block_hashes()
        request.weightwire_epoch = epoch

    @property
    def connector(self) -> Any:
        """The KV connector, if there is one. Other replicas may fill the store that it reaches, too, with versions of their own:
        only the root of the hashes, by which it finds blocks, tells these versions apart."""
        return getattr(self._core.scheduler, "connector", None)

    @property
    def _encodes(self) -> bool:
        """Whether the model has encoders of images or sound, whose outputs the engine caches by name."""
        return bool(self._core.vllm_config.model_config.is_multimodal_model)


_EPOCH = "@weightwire:"
"""Between the name of an encoder's input and the number of the prefix root under which it came."""


def _renamed(feature: Any, epoch: int) -> Any:
    """An encoder's input under the name that its encoding by the present weights has in the cache."""
    name, _, _ = feature.identifier.partition(_EPOCH)
    return dataclasses.replace(feature, identifier=f"{name}{_EPOCH}{epoch}")

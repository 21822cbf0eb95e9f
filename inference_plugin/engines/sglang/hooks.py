"""Where SGLang's scheduler is wrapped, and how a rank starts in it."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from typing import Any

import msgspec

from inference_plugin.engines.front import open_front
from inference_plugin.engines.hooking import installed_version, wrap
from inference_plugin.engines.rank import RankReply
from inference_plugin.engines.sglang.control import TurnControl
from inference_plugin.engines.sglang.scheduler import Site
from inference_plugin.engines.sglang.turn import Turn
from inference_plugin.wire import addresses
from inference_plugin.wire.codec import decode_as

__all__ = ["hook_scheduler"]

logger = logging.getLogger("sglang.weightwire")


def hook_scheduler() -> None:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver

    @wrap(Scheduler, "init_request_dispatcher")
    def init_request_dispatcher(original: Callable[..., Any], self: Any) -> Any:
        result = original(self)
        _start(self)
        return result

    @wrap(SchedulerRequestReceiver, "_pull_raw_reqs")
    def pull_raw_reqs(original: Callable[..., Any], self: Any) -> Any:
        if _site is not None:
            _site.while_paused(idle=_site.control is None or not _site.control.wants_turn())
        requests = original(self)
        if requests is not None and _site is not None:
            _site.bell.quiet()
            if _site.control is not None and _site.control.wants_turn():
                requests.append(Turn())
        return requests

    @wrap(Scheduler, "run_batch")
    def run_batch(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        site: Site | None = getattr(self, "_weightwire_site", None)
        with site.model.step() if site is not None else contextlib.nullcontext():
            return original(self, *args, **kwargs)

    @wrap(Scheduler, "_add_request_to_queue")
    def add_request_to_queue(original: Callable[..., Any], self: Any, req: Any, is_retracted: bool = False) -> Any:
        site: Site | None = getattr(self, "_weightwire_site", None)
        if site is not None and not site.admit(req, is_retracted):
            return None
        return original(self, req, is_retracted)

    @wrap(Scheduler, "_maybe_namespace_elastic_radix_cache")
    def namespace(original: Callable[..., Any], self: Any, req: Any) -> Any:
        result = original(self, req)
        site: Site | None = getattr(self, "_weightwire_site", None)
        if site is not None:
            site.name(req)
        return result


_site: Site | None = None
"""This process's rank: the request receiver doesn't know its scheduler."""


def _start(scheduler: Any) -> None:
    """Starts this rank and, on the first, the front; publishes the replica's card."""
    global _site
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    if why := _unserved(parallel):
        logger.warning("weightwire: off, no trainer will find this engine: %s", why)
        return
    site = scheduler._weightwire_site = Site(scheduler, addresses.new_replica_id("sglang"))
    scheduler._request_dispatcher._mapping[Turn] = site.take_turn
    start = RankReply("start", site.rank, card=site.runtime.card())
    cards = [decode_as(card, RankReply).card for card in site.ranks.gather(msgspec.msgpack.encode(start))]
    bells = site.ranks.gather(site.bell.address.encode())
    _site = site
    if not site.ranks.leads:
        return
    control = site.control = TurnControl(site, [bell.decode() for bell in bells])
    open_front(
        control,
        site.replica,
        cards,
        engine="sglang",
        engine_version=installed_version("sglang"),
        model=str(scheduler.model_config.model_path),
        tp=site.ranks.size,
        pp=1,
        dp_rank=int(parallel.dp_rank or 0),
        parent_pid=os.getppid(),
    )


def _unserved(parallel: Any) -> str:
    """Why a turn would not reach all ranks in the same pass; "" if it does."""
    if parallel.pp_size > 1:
        return "the stages of a pipeline don't take requests in the same pass"
    if parallel.attn_dp_enabled and parallel.enable_dp_attention_local_control_broadcast:
        return "local control broadcast keeps one group's control requests from the others"
    return ""

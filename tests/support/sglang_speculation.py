"""SGLang's kernels for speculative decoding on a CPU, which no package index has, in torch.

`give` puts them into this process, where SGLang may be imported already: chains and trees of drafts are laid out, verified
greedily, and their keys and values moved. Attention named "torch_native" also takes the steps of a draft and the tokens to be
verified, which SGLang's own can't.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import sys
import types
from pathlib import Path
from typing import Any

import torch

from tests.support import sglang_latent
from tests.support.reachable import reachable

__all__ = ["VARIABLE", "give"]

VARIABLE = "WEIGHTWIRE_TEST_SPECULATION"
"""Set in an engine's environment: it gets these. `overlap`: as on a GPU, SGLang processes the result of a step during the next
one; on a CPU it doesn't where it speculates."""


def give(*, overlap: bool = False) -> None:
    import sgl_kernel  # type: ignore[import-not-found]

    found: Any = types.ModuleType("sgl_kernel.speculative")
    found.reconstruct_indices_from_tree_mask = reconstruct_indices_from_tree_mask
    sys.modules[found.__name__] = found
    from sglang.kernels.ops.speculative.gather_spec_extras import gather_spec_extras
    from sglang.srt.arg_groups import speculative_hook
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.managers import scheduler  # which imports those that are replaced
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    replaced = {id(getattr(sgl_kernel, f"{kernel.__name__}_cpu")): kernel for kernel in KERNELS}
    replaced[id(gather_spec_extras)] = _gather
    for module in list(sys.modules.values()):
        if module.__name__.startswith(("sgl_kernel", "sglang.")):
            for name, value in list(vars(module).items()):
                if id(value) in replaced:
                    setattr(module, name, replaced[id(value)])

    sglang_latent.give()
    attend = _attention()
    attention_registry.ATTENTION_BACKENDS["torch_native"] = attend
    DraftBackendFactory.create_draft_extend_backend = lambda self: attend(self.draft_model_runner)
    DraftBackendFactory.create_decode_backend = lambda self: _Steps(self, attend)
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *_: None  # as drafts take the served model's head over
    scheduler.Scheduler.write_draft = _write_draft
    if overlap:
        speculative_hook._disable_overlap_schedule_for_cpu = lambda _: None


class _Steps:
    """Attention of the steps of a draft."""

    def __init__(self, factory: Any, attend: type) -> None:
        self.attn_backends = [attend(factory.draft_model_runner) for _ in range(factory.speculative_num_steps - 1)]
        for step, backend in enumerate(self.attn_backends):
            backend.drafted = (step, factory.topk, factory.speculative_num_steps)

    def init_forward_metadata(self, _: Any) -> None: ...


def copy_all_layer_kv_cache(
    pointers: torch.Tensor, strides: torch.Tensor, targets: torch.Tensor, sources: torch.Tensor
) -> None:
    """Copies rows of each buffer; a stride is the size of a row in bytes."""
    for pointer, stride in zip(pointers.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(pointer + source * stride, stride) for source in sources.tolist()]
        for target, row in zip(targets.tolist(), rows, strict=True):
            ctypes.memmove(pointer + target * stride, row, stride)


def assign_req_to_token_pool(
    requests: torch.Tensor, table: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, places: torch.Tensor, _: int
) -> None:
    """Writes the places of new tokens into the table of requests."""
    done = 0
    for request, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[request, start:end] = places[done : done + end - start].to(table.dtype)
        done += end - start


def assign_extend_cache_locs(
    requests: torch.Tensor, table: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, places: torch.Tensor, _: int
) -> None:
    """Reads the places of the tokens from `starts` to `ends` from the table."""
    done = 0
    for request, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        places[done : done + end - start] = table[request, start:end].to(places.dtype)
        done += end - start


def assign_draft_cache_locs_contiguous(
    requests: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    places: torch.Tensor,
    _: int,
    topk: int,
    steps: int,
) -> None:
    assign_extend_cache_locs(requests, table, lengths, lengths + topk * steps, places, 0)


def fill_bonus_tokens(accepted: torch.Tensor, lengths: torch.Tensor, bonus: torch.Tensor, stride: int) -> None:
    bonus.copy_(accepted.view(-1, stride)[torch.arange(len(lengths)), lengths.long() - 1])


def fill_accept_out_cache_loc(accepted: torch.Tensor, places: torch.Tensor, out: torch.Tensor) -> None:
    kept = accepted[accepted > -1].long()
    out[: len(kept)] = places[kept]


def build_tree_kernel_efficient(
    parents: torch.Tensor,
    selected: torch.Tensor,
    lengths: torch.Tensor,
    mask: torch.Tensor,
    positions: torch.Tensor,
    index: torch.Tensor,
    next_token: torch.Tensor,
    next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    count: int,
    _: int,
) -> None:
    """The trees of drafts: a node is a token, its first one the last token that was accepted."""
    masks = mask.view(-1, count, count)
    masks.zero_()
    for sequence, length in enumerate(lengths.tolist()):
        chosen = selected[sequence].tolist()
        above = [-1]
        for number in chosen:
            group = number // topk
            above.append(0 if group == 0 else chosen.index(int(parents[sequence, group])) + 1)
        for node in range(count):
            masks[sequence, node, _path(above, node)] = True
        _enter(sequence, above, length, positions, index, next_token, next_sibling)


def reconstruct_indices_from_tree_mask(
    mask: torch.Tensor,
    lengths: torch.Tensor,
    positions: torch.Tensor,
    index: torch.Tensor,
    next_token: torch.Tensor,
    next_sibling: torch.Tensor,
    sequences: int,
    count: int,
) -> None:
    """The same from the trees' masks."""
    masks = mask.view(sequences, count, count)
    next_token.fill_(-1)
    next_sibling.fill_(-1)
    for sequence, length in enumerate(lengths.tolist()):
        above = [
            max((other for other in range(node) if masks[sequence, node, other]), default=-1) for node in range(count)
        ]
        _enter(sequence, above, length, positions, index, next_token, next_sibling)


def _path(above: list[int], node: int) -> list[int]:
    """A node, and those above it up to one that has none above (-1)."""
    return [] if node == -1 else [node, *_path(above, above[node])]


def _enter(
    sequence: int,
    above: list[int],
    length: int,
    positions: torch.Tensor,
    index: torch.Tensor,
    next_token: torch.Tensor,
    next_sibling: torch.Tensor,
) -> None:
    """One sequence's tree, by the node above each one, into SGLang's tables."""
    count = len(above)
    for node in range(count):
        positions[sequence * count + node] = length + len(_path(above, node)) - 1
        index[sequence, node] = sequence * count + node
    for node in range(count - 1, 0, -1):
        if above[node] >= 0:
            next_sibling[sequence, node] = next_token[sequence, above[node]]
            next_token[sequence, above[node]] = node


def verify_tree_greedy(
    *,
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """The longest path of drafts that the served model would have taken, and the token that it takes after it."""
    for sequence in range(len(candidates)):
        node, accepted = 0, 0
        accept_index[sequence, 0] = retrive_index[sequence, 0]
        while accepted + 1 < accept_index.shape[1]:
            wanted = int(target_predict[sequence, node])
            child = int(retrive_next_token[sequence, node])
            while child != -1 and int(candidates[sequence, child]) != wanted:
                child = int(retrive_next_sibling[sequence, child])
            if child == -1:
                break
            predicts[int(retrive_index[sequence, node])] = wanted
            accepted, node = accepted + 1, child
            accept_index[sequence, accepted] = retrive_index[sequence, node]
        accept_token_num[sequence] = accepted
        predicts[int(retrive_index[sequence, node])] = target_predict[sequence, node]


def _write_draft(scheduler: Any, *, directory: str) -> None:
    """Writes all that the draft model reaches, as a file of this rank."""
    model = scheduler.draft_worker.draft_worker.draft_runner.model
    Path(directory, f"draft-{torch.distributed.get_rank()}.json").write_text(json.dumps(reachable(model)))


def _gather(rows: torch.Tensor, *buffers: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """What the next step of a request's draft starts from."""
    return tuple(None if buffer is None else buffer[rows] for buffer in buffers)


KERNELS = (
    copy_all_layer_kv_cache,
    assign_req_to_token_pool,
    assign_extend_cache_locs,
    assign_draft_cache_locs_contiguous,
    fill_bonus_tokens,
    fill_accept_out_cache_loc,
    build_tree_kernel_efficient,
    verify_tree_greedy,
)


def _attention() -> Any:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    class Attention(TorchNativeAttnBackend):
        drafted: tuple[int, int, int] | None = None
        """Which step of a draft this is, of how many branches and steps."""

        def forward_extend(
            self, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True, **more: Any
        ) -> Any:
            table, lengths = self.req_to_token_pool.req_to_token[batch.req_pool_indices], batch.seq_lens.tolist()
            if batch.forward_mode.is_target_verify():
                count = batch.spec_info.draft_token_num
                masks = batch.spec_info.custom_mask.view(-1, count, count)
                places = [row[: length + count] for row, length in zip(table, lengths, strict=True)]
                chain = torch.ones(count, count, dtype=torch.bool).tril()  # of sequences that only fill a batch up
                sees = [
                    torch.cat([torch.ones(count, length, dtype=torch.bool), chain if mask is None else mask], 1)
                    for length, mask in itertools.zip_longest(lengths, masks)
                ]
            elif batch.forward_mode.is_draft_extend_v2():
                places, sees = [], []
                for row, length, count in zip(table, lengths, batch.extend_seq_lens.tolist(), strict=True):
                    places.append(row[:length])
                    sees.append(torch.ones(count, length, dtype=torch.bool).tril(length - count))
            else:
                return super().forward_extend(q, k, v, layer, batch, save_kv_cache, **more)
            return self._attend(q, k, v, layer, batch, places, sees, save_kv_cache)

        def forward_decode(
            self, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True, **more: Any
        ) -> Any:
            if self.drafted is None:
                return super().forward_decode(q, k, v, layer, batch, save_kv_cache, **more)
            step, branches, steps = self.drafted
            table, places = self.req_to_token_pool.req_to_token[batch.req_pool_indices], []
            for row, length in zip(table, batch.seq_lens.tolist(), strict=True):
                for start in range(length, length + branches * steps, steps):
                    places.append(torch.cat([row[:length], row[start : start + step + 1]]))
            sees = [torch.ones(1, len(where), dtype=torch.bool) for where in places]
            return self._attend(q, k, v, layer, batch, places, sees, save_kv_cache)

        def _attend(
            self, q: Any, k: Any, v: Any, layer: Any, batch: Any, places: Any, sees: Any, save_kv_cache: bool
        ) -> Any:
            pool = self.token_to_kv_pool
            if save_kv_cache and k is not None:
                pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, self.swa_out_cache_loc), k, v)
            keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
            copies, out = layer.tp_q_head_num // layer.tp_k_head_num, []
            split = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim).split([len(seen) for seen in sees])
            for rows, where, seen in zip(split, places, sees, strict=True):
                key, value = (x[where].float().repeat_interleave(copies, 1) for x in (keys, values))
                scores = torch.einsum("qhd,khd->hqk", rows.float(), key) * layer.scaling
                weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
                out.append(torch.einsum("hqk,khd->qhd", weights, value).to(q.dtype).flatten(1))
            return torch.cat(out)

    return Attention

"""Convolutions and recurrences of state spaces in torch, token by token, with the signatures of SGLang's kernels in Triton.

`sglang_stand_ins` puts them in those kernels' places. `**_` takes what those need only to be fast, or to keep prefixes.
"""

from __future__ import annotations

from typing import Any

import torch


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens_cpu: list[int],
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    activation: str | None = "silu",
    **_: Any,
) -> torch.Tensor:
    """`causal_conv1d_fn`: x [channels, tokens], weight [channels, width], conv_states [slots, channels, width - 1]."""
    out = torch.empty_like(x)
    for sequence, slot in enumerate(cache_indices.tolist()):
        rows = slice(int(query_start_loc[sequence]), int(query_start_loc[sequence + 1]))
        past = conv_states[slot] if has_initial_state[sequence] else torch.zeros_like(conv_states[slot])
        window = torch.cat([past.to(x.dtype), x[:, rows]], 1)
        out[:, rows] = _activated(
            (window.unfold(1, weight.shape[1], 1) * weight[:, None]).sum(-1).mT, bias, activation
        ).mT
        conv_states[slot] = window[:, window.shape[1] - past.shape[1] :]
    return out


def convolve_on(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | bool | None = None,
    *,
    conv_state_indices: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """`causal_conv1d_update`: x [sequences, channels], one token of each."""
    slots = conv_state_indices.long()
    window = torch.cat([conv_state[slots].to(x.dtype), x[..., None]], -1)
    conv_state[slots] = window[..., 1:].to(conv_state.dtype)
    return _activated((window * weight).sum(-1), bias, activation)


def _activated(x: torch.Tensor, bias: torch.Tensor | None, activation: str | bool | None) -> torch.Tensor:
    x = x if bias is None else x + bias
    return torch.nn.functional.silu(x) if activation else x


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None, None]:
    """`chunk_gated_delta_rule` of SGLang's `fla` (arXiv:2412.06464, equation 10), with normed keys.

    q, k [1, tokens, key heads, K], v [1, tokens, heads, V], beta [1, tokens, heads]; g (logarithms) [1, tokens, heads], or with a
    decay for each channel of the keys, [1, tokens, heads, K]; initial_state [slots, heads, V, K] is read and written. Returns
    [1, tokens, heads, V].
    """
    heads, out = v.shape[2], torch.empty_like(v)
    q, k = (torch.nn.functional.normalize(x.float(), dim=-1).repeat_interleave(heads // x.shape[2], 2) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    for sequence, slot in enumerate(initial_state_indices.tolist()):
        state = initial_state[slot].float()
        for at in range(int(cu_seqlens[sequence]), int(cu_seqlens[sequence + 1])):
            state = state * g[0, at].float().exp().reshape(heads, 1, -1)
            found = torch.einsum("hvk,hk->hv", state, k[0, at])
            change = (v[0, at].float() - found) * beta[0, at].float()[:, None]
            state = state + torch.einsum("hv,hk->hvk", change, k[0, at])
            out[0, at] = torch.einsum("hvk,hk->hv", state, q[0, at]).to(out.dtype)
        initial_state[slot] = state.to(initial_state.dtype)
    return out, None, None


def one_token_each(*, a: torch.Tensor, dt_bias: torch.Tensor, A_log: torch.Tensor, **more: Any) -> None:  # noqa: N803
    """`fused_recurrent_gated_delta_rule_packed_decode`: the rule for one token of each sequence. a: [sequences, heads]."""
    _one_token(-A_log.float().exp() * torch.nn.functional.softplus(a.float() + dt_bias.float()), **more)


def _one_token(
    g: torch.Tensor,
    *,
    mixed_qkv: torch.Tensor,
    b: torch.Tensor,
    initial_state: torch.Tensor,
    out: torch.Tensor,
    ssm_state_indices: torch.Tensor,
    **_: Any,
) -> None:
    """Writes `out` [sequences, 1, heads, V]. g: logarithms, [sequences, heads] or [sequences, heads, K]; mixed_qkv: [sequences,
    channels], q, k and v one after the other."""
    count, _, heads, width = out.shape
    depth = initial_state.shape[-1]
    keys = (mixed_qkv.shape[1] - heads * width) // 2
    q, k, v = mixed_qkv.split([keys, keys, heads * width], 1)
    done, *_ = gated_delta_rule(
        q.view(1, count, -1, depth),
        k.view(1, count, -1, depth),
        v.view(1, count, heads, width),
        g[None],
        b.float().sigmoid()[None],
        initial_state=initial_state,
        initial_state_indices=ssm_state_indices,
        cu_seqlens=torch.arange(count + 1),
    )
    out.copy_(done.transpose(0, 1))


def kimi_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    A_log: torch.Tensor | None = None,  # noqa: N803
    dt_bias: torch.Tensor | None = None,
    beta_is_raw: bool = False,
    **more: Any,
) -> torch.Tensor:
    """`chunk_kda` (arXiv:2510.26692, equation 1): the gated delta rule with a decay for each channel. g [1, tokens, heads, K]:
    logarithms; with A_log, what they are made from."""
    if A_log is not None and dt_bias is not None:
        g = _decays(g, A_log, dt_bias)
    beta = beta.float().sigmoid() if beta_is_raw else beta
    return gated_delta_rule(q, k, v, g, beta, **more)[0]


def one_token_each_of_kimis(
    *,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    A_log: torch.Tensor,  # noqa: N803
    initial_state: torch.Tensor,
    **more: Any,
) -> None:
    """`fused_recurrent_kda_packed_decode`, as `one_token_each`. a: [sequences, heads * K]."""
    g = _decays(a.view(len(a), -1, initial_state.shape[-1]), A_log, dt_bias)
    _one_token(g, initial_state=initial_state, **more)


def _decays(g: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor) -> torch.Tensor:
    heads, depth = g.shape[-2:]
    return -a_log.float().reshape(heads, 1).exp() * torch.nn.functional.softplus(
        g.float() + dt_bias.float().reshape(heads, depth)
    )


def state_space_dual(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # noqa: N803
    B: torch.Tensor,  # noqa: N803
    C: torch.Tensor,  # noqa: N803
    *,
    D: torch.Tensor,  # noqa: N803
    dt_bias: torch.Tensor,
    cu_seqlens: torch.Tensor,
    initial_states: torch.Tensor | None,
    out: torch.Tensor,
    state_dtype: torch.dtype,
    **_: Any,
) -> tuple[None, torch.Tensor, None]:
    """`mamba_chunk_scan_combined` (Mamba-2, arXiv:2405.21060).

    x [1, tokens, heads, P], dt [1, tokens, heads], A, D, dt_bias [heads], B, C [1, tokens, groups, N]; writes `out`, of x's
    shape. Returns the states after each sequence, [sequences, heads, P, N].
    """
    states = []
    for sequence in range(len(cu_seqlens) - 1):
        empty = torch.zeros(*x.shape[2:], B.shape[-1])
        state = empty if initial_states is None else initial_states[sequence].float()
        for at in range(int(cu_seqlens[sequence]), int(cu_seqlens[sequence + 1])):
            state, out[0, at] = _next_state(state, x[0, at], dt[0, at], A, B[0, at], C[0, at], D, dt_bias)
        states.append(state)
    return None, torch.stack(states).to(state_dtype), None


def state_space_step(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # noqa: N803
    B: torch.Tensor,  # noqa: N803
    C: torch.Tensor,  # noqa: N803
    D: torch.Tensor,  # noqa: N803
    *,
    dt_bias: torch.Tensor,
    state_batch_indices: torch.Tensor,
    out: torch.Tensor,
    **_: Any,
) -> None:
    """`selective_state_update` of Mamba-2, whose dt, A, D and dt_bias are repeated over a head: one token of each sequence. x
    [sequences, heads, P]; `state` [slots, heads, P, N] is read and written, and `out`, of x's shape, is written."""
    for sequence, slot in enumerate(state_batch_indices.tolist()):
        new, out[sequence] = _next_state(
            state[slot].float(),
            x[sequence],
            dt[sequence, :, 0],
            A[:, 0, 0],
            B[sequence],
            C[sequence],
            D[:, 0],
            dt_bias[:, 0],
        )
        state[slot] = new.to(state.dtype)


def _next_state(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """state [heads, P, N], x [heads, P], dt, a, d, dt_bias [heads], b, c [groups, N]: the next state, and what is read of it."""
    step = torch.nn.functional.softplus(dt.float() + dt_bias.float())
    b, c = (each.float().repeat_interleave(len(x) // len(each), 0) for each in (b, c))
    state = state * (step * a.float()).exp()[:, None, None] + (step[:, None] * x.float())[:, :, None] * b[:, None, :]
    return state, (torch.einsum("hpn,hn->hp", state, c) + d.float()[:, None] * x.float()).to(x.dtype)

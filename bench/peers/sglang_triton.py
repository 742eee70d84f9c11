"""SGLang's Triton kernels: decode in splits, and extend over a prefix.

Written from their signatures and tested against stand-ins with them; no machine that measures here has had SGLang yet.
They address a pool of tokens, so pages must lie at one token stride. Extend reads the new keys from tensors of their
own, as its backend has them at hand; they are copied out of the cache beforehand, not timed.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from bench.candidate import Candidate, NotApplicableError

if TYPE_CHECKING:
    from bench.attention_inputs import AttentionInputs

MAX_KV_SPLITS = 8  # its `triton_attention_num_kv_splits`


def probe() -> str:
    """Imports the peer. Returns its version; raises if it cannot run here."""
    import sglang
    from sglang.srt.layers.attention.triton_ops import decode_attention, extend_attention  # noqa: F401

    return str(getattr(sglang, "__version__", "unknown"))


def attention(inputs: AttentionInputs) -> list[Candidate]:
    """`decode_attention_fwd` if every sequence has one query, else `extend_attention_fwd`."""
    if inputs.case.layout == "hnd":
        raise NotApplicableError("its pool of tokens has no pages, and HND pages no token stride")
    return [_decode(inputs) if inputs.case.is_decode else _extend(inputs)]


def _decode(inputs: AttentionInputs) -> Candidate:
    from sglang.srt.layers.attention.triton_ops.decode_attention import decode_attention_fwd

    case, device = inputs.case, inputs.device
    indptr, slots = _pool_slots(inputs, case.seq_lens)
    rows = (case.num_seqs, case.num_query_heads, MAX_KV_SPLITS)
    logits = torch.empty((*rows, case.head_dim), dtype=torch.float32, device=device)
    lse = torch.empty(rows, dtype=torch.float32, device=device)
    splits = torch.full((case.num_seqs,), MAX_KV_SPLITS, dtype=torch.int32, device=device)
    scales = _scales(decode_attention_fwd)

    def run(index: int) -> torch.Tensor:
        k, v = _pool(inputs, index)
        decode_attention_fwd(
            inputs.q[index], k, v, inputs.out, indptr, slots, logits, lse, splits, MAX_KV_SPLITS, inputs.scale, **scales
        )
        return inputs.out

    return Candidate("sglang-triton", run, f"decode_attention_fwd, {MAX_KV_SPLITS} splits of every sequence")


def _extend(inputs: AttentionInputs) -> Candidate:
    from sglang.srt.layers.attention.triton_ops.extend_attention import extend_attention_fwd

    case = inputs.case
    indptr, slots = _pool_slots(inputs, [n - q for n, q in zip(case.seq_lens, case.query_lens)])
    fresh = [_new_tokens(inputs, index) for index in range(inputs.sets)]
    scales = _scales(extend_attention_fwd)

    def run(index: int) -> torch.Tensor:
        extend_attention_fwd(
            inputs.q[index],
            *fresh[index],
            inputs.out,
            *_pool(inputs, index),
            inputs.query_start_loc,
            indptr,
            slots,
            custom_mask=None,
            is_causal=True,
            mask_indptr=None,
            max_len_extend=max(case.query_lens),
            sm_scale=inputs.scale,
            **scales,
        )
        return inputs.out

    return Candidate(
        "sglang-triton", run, "extend_attention_fwd, this step's keys and values contiguous beside the pool"
    )


def _scales(function: Any) -> dict[str, float]:
    """Releases differ in whether they ask for the factors of a quantised cache."""
    return {name: 1.0 for name in ("k_scale", "v_scale") if name in inspect.signature(function).parameters}


def _pool(inputs: AttentionInputs, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as `[num_slots, num_kv_heads, head_dim]`, views of the cache."""
    layer, heads = inputs.layers[index], (-1, inputs.case.num_kv_heads, inputs.case.head_dim)
    return layer.k.view(heads), layer.v.view(heads)


def _pool_slots(inputs: AttentionInputs, lengths: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """`indptr` over sequences and the slot of each of their first `lengths` tokens."""
    size = inputs.case.block_size
    slots = []
    for row, length in zip(inputs.block_rows, lengths):
        starts = torch.tensor(row, dtype=torch.int64)[:, None] * size
        slots.append((starts + torch.arange(size)).flatten()[:length])
    indptr = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return indptr.to(inputs.device), torch.cat(slots).to(inputs.device)


def _new_tokens(inputs: AttentionInputs, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    dense = [inputs.dense(index, sequence) for sequence in range(inputs.case.num_seqs)]
    parts = [(k[-queries:], v[-queries:]) for (k, v), queries in zip(dense, inputs.case.query_lens)]
    return torch.cat([k for k, _ in parts]), torch.cat([v for _, v in parts])

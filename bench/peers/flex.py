"""torch's flex_attention over a paged cache (`torch.nn.attention.experimental._paged_attention`), compiled.

It keeps the cache head-major in one row and wants pages of the kernel's key block, so the content is copied into a
cache of its own with pages of 128 tokens. One length for all sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from bench.candidate import Candidate, NotApplicableError

if TYPE_CHECKING:
    from bench.attention_inputs import AttentionInputs

PAGE = 128


def probe() -> str:
    """Imports the peer. Returns torch's version."""
    from torch.nn.attention.experimental._paged_attention import PagedAttention  # noqa: F401

    return torch.__version__


def attention(inputs: AttentionInputs, *, compiled: bool = True) -> list[Candidate]:
    """One candidate, over input set 0 alone."""
    from torch.nn.attention.experimental._paged_attention import PagedAttention
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    case, device = inputs.case, inputs.device
    length, query_len = case.seq_lens[0], case.query_lens[0]
    if len(set(case.seq_lens)) > 1 or len(set(case.query_lens)) > 1:
        raise NotApplicableError("set up here for sequences of one length only")
    if length % PAGE:
        raise NotApplicableError(f"set up here for multiples of {PAGE} tokens only")
    num_seqs, pages = case.num_seqs, case.num_seqs * length // PAGE
    paged = PagedAttention(pages, PAGE, num_seqs, device=str(device))
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(4)).tolist()
    paged.empty_pages = order
    for sequence in range(num_seqs):
        paged.reserve(torch.tensor([sequence], device=device), torch.tensor([length], device=device))
    shape = (1, case.num_kv_heads, pages * PAGE, case.head_dim)
    k_cache, v_cache = (torch.empty(shape, dtype=inputs.dtype, device=device) for _ in range(2))
    positions = torch.arange(length, device=device)[None]
    for sequence in range(num_seqs):
        k, v = (x.transpose(0, 1)[None] for x in inputs.dense(0, sequence))
        paged.assign(torch.tensor([sequence], device=device), positions, k, v, k_cache, v_cache)

    first = length - query_len

    def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return q + first >= kv

    query_block = PAGE if query_len >= PAGE else query_len
    logical = create_block_mask(
        causal, num_seqs, None, query_len, length, device=str(device), BLOCK_SIZE=(query_block, PAGE)
    )
    mask = paged.convert_logical_block_mask(logical)
    call = torch.compile(flex_attention, dynamic=False) if compiled else flex_attention
    heads = (num_seqs, query_len, case.num_query_heads, case.head_dim)
    q = inputs.q[0].view(heads).transpose(1, 2).contiguous()

    def run(index: int) -> Any:
        return call(q, k_cache, v_cache, block_mask=mask, scale=inputs.scale, enable_gqa=True)

    return [Candidate("flex", run, f"compiled, paged, pages of {PAGE} tokens in a cache of its own", sets=1)]

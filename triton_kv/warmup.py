"""`compile_kernels`: compile and load, before capture, every kernel that serving can reach."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from triton_kv.attention import paged_attention
from triton_kv.choices import PREFILL_ROWS, choose_decode, choose_prefill, hardware_of
from triton_kv.metadata import AttentionMetadata
from triton_kv.writing import write_kv

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    from triton_kv.cache import KVCache


def compile_kernels(
    cache: KVCache,
    num_query_heads: int,
    *,
    max_seqs: int,
    max_tokens: int,
    dtype: torch.dtype | None = None,
    return_lse: bool = False,
) -> None:
    """Run `write_kv` and `paged_attention` once in every variant that a step of this size can choose, on nothing.

    Afterwards no step of up to `max_seqs` sequences and `max_tokens` tokens compiles a kernel or loads a module, which
    would take time, and device memory that the cache's size did not allow for. Call it before capture, with at least
    one block committed; a profile run alone meets only the variants of its own batch. Lengths are zero and slots
    negative, so it reads and writes no block.

    num_query_heads: of the queries that will be passed. max_seqs, max_tokens: the largest step.
    dtype: of the queries; `None` is the cache's, the only one supported yet.
    return_lse: whether serving asks for the LSE.

    Causal attention without `table_rows`, over all layers (they share one geometry). Keys and values may be slices of
    wider rows as long as their strides are multiples of 16 bytes. Returns once everything ran: it waits for the device.
    On a CPU it does nothing. Raises `NothingCommitted` before the first `extend`, and what `paged_attention` raises.
    """
    if max_seqs < 1 or max_tokens < 1:
        raise ValueError(f"max_seqs {max_seqs} and max_tokens {max_tokens} must be at least 1")
    layer = cache[0]
    layer.check_usable()
    device = layer.control.device
    if device.type != "cuda":
        return
    _, block_size, num_kv_heads, head_dim = layer.k.shape
    v_head_dim = layer.v.shape[3]
    group = max(1, num_query_heads // num_kv_heads)
    shape = (group, head_dim, v_head_dim, block_size, layer.k.element_size(), hardware_of(device))

    def zeros(*size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32, device=device)

    def attend(num_tokens: int, num_seqs: int, max_query_len: int, *, varlen: bool) -> None:
        q = torch.zeros((num_tokens, num_query_heads, head_dim), dtype=dtype or layer.k.dtype, device=device)
        metadata = AttentionMetadata(
            block_table=zeros(num_seqs, 1),
            seq_lens=zeros(num_seqs),
            slot_mapping=torch.full((num_tokens,), -1, dtype=torch.int64, device=device),
            query_start_loc=zeros(num_seqs + 1) if varlen else None,
            num_tokens=num_tokens,
            num_seqs=num_seqs,
            max_query_len=max_query_len,
        )
        paged_attention(q, layer, metadata, return_lse=return_lse)

    with torch.cuda.device(device):
        k = torch.zeros((1, num_kv_heads, head_dim), dtype=layer.k.dtype, device=device)
        v = torch.zeros((1, num_kv_heads, v_head_dim), dtype=layer.v.dtype, device=device)
        for slot_dtype in (torch.int32, torch.int64):
            write_kv(k, v, layer, torch.full((1,), -1, dtype=slot_dtype, device=device))
        batches = range(1, max_seqs + 1)
        for num_seqs in first_of_each(batches, lambda n: choose_decode(n, num_kv_heads, *shape)):
            attend(num_seqs, num_seqs, 1, varlen=False)
        queries = range(1, min(max_tokens, PREFILL_ROWS[-1] + 1) + 1)
        for num_seqs in first_of_each(batches, lambda n: choose_prefill(n, 1, *shape)):
            for query_len in first_of_each(queries, lambda n: choose_prefill(1, n, *shape)):
                attend(max(num_seqs, query_len), num_seqs, query_len, varlen=True)
        torch.cuda.synchronize(device)


def first_of_each(numbers: Iterable[int], key: Callable[[int], Hashable]) -> list[int]:
    """The first number of each distinct key."""
    found: dict[Hashable, int] = {}
    for number in numbers:
        found.setdefault(key(number), number)
    return list(found.values())


__all__ = ["compile_kernels"]

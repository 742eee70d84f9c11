"""`compile_kernels`: everything that serving can reach is compiled and loaded before the cache is sized."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from triton_kv.attention import decode_launches, prefill_launches
from triton_kv.choices import choose_decode, choose_prefill, hardware_of
from triton_kv.launch import Launch
from triton_kv.layer import operands_of
from triton_kv.spec import positive_int
from triton_kv.writing import write_launch

if TYPE_CHECKING:
    from triton_kv.cache import KVCache
    from triton_kv.layer import LayerOperands


def compile_kernels(
    cache: KVCache, num_query_heads: int, *, max_seqs: int, max_tokens: int, return_lse: bool = False
) -> int:
    """Compiles and loads the kernels that batches of up to `max_seqs` sequences and `max_tokens` tokens reach.

    Call it before capture and before the plan: a module that loads later takes device memory that the plan gave away.
    Covers `write_kv` (rows of their own, and slices of one fused qkv tensor) and causal `paged_attention` with and
    without `query_start_loc`, over 16-byte aligned tensors. The kernel behind `AttentionBuffers.fill` compiles at its
    first fill (or `dummy`). Launches nothing and does not synchronise. Returns how many launches were compiled; on a
    CPU there is nothing to do and it returns 0.

    Raises `ValueError` for sizes below 1 or heads that are no multiple of the KV heads, and what an op raises on a
    cache that is closed or has no block.
    """
    max_seqs, max_tokens = positive_int("max_seqs", max_seqs), positive_int("max_tokens", max_tokens)
    operands = operands_of(cache[0])
    if positive_int("num_query_heads", num_query_heads) % operands.num_kv_heads:
        raise ValueError(
            f"num_query_heads {num_query_heads} must be a multiple of the cache's {operands.num_kv_heads} KV heads"
        )
    if cache.device.type != "cuda":
        return 0
    with torch.cuda.device(cache.device):
        launches = [
            *_decodes(operands, num_query_heads, max_seqs, return_lse),
            *_prefills(operands, num_query_heads, max_seqs, max_tokens, return_lse),
            *_writes(operands, num_query_heads, max_tokens),
        ]
        for launch in launches:
            launch.compile()
    return len(launches)


def _decodes(operands: LayerOperands, num_query_heads: int, max_seqs: int, return_lse: bool) -> list[Launch]:
    group, hardware = num_query_heads // operands.num_kv_heads, hardware_of(operands.device)
    representative: dict[object, int] = {}  # one batch size for each choice
    for num_seqs in range(1, max_seqs + 1):
        choice = choose_decode(
            num_seqs,
            operands.num_kv_heads,
            group,
            operands.head_dim,
            operands.v_head_dim,
            operands.block_size,
            operands.dtype.itemsize,
            hardware,
        )
        representative[choice] = num_seqs
    launches: list[Launch] = []
    for num_seqs in representative.values():
        q, out, lse, block_table, seq_lens = _batch(operands, num_query_heads, num_seqs, num_seqs, return_lse)
        scale = operands.head_dim**-0.5
        launches += decode_launches(q, operands, block_table, seq_lens, None, out, lse, scale=scale, hardware=hardware)
    return launches


def _prefills(
    operands: LayerOperands, num_query_heads: int, max_seqs: int, max_tokens: int, return_lse: bool
) -> list[Launch]:
    group, hardware = num_query_heads // operands.num_kv_heads, hardware_of(operands.device)
    representative: dict[object, tuple[int, int]] = {}
    query_lens = {*range(1, min(max_tokens, 128) + 1), max_tokens}  # from 128 on every choice is the same
    for num_seqs in {1, *(n for n in (255, 256, 1023, 1024) if n <= max_seqs), max_seqs}:
        for query_len in query_lens:
            choice = choose_prefill(
                num_seqs,
                query_len,
                group,
                operands.head_dim,
                operands.v_head_dim,
                operands.block_size,
                operands.dtype.itemsize,
                hardware,
            )
            representative[choice] = (num_seqs, query_len)
    launches: list[Launch] = []
    for num_seqs, query_len in representative.values():
        q, out, lse, block_table, seq_lens = _batch(operands, num_query_heads, max_tokens, num_seqs, return_lse)
        launches += prefill_launches(
            q,
            operands,
            block_table,
            seq_lens,
            torch.empty(num_seqs + 1, dtype=torch.int32, device="meta"),
            None,
            out,
            lse,
            scale=operands.head_dim**-0.5,
            causal=True,
            max_query_len=query_len,
            hardware=hardware,
        )
    return launches


def _writes(operands: LayerOperands, num_query_heads: int, max_tokens: int) -> list[Launch]:
    kv_heads = operands.num_kv_heads
    row = num_query_heads * operands.head_dim + kv_heads * (operands.head_dim + operands.v_head_dim)
    launches = []
    for num_tokens in {1, max_tokens}:
        slots = torch.empty(num_tokens, dtype=torch.int64, device="meta")
        for k_row, v_row in (
            (kv_heads * operands.head_dim, kv_heads * operands.v_head_dim),
            (row, row),  # slices of a fused qkv tensor
        ):
            shape = (num_tokens, kv_heads)
            k = torch.empty_strided(
                (*shape, operands.head_dim), (k_row, operands.head_dim, 1), dtype=operands.dtype, device="meta"
            )
            v = torch.empty_strided(
                (*shape, operands.v_head_dim), (v_row, operands.v_head_dim, 1), dtype=operands.dtype, device="meta"
            )
            launches.append(write_launch(k, v, operands, slots))
    return launches


def _batch(
    operands: LayerOperands, num_query_heads: int, num_tokens: int, num_seqs: int, return_lse: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Meta tensors of one batch: q, out, lse, block table and lengths."""
    q = torch.empty(num_tokens, num_query_heads, operands.head_dim, dtype=operands.dtype, device="meta")
    out = torch.empty(num_tokens, num_query_heads, operands.v_head_dim, dtype=operands.dtype, device="meta")
    lse = torch.empty(num_tokens, num_query_heads, device="meta") if return_lse else None
    block_table = torch.empty(num_seqs, 8, dtype=torch.int32, device="meta")
    return q, out, lse, block_table, torch.empty(num_seqs, dtype=torch.int32, device="meta")

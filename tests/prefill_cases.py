"""The variants of the Hopper prefill kernel that tests compile, and a batch's launches over meta tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tests.attention_cases import BF16, F16, PLAIN_SCORING, AttentionShape, shape_operands
from triton_kv.attention import prefill_launches
from triton_kv.batch import Batch
from triton_kv.prefill_hopper import use_prefill_kernel
from triton_kv.scoring import Scoring

if TYPE_CHECKING:
    from triton_kv.choices import Hardware
    from triton_kv.launch import Launch

# (shape, sequences, query tokens each, causal): both head dims and types, a page of a tile's part, a tile, and more.
HOPPER_VARIANTS = (
    (AttentionShape(8, 4, 128, 128, 16, BF16), 1, 8192, True),
    (AttentionShape(8, 4, 64, 64, 16, BF16), 1, 8192, True),
    (AttentionShape(8, 4, 128, 128, 16, F16, has_control=False, has_lse=True), 64, 32, True),
    (AttentionShape(8, 4, 64, 64, 32, F16, has_lse=True), 64, 32, False),
    (AttentionShape(8, 4, 128, 128, 64, BF16, has_lse=True), 4, 2048, False),
    (AttentionShape(8, 8, 128, 128, 128, BF16, has_control=False), 4, 2048, True),
    (AttentionShape(8, 1, 128, 128, 256, BF16), 4, 2048, True),
    (AttentionShape(4, 7, 128, 128, 16, BF16, has_lse=True), 16, 1024, True),
    (AttentionShape(4, 7, 64, 64, 64, BF16), 16, 20, True),
    (AttentionShape(8, 4, 64, 64, 16, BF16, has_lse=True), 16, 1024, True),
    (AttentionShape(8, 2, 256, 256, 16, BF16), 1, 8192, True),
    (AttentionShape(4, 7, 256, 256, 128, BF16, has_lse=True), 16, 1024, False),
)


def hopper_pair(
    shape: AttentionShape, num_seqs: int, query_len: int, causal: bool, hardware: Hardware, **fields: object
) -> tuple[Launch, ...]:
    """What the chooser launches for a batch, with `use_prefill_kernel("hopper")`."""
    meta = {"device": "meta"}
    heads, num_tokens = shape.num_kv_heads * shape.group, num_seqs * query_len
    q = torch.empty(num_tokens, heads, shape.head_dim, dtype=shape.dtype, **meta)
    out = torch.empty(num_tokens, heads, shape.v_head_dim, dtype=shape.dtype, **meta)
    lse = torch.empty(num_tokens, heads, **meta) if shape.has_lse else None
    table, lens, starts = (
        torch.empty(*size, dtype=torch.int32, **meta) for size in ((num_seqs, 512), (num_seqs,), (num_seqs + 1,))
    )
    batch = Batch(table, lens, starts, None, query_len)
    scoring = Scoring(**{**PLAIN_SCORING, "causal": causal, **fields})
    with use_prefill_kernel("hopper"):
        return prefill_launches(q, shape_operands(shape), batch, out, lse, scoring, hardware=hardware)

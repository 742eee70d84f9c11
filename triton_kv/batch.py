"""What launch builders of attention share: the batch of one step, and the arguments that all its kernels take."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from triton_kv.layer import LayerOperands
    from triton_kv.metadata import AttentionMetadata
    from triton_kv.scoring import Scoring

QUERY_STEPS = (2, 4, 8, 16)  # query tokens a sequence with `query_start_loc`, at most


class Batch(NamedTuple):
    """What metadata says of one step, as ops take it."""

    block_table: torch.Tensor  # int32 [rows, width]
    seq_lens: torch.Tensor  # int32 [num_seqs]
    query_start_loc: torch.Tensor | None  # int32 [num_seqs + 1]
    table_rows: torch.Tensor | None  # int32 [num_seqs]
    max_query_len: int

    @classmethod
    def of(cls, metadata: AttentionMetadata) -> Batch:
        return cls(
            metadata.block_table,
            metadata.seq_lens,
            metadata.query_start_loc,
            metadata.table_rows,
            metadata.max_query_len,
        )

    @property
    def num_seqs(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def queries(self) -> int:
        """Query tokens of a sequence that decode kernels make room for: few values, each a kernel of its own."""
        if self.query_start_loc is None:
            return 1
        return next((number for number in QUERY_STEPS if self.max_query_len <= number), self.max_query_len)


def input_pointers(
    q: torch.Tensor, operands: LayerOperands, batch: Batch, scoring: Scoring
) -> dict[str, torch.Tensor | None]:
    """The tensors that attention kernels read, in the order of their parameters."""
    return {
        "q_ptr": q,
        "k_cache_ptr": operands.k_cache,
        "v_cache_ptr": operands.k_cache if operands.v_cache is None else operands.v_cache,
        "block_table_ptr": batch.block_table,
        "seq_lens_ptr": batch.seq_lens,
        "query_start_loc_ptr": batch.query_start_loc,
        "table_rows_ptr": batch.table_rows,
        "sinks_ptr": scoring.sinks,
        "alibi_slopes_ptr": scoring.alibi_slopes,
        "tree_mask_ptr": scoring.tree_mask,
        "control_ptr": operands.control,
    }


def constants(q: torch.Tensor, operands: LayerOperands, out: torch.Tensor, scoring: Scoring) -> dict[str, Any]:
    """The constexprs that a cache and a model never change, in the order of the kernels' parameters."""
    return {
        "GROUP": q.shape[1] // operands.num_kv_heads,
        "NUM_KV_HEADS": operands.num_kv_heads,
        "HEAD_DIM": operands.head_dim,
        "V_HEAD_DIM": operands.v_head_dim,
        "BLOCK_SIZE": operands.block_size,
        "K_STRIDE_BLOCK": operands.k_strides[0],
        "K_STRIDE_TOKEN": operands.k_strides[1],
        "K_STRIDE_HEAD": operands.k_strides[2],
        "V_STRIDE_BLOCK": operands.v_strides[0],
        "V_STRIDE_TOKEN": operands.v_strides[1],
        "V_STRIDE_HEAD": operands.v_strides[2],
        "V_DIVISOR": math.gcd(operands.v_offset, operands.v_strides[2], 16 // operands.dtype.itemsize),
        "Q_STRIDE_HEAD": q.stride(1),
        "Q_DIVISOR": row_divisor(q),
        "OUT_STRIDE_HEAD": out.stride(1),
        "OUT_DIVISOR": row_divisor(out),
        "IS_CAUSAL": scoring.causal,
        "WINDOW": scoring.window,
        "SOFTCAP_LOG2": scoring.softcap_log2,
    }


def stride_token(tensor: torch.Tensor) -> int:
    """A single token's stride is never used and may be anything: no variant of the kernel for it."""
    return tensor.stride(0) if tensor.shape[0] > 1 else tensor.shape[1] * tensor.shape[2]


def row_divisor(tensor: torch.Tensor) -> int:
    """What divides the start of every head's row, in elements, up to 16 bytes: how wide its loads may be."""
    head_stride = tensor.stride(1) if tensor.shape[1] > 1 else 0
    return math.gcd(stride_token(tensor), head_stride, 16 // tensor.element_size())

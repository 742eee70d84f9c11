"""Launches of decode attention: a few query tokens a sequence, two kernels, nothing planned on the host."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from triton_kv.batch import QUERY_STEPS, Batch, constants, input_pointers, row_divisor, stride_token
from triton_kv.choices import DecodeChoice, Hardware, choose_decode, lanes_of, reads_scalar_ids
from triton_kv.kernels.decode import CHUNK_WORDS, PARTIAL_TAIL, decode_kernel, join_kernel, prepare_kernel
from triton_kv.launch import Launch

if TYPE_CHECKING:
    from triton_kv.layer import LayerOperands
    from triton_kv.scoring import Scoring

MAX_DECODE_ROWS = 32  # query tokens times query heads a KV head: beyond, prefill's wide tiles are faster
_PREPARED_ENTRIES = 1024  # table entries that prepare_kernel checks at a time


class Workspace(NamedTuple):
    """Device memory of attention between its launches."""

    partials: torch.Tensor  # f32 [elements]
    # int32 [num_chunks, CHUNK_WORDS], filled by prepare_kernel once a step; for prefill a plan's work list.
    chunks: torch.Tensor | None


def decodes(batch: Batch, group: int) -> bool:
    """Whether a batch goes to the decode kernels: one query token a sequence, or a few that share its reads."""
    if batch.query_start_loc is None:
        return True
    return batch.queries <= QUERY_STEPS[-1] and batch.queries * group <= MAX_DECODE_ROWS


def choice_of(
    batch: Batch,
    num_query_heads: int,
    operands: LayerOperands,
    hardware: Hardware,
    batch_invariant: bool,
) -> DecodeChoice:
    """The launch choice for a batch over a layer."""
    return choose_decode(
        batch.num_seqs,
        operands.num_kv_heads,
        num_query_heads // operands.num_kv_heads,
        operands.head_dim,
        operands.v_head_dim,
        operands.block_size,
        operands.dtype.itemsize,
        hardware,
        queries=batch.queries,
        batch_invariant=batch_invariant,
    )


def partial_elements(
    choice: DecodeChoice, num_seqs: int, max_seq_len: int, num_query_heads: int, queries: int, v_head_dim: int
) -> int:
    """f32 elements of the partials. Without splits independent of the batch and its lengths."""
    return choice.num_slots(num_seqs, max_seq_len) * num_query_heads * queries * (v_head_dim + PARTIAL_TAIL.value)


def make_workspace(
    batch: Batch,
    num_query_heads: int,
    operands: LayerOperands,
    choice: DecodeChoice,
    device: torch.device | None = None,
) -> Workspace:
    """A workspace for one call, on the layer's device unless another is named."""
    max_seq_len = batch.block_table.shape[1] * operands.block_size
    elements = partial_elements(
        choice, batch.num_seqs, max_seq_len, num_query_heads, batch.queries, operands.v_head_dim
    )
    return Workspace(torch.empty(elements, dtype=torch.float32, device=device or operands.device), None)


def decode_launches(
    q: torch.Tensor,
    operands: LayerOperands,
    batch: Batch,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scoring: Scoring,
    *,
    hardware: Hardware,
    batch_invariant: bool = False,
    workspace: Workspace | None = None,
    choice: DecodeChoice | None = None,
) -> tuple[Launch, Launch]:
    """The two launches of attention with at most `batch.queries` query tokens a sequence (at least one sequence).

    Looks at shapes, strides and dtypes only, so meta tensors will do; without a workspace allocates one on q's device.
    `choice` forces what `choose_decode` would return.
    """
    num_tokens, num_query_heads, head_dim = q.shape
    num_kv_heads, v_head_dim = operands.num_kv_heads, operands.v_head_dim
    group, queries = num_query_heads // num_kv_heads, batch.queries
    if choice is None:
        choice = choice_of(batch, num_query_heads, operands, hardware, batch_invariant)
    if workspace is None:
        workspace = make_workspace(batch, num_query_heads, operands, choice, q.device)
    num_parts = -(-group * queries // choice.rows)
    out_stride_token, out_divisor = stride_token(out), row_divisor(out)
    num_programs = choice.num_chunks * num_kv_heads * num_parts
    decode = Launch(
        kernel=decode_kernel,
        grid=(num_programs,),
        arguments={
            **input_pointers(q, operands, batch, scoring),
            "chunks_ptr": workspace.chunks,
            "out_ptr": out,
            "lse_ptr": lse,
            "partials_ptr": workspace.partials,
            "v_offset": operands.v_offset,
            "num_seqs": batch.num_seqs,
            "table_width": batch.block_table.shape[1],
            "num_blocks": operands.num_blocks,
            "table_stride_row": batch.block_table.stride(0),
            "q_stride_token": stride_token(q),
            "out_stride_token": out_stride_token,
            "scale_log2": scoring.scale_log2,
            **constants(q, operands, out, scoring),
            "QUERIES": queries,
            "ROWS": choice.rows,
            "TILE": choice.tile,
            "K_LANES": lanes_of(head_dim),
            "V_LANES": lanes_of(v_head_dim),
            "NUM_CHUNKS": choice.num_chunks,
            "SPLIT": choice.split_tokens,
            "SCAN": choice.scan,
            "ONE_SCAN": choice.one_scan,
            "SCALAR_IDS": reads_scalar_ids(operands.block_size),
            "STAGES": choice.num_stages,
            "STEP": spreading_step(num_programs) if choice.spreads_idle else 1,
            "USE_PDL": choice.use_pdl,
        },
        num_warps=choice.num_warps,
        num_stages=choice.num_stages,
        launch_pdl=choice.use_pdl,
        # What rows with words need was not measured: as many registers as there are.
        max_registers=choice.max_registers if scoring.tree_mask is None else hardware.all_registers,
    )
    by_sequence = choice.join_by_sequence
    places = batch.num_seqs if by_sequence else choice.num_chunks
    join = Launch(
        kernel=join_kernel,
        grid=(places * num_query_heads * queries * (lanes_of(v_head_dim) // choice.join_channels),),
        arguments={
            "seq_lens_ptr": batch.seq_lens,
            "query_start_loc_ptr": batch.query_start_loc,
            "sinks_ptr": scoring.sinks,
            "chunks_ptr": None if by_sequence else workspace.chunks,
            "out_ptr": out,
            "lse_ptr": lse,
            "partials_ptr": workspace.partials,
            "num_tokens": num_tokens,
            "num_seqs": batch.num_seqs,
            "table_width": batch.block_table.shape[1],
            "out_stride_token": out_stride_token,
            "GROUP": group,
            "NUM_KV_HEADS": num_kv_heads,
            "V_HEAD_DIM": v_head_dim,
            "BLOCK_SIZE": operands.block_size,
            "OUT_STRIDE_HEAD": out.stride(1),
            "OUT_DIVISOR": out_divisor,
            "WINDOW": scoring.window,
            "QUERIES": queries,
            "TILE": choice.tile,
            "V_LANES": lanes_of(v_head_dim),
            "NUM_CHUNKS": choice.num_chunks,
            "SPLIT": choice.split_tokens,
            "BY_SEQUENCE": by_sequence,
            "SCAN": choice.scan,
            "ONE_SCAN": choice.one_scan,
            "PARTS": choice.join_parts,
            "CHANNELS": choice.join_channels,
            "USE_PDL": choice.use_pdl,
        },
        num_warps=choice.join_warps,
        num_stages=1,
        launch_pdl=choice.use_pdl,
        # Sixteen-bit types on sm_90 as measured: fewer registers leave room beside the decode kernel.
        max_registers=None if hardware.architecture == 90 and q.element_size() == 2 else hardware.all_registers,
    )
    return decode, join


def spreading_step(num_programs: int) -> int:
    """A step that visits every program once and takes neighbours far apart: about the golden section of them all."""
    return next(step for step in range(round(num_programs * 0.618), 0, -1) if math.gcd(step, num_programs) == 1)


def prepare_launch(
    operands: LayerOperands, batch: Batch, window: int, choice: DecodeChoice, chunks: torch.Tensor
) -> Launch:
    """The launch that finds every chunk's place once a step, and counts table entries outside the bound."""
    return Launch(
        kernel=prepare_kernel,
        grid=(choice.num_chunks + batch.num_seqs,),
        arguments={
            "block_table_ptr": batch.block_table,
            "seq_lens_ptr": batch.seq_lens,
            "query_start_loc_ptr": batch.query_start_loc,
            "table_rows_ptr": batch.table_rows,
            "control_ptr": operands.control,
            "chunks_ptr": chunks,
            "num_seqs": batch.num_seqs,
            "table_width": batch.block_table.shape[1],
            "num_blocks": operands.num_blocks,
            "table_stride_row": batch.block_table.stride(0),
            "BLOCK_SIZE": operands.block_size,
            "WINDOW": window,
            "QUERIES": batch.queries,
            "NUM_CHUNKS": choice.num_chunks,
            "UNIT": choice.split_tokens or choice.tile,
            "SCAN": choice.scan,
            "ONE_SCAN": choice.one_scan,
            "ENTRIES": _PREPARED_ENTRIES,
        },
        num_warps=4,
        num_stages=1,
    )


__all__ = [
    "CHUNK_WORDS",
    "Workspace",
    "choice_of",
    "decode_launches",
    "decodes",
    "make_workspace",
    "partial_elements",
    "prepare_launch",
    "spreading_step",
]

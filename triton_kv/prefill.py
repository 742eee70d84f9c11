"""Launches of attention with any number of query tokens: the Hopper kernel where it can, else the portable one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from triton_kv.batch import Batch, constants, input_pointers, stride_token
from triton_kv.choices import Hardware, choose_prefill, lanes_of, reads_scalar_ids
from triton_kv.copy_engine import boxes, refuse_cache
from triton_kv.kernels.prefill import prefill_kernel
from triton_kv.launch import Launch
from triton_kv.prefill_hopper import hopper_launches

if TYPE_CHECKING:
    from triton_kv.layer import LayerOperands
    from triton_kv.scoring import Scoring


def prefill_launches(
    q: torch.Tensor,
    operands: LayerOperands,
    batch: Batch,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scoring: Scoring,
    *,
    hardware: Hardware,
    work: torch.Tensor | None = None,
) -> tuple[Launch, ...]:
    """The launches of attention with any number of query tokens a sequence (at least one token).

    `work` is a plan's list for the Hopper kernel. Looks at shapes, strides, alignments and dtypes only, so meta tensors
    will do.
    """
    on_hopper = hopper_launches(q, operands, batch, out, lse, scoring, hardware=hardware, work=work)
    if on_hopper is not None:
        return on_hopper
    num_tokens, num_query_heads, head_dim = q.shape
    num_kv_heads, v_head_dim = operands.num_kv_heads, operands.v_head_dim
    group = num_query_heads // num_kv_heads
    choice = choose_prefill(
        batch.num_seqs,
        batch.max_query_len,
        group,
        head_dim,
        v_head_dim,
        operands.block_size,
        q.element_size(),
        hardware,
        tree_window=scoring.tree_mask is not None and scoring.window > 0,
        windowed=scoring.window > 0,
        describable=refuse_cache(operands) is None,
    )
    k_desc = v_desc = None
    if choice.box:
        k, v = operands.views()
        k_desc, v_desc = boxes(k, choice.box, lanes_of(head_dim)), boxes(v, choice.box, lanes_of(v_head_dim))
    launch = Launch(
        kernel=prefill_kernel,
        # Enough however the tokens are shared out; one more sequence stands for padding tokens.
        grid=(num_tokens * group // choice.rows + batch.num_seqs + 1, num_kv_heads),
        arguments={
            **input_pointers(q, operands, batch, scoring),
            "k_desc": k_desc,
            "v_desc": v_desc,
            "out_ptr": out,
            "lse_ptr": lse,
            "v_offset": operands.v_offset,
            "num_tokens": num_tokens,
            "num_seqs": batch.num_seqs,
            "table_width": batch.block_table.shape[1],
            "num_blocks": operands.num_blocks,
            "table_stride_row": batch.block_table.stride(0),
            "q_stride_token": stride_token(q),
            "out_stride_token": stride_token(out),
            "scale_log2": scoring.scale_log2,
            **constants(q, operands, out, scoring),
            "ROWS": choice.rows,
            "TILE": choice.tile,
            "EDGE_TILE": choice.edge_tile,
            "BOX": choice.box,
            "K_LANES": lanes_of(head_dim),
            "V_LANES": lanes_of(v_head_dim),
            "SCAN": choice.scan,
            "ONE_SCAN": choice.one_scan,
            "SCALAR_IDS": reads_scalar_ids(operands.block_size),
            "STAGES": choice.num_stages,
        },
        num_warps=choice.num_warps,
        num_stages=choice.num_stages,
        max_registers=choice.max_registers,
    )
    return (launch,)

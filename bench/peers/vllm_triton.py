"""vLLM's Triton kernels: unified attention and the cache write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from bench.candidate import Candidate

if TYPE_CHECKING:
    from bench.attention_inputs import AttentionInputs
    from bench.write_inputs import WriteInputs

# As in vLLM's Triton backend: split softmax below 128 programs of the unsplit grid, into 16 segments.
MIN_LAUNCH_GRID_SIZE_2D = 128
NUM_SEGMENTS = 16


def probe() -> str:
    """Imports the peer. Returns its version; raises if it cannot run here."""
    import vllm
    from vllm.v1.attention.ops import triton_reshape_and_cache_flash, triton_unified_attention  # noqa: F401

    return str(getattr(vllm, "__version__", "of vLLM"))


def attention(inputs: AttentionInputs) -> list[Candidate]:
    """`unified_attention` with the buffers that its backend gives it."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    case = inputs.case
    threshold = MIN_LAUNCH_GRID_SIZE_2D // case.num_kv_heads
    padded = 1 << (case.head_dim - 1).bit_length()
    rows = (threshold, case.num_query_heads, NUM_SEGMENTS)
    partial = torch.empty((*rows, padded), dtype=torch.float32, device=inputs.device)
    maximum = torch.empty(rows, dtype=torch.float32, device=inputs.device)
    total = torch.empty(rows, dtype=torch.float32, device=inputs.device)
    one = torch.ones(1, dtype=torch.float32, device=inputs.device)
    max_query_len, max_seq_len = max(case.query_lens), max(case.seq_lens)

    def run(index: int) -> Any:
        layer = inputs.layers[index]
        unified_attention(
            q=inputs.q[index],
            k=layer.k,
            v=layer.v,
            out=inputs.out,
            cu_seqlens_q=inputs.query_start_loc,
            max_seqlen_q=max_query_len,
            seqused_k=inputs.seq_lens,
            max_seqlen_k=max_seq_len,
            softmax_scale=inputs.scale,
            causal=True,
            window_size=(-1, -1),
            block_table=inputs.block_table,
            softcap=0.0,
            q_descale=None,
            k_descale=one,
            v_descale=one,
            seq_threshold_3D=threshold,
            num_par_softmax_segments=NUM_SEGMENTS,
            softmax_segm_output=partial,
            softmax_segm_max=maximum,
            softmax_segm_expsum=total,
        )
        return inputs.out

    return [
        Candidate("vllm-triton", run, f"split into {NUM_SEGMENTS} up to {threshold} sequences, as its backend does")
    ]


def write(inputs: WriteInputs) -> list[Candidate]:
    """`triton_reshape_and_cache_flash`."""
    from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash

    one = torch.ones(1, dtype=torch.float32, device=inputs.device)

    def run(index: int) -> None:
        layer = inputs.layers[index]
        triton_reshape_and_cache_flash(
            inputs.k[index], inputs.v[index], layer.k, layer.v, inputs.slot_mapping, "auto", one, one
        )

    return [Candidate("vllm-triton", run, "triton_reshape_and_cache_flash")]

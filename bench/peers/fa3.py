"""FlashAttention-3 as vLLM packs it: `vllm.vllm_flash_attn.flash_attn_varlen_func(fa_version=3)`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from bench.candidate import Candidate, NotApplicableError

if TYPE_CHECKING:
    from bench.attention_inputs import AttentionInputs


def probe() -> str:
    """Imports the peer. Returns its version; raises if it cannot run here."""
    from vllm import vllm_flash_attn
    from vllm.vllm_flash_attn.flash_attn_interface import fa_version_unsupported_reason, is_fa_version_supported

    if not is_fa_version_supported(3):
        raise RuntimeError(fa_version_unsupported_reason(3))
    return str(getattr(vllm_flash_attn, "__version__", "of vLLM"))


def attention(inputs: AttentionInputs) -> list[Candidate]:
    """Twice: the tile schedule made inside each call, and made once a step by `get_scheduler_metadata`."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    case = inputs.case
    if case.torch_dtype not in (torch.bfloat16, torch.float16):
        raise NotApplicableError(f"no {case.dtype}")
    if case.head_dim > 256 or case.head_dim % 8:
        raise NotApplicableError(f"no head_dim {case.head_dim}")
    max_query_len, max_seq_len = max(case.query_lens), max(case.seq_lens)

    def call(index: int, schedule: torch.Tensor | None) -> Any:
        layer = inputs.layers[index]
        return flash_attn_varlen_func(
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
            block_table=inputs.block_table,
            scheduler_metadata=schedule,
            fa_version=3,
        )

    schedules: list[torch.Tensor] = []

    def plan() -> None:
        schedules[:] = [
            get_scheduler_metadata(
                batch_size=case.num_seqs,
                max_seqlen_q=max_query_len,
                max_seqlen_k=max_seq_len,
                num_heads_q=case.num_query_heads,
                num_heads_kv=case.num_kv_heads,
                headdim=case.head_dim,
                cache_seqlens=inputs.seq_lens,
                qkv_dtype=inputs.dtype,
                cu_seqlens_q=inputs.query_start_loc,
                page_size=case.block_size,
                causal=True,
            )
        ]

    return [
        Candidate("fa3", lambda index: call(index, None), "num_splits by its heuristic, schedule inside the call"),
        Candidate(
            "fa3-planned",
            lambda index: call(index, schedules[0]),
            "num_splits by its heuristic, get_scheduler_metadata once a step, not timed",
            plan=plan,
        ),
    ]

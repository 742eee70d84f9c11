"""torch's dense attention on K and V gathered beforehand: what paging costs. Prompts of one length without context."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.candidate import Candidate, NotApplicableError

if TYPE_CHECKING:
    from bench.attention_inputs import AttentionInputs

BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def probe() -> str:
    """Returns torch's version."""
    return torch.__version__


def attention(inputs: AttentionInputs, backends: tuple[str, ...] = ("cudnn", "flash")) -> list[Candidate]:
    """One candidate a backend, over input set 0 alone."""
    case = inputs.case
    length = case.seq_lens[0]
    if set(case.query_lens) | set(case.seq_lens) != {length}:
        raise NotApplicableError("dense attention takes prompts of one length without context")
    gathered = [inputs.dense(0, sequence) for sequence in range(case.num_seqs)]
    k = torch.stack([k for k, _ in gathered]).transpose(1, 2).contiguous()  # [seqs, kv_heads, length, head_dim]
    v = torch.stack([v for _, v in gathered]).transpose(1, 2).contiguous()
    shape = (case.num_seqs, length, case.num_query_heads, case.head_dim)
    q = inputs.q[0].view(shape).transpose(1, 2).contiguous()

    def candidate(name: str) -> Candidate:
        def run(index: int) -> Any:
            with sdpa_kernel(BACKENDS[name]):
                return torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=True, scale=inputs.scale, enable_gqa=True
                )

        return Candidate(f"sdpa-{name}", run, f"dense, {name} backend, K and V gathered, not timed", sets=1)

    return [candidate(name) for name in backends]

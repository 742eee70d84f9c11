"""Prefill: prompts, and chunks of prompts on top of context. How much of the matrix unit's rate is left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bench.attention_case import AttentionCase
from bench.attention_suite import run_case, warm_case
from bench.measure import Effort
from bench.peers.flashinfer import modules_for
from bench.suite import Suite

if TYPE_CHECKING:
    from bench.session import Session

# Back to back everything falls to the power limit, so short groups with idle in front.
EFFORT = Effort(rounds=5, samples=3, replay_us=1500.0, max_launches=8, idle_s=0.06, turn_us=20_000.0, host_calls=5)
K = 1024
WITH_PORTABLE = ("planned", "portable")  # where a share of FlashAttention-3's speed is the portable kernel's goal


def prompts(name: str, count: int, query_len: int, context: int = 0, **choices: Any) -> AttentionCase:
    """`count` sequences that add `query_len` tokens to `context` earlier ones."""
    choices.setdefault("ways", ("planned",))
    return AttentionCase(f"prefill/{name}", (query_len,) * count, (context + query_len,) * count, **choices)


NAMED = (  # heads (32, 8), head_dim 128, block 16, NHD
    prompts("1x8k", 1, 8 * K, quick=True, extra_peers=("sdpa",), ways=WITH_PORTABLE),
    prompts("1x32k", 1, 32 * K, extra_peers=("sdpa",)),
    prompts("16x1k", 16, 1 * K, quick=True, extra_peers=("sdpa",)),
    prompts("4x2k-ctx14k", 4, 2 * K, 14 * K, quick=True, ways=WITH_PORTABLE),
    prompts("64x128-ctx4k", 64, 128, 4 * K, quick=True),
    prompts("64x32-ctx4k", 64, 32, 4 * K, quick=True),
    prompts("64x16-ctx4k", 64, 16, 4 * K, quick=True),
    prompts("1x8k-d64", 1, 8 * K, head_dim=64, quick=True, extra_peers=("sdpa",)),
)
MORE = (
    prompts("1x2k", 1, 2 * K, extra_peers=("flex",)),
    prompts("1x512-ctx32k", 1, 512, 32 * K),
    prompts("16x1k-d64", 16, 1 * K, head_dim=64),
    prompts("1x8k-d256", 1, 8 * K, head_dim=256, extra_peers=("sdpa",)),
    prompts("16x1k-d256", 16, 1 * K, head_dim=256),
    prompts("1x8k-h64x8", 1, 8 * K, num_query_heads=64),
    prompts("1x8k-b64", 1, 8 * K, block_size=64, ways=WITH_PORTABLE),
    prompts("4x2k-ctx14k-b64", 4, 2 * K, 14 * K, block_size=64, ways=WITH_PORTABLE),
    prompts("1x8k-hnd", 1, 8 * K, layout="hnd"),
    prompts("16x1k-interleaved", 16, 1 * K, layout="interleaved"),
)
SMOKE = (
    prompts("1x40", 1, 40, dtype="float32", num_query_heads=4, num_kv_heads=2, head_dim=32, ways=WITH_PORTABLE),
    prompts("2x5-ctx30", 2, 5, 30, dtype="float32", num_query_heads=3, num_kv_heads=1, head_dim=64),
)


def run(session: Session, case: AttentionCase) -> dict[str, Any]:
    """Measures one case."""
    return run_case(session, case, EFFORT)


SUITE = Suite(
    name="prefill",
    about="paged attention over prompts, with and without context",
    cases=NAMED + MORE,
    smoke_cases=SMOKE,
    run=run,
    case_s=6.2,
    quick_case_s=3.6,
    setup_s=25.0,
    modules=modules_for,
    warm=warm_case,
)

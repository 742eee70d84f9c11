"""Decode: one query token a sequence. How much of the read bandwidth is left after finding the pages."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bench.attention_case import AttentionCase
from bench.attention_suite import run_case, warm_case
from bench.measure import Effort
from bench.peers.flashinfer import modules_for
from bench.suite import Suite

if TYPE_CHECKING:
    from bench.session import Session

EFFORT = Effort(rounds=4, samples=6, replay_us=1000.0, idle_s=0.01, turn_us=30_000.0)
K = 1024


def decode_case(name: str, seq_lens: tuple[int, ...], **choices: Any) -> AttentionCase:
    """One query for each length."""
    return AttentionCase(f"decode/{name}", (1,) * len(seq_lens), seq_lens, **choices)


def uniform(batch: int, length: int, suffix: str = "", **choices: Any) -> AttentionCase:
    """`batch` sequences of `length` tokens, named as in decode/B64-L8k."""
    shown = f"{length // K}k" if length % K == 0 else str(length)
    return decode_case(f"B{batch}-L{shown}{suffix}", (length,) * batch, **choices)


def ragged_lens(count: int = 256, shortest: int = 16, longest: int = 8016) -> tuple[int, ...]:
    """Many short and few long sequences in random order: 1.8 GiB at 4 KiB a token."""
    lengths = [shortest + round((longest - shortest) * (i / (count - 1)) ** 3.4) for i in range(count)]
    random.Random(5).shuffle(lengths)
    return tuple(lengths)


SKEW_LENS = (128 * K,) + (1 * K,) * 63
MAIN: dict[str, Any] = {"quick": True, "ways": ("planned",)}
MOST_OF_BEST = 0.99  # every case's goal: ours over the best peer of the run
NAMED = (  # heads (32, 8), head_dim 128, block 16, NHD
    uniform(1, 8 * K, goals={"fa3": 0.79}, **MAIN),
    uniform(1, 8 * K, "-warm", warm=True, goals={"fa3": 0.70}, **MAIN),
    uniform(1, 128 * K, goals={"floor_share": 0.93}, **MAIN),
    uniform(8, 32 * K, goals={"floor_share": 0.975}, **MAIN),
    uniform(16, 4 * K, goals={"floor_share": 0.88}, **MAIN),
    uniform(64, 8 * K, goals={"floor_share": 0.985}, **MAIN),
    uniform(256, 1 * K, goals={"floor_share": 0.955}, **MAIN),
    decode_case("ragged256", ragged_lens(), goals={"floor_share": 0.97}, **MAIN),
    decode_case("skew", SKEW_LENS, goals={"floor_share": 0.945}, **MAIN),
)
CONTEXT_SWEEP = (
    *(uniform(1, length) for length in (512, 2 * K, 32 * K)),
    *(uniform(16, length) for length in (512, 1 * K, 2 * K, 8 * K, 16 * K, 32 * K)),
    *(uniform(64, length) for length in (512, 2 * K)),
    *(uniform(256, length) for length in (512, 4 * K)),
)
HEADS = (
    *(uniform(b, n, "-h32x32", num_kv_heads=32) for b, n in ((1, 4 * K), (64, 2 * K))),
    *(uniform(b, n, "-h64x8", num_query_heads=64) for b, n in ((1, 16 * K), (16, 8 * K), (256, 1 * K))),
    *(uniform(b, n, "-h8x1", num_query_heads=8, num_kv_heads=1) for b, n in ((1, 128 * K), (64, 8 * K), (256, 2 * K))),
    *(uniform(b, n, "-h9x3-d64", num_query_heads=9, num_kv_heads=3, head_dim=64) for b, n in ((1, 2 * K), (64, 2 * K))),
)
HEAD_DIMS = (
    *(uniform(b, n, "-d64", head_dim=64) for b, n in ((1, 8 * K), (64, 8 * K), (256, 1 * K))),
    *(uniform(b, n, "-d256", head_dim=256) for b, n in ((1, 8 * K), (16, 4 * K), (64, 4 * K))),
    uniform(64, 8 * K, "-h8x1-d256", num_query_heads=8, num_kv_heads=1, head_dim=256),
)
BLOCKS_AND_LAYOUTS = (
    *(uniform(b, n, "-b64", block_size=64) for b, n in ((1, 8 * K), (64, 8 * K), (256, 1 * K))),
    *(uniform(b, n, "-b256", block_size=256) for b, n in ((16, 4 * K), (64, 8 * K))),
    *(uniform(b, n, "-hnd", layout="hnd") for b, n in ((1, 8 * K), (16, 4 * K), (64, 8 * K))),
    uniform(64, 8 * K, "-hnd-b64", layout="hnd", block_size=64),
    *(uniform(b, n, "-interleaved", layout="interleaved") for b, n in ((1, 8 * K), (16, 4 * K), (64, 8 * K))),
)
CASES = tuple(
    replace(case, goals={**case.goals, "best": MOST_OF_BEST})
    for case in NAMED + CONTEXT_SWEEP + HEADS + HEAD_DIMS + BLOCKS_AND_LAYOUTS
)
SMOKE = (
    uniform(2, 40, dtype="float32", ways=("planned",), goals={"floor_share": 0.9, "best": MOST_OF_BEST}),
    uniform(1, 33, "-warm-d64", dtype="float32", num_query_heads=9, num_kv_heads=3, head_dim=64, warm=True),
    decode_case("ragged3", (1, 70, 17), dtype="float32", layout="interleaved", num_query_heads=4, num_kv_heads=2),
)


def run(session: Session, case: AttentionCase) -> dict[str, Any]:
    """Measures one case."""
    return run_case(session, case, EFFORT)


SUITE = Suite(
    name="decode",
    about="paged attention, one query a sequence",
    cases=CASES,
    smoke_cases=SMOKE,
    run=run,
    case_s=0.75,
    quick_case_s=0.8,
    setup_s=35.0,
    modules=modules_for,
    warm=warm_case,
)

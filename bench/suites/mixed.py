"""Mixed batches: prompts, chunks, speculative and single tokens in one call, as a server's step has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bench.attention_case import AttentionCase
from bench.attention_suite import run_case, warm_case
from bench.peers.flashinfer import modules_for
from bench.suite import Suite
from bench.suites.prefill import EFFORT

if TYPE_CHECKING:
    from bench.session import Session


def batch(name: str, *groups: tuple[int, int, int], **choices: Any) -> AttentionCase:
    """Groups of (sequences, query tokens, length with them)."""
    query_lens = tuple(query for count, query, _ in groups for _ in range(count))
    seq_lens = tuple(length for count, _, length in groups for _ in range(count))
    return AttentionCase(f"mixed/{name}", query_lens, seq_lens, ways=("planned", "apart"), **choices)


CASES = (
    batch("2x1k+16-at-2k", (2, 1024, 1024), (16, 1, 2048), quick=True),
    batch(
        "257+7-at-1057+3x4-at-2051+2x129-at-4093", (1, 257, 257), (7, 1, 1057), (3, 4, 2051), (2, 129, 4093), quick=True
    ),
    batch("512-at-8k+64-at-4k", (1, 512, 8192), (64, 1, 4096)),
    batch("2k-at-2k+128-at-1k", (1, 2048, 2048), (128, 1, 1024)),
    batch("64x4-at-4k", (64, 4, 4096)),
    batch("2x1k+16-at-2k-d64", (2, 1024, 1024), (16, 1, 2048), head_dim=64),
)
SMOKE = (
    batch(
        "9+2-at-20+3-at-30",
        (1, 9, 9),
        (2, 1, 20),
        (1, 3, 30),
        dtype="float32",
        num_query_heads=4,
        num_kv_heads=2,
        head_dim=32,
    ),
)


def run(session: Session, case: AttentionCase) -> dict[str, Any]:
    """Measures one case."""
    return run_case(session, case, EFFORT)


SUITE = Suite(
    name="mixed",
    about="paged attention over batches of prompts and single tokens",
    cases=CASES,
    smoke_cases=SMOKE,
    run=run,
    case_s=4.0,
    quick_case_s=3.5,
    setup_s=25.0,
    modules=modules_for,
    warm=warm_case,
)

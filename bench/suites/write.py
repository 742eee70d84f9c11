"""Cache writes: this step's keys and values into their slots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton_kv as tkv
from bench.attention_case import AttentionCase
from bench.candidate import OURS, Candidate
from bench.case_result import case_result
from bench.floor import floor_us
from bench.measure import Effort, measure
from bench.peers.registry import peer_candidates
from bench.suite import Suite
from bench.write_inputs import WriteInputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.session import Session

EFFORT = Effort(rounds=4, samples=6, replay_us=500.0, idle_s=0.01, turn_us=20_000.0)
REQUIRED_PEERS = ("vllm", "flashinfer")


def write_case(name: str, groups: tuple[tuple[int, int, int], ...], **choices: Any) -> AttentionCase:
    """Groups of (sequences, new tokens, length with them)."""
    query_lens = tuple(query for count, query, _ in groups for _ in range(count))
    seq_lens = tuple(length for count, _, length in groups for _ in range(count))
    return AttentionCase(f"write/{name}", query_lens, seq_lens, **choices)


def run(session: Session, case: AttentionCase) -> dict[str, Any]:
    """Measures one case."""
    with WriteInputs(session, case) as inputs:

        def ours(index: int) -> None:
            tkv.write_kv(inputs.k[index], inputs.v[index], inputs.layers[index], inputs.slot_mapping)

        floor = floor_us(session.rooflines, bytes_read=inputs.bytes_moved, kind="copy")
        candidates = [
            Candidate(OURS, ours, "write_kv"),
            *peer_candidates(session, ("vllm", "flashinfer"), lambda module: module.write(inputs)),
        ]
        results = measure(
            session,
            case.id,
            candidates,
            sets=inputs.sets,
            floor_us=floor,
            effort=EFFORT,
            verify=inputs.verify,
            poison=inputs.poison,
        )
        return case_result(
            case.id,
            results,
            required=REQUIRED_PEERS,
            bytes_moved=inputs.bytes_moved,
            flops=0,
            floor=floor,
            parameters={**case.parameters(), "sets": inputs.sets},
        )


def modules_for(cases: Sequence[AttentionCase]) -> list[str]:
    """FlashInfer's append has one module."""
    return ["page"]


SUITE = Suite(
    name="write",
    about="keys and values of new tokens into their slots",
    cases=(
        write_case("1-token", ((1, 1, 64),), quick=True),
        write_case("256-tokens", ((256, 1, 64),), quick=True),
        write_case("8k-tokens", ((1, 8192, 8192),), quick=True),
        write_case("16x1k-tokens", ((16, 1024, 1024),)),
        write_case("8k-tokens-hnd", ((1, 8192, 8192),), layout="hnd"),
        write_case("8k-tokens-interleaved", ((1, 8192, 8192),), layout="interleaved"),
        write_case("256-tokens-h9x3-d64", ((256, 1, 64),), num_query_heads=9, num_kv_heads=3, head_dim=64),
        write_case("8k-tokens-b64", ((1, 8192, 8192),), block_size=64),
    ),
    smoke_cases=(
        write_case(
            "3+2x5-tokens", ((3, 1, 20), (2, 5, 17)), dtype="float32", num_query_heads=4, num_kv_heads=2, head_dim=16
        ),
    ),
    run=run,
    case_s=0.6,
    quick_case_s=0.7,
    setup_s=20.0,
    modules=modules_for,
)

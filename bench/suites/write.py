"""Cache writes: this step's keys and values into their slots, as they are or rotated first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import triton_kv as tkv
from bench.attention_case import AttentionCase
from bench.candidate import OURS, Candidate
from bench.case_result import case_result
from bench.floor import floor_us
from bench.measure import Effort, measure
from bench.peers.registry import peer_candidates
from bench.rope_inputs import RopeCase, RopeInputs, rotated
from bench.suite import Suite
from bench.write_inputs import WriteInputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.session import Session

EFFORT = Effort(rounds=4, samples=6, replay_us=500.0, idle_s=0.01, turn_us=20_000.0)
REQUIRED_PEERS = ("vllm", "flashinfer")
COPY = "copy"


def write_case(name: str, groups: tuple[tuple[int, int, int], ...], **choices: Any) -> AttentionCase:
    """Groups of (sequences, new tokens, length with them)."""
    return AttentionCase(f"write/{name}", *_lengths(groups), **choices)


def rope_case(name: str, groups: tuple[tuple[int, int, int], ...], **choices: Any) -> RopeCase:
    """The same, with queries and keys rotated."""
    return RopeCase(f"write/{name}", *_lengths(groups), **choices)


def _lengths(groups: tuple[tuple[int, int, int], ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    query_lens = tuple(query for count, query, _ in groups for _ in range(count))
    seq_lens = tuple(length for count, _, length in groups for _ in range(count))
    return query_lens, seq_lens


def run(session: Session, case: AttentionCase) -> dict[str, Any]:
    """Measures one case."""
    if isinstance(case, RopeCase):
        with RopeInputs(session, case) as rope:
            return _measured(session, case, rope, rope_candidates(session, rope), required=("torch",))
    with WriteInputs(session, case) as inputs:
        return _measured(session, case, inputs, write_candidates(session, inputs), required=REQUIRED_PEERS)


def write_candidates(session: Session, inputs: WriteInputs) -> list[Candidate]:
    """`write_kv`, the peers, and a copy of as many bytes that lie in one piece."""

    def ours(index: int) -> None:
        tkv.write_kv(inputs.k[index], inputs.v[index], inputs.layers[index], inputs.slot_mapping)

    def copy(index: int) -> torch.Tensor:
        source, target = inputs.copied[index]
        return target.copy_(source)

    return [
        Candidate(OURS, ours, "write_kv"),
        *peer_candidates(session, ("vllm", "flashinfer"), lambda module: module.write(inputs)),
        Candidate(COPY, copy, "tensor.copy_ of as many bytes in one piece"),
    ]


def rope_candidates(session: Session, inputs: RopeInputs) -> list[Candidate]:
    """`rope_and_write_kv`, and rotations by torch in front of `write_kv`."""
    candidates = [
        Candidate(OURS, inputs.ours, "rope_and_write_kv, one launch"),
        Candidate("torch", lambda index: inputs.unfused(index, rotated), "torch ops, then write_kv"),
    ]
    if session.on_gpu:
        compiled = torch.compile(rotated, dynamic=False)
        candidates.append(
            Candidate(
                "torch-compiled",
                lambda index: inputs.unfused(index, compiled),
                "torch.compile of the ops, then write_kv",
            )
        )
    return candidates


def _measured(
    session: Session,
    case: AttentionCase,
    inputs: WriteInputs,
    candidates: Sequence[Candidate],
    required: tuple[str, ...],
) -> dict[str, Any]:
    floor = floor_us(session.rooflines, bytes_read=inputs.bytes_moved, kind="copy")
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
    if COPY in results:
        results[COPY]["aside"] = True  # it scatters nothing
    return case_result(
        case.id,
        results,
        required=required,
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
        write_case("4k-tokens", ((1, 4096, 4096),)),
        write_case("8k-tokens", ((1, 8192, 8192),), quick=True),
        write_case("64k-tokens", ((8, 8192, 8192),)),
        write_case("16x1k-tokens", ((16, 1024, 1024),)),
        write_case("8k-tokens-hnd", ((1, 8192, 8192),), layout="hnd"),
        write_case("8k-tokens-interleaved", ((1, 8192, 8192),), layout="interleaved"),
        write_case("256-tokens-h9x3-d64", ((256, 1, 64),), num_query_heads=9, num_kv_heads=3, head_dim=64),
        write_case("8k-tokens-b64", ((1, 8192, 8192),), block_size=64),
        rope_case("256-tokens-rope", ((256, 1, 64),)),
        rope_case("8k-tokens-rope-norm", ((1, 8192, 8192),), is_normed=True),
    ),
    smoke_cases=(
        write_case(
            "3+2x5-tokens", ((3, 1, 20), (2, 5, 17)), dtype="float32", num_query_heads=4, num_kv_heads=2, head_dim=16
        ),
        rope_case(
            "3+2x5-tokens-rope-norm",
            ((3, 1, 20), (2, 5, 17)),
            dtype="float32",
            num_query_heads=4,
            num_kv_heads=2,
            head_dim=16,
            is_normed=True,
        ),
    ),
    run=run,
    case_s=1.0,
    quick_case_s=0.7,
    setup_s=20.0,
    modules=modules_for,
)

"""Decode against itself: what its promises cost, each as the ratio of two times of ours in one run."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

import triton_kv as tkv
from bench.attention_inputs import AttentionInputs
from bench.attention_suite import ours
from bench.candidate import OURS, Candidate
from bench.case_result import case_result, put_ratio
from bench.floor import floor_us
from bench.measure import Effort, measure
from bench.suite import Suite
from bench.suites.decode import SKEW_LENS, decode_case, ragged_lens, uniform

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.attention_case import AttentionCase
    from bench.session import Session

EFFORT = Effort(rounds=4, samples=6, replay_us=1000.0, idle_s=0.01, turn_us=30_000.0, host_calls=0)
K = 1024


@dataclass(frozen=True)
class RatioCase:
    """`what` is done to `batch`, against a plain call: of `other`, or of the same batch.

    "captured" at length 1; "invariant" with `batch_invariant=True`; "cascade", the shared tokens read once; or the
    "batch" plainly.
    """

    id: str
    what: str
    batch: AttentionCase
    against: str  # the name of the plain call
    other: AttentionCase | None = None
    goal: float | None = None  # the most that the ratio should be; None: no number is stated
    quick: bool = False


def run(session: Session, case: RatioCase) -> dict[str, Any]:
    """Measures one case: the ratio is our time over the plain call's."""
    floor = floor_us(session.rooflines, bytes_read=case.batch.bytes_moved, flops=case.batch.flops)
    with AttentionInputs(session, case.batch) as inputs, _other(session, case, inputs) as other:
        candidates = [
            _checked(inputs, WHATS[case.what](inputs)),
            _checked(other, replace(ours(other), name=case.against)),
        ]

        def poison(index: int) -> None:
            inputs.poison(index)
            other.poison(index)

        results = measure(
            session,
            case.id,
            candidates,
            sets=max(inputs.sets, other.sets),
            floor_us=floor,
            effort=EFFORT,
            verify=lambda output, index: output[0].verify(output[1], index),
            poison=poison,
        )
        inputs.judge(results[OURS])
        other.judge(results[case.against])
        parameters = {**case.batch.parameters(), "sets": inputs.sets, "other": other.case.parameters()}
    result = case_result(
        case.id,
        results,
        required=(case.against.partition("-")[0],),
        bytes_moved=case.batch.bytes_moved,
        flops=case.batch.flops,
        floor=floor,
        parameters=parameters,
    )
    put_ratio(result, case.against, case.goal)
    return result


@contextmanager
def _other(session: Session, case: RatioCase, inputs: AttentionInputs) -> Iterator[AttentionInputs]:
    if case.other is None:
        yield inputs
        return
    with AttentionInputs(session, case.other) as other:
        yield other


def _checked(inputs: AttentionInputs, candidate: Candidate) -> Candidate:
    """Its output with the inputs that know what is right."""
    return replace(candidate, run=lambda index: (inputs, candidate.run(index)), sets=inputs.sets)


def captured(inputs: AttentionInputs) -> Candidate:
    """The plain call, its graph captured while every sequence had one token."""

    @contextmanager
    def short() -> Iterator[None]:
        inputs.seq_lens.fill_(1)
        yield
        inputs.seq_lens.copy_(torch.tensor(inputs.case.seq_lens, dtype=torch.int32))

    return replace(ours(inputs), settings="captured at length 1, replayed at the case's lengths", capturing=short)


def invariant(inputs: AttentionInputs) -> Candidate:
    """`batch_invariant=True`."""

    def run(index: int) -> Any:
        return tkv.paged_attention(
            inputs.q[index],
            inputs.layers[index],
            inputs.metadata,
            scale=inputs.scale,
            out=inputs.out,
            batch_invariant=True,
        )

    return Candidate(OURS, run, "batch_invariant=True")


def cascade(inputs: AttentionInputs) -> Candidate:
    """The recipe of docs/decode.md: all queries over the shared blocks once, each over its own rest, then merged."""
    case, device, slots = inputs.case, inputs.device, inputs.metadata.slot_mapping
    prefix = tkv.AttentionMetadata(
        block_table=inputs.block_table[:1],
        seq_lens=torch.tensor([case.shared_tokens], dtype=torch.int32, device=device),
        slot_mapping=slots,
        query_start_loc=torch.tensor([0, case.num_seqs], dtype=torch.int32, device=device),
        num_tokens=case.num_seqs,
        num_seqs=1,
        max_query_len=case.num_seqs,
    )
    suffix = tkv.AttentionMetadata(
        block_table=inputs.block_table[:, case.shared_blocks :],
        seq_lens=inputs.seq_lens - case.shared_tokens,
        slot_mapping=slots,
        num_tokens=case.num_seqs,
        num_seqs=case.num_seqs,
        max_query_len=1,
    )

    def run(index: int) -> Any:
        q, layer, scale = inputs.q[index], inputs.layers[index], inputs.scale
        over_prefix = tkv.paged_attention(q, layer, prefix, causal=False, scale=scale, return_lse=True)
        over_suffix = tkv.paged_attention(q, layer, suffix, scale=scale, return_lse=True)
        return tkv.merge_attention(*over_prefix, *over_suffix)[0]

    return Candidate(OURS, run, "shared blocks once for all queries, the rest apart, merge_attention")


WHATS = {"batch": ours, "captured": captured, "invariant": invariant, "cascade": cascade}


def warm(session: Session, case: RatioCase) -> None:
    """Compiles both calls on short inputs of the same geometry."""
    for batch, build in ((case.batch, WHATS[case.what]), (case.other or case.batch, ours)):
        with AttentionInputs(session, batch, short=True) as inputs:
            build(inputs).run(0)
            session.synchronize()


def tokens(batch: int, length: int, count: int) -> AttentionCase:
    """`count` query tokens a sequence, as speculative decoding has them."""
    return replace(uniform(batch, length), query_lens=(count,) * batch)


def against(
    name: str, what: str, plain: str, batch: AttentionCase, other: AttentionCase | None = None, **choices: Any
) -> RatioCase:
    """A case whose batch is reported under the case's id."""
    return RatioCase(f"ratios/{name}", what, replace(batch, id=f"ratios/{name}"), plain, other, **choices)


def even(lengths: tuple[int, ...]) -> AttentionCase:
    """As many sequences with as many bytes, of one length."""
    return uniform(len(lengths), sum(lengths) // len(lengths))


CASES = (
    against("captured-short-B1-L128k", "captured", "captured-long", uniform(1, 128 * K), goal=1.05, quick=True),
    against("captured-short-B8-L128k", "captured", "captured-long", uniform(8, 128 * K), goal=1.05),
    against("4-tokens-B1-L64k", "batch", "1-token", tokens(1, 64 * K, 4), uniform(1, 64 * K), goal=1.3, quick=True),
    against("4-tokens-B8-L64k", "batch", "1-token", tokens(8, 64 * K, 4), uniform(8, 64 * K), goal=1.3),
    against("invariant-B8-L32k", "invariant", "default", uniform(8, 32 * K), goal=1.5, quick=True),
    against("invariant-B64-L8k", "invariant", "default", uniform(64, 8 * K), goal=1.5, quick=True),
    against("window4k-B1-L128k", "batch", "L4k", uniform(1, 128 * K, window=4 * K), uniform(1, 4 * K), goal=1.05),
    against("window4k-B8-L128k", "batch", "L4k", uniform(8, 128 * K, window=4 * K), uniform(8, 4 * K), goal=1.05),
    against(
        "ragged256", "batch", "even", decode_case("ragged", ragged_lens()), even(ragged_lens()), goal=1.05, quick=True
    ),
    against("skew", "batch", "even", decode_case("skew", SKEW_LENS), even(SKEW_LENS), goal=1.05),
    against(
        "cascade-64x1k-on-16k",
        "cascade",
        "full-tables",
        uniform(64, 17 * K, shared_tokens=16 * K),
        goal=1.0,
        quick=True,
    ),
)
TINY: dict[str, Any] = {"dtype": "float32", "num_query_heads": 4, "num_kv_heads": 2, "head_dim": 32}
SMOKE = (
    against("captured-short-B2-L40", "captured", "captured-long", uniform(2, 40, **TINY), goal=1e3),
    against(
        "3-tokens-B2-L40",
        "batch",
        "1-token",
        replace(uniform(2, 40, **TINY), query_lens=(3, 3)),
        uniform(2, 40, **TINY),
    ),
    against("invariant-B2-L40", "invariant", "default", uniform(2, 40, **TINY)),
    against("window7-B2-L40", "batch", "L7", uniform(2, 40, window=7, **TINY), uniform(2, 7, **TINY)),
    against("cascade-3x5-on-32", "cascade", "full-tables", uniform(3, 37, shared_tokens=32, **TINY)),
)

SUITE = Suite(
    name="ratios",
    about="decode against itself: late lengths, more tokens, windows, ragged batches, a shared prefix",
    cases=CASES,
    smoke_cases=SMOKE,
    run=run,
    case_s=1.0,
    quick_case_s=1.0,
    setup_s=25.0,
    warm=warm,
)

"""What the suites of paged attention share: one case measured, its kernels compiled ahead, FlashInfer's modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton_kv as tkv
from bench.attention_inputs import AttentionInputs
from bench.candidate import OURS, Candidate, NotApplicableError
from bench.case_result import case_result
from bench.floor import floor_us
from bench.measure import Effort, measure
from bench.peers.registry import peer_candidates

if TYPE_CHECKING:
    from bench.attention_case import AttentionCase
    from bench.session import Session

REQUIRED_PEERS = ("fa3", "flashinfer")
OURS_PLANNED = "ours-planned"


def ours(inputs: AttentionInputs) -> Candidate:
    """`paged_attention` over the cache's layers; it plans for itself inside the call."""

    def run(index: int) -> Any:
        return tkv.paged_attention(
            inputs.q[index], inputs.layers[index], inputs.metadata, scale=inputs.scale, out=inputs.out
        )

    return Candidate(OURS, run, "paged_attention, planned inside the call")


def ours_planned(inputs: AttentionInputs) -> Candidate:
    """`paged_attention` with an `AttentionPlan` that was prepared before: what a step's later layers cost."""
    case = inputs.case
    plans: list[tkv.AttentionPlan] = []

    def prepare() -> None:
        if not plans:
            plan = tkv.AttentionPlan(
                inputs.layers[0],
                case.num_query_heads,
                max_seqs=case.num_seqs,
                max_query_len=max(case.query_lens),
                max_tokens=case.num_tokens,
            )
            plans.append(plan)
        plans[0].prepare(inputs.metadata)

    def run(index: int) -> Any:
        return tkv.paged_attention(
            inputs.q[index], inputs.layers[index], inputs.metadata, plan=plans[0], scale=inputs.scale, out=inputs.out
        )

    return Candidate(OURS_PLANNED, run, "paged_attention, AttentionPlan.prepare once a step, not timed", plan=prepare)


def run_case(session: Session, case: AttentionCase, effort: Effort) -> dict[str, Any]:
    """Measures one attention case against its peers."""
    floor = floor_us(session.rooflines, bytes_read=case.bytes_moved, flops=case.flops)
    families = ("fa3", "flashinfer", "vllm", *case.extra_peers)
    with AttentionInputs(session, case) as inputs:
        candidates = [ours(inputs), *peer_candidates(session, families, lambda module: module.attention(inputs))]
        if not case.is_decode:
            candidates.append(ours_planned(inputs))
        results = measure(
            session,
            case.id,
            candidates,
            sets=inputs.sets,
            floor_us=floor,
            effort=effort,
            verify=inputs.verify,
            poison=inputs.poison,
        )
        sets = inputs.sets
    if OURS_PLANNED in results:
        results[OURS_PLANNED]["aside"] = True
    return case_result(
        case.id,
        results,
        required=REQUIRED_PEERS,
        bytes_moved=case.bytes_moved,
        flops=case.flops,
        floor=floor,
        parameters={**case.parameters(), "sets": sets},
    )


def warm_case(session: Session, case: AttentionCase) -> None:
    """Runs the Triton candidates once on short sequences of the same geometry: their kernels are compiled then."""
    with AttentionInputs(session, case, short=True) as inputs:
        candidates = [ours(inputs), *peer_candidates(session, ("vllm",), lambda module: module.attention(inputs))]
        if not case.is_decode:
            candidates.append(ours_planned(inputs))
        for candidate in candidates:
            try:
                if candidate.name == OURS_PLANNED and candidate.plan is not None:
                    candidate.plan()
                candidate.run(0)
            except NotApplicableError:
                continue
        session.synchronize()

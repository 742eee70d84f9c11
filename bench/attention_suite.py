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


def ours(inputs: AttentionInputs) -> Candidate:
    """`paged_attention` over the cache's layers; it plans for itself inside the call."""

    def run(index: int) -> Any:
        return tkv.paged_attention(
            inputs.q[index], inputs.layers[index], inputs.metadata, scale=inputs.scale, out=inputs.out
        )

    return Candidate(OURS, run, "paged_attention, planned inside the call")


def run_case(session: Session, case: AttentionCase, effort: Effort) -> dict[str, Any]:
    """Measures one attention case against its peers."""
    floor = floor_us(session.rooflines, bytes_read=case.bytes_moved, flops=case.flops)
    families = ("fa3", "flashinfer", "vllm", *case.extra_peers)
    with AttentionInputs(session, case) as inputs:
        candidates = [ours(inputs), *peer_candidates(session, families, lambda module: module.attention(inputs))]
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
        for candidate in [ours(inputs), *peer_candidates(session, ("vllm",), lambda module: module.attention(inputs))]:
            try:
                candidate.run(0)
            except NotApplicableError:
                continue
        session.synchronize()

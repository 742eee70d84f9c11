"""What the suites of paged attention share: one case measured, its kernels compiled ahead, FlashInfer's modules."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch

import triton_kv as tkv
from bench.attention_inputs import AttentionInputs
from bench.candidate import OURS, Candidate, NotApplicableError
from bench.case_result import case_result
from bench.floor import floor_us
from bench.measure import Effort, measure
from bench.peers.registry import peer_candidates
from triton_kv.prefill_hopper import use_prefill_kernel

if TYPE_CHECKING:
    from bench.attention_case import AttentionCase
    from bench.session import Session

REQUIRED_PEERS = ("fa3", "flashinfer")


def ours(inputs: AttentionInputs) -> Candidate:
    """`paged_attention` over the cache's layers; it plans for itself inside the call."""

    def run(index: int) -> Any:
        return tkv.paged_attention(
            inputs.q[index],
            inputs.layers[index],
            inputs.metadata,
            scale=inputs.scale,
            window=inputs.case.window,
            out=inputs.out,
        )

    return Candidate(OURS, run, "paged_attention, planned inside the call")


def ours_portable(inputs: AttentionInputs) -> Candidate:
    """The same call on the portable prefill kernel, whichever would be chosen."""
    plain = ours(inputs)

    def run(index: int) -> Any:
        with use_prefill_kernel("portable"):
            return plain.run(index)

    return Candidate("ours-portable", run, 'paged_attention under use_prefill_kernel("portable")')


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
                max_tokens=None if case.is_decode else case.num_tokens,
                window=case.window,
            )
            plans.append(plan)
        plans[0].prepare(inputs.metadata)

    def run(index: int) -> Any:
        return tkv.paged_attention(
            inputs.q[index],
            inputs.layers[index],
            inputs.metadata,
            plan=plans[0],
            scale=inputs.scale,
            window=case.window,
            out=inputs.out,
        )

    return Candidate("ours-planned", run, "paged_attention, AttentionPlan.prepare once a step, not timed", plan=prepare)


def ours_apart(inputs: AttentionInputs) -> Candidate:
    """A call of its own for each run of sequences with as many query tokens: what a mixed batch must not exceed."""
    case = inputs.case
    parts = []
    first = 0
    for query_len, run_of in itertools.groupby(case.query_lens):
        num_seqs = len(tuple(run_of))
        seqs = slice(first, first + num_seqs)
        tokens = slice(inputs.query_starts[first], inputs.query_starts[first + num_seqs])
        starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=inputs.device) * query_len
        part = tkv.AttentionMetadata(
            block_table=inputs.block_table[seqs],
            seq_lens=inputs.seq_lens[seqs],
            slot_mapping=inputs.metadata.slot_mapping[tokens],
            query_start_loc=None if query_len == 1 else starts,
            num_tokens=num_seqs * query_len,
            num_seqs=num_seqs,
            max_query_len=query_len,
        )
        parts.append((tokens, part))
        first += num_seqs

    def run(index: int) -> Any:
        for tokens, metadata in parts:
            tkv.paged_attention(
                inputs.q[index][tokens],
                inputs.layers[index],
                metadata,
                scale=inputs.scale,
                window=case.window,
                out=inputs.out[tokens],
            )
        return inputs.out

    return Candidate("ours-apart", run, "paged_attention, a call for each number of query tokens")


WAYS = {"planned": ours_planned, "portable": ours_portable, "apart": ours_apart}


def run_case(session: Session, case: AttentionCase, effort: Effort) -> dict[str, Any]:
    """Measures one attention case against its peers."""
    floor = floor_us(session.rooflines, bytes_read=case.bytes_moved, flops=case.flops)
    families = ("fa3", "flashinfer", "vllm", "sglang", *case.extra_peers)
    with AttentionInputs(session, case) as inputs:
        ways = [WAYS[way](inputs) for way in case.ways]
        peers = peer_candidates(session, families, lambda module: module.attention(inputs))
        candidates = [ours(inputs), *peers, *ways]
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
        inputs.judge(results[OURS])
        for way in ways:
            results[way.name]["aside"] = True
            inputs.judge(results[way.name])
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
        peers = peer_candidates(session, ("vllm",), lambda module: module.attention(inputs))
        candidates = [ours(inputs), *peers, *(WAYS[way](inputs) for way in case.ways)]
        for candidate in candidates:
            try:
                if candidate.plan is not None:
                    candidate.plan()
                candidate.run(0)
            except NotApplicableError:
                continue
        session.synchronize()

"""Host cost: what the CPU spends on each eager call, on filling a batch's tensors, on an extend with nothing to do."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

import triton_kv as tkv
from bench.attention_case import AttentionCase
from bench.attention_inputs import AttentionInputs
from bench.attention_suite import ours as attention_of_ours
from bench.attention_suite import ours_planned as planned_attention_of_ours
from bench.candidate import OURS, Candidate
from bench.case_result import case_result
from bench.measure import describe, require_device
from bench.peers.flashinfer import modules_for as attention_modules
from bench.peers.registry import peer_candidates
from bench.suite import Suite
from bench.timing import Samples, host_samples
from bench.write_inputs import WriteInputs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.goals import Goals
    from bench.session import Session


@dataclass(frozen=True)
class HostCase:
    """One kind of call: "attention", "write", "fill" or "extend"."""

    id: str
    what: str
    num_seqs: int = 4
    query_len: int = 1
    seq_len: int = 64
    quick: bool = True
    planned: bool = False  # attention: with an `AttentionPlan` prepared before, so that a call allocates nothing
    goals: Goals = field(default_factory=dict, hash=False)  # what it should reach

    def batch(self, smoke: bool) -> AttentionCase:
        """A small batch: the device is done before the host is."""
        lengths = (self.seq_len,) * self.num_seqs
        if smoke:
            return AttentionCase(
                self.id, (self.query_len,) * self.num_seqs, lengths, 4, 2, head_dim=16, dtype="float32"
            )
        return AttentionCase(self.id, (self.query_len,) * self.num_seqs, lengths)


def run(session: Session, case: HostCase) -> dict[str, Any]:
    """Measures one case."""
    measured = {"attention": _attention, "write": _write, "fill": _fill, "extend": _extend}
    results = measured[case.what](session, case)
    return case_result(
        case.id,
        results,
        required=("fa3", "flashinfer") if case.what == "attention" else (),
        bytes_moved=0,
        flops=0,
        floor=None,
        parameters={
            "num_seqs": case.num_seqs,
            "query_len": case.query_len,
            "seq_len": case.seq_len,
            "planned": case.planned,
        },
    )


def _attention(session: Session, case: HostCase) -> dict[str, dict[str, Any]]:
    with AttentionInputs(session, case.batch(session.smoke)) as inputs:
        families = ("fa3", "flashinfer", "vllm")
        candidates = [
            replace(planned_attention_of_ours(inputs), name=OURS) if case.planned else attention_of_ours(inputs),
            *peer_candidates(session, families, lambda module: module.attention(inputs)),
        ]
        return _timed(session, case, candidates)


def _write(session: Session, case: HostCase) -> dict[str, dict[str, Any]]:
    with WriteInputs(session, case.batch(session.smoke)) as inputs:

        def ours(index: int) -> None:
            tkv.write_kv(inputs.k[index], inputs.v[index], inputs.layers[index], inputs.slot_mapping)

        candidates = [
            Candidate(OURS, ours, "write_kv"),
            *peer_candidates(session, ("vllm", "flashinfer"), lambda module: module.write(inputs)),
        ]
        return _timed(session, case, candidates)


def _fill(session: Session, case: HostCase) -> dict[str, dict[str, Any]]:
    width = -(-case.seq_len // 16)
    buffers = tkv.AttentionBuffers(case.num_seqs, case.num_seqs, max(width, 8), session.device, block_size=16)
    tables = np.arange(1, case.num_seqs * width + 1, dtype=np.int32).reshape(case.num_seqs, width)
    seq_lens = [case.seq_len] * case.num_seqs
    slots = [int(row[-1]) * 16 + (case.seq_len - 1) % 16 for row in tables]
    rows = tables.tolist()
    lens, positions = np.array(seq_lens, dtype=np.int32), np.array(slots, dtype=np.int64)
    arrays = Candidate(OURS, lambda _: buffers.fill(tables, lens, positions), "AttentionBuffers.fill of NumPy arrays")
    lists = Candidate("lists", lambda _: buffers.fill(rows, seq_lens, slots), "AttentionBuffers.fill of lists")
    return _timed(session, case, [arrays, lists])


def _extend(session: Session, case: HostCase) -> dict[str, dict[str, Any]]:
    with WriteInputs(session, case.batch(session.smoke)) as inputs:
        blocks = inputs.cache.num_blocks
        nothing = Candidate(OURS, lambda _: inputs.cache.extend(blocks), "KVCache.extend(num_blocks)")
        return _timed(session, case, [nothing])


def _timed(session: Session, case: HostCase, candidates: Sequence[Candidate]) -> dict[str, dict[str, Any]]:
    """Groups of calls in turn; the device catches up between groups, uncounted."""
    calls, groups = (3, 2) if session.smoke else (50, 9)
    results: dict[str, dict[str, Any]] = {}
    ready: list[tuple[str, Callable[[], object], Samples]] = []
    for candidate in candidates:
        name = candidate.name
        if session.is_banned(case.id, name):
            results[name] = {"ok": False, "error": session.ban_reason(case.id, name)}
            continue
        session.enter(case.id, name)
        try:
            if candidate.plan is not None:
                candidate.plan()
            for _ in range(3):
                candidate.run(0)
            session.synchronize()
        except Exception as error:
            results[name] = {"ok": False, "error": describe(error)}
            require_device(session, name, error)
            continue
        results[name] = {"ok": True, "settings": candidate.settings}
        ready.append((name, _call(candidate), Samples()))
        if candidate.plan is not None:
            ready.append((f"{name} plan", candidate.plan, Samples()))
            results[f"{name} plan"] = {"ok": True, "aside": True, "settings": "its step before a batch"}
    for _ in range(groups):
        for name, call, samples in ready:
            session.enter(case.id, name)
            group = host_samples(call, calls=calls, groups=1, between=session.synchronize)
            samples.values_us += group.values_us
    for name, _, samples in ready:
        results[name].update(samples.summary())
    if "lists" in results:
        results["lists"]["aside"] = True
    return results


def _call(candidate: Candidate) -> Callable[[], object]:
    return lambda: candidate.run(0)


def modules_for(cases: Sequence[HostCase]) -> list[str]:
    """What FlashInfer has to build."""
    batches = [case.batch(smoke=False) for case in cases if case.what == "attention"]
    return [*attention_modules(batches), "page"]


SUITE = Suite(
    name="host",
    about="CPU time of each eager call",
    cases=(
        HostCase("host/attention-decode", "attention", goals={"us": 35.0}),
        HostCase("host/attention-decode-planned", "attention", planned=True, quick=False),
        HostCase("host/attention-prefill", "attention", num_seqs=2, query_len=32),
        HostCase("host/write_kv", "write"),
        HostCase("host/fill-B64-L8k", "fill", num_seqs=64, seq_len=8192),
        HostCase("host/fill-B256-L1k", "fill", num_seqs=256, seq_len=1024, quick=False, goals={"us": 60.0}),
        HostCase("host/extend-nothing", "extend"),
    ),
    smoke_cases=(
        HostCase("host/attention-decode", "attention", num_seqs=2, seq_len=20, goals={"us": 35.0}),
        HostCase("host/attention-decode-planned", "attention", num_seqs=2, seq_len=20, planned=True),
        HostCase("host/write_kv", "write", num_seqs=2, seq_len=20),
        HostCase("host/fill-B2-L20", "fill", num_seqs=2, seq_len=20),
        HostCase("host/extend-nothing", "extend", num_seqs=2, seq_len=20),
    ),
    run=run,
    case_s=2.0,
    quick_case_s=1.5,
    setup_s=20.0,
    modules=modules_for,
)

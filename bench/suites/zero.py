"""Zeroing: our kernel against the driver's memset and torch's `zero_()`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from bench.candidate import OURS, Candidate, WrongResultError
from bench.case_result import case_result
from bench.floor import floor_us
from bench.measure import Effort, measure
from bench.peers.memset import memset
from bench.suite import Suite
from triton_kv.blocks import zero_ranges

if TYPE_CHECKING:
    from bench.goals import Goals
    from bench.session import Session

# Eager launches behind a sleeping kernel: a captured memset becomes a node of its own kind.
EFFORT = Effort(
    rounds=5, samples=6, replay_us=1000.0, max_launches=16, idle_s=0.02, turn_us=30_000.0, captured=False, host_calls=5
)
MIB, GIB = 1 << 20, 1 << 30
GUARD_BYTES = 4096
REQUIRED_PEERS = ("memset", "torch")
# At 1 GiB and more: 0.97 of the driver's speed and 1.25 of torch's, as times over theirs.
GOALS = {"memset": round(1 / 0.97, 4), "torch-zero_": 1 / 1.25}


@dataclass(frozen=True)
class ZeroCase:
    """`count` ranges of `num_bytes`, whose starts lie `stride` apart."""

    id: str
    num_bytes: int
    count: int = 1
    stride: int = 0
    sets: int = 1  # buffers used in turn
    quick: bool = False

    @property
    def total_bytes(self) -> int:
        return self.num_bytes * self.count

    @property
    def goals(self) -> Goals:
        return GOALS if self.total_bytes >= GIB else {}

    @property
    def span_bytes(self) -> int:
        return self.stride * (self.count - 1) + self.num_bytes


class Buffers:
    """One allocation with the case's buffers in it, each between two guards."""

    def __init__(self, session: Session, case: ZeroCase) -> None:
        self.case = case
        self.step = case.span_bytes + GUARD_BYTES
        self.memory = torch.empty(self.step * case.sets + GUARD_BYTES, dtype=torch.uint8, device=session.device)

    def offset(self, index: int) -> int:
        return GUARD_BYTES + index * self.step

    def address(self, index: int, part: int = 0) -> int:
        return int(self.memory.data_ptr()) + self.offset(index) + part * self.case.stride

    def part(self, index: int, part: int) -> torch.Tensor:
        begin = self.offset(index) + part * self.case.stride
        return self.memory[begin : begin + self.case.num_bytes]

    def poison(self, index: int) -> None:
        """Fills the buffer and its guards with 0xFF."""
        begin = self.offset(index)
        self.memory[begin - GUARD_BYTES : begin + self.case.span_bytes + GUARD_BYTES].fill_(255)

    def verify(self, output: Any, index: int) -> float:
        """Every byte of the ranges is zero, every other one still 0xFF."""
        case, begin = self.case, self.offset(index)
        for part in range(case.count):
            if bool(self.part(index, part).view(torch.int32).any()):
                raise WrongResultError(f"range {part} has bytes that are not zero")
            end = begin + part * case.stride + case.num_bytes
            gap = case.stride - case.num_bytes if part < case.count - 1 else GUARD_BYTES
            if bool((self.memory[end : end + min(GUARD_BYTES, gap)] != 255).any()):
                raise WrongResultError(f"bytes behind range {part} were overwritten")
        if bool((self.memory[begin - GUARD_BYTES : begin] != 255).any()):
            raise WrongResultError("bytes in front of the first range were overwritten")
        return 0.0


def run(session: Session, case: ZeroCase) -> dict[str, Any]:
    """Measures one case."""
    buffers = Buffers(session, case)

    def ours(index: int) -> None:
        zero_ranges(buffers.address(index), case.num_bytes, stride=case.stride, count=case.count, device=session.device)

    def by_driver(index: int) -> None:
        for part in range(case.count):
            memset(buffers.address(index, part), case.num_bytes)

    def by_torch(index: int) -> None:
        for part in range(case.count):
            buffers.part(index, part).view(torch.bfloat16).zero_()

    candidates = [Candidate(OURS, ours, "zero_ranges, one launch")]
    if session.peer_available("memset"):
        candidates.append(Candidate("memset", by_driver, "cuMemsetD8Async, one call a range"))
    candidates.append(Candidate("torch-zero_", by_torch, "bfloat16 tensor.zero_(), one call a range"))
    floor = floor_us(session.rooflines, bytes_written=case.total_bytes, kind="write")
    results = measure(
        session,
        case.id,
        candidates,
        sets=case.sets,
        floor_us=floor,
        effort=EFFORT,
        verify=buffers.verify,
        poison=buffers.poison,
    )
    parameters = {"num_bytes": case.num_bytes, "count": case.count, "stride": case.stride, "sets": case.sets}
    return case_result(
        case.id,
        results,
        required=REQUIRED_PEERS,
        bytes_moved=case.total_bytes,
        flops=0,
        floor=floor,
        parameters=parameters,
    )


SUITE = Suite(
    name="zero",
    about="filling memory with zeros",
    cases=(
        ZeroCase("zero/64MiB", 64 * MIB, sets=8, quick=True),
        ZeroCase("zero/1GiB", 1 * GIB, sets=2, quick=True),
        ZeroCase("zero/8GiB", 8 * GIB, quick=True),
        ZeroCase("zero/64x16MiB-in-8GiB", 16 * MIB, count=64, stride=128 * MIB, quick=True),
        ZeroCase("zero/64x1GiB", 1 * GIB, count=64, stride=1 * GIB),
        ZeroCase("zero/64x2MiB-in-8GiB", 2 * MIB, count=64, stride=128 * MIB),
    ),
    smoke_cases=(
        ZeroCase("zero/64KiB", 64 << 10, sets=2),
        ZeroCase("zero/3x4KiB-in-96KiB", 4 << 10, count=3, stride=32 << 10),
    ),
    run=run,
    case_s=1.2,
    quick_case_s=0.9,
    setup_s=3.0,
)

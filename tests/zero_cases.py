"""The table of byte ranges that the CPU, interpreter and GPU tests of zeroing share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from triton_kv.blocks import zero_ranges

POISON = 0xFF
MIB = 1 << 20


@dataclass(frozen=True)
class ZeroCase:
    """`count` ranges of `num_bytes`, `stride` bytes apart, the first `offset` bytes behind a 4096-byte border."""

    name: str
    offset: int
    num_bytes: int
    stride: int
    count: int

    def __str__(self) -> str:
        return self.name


CASES = (
    ZeroCase("aligned", 0, 4096, 0, 1),
    ZeroCase("one_byte", 5, 1, 0, 1),
    ZeroCase("inside_16_bytes", 3, 9, 0, 1),
    ZeroCase("over_a_16_byte_border", 9, 14, 0, 1),
    ZeroCase("ragged_start", 1, 4095, 0, 1),
    ZeroCase("ragged_end", 0, 4097, 0, 1),
    ZeroCase("ragged_both", 7, 8199, 0, 1),
    ZeroCase("nothing", 3, 0, 0, 1),
    ZeroCase("no_range", 3, 16, 16, 0),
    ZeroCase("pages", 64, 512, 4096, 7),
    ZeroCase("odd_stride", 1, 100, 131, 9),
    ZeroCase("touching", 2, 33, 33, 20),
    ZeroCase("overlapping", 2, 100, 48, 5),
    ZeroCase("backwards", 4096, 100, -512, 4),
    ZeroCase("several_programs", 13, 3 * MIB + 5, 0, 1),
    ZeroCase("several_programs_and_ranges", 8, MIB + 40, 2 * MIB - 24, 3),
)


def poisoned(case: ZeroCase, device: torch.device) -> torch.Tensor:
    """uint8, starts on a 4096-byte border, with room on both sides of every range."""
    room = 3 * 4096 + case.offset + case.num_bytes + abs(case.stride) * case.count
    buffer = torch.full((room,), POISON, dtype=torch.uint8, device=device)
    return buffer[-buffer.data_ptr() % 4096 :]


def check(case: ZeroCase, device: torch.device) -> None:
    """Runs the case and compares every byte around the ranges."""
    memory = poisoned(case, device)
    expected = memory.clone()
    for i in range(case.count):
        start = case.offset + i * case.stride
        expected[start : start + case.num_bytes] = 0
    zero_ranges(
        memory.data_ptr() + case.offset, case.num_bytes, stride=case.stride, count=case.count, device=memory.device
    )
    assert torch.equal(memory, expected)


def check_every_alignment(num_bytes: int, device: torch.device) -> None:
    for offset in range(17):
        check(ZeroCase("", offset, num_bytes, 0, 1), device)

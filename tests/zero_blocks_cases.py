"""Segments in ordinary memory and what zeroing some of their blocks must leave: for the interpreter and GPU tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from triton_kv.zeroing import SegmentTable

POISON = 0xFF
NUM_BLOCKS = 6  # of which WATERMARK are committed
WATERMARK = 5


@dataclass(frozen=True)
class Segments:
    """One segment for each entry: its bytes a block, and how far behind a 16-byte border it starts."""

    name: str
    block_bytes: tuple[int, ...]
    offsets: tuple[int, ...]

    def __str__(self) -> str:
        return self.name

    def allocate(self, device: torch.device) -> list[torch.Tensor]:
        """uint8, poisoned, with room on both sides of each segment."""
        memories = []
        for size, offset in zip(self.block_bytes, self.offsets, strict=True):
            memory = torch.full((size * NUM_BLOCKS + 96,), POISON, dtype=torch.uint8, device=device)
            memories.append(memory[-memory.data_ptr() % 16 + 32 + offset :])
        return memories


CASES = (
    Segments("aligned", (4096, 4096), (0, 0)),
    Segments("odd", (1, 33, 4097), (3, 0, 7)),
    Segments("several_pieces", (16, (64 << 10) + 5, 200_000), (0, 1, 0)),
)
IDS = ([0], [4, -1, 2, 2], [-7, -1], [3, 5, 1, 99], [0, 1, 2, 3, 4])


def check_blocks(case: Segments, ids: list[int], dtype: torch.dtype, device: torch.device) -> None:
    """`blocks_launch` over a table that got its last segment after the others."""
    memories = case.allocate(device)
    expected = [memory.clone() for memory in memories]
    table = SegmentTable(device)
    segments = [(memory.data_ptr(), size) for memory, size in zip(memories, case.block_bytes)]
    control = torch.zeros(8, dtype=torch.int32, device=device)
    control[0] = WATERMARK
    table.set(segments[:-1])
    launch = table.blocks_launch(torch.tensor(ids, dtype=dtype, device=device), control)
    table.set(segments)
    launch.run(device)
    bad = [(row, block) for row, block in enumerate(ids) if block >= WATERMARK]
    for memory, size in zip(expected, case.block_bytes):
        for block in ids:
            if 0 <= block < WATERMARK:
                memory[block * size : (block + 1) * size] = 0
    assert all(torch.equal(memory, wanted) for memory, wanted in zip(memories, expected))
    assert control[:3].tolist() == [WATERMARK, len(bad), 4 if bad else 0]
    if bad:
        assert tuple(control[3:5].tolist()) in bad


def check_range(case: Segments, first: int, count: int, limit: int, device: torch.device) -> None:
    """`range_launch` of new blocks: short ranges become zero, long ones and everything around stay as they were."""
    memories = case.allocate(device)
    expected = [memory.clone() for memory in memories]
    table = SegmentTable(device)
    table.set([(memory.data_ptr(), size) for memory, size in zip(memories, case.block_bytes)])
    table.range_launch(first, count, limit_bytes=limit).run(device)
    for memory, size in zip(expected, case.block_bytes):
        if size * count < limit:
            memory[first * size : (first + count) * size] = 0
    assert all(torch.equal(memory, wanted) for memory, wanted in zip(memories, expected))

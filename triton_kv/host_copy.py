"""Contents of blocks in pinned host memory, while the cache sleeps."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from triton_kv.extensible import ExtensibleTensor
    from triton_kv.memory.pinned import PinnedBuffer

BlockRun = tuple[int, int]  # first block, number of blocks


def block_runs(blocks: Iterable[int]) -> list[BlockRun]:
    """Ascending block ids as runs of consecutive ones."""
    runs: list[BlockRun] = []
    for block in blocks:
        if runs and sum(runs[-1]) == block:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block, 1))
    return runs


class HostCopy:
    """Chosen blocks of one buffer: segment after segment, and in each the blocks in ascending order, without gaps.

    Args:
        buffer: where the blocks live.
        block_bytes: bytes of a block in each segment.
        runs: the blocks.
        pinned: host memory with room for `num_bytes` from `offset_bytes` on.
    """

    def __init__(
        self,
        buffer: ExtensibleTensor,
        block_bytes: int,
        runs: Sequence[BlockRun],
        pinned: PinnedBuffer,
        offset_bytes: int = 0,
    ) -> None:
        self.buffer = buffer
        self.block_bytes = block_bytes
        self.runs = tuple(runs)
        self.pinned = pinned
        self.offset_bytes = offset_bytes
        assert offset_bytes + self.num_bytes <= pinned.num_bytes

    @property
    def num_bytes(self) -> int:
        return sum(count for _, count in self.runs) * self.block_bytes * self.buffer.num_segments

    def save(self) -> None:
        """Queue the copies to the host; the caller waits (`memory.wait()`)."""
        for host, device, num_bytes in self._pieces():
            self.buffer.memory.copy(host, device, num_bytes)

    def restore(self) -> None:
        """Queue the copies back, over blocks that are committed again."""
        for host, device, num_bytes in self._pieces():
            self.buffer.memory.copy(device, host, num_bytes)

    def _pieces(self) -> Iterator[tuple[int, int, int]]:
        """Host address, device address, bytes."""
        host = self.pinned.address + self.offset_bytes
        for segment in range(self.buffer.num_segments):
            for first, count in self.runs:
                num_bytes = count * self.block_bytes
                yield host, self.buffer.address_of(segment, first * self.block_bytes), num_bytes
                host += num_bytes


__all__ = ["HostCopy", "block_runs"]

"""Contents of blocks in pinned host memory, while the cache sleeps."""

from __future__ import annotations

import ctypes
import logging
from array import array
from functools import partial
from typing import TYPE_CHECKING

import torch

from triton_kv.gathering import BlockPlaces, gather_blocks, gather_launch
from triton_kv.memory.estate import warn
from triton_kv.memory.reservation import round_up
from triton_kv.memory.staging import Lanes, Staging

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from triton_kv.extensible import ExtensibleTensor
    from triton_kv.launch import Launch
    from triton_kv.memory import VirtualMemory
    from triton_kv.memory.pinned import PinnedBuffer

logger = logging.getLogger(__name__)

BlockRun = tuple[int, int]  # first block, number of blocks

# A copy over the link costs some microseconds to start, as much as a short run of blocks takes to move. Where there are
# many such runs, kernels gather them first, this many bytes at a time (`python -m bench run sleep`).
DIRECT_BYTES = 256 << 10
FEW_COPIES = 64
BATCH_BYTES = 16 << 20
ID_BYTES = 4  # of a block's entry in the list that kernels read


def block_runs(blocks: Sequence[int]) -> list[BlockRun]:
    """Ascending block ids as runs of consecutive ones."""
    if not blocks:
        return []
    if isinstance(blocks, range) and blocks.step == 1:
        return [(blocks.start, len(blocks))]
    ids = torch.tensor(blocks, dtype=torch.int64)
    starts = [0, *((ids.diff() != 1).nonzero()[:, 0] + 1).tolist()]
    return [(int(ids[first]), end - first) for first, end in zip(starts, [*starts[1:], len(blocks)])]


class BlockList:
    """The blocks that a sleep keeps, as runs, and as a list in pinned memory for the kernels that gather them.

    Args:
        blocks: ascending.
        pinned: host memory of `host_bytes_for` so many blocks, or more: the list lies at its end.
    """

    def __init__(self, blocks: Sequence[int], pinned: PinnedBuffer) -> None:
        self.blocks = blocks
        self.runs = block_runs(blocks)
        self.pinned = pinned
        self.address = pinned.address + pinned.num_bytes - len(blocks) * ID_BYTES
        self._is_written = False

    def write(self) -> None:
        """Have the list in pinned memory."""
        if not self._is_written:
            words = array("i", self.blocks)
            assert words.itemsize == ID_BYTES
            ctypes.memmove(self.address, words.buffer_info()[0], len(words) * ID_BYTES)
            self._is_written = True

    def runs_of(self, start: int, count: int) -> list[BlockRun]:
        """The runs of a part of the list."""
        return self.runs if count == len(self.blocks) else block_runs(self.blocks[start : start + count])


class HostCopy:
    """Chosen blocks of one buffer: batch after batch, in each segment after segment, in each block after block.

    Args:
        buffer: where the blocks live.
        block_bytes: bytes of a block in each segment.
        blocks: which.
        offset_bytes: where their contents begin in the list's pinned memory, which has room for `num_bytes` there.
    """

    def __init__(self, buffer: ExtensibleTensor, block_bytes: int, blocks: BlockList, offset_bytes: int = 0) -> None:
        self.buffer = buffer
        self.block_bytes = block_bytes
        self.blocks = blocks
        self.pinned = blocks.pinned
        self.offset_bytes = offset_bytes
        assert offset_bytes + self.num_bytes + self.num_blocks * ID_BYTES <= self.pinned.num_bytes
        num_runs = len(blocks.runs)
        run_bytes = self.num_blocks * block_bytes // max(num_runs, 1)
        self.is_gathered = bool(self.num_blocks) and should_gather(
            buffer.memory, run_bytes, num_runs * buffer.num_segments
        )
        if self.is_gathered:
            blocks.write()
        self._batch_blocks = self.num_blocks
        if self.is_gathered:
            self._batch_blocks = min(max(BATCH_BYTES // (block_bytes * buffer.num_segments), 1), self.num_blocks)

    @property
    def num_blocks(self) -> int:
        return len(self.blocks.blocks)

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes * self.buffer.num_segments

    @property
    def half_bytes(self) -> int:
        """What each half of staging memory must hold; 0 where it is not needed."""
        return self._bytes_of(self._batch_blocks) if self.is_gathered else 0

    def save(self, staging: Staging | None = None) -> None:
        """Queue the copies to the host; the caller waits (`memory.wait()`).

        Without staging memory, kernels write scattered blocks over the link by themselves.
        """
        self._transfer(staging, to_host=True)

    def restore(self, staging: Staging | None = None) -> None:
        """Queue the copies back, over blocks that are committed again."""
        self._transfer(staging, to_host=False)

    def _transfer(self, staging: Staging | None, *, to_host: bool) -> None:
        if not self.is_gathered or not self._can_launch(staging, scatter=not to_host):
            self._copy_runs(to_host=to_host)
            return
        memory = self.buffer.memory
        lanes = Lanes(memory)
        kernel = partial(self._gather, scatter=not to_host)
        try:
            for start, count, host in self._batches():
                if staging is None:
                    lanes.launch_after(None, partial(kernel, start, count, host))
                    continue
                num_bytes = self._bytes_of(count)
                if to_host:
                    staging.pass_out(partial(kernel, start, count), partial(memory.copy, host, num_bytes=num_bytes))
                else:
                    staging.pass_in(
                        partial(memory.copy, source=host, num_bytes=num_bytes), partial(kernel, start, count)
                    )
        finally:
            lanes.hold_copies()  # so that whoever waits for the copies waits for the kernels

    def _gather(self, start: int, count: int, packed: int, *, scatter: bool) -> None:
        ids = self.blocks.address + start * ID_BYTES
        gather_blocks(self._places(), ids, count, packed, self.buffer.device, scatter=scatter)

    def _can_launch(self, staging: Staging | None, *, scatter: bool) -> bool:
        packed = self.pinned.address + self.offset_bytes if staging is None else 0
        launch = gather_launch(self._places(), 0, 1, packed, scatter=scatter)
        return can_launch(self.buffer.memory, [launch])

    def _places(self) -> BlockPlaces:
        return places_of(self.buffer, self.block_bytes)

    def _copy_runs(self, *, to_host: bool) -> None:
        memory = self.buffer.memory
        for start, count, host in self._batches():
            for at, device, num_bytes in self._pieces(self.blocks.runs_of(start, count), host):
                memory.copy(*((at, device) if to_host else (device, at)), num_bytes)

    def _batches(self) -> Iterator[tuple[int, int, int]]:
        """First place in the list, number of blocks and host address of every batch."""
        host = self.pinned.address + self.offset_bytes
        for start in range(0, self.num_blocks, max(self._batch_blocks, 1)):
            count = min(self._batch_blocks, self.num_blocks - start)
            yield start, count, host
            host += self._bytes_of(count)

    def _bytes_of(self, num_blocks: int) -> int:
        return num_blocks * self.block_bytes * self.buffer.num_segments

    def _pieces(self, runs: Sequence[BlockRun], host: int) -> Iterator[tuple[int, int, int]]:
        """Host address, device address and bytes of every run of a batch, in every segment."""
        for segment in range(self.buffer.num_segments):
            for first, count in runs:
                num_bytes = count * self.block_bytes
                yield host, self.buffer.address_of(segment, first * self.block_bytes), num_bytes
                host += num_bytes


def places_of(buffer: ExtensibleTensor, block_bytes: int) -> BlockPlaces:
    """Where the blocks of a buffer are, for a kernel."""
    return BlockPlaces(buffer.base_ptr, buffer.num_segments, buffer.segment_stride_bytes, block_bytes)


def host_bytes_for(num_blocks: int, block_bytes: int) -> int:
    """Pinned memory for so many blocks of so many bytes over all segments, and the list of their ids."""
    return round_up(num_blocks * block_bytes, ID_BYTES) + num_blocks * ID_BYTES


def gather_launches(buffer: ExtensibleTensor, block_bytes: int) -> list[Launch]:
    """What a sleep and a wake launch by way of staging memory, for compiling ahead."""
    return [gather_launch(places_of(buffer, block_bytes), 0, 1, 0, scatter=scatter) for scatter in (False, True)]


def can_launch(memory: VirtualMemory, launches: Sequence[Launch]) -> bool:
    """Whether kernels are compiled and loaded, or can be: loading takes device memory, and none may be left."""
    if memory.device.type != "cuda":
        return True
    try:
        with memory.activate(), torch.cuda.device(memory.device):
            for launch in launches:
                launch.compile()
    except Exception as failure:
        warn(memory, "no kernels to gather blocks with, so they are copied run by run", [failure])
        return False
    return True


def half_bytes_for(buffers: Sequence[tuple[ExtensibleTensor, int]], num_blocks: int) -> int:
    """The least half of staging memory that serves any `num_blocks` blocks of buffers with their bytes a block."""
    sizes = [
        block_bytes * buffer.num_segments
        for buffer, block_bytes in buffers
        if should_gather(buffer.memory, block_bytes, num_blocks * buffer.num_segments)
    ]
    return max((min(max(BATCH_BYTES // size, 1), num_blocks) * size for size in sizes), default=0)


def should_gather(memory: VirtualMemory, run_bytes: int, num_copies: int) -> bool:
    """Whether kernels gather runs of `run_bytes` on average, which would take `num_copies` copies over the link."""
    return memory.device.type == "cuda" and run_bytes < DIRECT_BYTES and num_copies > FEW_COPIES


__all__ = [
    "BlockList",
    "HostCopy",
    "block_runs",
    "can_launch",
    "gather_launches",
    "half_bytes_for",
    "host_bytes_for",
    "places_of",
    "should_gather",
]

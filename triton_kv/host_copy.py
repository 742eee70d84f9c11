"""Contents of blocks in pinned host memory, while the cache sleeps."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

import torch

from triton_kv.blocks import BlockSpans, CopyTable, copy_block_pairs, copy_table
from triton_kv.errors import DriverError
from triton_kv.memory.estate import warn
from triton_kv.memory.reservation import Reservation
from triton_kv.memory.transaction import Transaction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from triton_kv.extensible import ExtensibleTensor
    from triton_kv.memory import VirtualMemory
    from triton_kv.memory.pinned import PinnedBuffer

logger = logging.getLogger(__name__)

BlockRun = tuple[int, int]  # first block, number of blocks

# A copy over the link costs some microseconds to start, as much as a short run of blocks takes to move. Such runs are
# gathered on the device first, this many bytes at a time (`python -m bench run sleep`).
DIRECT_BYTES = 256 << 10
STAGING_BYTES = 64 << 20


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
    """Chosen blocks of one buffer: batch after batch, in each segment after segment, in each block after block.

    Args:
        buffer: where the blocks live.
        block_bytes: bytes of a block in each segment.
        runs: the blocks, ascending.
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
        self.num_blocks = sum(count for _, count in runs)
        self.pinned = pinned
        self.offset_bytes = offset_bytes
        assert offset_bytes + self.num_bytes <= pinned.num_bytes
        self._is_staged = should_stage(buffer.memory, self.num_blocks * block_bytes // max(len(runs), 1))
        batch_blocks = self.num_blocks
        if self._is_staged:
            batch_blocks = max(STAGING_BYTES // (block_bytes * buffer.num_segments), 1)
        self._batches = list(_batches(runs, batch_blocks))

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes * self.buffer.num_segments

    def save(self) -> None:
        """Queue the copies to the host; the caller waits (`memory.wait()`)."""
        self._transfer(to_host=True)

    def restore(self) -> None:
        """Queue the copies back, over blocks that are committed again."""
        self._transfer(to_host=False)

    def _transfer(self, *, to_host: bool) -> None:
        memory, host = self.buffer.memory, self.pinned.address + self.offset_bytes
        staging = self._staging()
        if staging is None:
            for runs in self._batches:
                for at, device, num_bytes in self._pieces(runs, host):
                    memory.copy(*((at, device) if to_host else (device, at)), num_bytes)
                host += self._bytes_of(runs)
            return
        try:
            self._transfer_staged(staging, host, to_host=to_host)
            memory.wait()
        finally:
            try:
                staging.close()
            except BaseException as failure:
                staging.close()  # tries again what failed
                if not isinstance(failure, DriverError):
                    raise
                warn(memory, "the staging memory of a copy could not be given back at once", [failure])

    def _transfer_staged(self, staging: Reservation, host: int, *, to_host: bool) -> None:
        memory = self.buffer.memory
        with torch.cuda.stream(getattr(memory, "copy_stream", None)):
            # All that waits for the host comes first, so that the link does not.
            gathers = self._gathers(staging.view(0, staging.num_bytes), back=not to_host)
            for runs, gather in zip(self._batches, gathers):
                num_bytes = self._bytes_of(runs)
                if to_host:
                    gather()
                    memory.copy(host, staging.address, num_bytes)
                else:
                    memory.copy(staging.address, host, num_bytes)
                    gather()
                host += num_bytes

    def _bytes_of(self, runs: Sequence[BlockRun]) -> int:
        return sum(count for _, count in runs) * self.block_bytes * self.buffer.num_segments

    def _staging(self) -> Reservation | None:
        """Device memory for the largest batch; None where it is not wanted or not there.

        Not torch's: its allocator would keep it.
        """
        if not self._is_staged or not self.num_blocks:
            return None
        size = max(map(self._bytes_of, self._batches))
        staging = Reservation(self.buffer.memory, size)
        try:
            with Transaction() as transaction:
                staging.ensure([(0, size)], transaction)
        except DriverError as error:
            staging.close()
            if not error.out_of_memory:
                raise
            logger.warning("no %d bytes of device memory to gather blocks in: the copies go block by block", size)
            return None
        return staging

    def _gathers(self, staging: torch.Tensor, *, back: bool) -> list[Callable[[], None]]:
        """For each batch the launch that copies its blocks, in all segments, into the staging memory or back."""
        buffer, size = self.buffer, self.block_bytes
        cache = BlockSpans((buffer.full_view(),), (buffer.num_segments,), (buffer.segment_stride_bytes,), (size,))
        batches = [[block for first, count in runs for block in range(first, first + count)] for runs in self._batches]
        rows = [(at, block) if back else (block, at) for blocks in batches for at, block in enumerate(blocks)]
        pairs = torch.tensor(rows, dtype=torch.int32).to(buffer.device)
        launches: list[Callable[[], None]] = []
        spans: dict[int, tuple[BlockSpans, BlockSpans, CopyTable]] = {}
        start = 0
        for count in map(len, batches):  # one number but for the last
            if count not in spans:
                staged = BlockSpans((staging,), (buffer.num_segments,), (count * size,), (size,))
                source, target = (staged, cache) if back else (cache, staged)
                spans[count] = (source, target, copy_table(source, target))
            source, target, table = spans[count]
            launches.append(partial(copy_block_pairs, source, target, pairs[start : start + count], table))
            start += count
        return launches

    def _pieces(self, runs: Sequence[BlockRun], host: int) -> Iterator[tuple[int, int, int]]:
        """Host address, device address and bytes of every run of a batch, in every segment."""
        for segment in range(self.buffer.num_segments):
            for first, count in runs:
                num_bytes = count * self.block_bytes
                yield host, self.buffer.address_of(segment, first * self.block_bytes), num_bytes
                host += num_bytes


def should_stage(memory: VirtualMemory, mean_run_bytes: int) -> bool:
    """Whether blocks are gathered on the device before they cross the link."""
    return memory.device.type == "cuda" and mean_run_bytes < DIRECT_BYTES


def _batches(runs: Sequence[BlockRun], batch_blocks: int) -> Iterator[list[BlockRun]]:
    """The runs in batches of at most `batch_blocks` blocks."""
    batch: list[BlockRun] = []
    room = batch_blocks
    for first, count in runs:
        while count:
            taken = min(count, room)
            batch.append((first, taken))
            first, count, room = first + taken, count - taken, room - taken
            if not room:
                yield batch
                batch, room = [], batch_blocks
    if batch:
        yield batch


__all__ = ["HostCopy", "block_runs", "should_stage"]

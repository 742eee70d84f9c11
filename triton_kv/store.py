"""Blocks of memory over any number of buffers, committed in lockstep: what a cache is below its layers and views."""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch

from triton_kv.errors import (
    Broken,
    CaptureError,
    Closed,
    DriverError,
    Forked,
    NothingCommitted,
    OutOfMemory,
    attach_failures,
    raise_together,
)
from triton_kv.memory.transaction import Transaction
from triton_kv.sizing import GIB, largest_fit
from triton_kv.zeroing import Zeroing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from triton_kv.extensible import ExtensibleTensor
    from triton_kv.memory import VirtualMemory

logger = logging.getLogger(__name__)

CONTROL_WORDS = 8  # int32: watermark, error count, first error's kind, row, value, then zeros
ERROR_KINDS = {0: "none", 1: "block id read by attention", 2: "slot written", 3: "block zeroed"}


class CheckReport(NamedTuple):
    """What kernels met outside the watermark since the cache was reserved (or since the last reset)."""

    num_errors: int  # accesses masked (reads) or dropped (writes)
    kind: str  # of the first one
    row: int  # its sequence (reads) or token (writes)
    value: int  # the block id or slot

    @property
    def ok(self) -> bool:
        return self.num_errors == 0


class StoredBuffer(NamedTuple):
    """A buffer and what one block takes of it: `block_bytes` in each of its segments."""

    buffer: ExtensibleTensor
    block_bytes: int


def _segments(buffers: Sequence[StoredBuffer]) -> list[tuple[int, int]]:
    """Address and bytes a block of every segment."""
    return [
        (buffer.address_of(segment), block_bytes)
        for buffer, block_bytes in buffers
        for segment in range(buffer.num_segments)
    ]


class BlockStore:
    """Buffers whose segments all hold the same number of blocks: all of them grow, or none does.

    It owns the count that the host believes, the watermark that kernels read, the lock under which either changes, and
    the life of the buffers (open, broken, closed). It knows bytes a block, and nothing of layers or layouts. Changing
    calls may come from any thread, one at a time; reading counters never waits.
    """

    def __init__(self, memory: VirtualMemory, buffers: Sequence[StoredBuffer], capacity: int) -> None:
        self.memory = memory
        self.buffers = tuple(buffers)
        self.capacity = capacity  # blocks
        self.num_blocks = 0
        self._state = "open"  # "open", "closed" or "broken"
        self._pid = os.getpid()
        self._lock = threading.RLock()
        # The watermark must not wait behind the caller's queued work, so it is written on a stream of its own; and the
        # allocator may hand out memory that queued work still writes, so that work is waited for once.
        self._stream = torch.cuda.Stream(memory.device) if memory.device.type == "cuda" else None
        self.control = torch.zeros(CONTROL_WORDS, dtype=torch.int32, device=memory.device)
        if self._stream is not None:
            torch.cuda.current_stream(memory.device).synchronize()
        self.zeroing = Zeroing(memory)
        self.zeroing.table.add(_segments(self.buffers))
        self._set_watermark(0)

    # Counters.

    @property
    def closed(self) -> bool:
        return self._state == "closed"

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all buffers and segments, without padding."""
        return sum(block_bytes * buffer.num_segments for buffer, block_bytes in self.buffers)

    @property
    def reserved_bytes(self) -> int:
        return sum(buffer.capacity_bytes for buffer, _ in self.buffers)

    @property
    def committed_bytes(self) -> int:
        return sum(buffer.num_bytes for buffer, _ in self.buffers)

    @property
    def mapped_bytes(self) -> int:
        return sum(buffer.mapped_bytes for buffer, _ in self.buffers)

    def mapped_bytes_at(self, num_blocks: int) -> int:
        """The physical bytes that `num_blocks` committed blocks hold, exact and without committing anything."""
        if not 0 <= num_blocks <= self.capacity:
            raise ValueError(f"num_blocks must lie in 0..{self.capacity} (the capacity), got {num_blocks}")
        return sum(buffer.mapped_bytes_at(num_blocks * block_bytes) for buffer, block_bytes in self.buffers)

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes of the device, after all queued work is done (synchronises)."""
        self.require_usable()
        with self.memory.activate():
            self.memory.synchronize()
            return self.memory.memory_info()

    # Changing.

    def extend(self, num_blocks: int) -> None:
        """`KVCache.extend` for a number of blocks within the capacity."""
        with self.growing(num_blocks):
            pass

    @contextmanager
    def growing(self, target: int) -> Iterator[None]:
        """`extend` in two steps, for owners that must agree with others in between (ranks, several caches).

        Entering maps and zeroes everything and shows none of it; the body runs with the lock held; leaving it normally
        publishes the blocks, an exception from it (or from either step) leaves all as it was.
        """
        with self._lock:
            self._require_changeable("extend")
            if target <= self.num_blocks:
                yield
                return
            before, started, prepared = self.num_blocks, time.perf_counter(), False
            try:
                with self._changing() as transaction:
                    self._grow(target, transaction)
                    self.memory.wait()  # zeroed before the watermark moves
                    prepared = True
                    yield
                    self._publish(target, transaction)
            except DriverError as error:
                if prepared or not error.out_of_memory:
                    raise
                raise self._out_of_memory(target, list(error.undo_failures)) from error
            logger.info(
                "extended from %d to %d blocks: %.2f GiB committed, %.2f GiB mapped, in %.1f ms",
                before,
                target,
                self.committed_bytes / GIB,
                self.mapped_bytes / GIB,
                (time.perf_counter() - started) * 1e3,
            )

    def _grow(self, target: int, transaction: Transaction) -> None:
        """Maps the new blocks of all buffers and queues their zeroing: short ranges of all of them in one launch."""
        first, count = self.num_blocks, target - self.num_blocks
        for buffer, block_bytes in self.buffers:
            buffer.grow_(target * block_bytes, transaction, zero_new=not self.zeroing.takes(count * block_bytes))
        transaction.undo(self.memory.wait)  # a failure must not unmap what a kernel that did start is still writing
        self.zeroing.zero_new(first, count)

    def add_buffers(self, buffers: Sequence[StoredBuffer], publish: Callable[[], None]) -> None:
        """Brings new buffers to the committed blocks, zeroed, and only then makes them part of every later change.

        `publish` is called last, with the lock held. After an error nothing has changed but the new buffers, which the
        caller frees.
        """
        with self._lock:
            self._require_changeable("adding a group")
            mapped_bytes = sum(buffer.mapped_bytes_at(self.num_blocks * size) for buffer, size in buffers)
            try:
                with self.memory.activate(), Transaction() as transaction:
                    for buffer, block_bytes in buffers:
                        buffer.grow_(self.num_blocks * block_bytes, transaction)
                    self.memory.wait()
                    publish()
            except DriverError as error:
                if not error.out_of_memory:
                    raise
                described = OutOfMemory(
                    mapped_bytes, self.memory.memory_info()[0], detail=f"adding a group at {self.num_blocks} blocks"
                )
                attach_failures(described, list(error.undo_failures))
                raise described from error
            self.buffers = (*self.buffers, *buffers)
            self.zeroing.table.add(_segments(buffers))

    @contextmanager
    def _changing(self) -> Iterator[Transaction]:
        """One transaction over all buffers, with the device current; the store is broken if its undo fails."""
        transaction = Transaction()
        try:
            with self.memory.activate(), transaction:
                yield transaction
        finally:
            if transaction.undo_failures:
                self._state = "broken"

    def _publish(self, num_blocks: int, transaction: Transaction) -> None:
        """The watermark and the host's count, together."""
        transaction.undo(self._set_count, self.num_blocks)
        self._set_count(num_blocks)

    def _set_count(self, num_blocks: int) -> None:
        self._set_watermark(num_blocks)
        self.num_blocks = num_blocks

    def _set_watermark(self, num_blocks: int) -> None:
        """Writes the bound that kernels read; the host waits, so whoever launches next sees it."""
        with torch.cuda.stream(self._stream):
            self.control[:1].fill_(num_blocks)
        if self._stream is not None:
            self._stream.synchronize()

    def _out_of_memory(self, target: int, undo_failures: list[BaseException]) -> OutOfMemory:
        free_bytes, _ = self.memory.memory_info()
        would_fit = largest_fit(self.mapped_bytes_at, self.mapped_bytes + free_bytes, self.capacity)
        described = OutOfMemory(
            self.mapped_bytes_at(target) - self.mapped_bytes,
            free_bytes,
            would_fit=would_fit,
            unit="blocks",
            detail=f"extend({target}) from {self.num_blocks} blocks",
        )
        attach_failures(described, undo_failures)
        return described

    def close(self, drop_views: Callable[[], None]) -> None:
        """`KVCache.close`. `drop_views` is called once nothing refuses any more: addresses go with the last view."""
        if os.getpid() != self._pid:
            raise Forked("this KVCache")
        with self._lock:
            if self._state == "closed":
                self._free()  # does nothing unless an earlier try failed
                return
            if self.memory.is_capturing():
                raise CaptureError("close")
            self._state = "closed"
            self.num_blocks = 0
            drop_views()
            with self.memory.activate():
                try:
                    self._set_watermark(0)
                finally:
                    self._free()

    def _free(self) -> None:
        failures: list[BaseException] = []
        for buffer, _ in self.buffers:
            try:
                buffer.free()
            except Exception as failure:
                failures.append(failure)
        raise_together(failures)

    # Watching.

    def check(self, *, reset: bool = False) -> CheckReport:
        """`KVCache.check`."""
        self.require_usable()
        _, count, kind, row, value, *_ = self.control.tolist()
        if reset:
            self.control[1:5].zero_()
        return CheckReport(count, ERROR_KINDS.get(kind, str(kind)), row, value)

    def require_open(self) -> None:
        if self._state == "closed":
            raise Closed("the cache is closed; reserve a new one")
        if os.getpid() != self._pid:
            raise Forked("this KVCache")

    def require_usable(self) -> None:
        self.require_open()
        if self._state == "broken":
            raise Broken(
                "an earlier extend failed and could not be undone; close() frees what it can, then reserve anew"
            )

    def require_committed(self) -> None:
        if self._state != "open" or os.getpid() != self._pid:
            self.require_usable()
        if self.num_blocks == 0:
            raise NothingCommitted("no block is committed yet: call extend(1) or more before using the cache")

    def _require_changeable(self, operation: str) -> None:
        self.require_usable()
        if self.memory.is_capturing():
            raise CaptureError(operation)

"""Blocks of memory over any number of buffers, committed in lockstep: what a cache is below its layers and views."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from triton_kv.blocks import BlockSpans, CopyTable, copy_block_pairs, copy_launch, copy_table, order_copies
from triton_kv.compaction import CompactionPlan, compact
from triton_kv.errors import (
    AddressSpaceExhausted,
    Asleep,
    BadAccess,
    Broken,
    CaptureError,
    Closed,
    DriverError,
    Forked,
    NothingCommitted,
    OutOfMemory,
    TritonKVError,
    attach_failures,
    raise_together,
)
from triton_kv.extensible import Freed, Progress
from triton_kv.host_copy import BlockList, HostCopy, can_launch, gather_launches, half_bytes_for, host_bytes_for
from triton_kv.memory.estate import reap, warn
from triton_kv.memory.pinned import PinnedBuffer
from triton_kv.memory.poison import POISON
from triton_kv.memory.staging import Staging
from triton_kv.memory.transaction import Transaction
from triton_kv.sizing import GIB, largest_fit
from triton_kv.spec import whole_number
from triton_kv.stats import CacheStats
from triton_kv.zeroing import Zeroing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from triton_kv.extensible import ExtensibleTensor
    from triton_kv.launch import Launch
    from triton_kv.memory import VirtualMemory

logger = logging.getLogger(__name__)

CONTROL_WORDS = 8  # int32: watermark, error count, first error's kind, row, value, then zeros
ERROR_KINDS = {
    0: "none",
    1: "block id read by attention",
    2: "slot written",
    3: "block copied",
    4: "block zeroed",
    5: "position of a token written",
}


class CheckReport(NamedTuple):
    """What kernels met outside the watermark since the cache was reserved (or since the last reset).

    Positions outside a cos/sin cache (`rope_and_write_kv`) count too.
    """

    num_errors: int  # accesses masked (reads) or dropped (writes)
    kind: str  # of the first one
    row: int  # its row of the block table (reads), its token (writes), its place in the list (copies, zeroing)
    value: int  # the block id, slot or position

    @property
    def ok(self) -> bool:
        return self.num_errors == 0

    @classmethod
    def of(cls, control: Sequence[int]) -> CheckReport:
        """From the words of a control block."""
        _, count, kind, row, value, *_ = control
        return cls(count, ERROR_KINDS.get(kind, str(kind)), row, value)


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


class MemoryChange(NamedTuple):
    """What a watcher is told, around every change of what is behind the addresses."""

    phase: str  # "before": what goes is still there, and no work uses it; "after": what came is there, not yet in use
    old_num_blocks: int
    num_blocks: int
    epoch: int  # once the change is complete


class Waitable(Protocol):
    """A `torch.cuda.Event` or `torch.cuda.Stream`."""

    def synchronize(self) -> None:
        """The host waits for it."""


class SleepReport(NamedTuple):
    freed: Freed  # bytes of device memory given back
    host_bytes: int  # contents kept in pinned host memory
    pin_seconds: float  # making that memory, and device memory to gather blocks in; 0 where `prepare_sleep` did
    copy_seconds: float  # the copies alone


class WakeReport(NamedTuple):
    num_blocks: int
    host_bytes: int  # contents restored; all else is zero
    map_seconds: float  # mapping, zeroing, and making device memory to scatter blocks from
    copy_seconds: float  # the copies alone


class CoalesceReport(NamedTuple):
    num_segments: int  # that several handles backed, and one does now
    extra_bytes: int  # memory that it took for a moment
    num_handles: int  # now


class BlockStore:
    """Buffers whose segments all hold the same number of blocks: all of them change, or none does.

    It owns the count that the host believes, the watermark that kernels read, the lock under which either changes, and
    the life of the buffers (open, asleep, broken, closed). It knows bytes a block, and nothing of layers or layouts.
    Changing calls may come from any thread, one at a time; reading counters never waits.

    Every change is one transaction. Its `...ing` form stops in the middle for owners that must agree with others first:
    what can fail is done by then and none of it shows; leaving the block publishes it, an exception undoes it.

    Args:
        memory: the driver of all buffers.
        buffers: what grows and shrinks in lockstep.
        capacity: blocks.
        alias: back all first granules by one, until the first extend that needs more (`KVCache.reserve`).
        checked: poison what a shrink leaves mapped, and raise `BadAccess` in the next op after a kernel's bad access.
    """

    def __init__(
        self,
        memory: VirtualMemory,
        buffers: Sequence[StoredBuffer],
        capacity: int,
        *,
        alias: bool = False,
        checked: bool = False,
    ) -> None:
        self.memory = memory
        self.buffers = tuple(buffers)
        self.capacity = capacity  # blocks
        self.checked = checked
        self.num_blocks = 0
        self.epoch = 0
        self.extends = self.shrinks = self.sleeps = self.failures = 0
        self._state = "open"  # "open", "closed" or "broken"
        self._alias = "wanted" if alias else "no"  # "wanted", "on" or "no"
        self._asleep: dict[int, HostCopy | None] = {}  # buffer -> its contents
        self._blocks_asleep = 0  # what a wake commits again
        self._pinned: PinnedBuffer | None = None  # made by `prepare_sleep`
        self._unneeded: list[PinnedBuffer] = []  # to be freed as soon as the driver does it
        self._staging: Staging | None = None  # made by `prepare_sleep`, or for one sleep or wake
        self._block_spans: BlockSpans | None = None
        self._table: CopyTable | None = None
        self._watchers: list[tuple[Callable[[MemoryChange], object]]] = []  # one tuple a registration
        self._changing_thread: int | None = None
        self._pid = os.getpid()
        self._lock = threading.RLock()
        # Activated, so that a thread without a context is left without one; and not in inference mode, else changes
        # outside of it could not write these tensors.
        with memory.activate(), torch.inference_mode(False):
            # Polls and zeroing of single blocks must not wait behind the caller's queued work; and the allocator may
            # hand out memory that queued work still writes, so that work is waited for once.
            self._stream = torch.cuda.Stream(memory.device) if memory.device.type == "cuda" else None
            # The watermark goes through the driver's own stream where there is one: torch's are shared, and somebody
            # may be capturing on one.
            self._watermark_stream = getattr(memory, "copy_stream", self._stream)
            self.control = torch.zeros(CONTROL_WORDS, dtype=torch.int32, device=memory.device)
            if self._stream is not None:
                torch.cuda.current_stream(memory.device).synchronize()
            self.zeroing = Zeroing(memory, self._stream)
            self.zeroing.table.set(_segments(self.buffers))
            self._share_pools(self.buffers)
            self._errors = ErrorPoll(self.control, self._stream)
            self._set_watermark(0)

    # Counters.

    @property
    def closed(self) -> bool:
        return self._state == "closed"

    @property
    def asleep(self) -> bool:
        """Whether some of the buffers sleep."""
        return bool(self._asleep)

    @property
    def blocks_awake(self) -> int:
        """Blocks once all buffers are awake."""
        return self._blocks_asleep if self._asleep else self.num_blocks

    @property
    def state(self) -> str:
        return "asleep" if self._state == "open" and self._asleep else self._state

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
        if not self.elastic:
            return 0 if self.closed else self.reserved_bytes
        return sum(buffer.mapped_bytes for buffer, _ in self.buffers)

    @property
    def elastic(self) -> bool:
        """Whether memory comes and goes; false over plain torch memory, which is all there from the start."""
        return getattr(self.memory, "elastic", True)

    def mapped_bytes_at(self, num_blocks: int) -> int:
        """The physical bytes that `num_blocks` committed blocks hold, exact and without committing anything."""
        if not 0 <= num_blocks <= self.capacity:
            raise ValueError(f"num_blocks must lie in 0..{self.capacity} (the capacity), got {num_blocks}")
        if not self.elastic:
            return self.reserved_bytes
        return sum(buffer.mapped_bytes_at(num_blocks * block_bytes) for buffer, block_bytes in self.buffers)

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes of the device, after all queued work is done (synchronises)."""
        self.require_usable()
        if self.memory.is_capturing():
            raise CaptureError("memory_info")
        self._reap()
        with self.memory.activate():
            self.memory.synchronize()
            return self.memory.memory_info()

    def min_release_blocks(self) -> int:
        """`KVCache.min_release_blocks`."""
        reached = [point // block_bytes for buffer, block_bytes in self.buffers for point in buffer.release_points()]
        return max(self.num_blocks - max(reached), 0) if reached else 0

    def stats(self) -> CacheStats:
        """`KVCache.stats`."""
        kept = [copy for copy in self._asleep.values() if copy is not None]
        owned = (*(copy.pinned for copy in kept), self._pinned, *self._unneeded)
        pinned = {id(each): each.num_bytes for each in owned if each is not None}
        committed_bytes, mapped_bytes = self.committed_bytes, self.mapped_bytes
        return CacheStats(
            state=self.state,
            capacity=self.capacity,
            num_blocks=self.num_blocks,
            reserved_bytes=self.reserved_bytes,
            committed_bytes=committed_bytes,
            mapped_bytes=mapped_bytes,
            padding_bytes=max(mapped_bytes - committed_bytes, 0),  # while segments alias, they share one granule
            pooled_bytes=sum(buffer.pooled_bytes for buffer, _ in self.buffers),
            stray_bytes=sum(buffer.stray_bytes for buffer, _ in self.buffers),
            staging_bytes=staging.num_bytes if (staging := self._staging) is not None else 0,
            host_bytes=sum(pinned.values()),
            num_handles=sum(buffer.num_handles for buffer, _ in self.buffers),
            epoch=self.epoch,
            extends=self.extends,
            shrinks=self.shrinks,
            sleeps=self.sleeps,
            failures=self.failures,
        )

    def watch(self, callback: Callable[[MemoryChange], object]) -> Callable[[], None]:
        """`KVCache.watch`."""
        registered = (callback,)
        self._watchers.append(registered)

        def end() -> None:
            self._watchers = [each for each in self._watchers if each is not registered]

        return end

    # Growing.

    def extend(self, num_blocks: int) -> None:
        """`KVCache.extend` for a number of blocks within the capacity."""
        with self.growing(num_blocks):
            pass

    def extend_async(self, num_blocks: int) -> Future[None]:
        """`KVCache.extend_async` for a number of blocks within the capacity."""
        self._require_changeable("extend_async")
        future: Future[None] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                with self.growing(num_blocks, paced=True):
                    pass
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)

        # Not a daemon: the interpreter waits for it at exit, instead of tearing the driver down under it.
        threading.Thread(target=work, name="triton_kv extend").start()
        return future

    @contextmanager
    def growing(self, target: int, *, paced: bool = False, confirm: Callable[[], None] | None = None) -> Iterator[None]:
        """`extend` in two steps: maps and zeroes everything, and on leaving publishes the blocks.

        `confirm` is called once they are published and can still be taken back: what it raises undoes everything.
        `paced` zeroes slowly, so that a device that serves meanwhile keeps most of its bandwidth.
        """
        with self.locked():
            self._require_changeable("extend")
            if target <= self.num_blocks:
                yield
                return
            self._reap()
            before, started, prepared = self.num_blocks, time.perf_counter(), False
            try:
                with self._changing() as transaction:
                    if self._alias == "wanted" and self._fits_one_granule(target):
                        self._set("_alias", "on", transaction)
                        for buffer, block_bytes in self.buffers:
                            buffer.alias_(target * block_bytes, transaction)
                    else:
                        if self._alias == "on":
                            self._take_out_aliases(transaction)
                        self._set("_alias", "no", transaction)
                        self._grow(target, transaction, paced=paced)
                    self.memory.wait()  # zeroed before the watermark moves
                    self._announce(MemoryChange("after", before, target, self.epoch), transaction)
                    prepared = True
                    yield
                    self._publish(target, transaction)
                    if confirm is not None:
                        confirm()
            except DriverError as error:
                if prepared or not error.out_of_memory:
                    raise
                raise self._out_of_memory(target, f"extend({target})", error) from error
            self.extends += 1
            for buffer, _ in self.buffers:
                warn(self.memory, "a handle could not be released yet", buffer.settle_())
            logger.info(
                "extended from %d to %d blocks: %.2f GiB committed, %.2f GiB mapped, in %.1f ms",
                before,
                target,
                self.committed_bytes / GIB,
                self.mapped_bytes / GIB,
                (time.perf_counter() - started) * 1e3,
            )

    def _grow(self, target: int, transaction: Transaction, *, paced: bool) -> None:
        """Maps the new blocks of all buffers and queues their zeroing: short ranges of all of them in one launch."""
        first, count = self.num_blocks, target - self.num_blocks
        for buffer, block_bytes in self.buffers:
            later = self.zeroing.takes(count * block_bytes)
            buffer.grow_(target * block_bytes, transaction, zero_new=not later, paced=paced)
        transaction.undo(self.memory.wait)  # a failure must not unmap what a kernel that did start is still writing
        self.zeroing.zero_new(first, count)

    def _fits_one_granule(self, num_blocks: int) -> bool:
        return all(num_blocks * block_bytes <= self.memory.granularity for _, block_bytes in self.buffers)

    def _take_out_aliases(self, transaction: Transaction) -> None:
        """The shared granules go, and with them what block 0 held; what comes instead is other memory."""
        self._announce(MemoryChange("before", self.num_blocks, 0, self.epoch + 1), transaction)
        self._publish(0, transaction)
        self.memory.synchronize()
        self._set("epoch", self.epoch + 1, transaction)
        for buffer, _ in self.buffers:
            buffer.shrink_(0, transaction)

    def add_buffers(self, buffers: Sequence[StoredBuffer], publish: Callable[[Transaction], None]) -> None:
        """Brings new buffers to the committed blocks, zeroed, and only then makes them part of every later change.

        `publish` is called last, with the lock held, and notes its undo. After an error nothing has changed but the new
        buffers, which the caller frees.
        """
        with self.locked():
            self._require_changeable("adding a group")
            mapped_bytes = sum(buffer.mapped_bytes_at(self.num_blocks * size) for buffer, size in buffers)
            self._share_pools(buffers)
            try:
                with self._changing() as transaction:
                    for buffer, block_bytes in buffers:
                        buffer.grow_(self.num_blocks * block_bytes, transaction)
                    self.memory.wait()
                    self._show_segments([*self.buffers, *buffers], transaction)
                    self._set("buffers", (*self.buffers, *buffers), transaction)
                    publish(transaction)
            except DriverError as error:
                if not error.out_of_memory:
                    raise
                described = OutOfMemory(
                    mapped_bytes, self.memory.memory_info()[0], detail=f"adding a group at {self.num_blocks} blocks"
                )
                attach_failures(described, list(error.undo_failures))
                raise described from error

    # Giving back.

    def shrink(self, num_blocks: int, *, after: Waitable | None = None) -> Freed:
        """`KVCache.shrink` for a number of blocks within 0 to `num_blocks`."""
        with self.shrinking(num_blocks, after=after) as progress:
            pass
        return self.freed(progress)

    @contextmanager
    def shrinking(self, target: int, *, after: Waitable | None = None) -> Iterator[Progress]:
        """`shrink` in two steps: takes memory out, still in reach of an undo, and on leaving gives it back."""
        with self.locked():
            self._require_changeable("shrink")
            if target > self.num_blocks:
                raise ValueError(f"shrink({target}) of {self.num_blocks} committed blocks: use extend to grow")
            progress = Progress([buffer for buffer, _ in self.buffers])
            before = self.num_blocks
            changes = any(buffer.changes_at(target * block_bytes) for buffer, block_bytes in self.buffers)
            if not changes and target == before:
                yield progress
                progress.finish()  # handles that the driver refused to release
                return
            with self._changing() as transaction:
                epoch = self.epoch + changes
                self._announce(MemoryChange("before", before, target, epoch), transaction)
                self._publish(target, transaction)
                self._wait_for(after)  # also where nothing is unmapped: work must not write to blocks that come back
                self._set("epoch", epoch, transaction)
                for buffer, block_bytes in self.buffers:
                    buffer.shrink_(target * block_bytes, transaction)
                for buffer, _ in self.buffers:
                    progress.prepare(buffer.cut(), transaction)
                self._announce(MemoryChange("after", before, target, epoch), transaction)
                yield progress
            self.shrinks += 1
            self._finish(progress)
            if self.checked and self.elastic:
                self._poison_tails()
            logger.info("shrank from %d to %d blocks: %.2f GiB mapped", before, target, self.mapped_bytes / GIB)

    def _poison_tails(self) -> None:
        """What is mapped behind the last block, so that a stale read of it is seen. The shrink is done by then."""
        try:
            self._fill_tails(POISON)
        except DriverError as failure:
            warn(self.memory, "what a shrink left mapped could not be poisoned", [failure])

    def _fill_tails(self, value: int) -> None:
        granularity = self.memory.granularity
        with self.memory.activate():
            for buffer, block_bytes in self.buffers if self.num_blocks else ():
                start = self.num_blocks * block_bytes
                for segment in range(buffer.num_segments):
                    address = buffer.address_of(segment, start)
                    size = min(-address % granularity, buffer.segment_capacity_bytes - start)
                    if size:
                        self.memory.fill(address, size, value)
            self.memory.wait()

    def coalesce(self) -> CoalesceReport:
        """`KVCache.coalesce`."""
        with self.locked():
            self._require_changeable("coalesce")
            jobs = [job for buffer, _ in self.buffers for job in buffer.scattered()]
            extra_bytes = max((job.num_bytes for job in jobs), default=0)
            progress = Progress([buffer for buffer, _ in self.buffers])
            if jobs:
                with self._changing() as transaction:
                    epoch = self.epoch + 1
                    self._announce(MemoryChange("before", self.num_blocks, self.num_blocks, epoch), transaction)
                    self.memory.synchronize()
                    self._set("epoch", epoch, transaction)
                    progress.prepare(jobs, transaction)
                    self._announce(MemoryChange("after", self.num_blocks, self.num_blocks, epoch), transaction)
                self._finish(progress)
                progress.require_all("coalesce")
            return CoalesceReport(len(jobs), extra_bytes, sum(buffer.num_handles for buffer, _ in self.buffers))

    def coalesce_bytes(self) -> int:
        """Memory that `coalesce` would need for a moment."""
        return max((job.num_bytes for buffer, _ in self.buffers for job in buffer.scattered()), default=0)

    def trim(self, limit_bytes: int = 0) -> int:
        """`KVCache.trim`."""
        with self.locked():
            self._require_changeable("trim", awake=())
            if whole_number("limit_bytes", limit_bytes) < 0:
                raise ValueError(f"limit_bytes must not be negative, got {limit_bytes}")
            self._unpin()
            with self.memory.activate():
                return self._drop_staging() + sum(buffer.trim(limit_bytes) for buffer, _ in self.buffers)

    # Sleeping.

    def prepare_sleep(self, num_blocks: int | None = None) -> float:
        """`KVCache.prepare_sleep`."""
        with self.locked():
            self._require_changeable("prepare_sleep")
            if num_blocks is None:
                num_blocks = self.num_blocks
            if not 0 <= whole_number("num_blocks", num_blocks) <= self.capacity:
                raise ValueError(f"num_blocks must lie in 0..{self.capacity} (the capacity), got {num_blocks}")
            if not num_blocks:
                return 0.0
            started = time.perf_counter()
            had_staging = self._staging is not None
            half_bytes = half_bytes_for(self.buffers, num_blocks)
            num_bytes = host_bytes_for(num_blocks, self.block_bytes)
            if self._pinned is not None and self._pinned.num_bytes >= num_bytes and (had_staging or not half_bytes):
                return 0.0
            if half_bytes and can_launch(self.memory, self._gather_launches()):
                self._stage(half_bytes)
            try:
                self._pin_beforehand(num_bytes)
            except BaseException:
                if not had_staging:
                    self._drop_staging()
                raise
            return time.perf_counter() - started

    def _pin_beforehand(self, num_bytes: int) -> None:
        if self._pinned is not None and self._pinned.num_bytes >= num_bytes:
            return
        if self._pinned is not None:
            self._unneeded.append(self._pinned)
            self._pinned = None
        self._unpin()
        self._pinned = PinnedBuffer(self.memory, num_bytes)

    def _stage(self, half_bytes: int) -> Staging | None:
        """Staging memory with halves of so many bytes or more; None where there is none, or none is needed."""
        if not half_bytes:
            return None
        if self._staging is None or self._staging.half_bytes < half_bytes:
            self._drop_staging()
            try:
                self._staging = Staging(self.memory, half_bytes)
            except TritonKVError as error:
                is_short = isinstance(error, (OutOfMemory, AddressSpaceExhausted))
                if not (is_short or (isinstance(error, DriverError) and error.out_of_memory)):
                    raise
                logger.warning(
                    "no %d bytes of device memory to gather blocks in, so kernels copy them over the link by "
                    "themselves: %s",
                    2 * half_bytes,
                    error,
                )
        return self._staging

    def _drop_staging(self) -> int:
        """Give the staging memory back; returns its bytes. What fails is tried again as a dead owner's."""
        staging, self._staging = self._staging, None
        if staging is None:
            return 0
        num_bytes = staging.num_bytes
        try:
            staging.close()
        except BaseException as failure:
            try:
                staging.close()  # tries again what failed
            except DriverError as again:
                warn(self.memory, "staging memory could not be given back yet", [again])
            if not isinstance(failure, DriverError):
                raise
        return num_bytes - staging.num_bytes

    def sleep(
        self,
        *,
        keep: str | None = None,
        live: Iterable[int] | None = None,
        only: Sequence[int] | None = None,
        after: Waitable | None = None,
    ) -> SleepReport:
        """`KVCache.sleep`; `only` are the numbers of the buffers that sleep, all by default."""
        with self.sleeping(keep=keep, live=live, only=only, after=after) as nap:
            pass
        return self.slept(nap)

    def slept(self, nap: Nap) -> SleepReport:
        """What a sleep came to."""
        freed = self.freed(nap.progress)
        if self.elastic:
            freed = Freed(freed + nap.staging_bytes, freed.kept_bytes, freed.reasons)
        return SleepReport(freed, nap.host_bytes, nap.pin_seconds, nap.copy_seconds)

    @contextmanager
    def sleeping(
        self,
        *,
        keep: str | None = None,
        live: Iterable[int] | None = None,
        only: Sequence[int] | None = None,
        after: Waitable | None = None,
    ) -> Iterator[Nap]:
        """`sleep` in two steps: copies and takes memory out, still in reach of an undo; on leaving gives it back."""
        if keep not in (None, "host"):
            raise ValueError(f'keep must be None or "host", got {keep!r}')
        if live is not None and keep is None:
            raise ValueError('live blocks are kept only with keep="host"')
        with self.locked():
            chosen = sorted(set(range(len(self.buffers)) if only is None else only))
            self._require_changeable("sleep", awake=chosen)
            if not chosen and self.buffers:
                yield Nap(Progress([]))
                return
            num_blocks = self._blocks_asleep if self._asleep else self.num_blocks
            blocks = range(num_blocks) if live is None else check_live(live, num_blocks)
            nap = Nap(Progress([self.buffers[index].buffer for index in chosen], pool=False))
            had_staging = self._staging is not None
            self._unpin()
            pinned = self._pin(nap, len(blocks), chosen) if keep else None
            try:
                with self._changing() as transaction:
                    epoch = self.epoch + 1
                    all_asleep = len(self._asleep) + len(chosen) == len(self.buffers)
                    remaining = 0 if all_asleep else self.num_blocks
                    self._announce(MemoryChange("before", self.num_blocks, remaining, epoch), transaction)
                    if all_asleep:
                        self._publish(0, transaction)
                    gone = {*self._asleep, *chosen}
                    awake = [stored for index, stored in enumerate(self.buffers) if index not in gone]
                    self._show_segments(awake, transaction)  # a captured `zero_blocks` may run while some groups sleep
                    self._wait_for(after)
                    copies = self._save(nap, pinned, blocks, chosen)
                    self._set("epoch", epoch, transaction)
                    if all_asleep:  # what wakes is real memory; aliases of groups that are awake go at the next extend
                        self._set("_alias", "no", transaction)
                    for index in chosen:
                        self.buffers[index].buffer.shrink_(0, transaction)
                    self._set("_asleep", {**self._asleep, **copies}, transaction)
                    self._set("_blocks_asleep", num_blocks, transaction)
                    self._announce(MemoryChange("after", num_blocks, remaining, epoch), transaction)
                    yield nap
            except BaseException:
                if not had_staging:
                    self._drop_staging()
                if pinned is not None and pinned is not self._pinned:
                    self._unneeded.append(pinned)
                    self._unpin()
                raise
            self.sleeps += 1
            staging_bytes = self._drop_staging()
            nap.staging_bytes = staging_bytes if had_staging else 0  # else the driver had it before
            self._finish(nap.progress)
            logger.info("asleep: %d blocks, %.2f GiB kept on the host", num_blocks, nap.host_bytes / GIB)

    def _pin(self, nap: Nap, num_blocks: int, chosen: Sequence[int]) -> PinnedBuffer | None:
        """Host memory for the copies: what `prepare_sleep` made if that is enough, else made now."""
        if not num_blocks:
            return None
        block_bytes = sum(self.buffers[index].block_bytes * self.buffers[index].buffer.num_segments for index in chosen)
        num_bytes = host_bytes_for(num_blocks, block_bytes)
        in_use = {id(copy.pinned) for copy in self._asleep.values() if copy is not None}
        if self._pinned is not None and self._pinned.num_bytes >= num_bytes and id(self._pinned) not in in_use:
            return self._pinned
        started = time.perf_counter()
        pinned = PinnedBuffer(self.memory, num_bytes)
        nap.pin_seconds = time.perf_counter() - started
        return pinned

    def _save(
        self, nap: Nap, pinned: PinnedBuffer | None, blocks: Sequence[int], chosen: Sequence[int]
    ) -> dict[int, HostCopy | None]:
        copies: dict[int, HostCopy | None] = dict.fromkeys(chosen)
        if pinned is None:
            return copies
        started = time.perf_counter()
        block_list = BlockList(blocks, pinned)
        kept = []
        for index in chosen:
            copy = HostCopy(*self.buffers[index], block_list, nap.host_bytes)
            kept.append(copy)
            copies[index] = copy
            nap.host_bytes += copy.num_bytes
        before, staging_seconds = self._staging, 0.0
        staging_started = time.perf_counter()
        staging = self._stage(max(copy.half_bytes for copy in kept))
        if staging is not before:
            staging_seconds = time.perf_counter() - staging_started
        nap.pin_seconds += staging_seconds
        for copy in kept:
            copy.save(staging)
        self.memory.wait()
        nap.copy_seconds = time.perf_counter() - started - staging_seconds
        return copies

    def wake(self, only: Sequence[int] | None = None) -> WakeReport:
        """`KVCache.wake`; `only` are the numbers of the buffers that wake, all that sleep by default."""
        with self.waking(only) as report:
            pass
        return report

    @contextmanager
    def waking(
        self, only: Sequence[int] | None = None, *, confirm: Callable[[], None] | None = None
    ) -> Iterator[WakeReport]:
        """`wake` in two steps: maps, zeroes and restores everything, and on leaving publishes the blocks.

        `confirm` is as in `growing`.
        """
        with self.locked():
            self.require_usable()
            self._require_no_change("wake")
            if self.memory.is_capturing():
                raise CaptureError("wake")
            chosen = [index for index in self._asleep if only is None or index in only]
            if not chosen:
                yield WakeReport(self.num_blocks, 0, 0.0, 0.0)
                return
            self._reap()
            target, prepared = self._blocks_asleep, False
            had_staging = self._staging is not None
            copies = [copy for copy in (self._asleep[index] for index in chosen) if copy is not None]
            try:
                with self._changing() as transaction:
                    started = time.perf_counter()
                    for index in chosen:
                        buffer, block_bytes = self.buffers[index]
                        buffer.grow_(target * block_bytes, transaction)
                    self.memory.wait()
                    # Last: it must not take what the blocks need.
                    staging = self._stage(max((copy.half_bytes for copy in copies), default=0))
                    mapped = time.perf_counter()
                    transaction.undo(self.memory.wait)
                    for copy in copies:
                        copy.restore(staging)
                    self.memory.wait()
                    gone = self._asleep.keys() - chosen
                    awake = [stored for index, stored in enumerate(self.buffers) if index not in gone]
                    self._show_segments(awake, transaction)
                    report = WakeReport(
                        target, sum(copy.num_bytes for copy in copies), mapped - started, time.perf_counter() - mapped
                    )
                    self._set("epoch", self.epoch + 1, transaction)
                    self._announce(MemoryChange("after", self.num_blocks, target, self.epoch), transaction)
                    prepared = True
                    yield report
                    left = {index: copy for index, copy in self._asleep.items() if index not in chosen}
                    self._set("_asleep", left, transaction)
                    self._publish(target, transaction)
                    if confirm is not None:
                        confirm()
            except BaseException as error:
                if not had_staging:
                    self._drop_staging()
                if prepared or not isinstance(error, DriverError) or not error.out_of_memory:
                    raise
                raise self._out_of_memory(target, "wake()", error, chosen) from error
            if self._pinned is None:  # else the next sleep will want it, too
                self._drop_staging()
            for index in chosen:
                warn(self.memory, "a handle could not be released yet", self.buffers[index].buffer.settle_())
            self._unpin(*copies)
            logger.info("awake: %d blocks, %.2f GiB restored from the host", target, report.host_bytes / GIB)

    def _unpin(self, *copies: HostCopy) -> None:
        """Free host memory that no copy needs any more; what fails is noted, and tried again by the next change."""
        self._unneeded += [copy.pinned for copy in copies if copy.pinned not in self._unneeded]
        in_use = [copy.pinned for copy in self._asleep.values() if copy is not None]
        for pinned in [each for each in self._unneeded if each is not self._pinned and each not in in_use]:
            try:
                pinned.free()
            except Exception as failure:
                warn(self.memory, "pinned host memory could not be given back yet", [failure])
            else:
                self._unneeded.remove(pinned)

    # Contents.

    def copy_blocks(self, pairs: torch.Tensor | Sequence[tuple[int, int]]) -> None:
        """`KVCache.copy_blocks`."""
        self.require_committed()
        if isinstance(pairs, torch.Tensor):
            self._copy(pairs)
            return
        if self.memory.is_capturing():
            raise CaptureError("copy_blocks with pairs on the host (pass a tensor on the device instead)")
        order = order_copies(
            [(whole_number("a block id", source), whole_number("a block id", target)) for source, target in pairs]
        )
        highest = max((max(pair) for copies in order for pair in copies), default=-1)
        if highest >= self.num_blocks:
            raise ValueError(f"block {highest} is not one of the {self.num_blocks} committed blocks")
        device = self.memory.device
        if order.staged:
            spans, count = self._spans(), len(order.staged)
            staging = BlockSpans(
                tuple(
                    torch.empty(segments * count * size, dtype=torch.uint8, device=device)
                    for segments, size in zip(spans.num_segments, spans.block_bytes)
                ),
                spans.num_segments,
                tuple(count * size for size in spans.block_bytes),
                spans.block_bytes,
            )
            into = torch.tensor([(a, i) for i, (a, _) in enumerate(order.staged)], dtype=torch.int32, device=device)
            back = torch.tensor([(i, b) for i, (_, b) in enumerate(order.staged)], dtype=torch.int32, device=device)
            self._copy(into, target=staging)
        if order.direct:
            self._copy(torch.tensor(order.direct, dtype=torch.int32, device=device))
        if order.staged:
            self._copy(back, source=staging)

    def _copy(self, pairs: torch.Tensor, *, source: BlockSpans | None = None, target: BlockSpans | None = None) -> None:
        spans = self._spans()
        within = source is None and target is None
        table = self._copy_table(spans) if within else copy_table(source or spans, target or spans)
        copy_block_pairs(
            source or spans,
            target or spans,
            pairs,
            table,
            control=self.control,
            source_bounded=source is None,
            target_bounded=target is None,
        )

    def copy_launches(self) -> list[Launch]:
        """`KVCache.copy_launches`."""
        spans = self._spans()
        table = self._copy_table(spans)
        meta = {dtype: torch.empty(1, 2, dtype=dtype, device="meta") for dtype in (torch.int32, torch.int64)}
        launch = partial(copy_launch, table.addresses, alignment=table.alignment)
        largest = max(spans.block_bytes)
        control = self.control
        launches = [launch(pairs, control, largest_block_bytes=largest) for pairs in meta.values()]
        for bounded in ({"source_bounded": False}, {"target_bounded": False}):  # by way of a staging buffer
            launches.append(launch(meta[torch.int32], control, largest_block_bytes=largest, **bounded))
        return launches + self._gather_launches()

    def _gather_launches(self) -> list[Launch]:
        """What a sleep and a wake launch where blocks are scattered."""
        return [launch for buffer, block_bytes in self.buffers for launch in gather_launches(buffer, block_bytes)]

    def _spans(self) -> BlockSpans:
        """The buffers as a copy of blocks sees them; made anew when buffers were added."""
        if self._block_spans is None or len(self._block_spans.buffers) != len(self.buffers):
            self._table = None
            self._block_spans = BlockSpans(
                tuple(buffer.full_view() for buffer, _ in self.buffers),
                tuple(buffer.num_segments for buffer, _ in self.buffers),
                tuple(buffer.segment_stride_bytes for buffer, _ in self.buffers),
                tuple(block_bytes for _, block_bytes in self.buffers),
            )
        return self._block_spans

    def _copy_table(self, spans: BlockSpans) -> CopyTable:
        """Addresses never move, so the table is made once; a capture needs it made before."""
        if self._table is None:
            if self.memory.is_capturing():
                raise CaptureError("the first copy_blocks, which makes its table (call it or compile_kernels before)")
            self._table = copy_table(spans, spans)
        return self._table

    def compaction_plan(self, live: Iterable[int]) -> CompactionPlan:
        """`KVCache.compaction_plan`."""
        self.require_committed()
        blocks = check_live(live, self.num_blocks)
        moves, new = compact(blocks, self.num_blocks)
        device = self.memory.device
        return CompactionPlan(
            num_blocks=len(blocks),
            moves=torch.tensor(moves, dtype=torch.int32).reshape(-1, 2).to(device),
            remapping=torch.tensor(new, dtype=torch.int32).to(device),
            freed_bytes=self.mapped_bytes - self.mapped_bytes_at(len(blocks)) if self.elastic else 0,
        )

    # Steps of every change.

    def _show_segments(self, buffers: Sequence[StoredBuffer], transaction: Transaction) -> None:
        """Which segments `zero_blocks` covers from now on, in graphs captured before as well."""
        transaction.undo(self.zeroing.table.set, self.zeroing.table.segments)
        self.zeroing.table.set(_segments(buffers))

    def _share_pools(self, buffers: Sequence[StoredBuffer]) -> None:
        """When memory runs out for one of these buffers, the spare handles of all go, and staging memory."""
        # Weak: buffers that held each other would die late.
        relieve = partial(_relieve, weakref.ref(self))
        for buffer, _ in buffers:
            buffer.when_out_of_memory(relieve)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """The lock of all changes. A forked child is refused first: it may have inherited the lock held."""
        if os.getpid() != self._pid:
            raise Forked("this KVCache")
        with self._lock:
            yield

    @contextmanager
    def _changing(self) -> Iterator[Transaction]:
        """One transaction over all buffers, with the device current; the store is broken if its undo fails."""
        transaction = Transaction()
        try:
            self._changing_thread = threading.get_ident()
            with self.memory.activate(), transaction:
                yield transaction
        except BaseException:
            self.failures += 1
            raise
        finally:
            self._changing_thread = None
            if transaction.undo_failures or any(buffer.broken for buffer, _ in self.buffers):
                self._state = "broken"

    def _publish(self, num_blocks: int, transaction: Transaction) -> None:
        """The watermark and the host's count, together."""
        transaction.undo(self._set_count, self.num_blocks)
        self._set_count(num_blocks)

    def _set_count(self, num_blocks: int) -> None:
        """Up: the watermark first; down: the count. So the host never believes in more than kernels do."""
        if num_blocks < self.num_blocks:
            self.num_blocks = num_blocks
        self._set_watermark(num_blocks)
        self.num_blocks = num_blocks

    def _set_watermark(self, num_blocks: int) -> None:
        """Writes the bound that kernels read; the host waits, so whoever launches next sees it."""
        stream = self._watermark_stream
        with torch.inference_mode(False), torch.cuda.stream(stream):
            self.control[:1].fill_(num_blocks)
        if stream is not None:
            stream.synchronize()

    def _set(self, name: str, value: object, transaction: Transaction) -> None:
        transaction.undo(setattr, self, name, getattr(self, name))
        setattr(self, name, value)

    def _announce(self, change: MemoryChange, transaction: Transaction) -> None:
        """Tell the watchers; the undo tells them the opposite."""
        opposite = MemoryChange(
            "before" if change.phase == "after" else "after", change.num_blocks, change.old_num_blocks, self.epoch
        )
        for (watcher,) in tuple(self._watchers):  # one may unsubscribe meanwhile
            watcher(change)
            transaction.undo(watcher, opposite)

    def _wait_for(self, after: Waitable | None) -> None:
        if after is None:
            self.memory.synchronize()
        else:
            after.synchronize()

    def _finish(self, progress: Progress) -> None:
        """After a commit: nothing is undone any more, what fails is reported and tried again later."""
        try:
            with self.memory.activate():
                progress.finish()
        finally:
            if any(buffer.broken for buffer in progress.buffers):
                self._state = "broken"
        freed = progress.freed
        if freed.kept_bytes:
            logger.warning(
                "%d bytes stay mapped for now, which a later shrink gives back: %s",
                freed.kept_bytes,
                "; ".join(freed.reasons),
            )

    def freed(self, progress: Progress) -> Freed:
        return progress.freed if self.elastic else Freed(0)

    def _missing_bytes(self, num_blocks: int) -> int:
        """What an extension to so many blocks must allocate."""
        if self._alias == "wanted" and self._fits_one_granule(num_blocks):
            return self.memory.granularity * len(self.buffers) if num_blocks else 0
        if self._alias == "on":  # what is mapped goes, but only once what replaces it is there
            return self.mapped_bytes_at(num_blocks)
        return sum(buffer.missing_bytes_at(num_blocks * block_bytes) for buffer, block_bytes in self.buffers)

    def _out_of_memory(
        self, target: int, operation: str, error: DriverError, only: Sequence[int] | None = None
    ) -> OutOfMemory:
        free_bytes, _ = self.memory.memory_info()
        free_bytes += sum(buffer.pooled_bytes for buffer, _ in self.buffers)
        free_bytes += self._staging.num_bytes if self._staging is not None else 0
        would_fit = None
        if only is None:
            asked_bytes = self._missing_bytes(target)
            most = max(largest_fit(self._missing_bytes, free_bytes, self.capacity), self.num_blocks)
            would_fit = most if most < target else None  # the driver refused what the numbers allow
        else:  # all or none of it
            chosen = [self.buffers[index] for index in only]
            asked_bytes = sum(buffer.missing_bytes_at(target * size) for buffer, size in chosen)
        described = OutOfMemory(
            asked_bytes,
            free_bytes,
            would_fit=would_fit,
            unit="blocks",
            detail=f"{operation} from {self.num_blocks} blocks ({error.call}: {error.code})",
        )
        attach_failures(described, list(error.undo_failures))
        return described

    # The end.

    def close(self, drop_views: Callable[[], None]) -> None:
        """`KVCache.close`. `drop_views` is called once nothing refuses any more: addresses go with the last view."""
        if os.getpid() != self._pid:
            raise Forked("this KVCache")
        with self._lock:
            if self._state == "closed":
                self._free()  # does nothing unless an earlier try failed
                return
            self._require_no_change("close")
            if self.memory.is_capturing():
                raise CaptureError("close")
            self._state = "closed"
            self.num_blocks = 0
            drop_views()
            self._block_spans = self._table = None
            with self.memory.activate():
                try:
                    self._set_watermark(0)
                finally:
                    self._free()

    def _free(self) -> None:
        failures: list[BaseException] = []
        self._drop_staging()
        kept = [copy.pinned for copy in self._asleep.values() if copy is not None]
        owned: list[ExtensibleTensor | PinnedBuffer] = [buffer for buffer, _ in self.buffers]
        for each in (*owned, *kept, *self._unneeded, *([self._pinned] if self._pinned else ())):
            try:
                each.free()
            except Exception as failure:
                failures.append(failure)
        if not failures:
            self._asleep = {}
            self._pinned = None
            self._unneeded = []
        raise_together(failures)

    # Watching.

    def check(self, *, reset: bool = False) -> CheckReport:
        """`KVCache.check`."""
        self.require_usable()
        if self.memory.is_capturing():
            raise CaptureError("check")
        report = CheckReport.of(self.control.tolist())
        if reset:
            self.control[1:5].zero_()
            self._errors.clear()
        return report

    def poll_errors(self) -> CheckReport:
        """`KVCache.poll_errors`."""
        self.require_usable()
        with self.memory.activate():
            return self._errors.poll()

    def require_open(self) -> None:
        if self._state == "closed":
            raise Closed("the cache is closed; reserve a new one")
        if os.getpid() != self._pid:
            raise Forked("this KVCache")

    def require_usable(self) -> None:
        self.require_open()
        if self._state == "broken":
            raise Broken(
                "an earlier change failed and could not be undone; close() frees what it can, then reserve anew"
            )

    def require_committed(self, buffer: int | None = None) -> None:
        """Whether ops may use the blocks: of one of the buffers, or of all of them."""
        if self._state != "open" or os.getpid() != self._pid:
            self.require_usable()
        if self._asleep and (buffer is None or buffer in self._asleep):
            raise Asleep("use of the cache")
        if self.num_blocks == 0:
            raise NothingCommitted("no block is committed yet: call extend(1) or more before using the cache")
        if self.checked and not self.memory.is_capturing():
            report = self.poll_errors()
            if not report.ok:
                raise BadAccess(
                    f"{report.num_errors} accesses outside the {self.num_blocks} committed blocks were masked or "
                    f"dropped, the first a {report.kind} at row {report.row}: {report.value}; "
                    "check(reset=True) clears the count"
                )

    def _require_changeable(self, operation: str, awake: Sequence[int] | None = None) -> None:
        """Refuse what may not be changed now. `awake`: the buffers that it is about; None is all of them."""
        self.require_usable()
        self._require_no_change(operation)
        if any(awake is None or index in awake for index in self._asleep):
            raise Asleep(operation)
        if self.memory.is_capturing():
            raise CaptureError(operation)

    def _reap(self) -> None:
        """Memory of caches and buffers that died without being closed is free memory."""
        warn(self.memory, "what a dead owner left could not be given back yet", reap(self.memory))

    def _require_no_change(self, operation: str) -> None:
        """The lock lets its own thread in again: from a watcher, or a signal handler."""
        if self._changing_thread == threading.get_ident():
            raise TritonKVError(
                f"{operation} inside another change of this cache, from a watcher or a signal handler: nothing was "
                "done, call it when that change has ended"
            )


class Nap:
    """What a sleep did so far."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.host_bytes = 0
        self.staging_bytes = 0  # given back beside what the blocks took
        self.pin_seconds = 0.0
        self.copy_seconds = 0.0


class ErrorPoll:
    """Reads the control block's error words without waiting for anything that runs.

    On a GPU it looks at a copy that an earlier poll queued, on a stream that no other is ordered with, so what kernels
    report shows one poll late.
    """

    def __init__(self, control: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
        self._control = control
        self._stream = stream
        self._seen = CheckReport.of([0] * CONTROL_WORDS)
        self._words: torch.Tensor | None = None  # pinned
        self._copied: torch.cuda.Event | None = None

    def poll(self) -> CheckReport:
        if self._stream is None:
            self._seen = CheckReport.of(self._control.tolist())
            return self._seen
        if self._words is None or self._copied is None:
            self._words = torch.zeros(CONTROL_WORDS, dtype=torch.int32, device="cpu", pin_memory=True)
            self._copied = torch.cuda.Event()
        elif not self._copied.query():
            return self._seen
        self._seen = CheckReport.of(self._words.tolist())
        with torch.cuda.stream(self._stream):
            self._words.copy_(self._control, non_blocking=True)
            self._copied.record()
        return self._seen

    def clear(self) -> None:
        """Forget what was seen, also in a copy that is under way."""
        if self._copied is not None:
            self._copied.synchronize()
        self._words = None
        self._seen = CheckReport.of([0] * CONTROL_WORDS)


def _relieve(reference: weakref.ref[BlockStore]) -> bool:
    """Give back what is only kept to be faster later; returns whether there was any."""
    store = reference()
    if store is None:
        return False
    drained = [buffer.drain_pool() for buffer, _ in store.buffers]
    return store._drop_staging() > 0 or any(drained)


def check_live(live: Iterable[int], num_blocks: int) -> list[int]:
    """Block ids, ascending and each once. Raises `ValueError` for one that is not committed."""
    blocks = sorted({whole_number("a live block", block) for block in live})
    if blocks and not (blocks[0] >= 0 and blocks[-1] < num_blocks):
        bad = blocks[0] if blocks[0] < 0 else blocks[-1]
        raise ValueError(f"live block {bad} is not one of the {num_blocks} committed blocks")
    return blocks

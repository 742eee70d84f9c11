"""A buffer of bytes that grows without moving: equal segments in one reservation, all grown in lockstep."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from triton_kv.errors import CaptureError, Closed, DriverError, Forked, OutOfMemory, attach_failures
from triton_kv.memory import HandlePolicy, VirtualMemory, names_device, open_memory
from triton_kv.memory.estate import Run, warn
from triton_kv.memory.reservation import ByteRange, Reservation, Span, granule_bytes, round_up
from triton_kv.memory.transaction import Transaction

# Zeroing is queued for this many new bytes at a time: enough that the host's time for a launch stays behind the zeroing
# itself, and few enough that the device starts early (`python -m bench run vmm`).
FILL_BYTES = 512 << 20

# Zeroing in the background: so many bytes, then a pause of so many times what they took, so that the kernels of a
# serving step keep most of the bandwidth.
PACED_BYTES = 64 << 20
_PAUSE_RATIO = 8.0
_LONGEST_PAUSE_SECONDS = 4e-3


class Replacement(NamedTuple):
    """Handles of one buffer that are to give way to others which back less, or more in one."""

    reservation: Reservation
    old: Sequence[Run]
    spans: Sequence[Span]

    @property
    def num_bytes(self) -> int:
        """What it takes for a moment: the new handles live beside the old ones."""
        return sum(end - start for start, end in self.spans)

    @property
    def num_excess_bytes(self) -> int:
        """What the old handles hold and the new ones will not."""
        return sum(run.num_bytes for run in self.old) - self.num_bytes


class Freed(int):
    """Bytes of memory given back: what the driver's free memory gained. An int that also says what stayed, and why.

    `kept_bytes` are mapped beyond the committed prefix because a handle that is needed in part could not be replaced,
    or wait in `stray` for a driver that refused to release them; the next shrink tries again.
    """

    kept_bytes: int
    reasons: tuple[str, ...]

    def __new__(cls, num_bytes: int, kept_bytes: int = 0, reasons: Sequence[str] = ()) -> Freed:
        freed = super().__new__(cls, num_bytes)
        freed.kept_bytes = kept_bytes
        freed.reasons = tuple(reasons)
        return freed


class ExtensibleTensor:
    """Address space for `num_segments` equal segments, of which each has a committed prefix, all of one length.

    Committed bytes are readable and writable at addresses that never change; touching others is an error, and faults
    behind the granule in which the prefix ends. Fresh bytes hold anything unless zeroing is asked for. Methods ending
    in `_` change the committed size, from any thread; they raise `CaptureError` while the current stream captures,
    `Closed` after `free`, `Broken` after a change whose undo failed, and `Forked` in a forked child. After any other
    error the buffer is as it was.

    Args:
        max_num_bytes: capacity of all segments together, a multiple of `num_segments`.
        device: None is the memory's device, or the current CUDA device where usable, else the CPU.
        num_segments: segments, at least 1.
        segment_stride_bytes: distance between the starts of two segments; None packs them, so that a granule may
            straddle two of them (it is mapped once and stays while either needs it).
        memory: a driver; None is `open_memory(device)`.
        handles: how memory is cut into handles, and how many unused ones are kept.

    Raises:
        ValueError, TypeError: impossible sizes.
        Unavailable: the device cannot back reservations.
        AddressSpaceExhausted: too little address space is left.
    """

    def __init__(
        self,
        max_num_bytes: int,
        device: torch.device | str | None = None,
        num_segments: int = 1,
        *,
        segment_stride_bytes: int | None = None,
        memory: VirtualMemory | None = None,
        handles: HandlePolicy | None = None,
    ) -> None:
        _check_int("num_segments", num_segments)
        if num_segments < 1:
            raise ValueError(f"num_segments must be at least 1, got {num_segments}")
        _check_int("max_num_bytes", max_num_bytes)
        if max_num_bytes <= 0:
            raise ValueError(f"max_num_bytes must be positive, got {max_num_bytes}")
        if max_num_bytes % num_segments:
            raise ValueError(f"max_num_bytes {max_num_bytes} is not divisible by {num_segments} segments")
        self._segment_capacity_bytes = max_num_bytes // num_segments
        if segment_stride_bytes is None:
            segment_stride_bytes = self._segment_capacity_bytes
        _check_int("segment_stride_bytes", segment_stride_bytes)
        if segment_stride_bytes < self._segment_capacity_bytes:
            raise ValueError(
                f"segment_stride_bytes {segment_stride_bytes} is less than the {self._segment_capacity_bytes} bytes "
                "of a segment: segments would overlap"
            )
        self._num_segments = num_segments
        self._segment_stride_bytes = segment_stride_bytes
        if memory is None:
            memory = open_memory(device)
        elif not names_device(device, memory.device):
            raise ValueError(f"device {str(device)!r} is not the memory's device {str(memory.device)!r}")
        self._memory = memory
        self._span_bytes = segment_stride_bytes * (num_segments - 1) + self._segment_capacity_bytes
        self._bytes_per_segment = 0
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._reservation = Reservation(memory, self._span_bytes, handles)

    @property
    def memory(self) -> VirtualMemory:
        return self._memory

    @property
    def device(self) -> torch.device:
        return self._memory.device

    @property
    def base_ptr(self) -> int:
        """Address of the first byte."""
        return self._reservation.address

    @property
    def num_segments(self) -> int:
        return self._num_segments

    @property
    def segment_capacity_bytes(self) -> int:
        """Bytes that a segment can grow to, exactly as asked for."""
        return self._segment_capacity_bytes

    @property
    def segment_stride_bytes(self) -> int:
        """Bytes from the start of a segment to the start of the next."""
        return self._segment_stride_bytes

    @property
    def bytes_per_segment(self) -> int:
        """Committed bytes of each segment."""
        return self._bytes_per_segment

    @property
    def num_bytes(self) -> int:
        """Committed bytes of all segments."""
        return self._bytes_per_segment * self._num_segments

    @property
    def mapped_bytes(self) -> int:
        """Physical bytes behind the buffer, in whole granules."""
        return self._reservation.mapped_bytes

    @property
    def pooled_bytes(self) -> int:
        """Physical bytes of unused handles that are kept for the next growth."""
        return self._reservation.pooled_bytes

    @property
    def stray_bytes(self) -> int:
        """Physical bytes that the driver refused to take back so far."""
        return self._reservation.stray_bytes

    @property
    def held_bytes(self) -> int:
        """Physical bytes that the driver counts as taken by this buffer: mapped, pooled and stray."""
        return self._reservation.held_bytes

    @property
    def num_handles(self) -> int:
        """Handles held, mapped or not."""
        return self._reservation.num_handles

    @property
    def capacity_bytes(self) -> int:
        """Reserved bytes of address space, in whole granules."""
        return self._reservation.num_bytes

    @property
    def closed(self) -> bool:
        """Whether `free` was called."""
        return self._reservation.closed

    @property
    def broken(self) -> bool:
        """Whether a change failed and its undo too: only `free` is left."""
        return self._reservation.broken

    @property
    def tensor(self) -> torch.Tensor:
        """The committed prefix, uint8 `[num_bytes]`; its storage ends with it. For one segment only."""
        self._check_one_segment("tensor")
        return self.view(0, self._bytes_per_segment)

    def full_view(self) -> torch.Tensor:
        """uint8 over all segments, committed or not, `[segment_stride_bytes * (num_segments - 1) + capacity]`.

        It stays valid through every resize. Touching uncommitted bytes faults, so do not print or copy the whole of it.
        """
        return self.view(0, self._span_bytes)

    def view(self, offset_bytes: int, num_bytes: int) -> torch.Tensor:
        """uint8 `[num_bytes]` from `offset_bytes` on, with a storage of its own that keeps the addresses reserved."""
        self._check_usable()
        return self._reservation.view(offset_bytes, num_bytes)

    def address_of(self, segment: int, offset: int = 0) -> int:
        """Address of a byte of a segment, committed or not."""
        if not 0 <= segment < self._num_segments:
            raise ValueError(f"segment {segment} of a buffer with {self._num_segments} segments")
        if not 0 <= offset <= self._segment_capacity_bytes:
            raise ValueError(f"offset {offset} in a segment of {self._segment_capacity_bytes} bytes")
        return self.base_ptr + segment * self._segment_stride_bytes + offset

    def mapped_bytes_at(self, bytes_per_segment: int) -> int:
        """Physical bytes that a buffer grown to `bytes_per_segment` takes, in whole granules. Exact; maps nothing."""
        _check_int("bytes_per_segment", bytes_per_segment)
        if not 0 <= bytes_per_segment <= self._segment_capacity_bytes:
            raise ValueError(
                f"{bytes_per_segment} bytes per segment, of a capacity of {self._segment_capacity_bytes} bytes"
            )
        granularity = self._memory.granularity
        if self._segment_stride_bytes % granularity == 0:
            return self._num_segments * round_up(bytes_per_segment, granularity)
        return granule_bytes(self._ranges(0, bytes_per_segment), granularity)

    def missing_bytes_at(self, bytes_per_segment: int) -> int:
        """Physical bytes that growing to `bytes_per_segment` would take beside what is mapped, in whole granules."""
        return self._reservation.missing_bytes(self._ranges(0, bytes_per_segment))

    def resize_per_segment_(self, bytes_per_segment: int, zero_new: bool = False) -> ExtensibleTensor:
        """Grow every segment to `bytes_per_segment` committed bytes; the bytes before keep their contents.

        Args:
            bytes_per_segment: at least what is committed, at most the segment's capacity.
            zero_new: have exactly the new bytes of each segment zeroed; the host then waits for the zeroing, so work
                launched afterwards on any stream sees zeros. Without it nothing is waited for.

        Raises:
            ValueError: smaller than now (grow-only), or beyond the capacity.
            OutOfMemory: with what was asked, what is free and what would fit.
        """
        self._check_usable()
        with self._lock:
            self._check_growth(bytes_per_segment)
            try:
                with Transaction() as transaction:
                    self.grow_(bytes_per_segment, transaction, zero_new)
                    if zero_new:
                        self._memory.wait()
            except DriverError as error:
                if not error.out_of_memory:
                    raise
                raise self._out_of_memory(bytes_per_segment, error) from error
        return self

    def grow_(
        self, bytes_per_segment: int, transaction: Transaction, zero_new: bool = True, *, paced: bool = False
    ) -> None:
        """The steps of a growth, with their undos in `transaction`, for owners of several buffers.

        Zeroing is queued while mapping goes on; the caller calls `memory.wait()` before it commits. Out of memory is
        the driver's error here: the owner knows what would fit. `paced` zeroes slowly, for a device that serves.
        """
        self._check_usable()
        self._check_growth(bytes_per_segment)
        if self._memory.is_capturing():
            raise CaptureError("growing a buffer")
        old = self._bytes_per_segment
        new = bytes_per_segment - old
        if new == 0:
            return
        stride, base, last = self._segment_stride_bytes, self.base_ptr, self._num_segments - 1
        first = 0  # the segments before it are zeroed or queued

        def zero_up_to(segment: int) -> None:
            nonlocal first
            count = segment + 1 - first
            if count * new < FILL_BYTES and segment < last:
                return
            # Before the launch: a failure must not unmap what a kernel that did start is still writing.
            transaction.undo(self._memory.wait)
            self._memory.fill(base + first * stride + old, new, stride=stride, count=count)
            first = segment + 1

        with self._memory.activate():
            on_mapped = zero_up_to if zero_new and not paced else None
            self._reservation.ensure(self._ranges(old, new), transaction, on_mapped)
            if zero_new and paced:
                transaction.undo(self._memory.wait)
                for segment in range(self._num_segments):
                    self._zero_slowly(self.address_of(segment, old), new)
        transaction.undo(self._set_size, old)
        self._set_size(bytes_per_segment)

    def _zero_slowly(self, address: int, num_bytes: int) -> None:
        for offset in range(0, num_bytes, PACED_BYTES):
            started = time.perf_counter()
            self._memory.fill(address + offset, min(PACED_BYTES, num_bytes - offset))
            self._memory.wait()
            if self.device.type == "cuda":
                time.sleep(min(_PAUSE_RATIO * (time.perf_counter() - started), _LONGEST_PAUSE_SECONDS))

    def alias_(self, bytes_per_segment: int, transaction: Transaction) -> None:
        """The steps of a growth from nothing whose granules, of all segments, are one and the same granule of memory.

        Every segment shows the same bytes, zeroed here; the caller calls `memory.wait()`. For addresses that must be
        backed but whose contents nobody needs, as while graphs are captured. Shrinking to 0 takes it all out again.
        """
        self._check_usable()
        self._check_growth(bytes_per_segment)
        assert self._bytes_per_segment == 0
        with self._memory.activate():
            self._reservation.alias(self._ranges(0, bytes_per_segment), transaction)
            transaction.undo(self._memory.wait)
            self._memory.fill(
                self.base_ptr, bytes_per_segment, stride=self._segment_stride_bytes, count=self._num_segments
            )
        transaction.undo(self._set_size, 0)
        self._set_size(bytes_per_segment)

    def resize_(self, num_bytes: int, zero_new: bool = False) -> ExtensibleTensor:
        """`resize_per_segment_` of a buffer with one segment."""
        self._check_one_segment("resize_")
        return self.resize_per_segment_(num_bytes, zero_new)

    def append(self, num_bytes: int, zero_new: bool = False) -> ExtensibleTensor:
        """Commit `num_bytes` more. For one segment only."""
        self._check_one_segment("append")
        _check_int("num_bytes", num_bytes)
        if num_bytes < 0:
            raise ValueError(f"append must not be negative, got {num_bytes} bytes")
        self._check_usable()
        with self._lock:
            return self.resize_per_segment_(self._bytes_per_segment + num_bytes, zero_new)

    def shrink_per_segment_(self, bytes_per_segment: int) -> Freed:
        """Keep the first `bytes_per_segment` bytes of each segment; returns the bytes of memory given back.

        Waits for the device. Whole handles that no segment needs go. One that is needed in part gives way to a smaller
        one: the kept part is copied, which takes that much memory for a moment, and nothing may touch it meanwhile.
        Where that memory is missing only whole handles go, and the result says so. After an error all is as it was. A
        handle that the driver refuses to release is kept in the books, and the next change tries it again.
        """
        self._check_usable()
        _check_int("bytes_per_segment", bytes_per_segment)
        with self._lock:
            if not 0 <= bytes_per_segment <= self._bytes_per_segment:
                raise ValueError(
                    f"shrink to {bytes_per_segment} bytes per segment, of {self._bytes_per_segment} committed: "
                    "use resize_per_segment_ to grow"
                )
            if self._memory.is_capturing():
                raise CaptureError("shrinking a buffer")
            progress = Progress([self])
            with self._memory.activate(), Transaction() as transaction:
                if self.changes_at(bytes_per_segment):
                    self._memory.synchronize()
                self.shrink_(bytes_per_segment, transaction)
                progress.prepare(self.cut(), transaction)
            progress.finish()
            return progress.freed

    @property
    def elastic(self) -> bool:
        """Whether memory comes and goes; false over plain torch memory, where replacing a handle would gain nothing."""
        return getattr(self._memory, "elastic", True)

    def changes_at(self, bytes_per_segment: int) -> bool:
        """Whether shrinking to this size takes memory out, or replaces it."""
        ranges = self._ranges(0, bytes_per_segment)
        return bool(self._reservation.unneeded(ranges) or (self.elastic and self._reservation.cut(ranges)))

    def shrink_(self, bytes_per_segment: int, transaction: Transaction) -> None:
        """Take out the whole handles beyond a smaller size, for owners of several buffers.

        The caller has waited for the device, and calls `settle_` once the transaction is committed.
        """
        self._check_usable()
        transaction.undo(self._set_size, self._bytes_per_segment)
        self._set_size(bytes_per_segment)
        self._reservation.take_out(self._reservation.unneeded(self._ranges(0, bytes_per_segment)), transaction)

    def cut(self) -> list[Replacement]:
        """What is mapped beyond the committed size, because a handle is needed in part."""
        jobs = self._reservation.cut(self._ranges(0, self._bytes_per_segment)) if self.elastic else []
        return [Replacement(self._reservation, *job) for job in jobs]

    def scattered(self) -> list[Replacement]:
        """The segments that several handles back."""
        jobs = self._reservation.scattered(self._ranges(0, self._bytes_per_segment)) if self.elastic else []
        return [Replacement(self._reservation, *job) for job in jobs]

    def settle_(self, *, pool: bool = True) -> list[BaseException]:
        """Give back what a committed change took out, or `pool` it as the policy says; returns what failed."""
        return self._reservation.settle() if pool else self._reservation.trim()

    def when_out_of_memory(self, relieve: Callable[[], bool]) -> None:
        """Have `relieve` called instead of `drain_pool` when memory runs out, by an owner of several buffers."""
        self._reservation.relieve = relieve

    def drain_pool(self) -> bool:
        """Release the spare handles, also in the middle of a change; returns whether there were any."""
        return self._reservation.drain_pool()

    def trim(self, limit_bytes: int = 0) -> int:
        """Release pooled handles until at most `limit_bytes` are kept; returns the bytes given back."""
        self._check_usable()
        with self._lock:
            before = self.held_bytes
            warn(self._memory, "a handle could not be released yet", self._reservation.trim(limit_bytes))
            return before - self.held_bytes

    def coalesce_(self) -> Freed:
        """Make each segment one handle, contents kept; returns as `shrink_per_segment_` does (0 bytes).

        Waits for the device; nothing may touch the buffer meanwhile. It takes the memory of the largest such segment
        for a moment; where that is missing, `OutOfMemory` is raised.
        """
        self._check_usable()
        with self._lock:
            if self._memory.is_capturing():
                raise CaptureError("coalescing a buffer")
            progress = Progress([self])
            with self._memory.activate(), Transaction() as transaction:
                jobs = self.scattered()
                if jobs:
                    self._memory.synchronize()
                progress.prepare(jobs, transaction)
            progress.finish()
            progress.require_all("coalesce_")
            return progress.freed

    def release_points(self) -> list[int]:
        """For each handle the size, in bytes per segment, at and below which no segment needs it."""
        stride = self._segment_stride_bytes
        points = []
        for run in self._reservation.runs:
            segment = min(run.start // stride, self._num_segments - 1)
            begins_inside = segment + 1 < self._num_segments and (segment + 1) * stride < run.end
            points.append(0 if begins_inside else run.start - segment * stride)
        return points

    def free(self) -> None:
        """Wait for the device and give all memory back; sizes become 0. Idempotent.

        The addresses stay reserved while a view lives, so that a stale view faults instead of reading other memory.
        What fails is raised after all else was given back; the next call tries it again.
        """
        if os.getpid() != self._pid:
            raise Forked("this buffer")
        with self._lock:
            if not self._reservation.closed and self._memory.is_capturing():
                raise CaptureError("freeing a buffer")
            self._bytes_per_segment = 0
            self._reservation.close()

    def _ranges(self, offset: int, num_bytes: int) -> list[ByteRange]:
        """The same bytes of every segment, as ranges of the reservation."""
        if num_bytes == 0:
            return []
        stride = self._segment_stride_bytes
        return [(segment * stride + offset, num_bytes) for segment in range(self._num_segments)]

    def _set_size(self, bytes_per_segment: int) -> None:
        self._bytes_per_segment = bytes_per_segment

    def _out_of_memory(self, bytes_per_segment: int, cause: DriverError) -> OutOfMemory:
        free_bytes = self._memory.memory_info()[0] + self.pooled_bytes
        low, high = self._bytes_per_segment, self._segment_capacity_bytes
        while low < high:
            middle = (low + high + 1) // 2
            if self.missing_bytes_at(middle) <= free_bytes:
                low = middle
            else:
                high = middle - 1
        error = OutOfMemory(
            self.missing_bytes_at(bytes_per_segment),
            free_bytes,
            low if low < bytes_per_segment else None,  # the driver refused what the numbers allow
            "bytes per segment",
            f"growing {self._num_segments} segments from {self._bytes_per_segment} to {bytes_per_segment} bytes",
        )
        attach_failures(error, list(cause.undo_failures))
        return error

    def _check_growth(self, bytes_per_segment: int) -> None:
        _check_int("bytes_per_segment", bytes_per_segment)
        if bytes_per_segment < 0:
            raise ValueError(f"bytes_per_segment must not be negative, got {bytes_per_segment}")
        if bytes_per_segment < self._bytes_per_segment:
            raise ValueError(
                f"resize is grow-only: asked for {bytes_per_segment} bytes per segment, {self._bytes_per_segment} are "
                "committed; use shrink_per_segment_"
            )
        if bytes_per_segment > self._segment_capacity_bytes:
            raise ValueError(
                f"asked for {bytes_per_segment} bytes per segment, beyond the capacity of "
                f"{self._segment_capacity_bytes} bytes that was reserved for each"
            )

    def _check_one_segment(self, what: str) -> None:
        if self._num_segments != 1:
            raise ValueError(
                f"{what} needs a buffer of one segment, this one has {self._num_segments}: its committed bytes are no "
                "single prefix; use resize_per_segment_ and full_view"
            )

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise Forked("this buffer")
        if self._reservation.closed:
            raise Closed("this buffer was freed: make a new one")

    def __repr__(self) -> str:
        state = "freed" if self._reservation.closed else f"{self._bytes_per_segment} bytes each committed"
        return (
            f"ExtensibleTensor({self._num_segments} segments of {self._segment_capacity_bytes} bytes, {state}, "
            f"device={str(self.device)!r})"
        )


class Progress:
    """The replacements of a change of several buffers, and the memory that the change gave back.

    `prepare` belongs to the owner's transaction: old handles are held until it commits, so that any failure is undone.
    What memory was missing for waits for `finish`, which first gives back what was taken out and then goes handle by
    handle, so that one handle's memory is enough; nothing is undone any more then, and what fails is reported.
    """

    def __init__(self, buffers: Sequence[ExtensibleTensor], *, pool: bool = True) -> None:
        self.buffers = buffers
        self._pool = pool  # whether unused handles may be kept
        self.refused: list[tuple[Replacement, DriverError]] = []
        self.failures: list[BaseException] = []  # handles that the driver would not release
        self.freed = Freed(0)  # the outcome, once finished
        self._held_before = self._held_bytes()
        self._waiting: list[Replacement] = []

    def prepare(self, jobs: Sequence[Replacement], transaction: Transaction) -> None:
        """Do the replacements that memory allows while all old handles are still held."""
        for job in jobs:
            try:
                self._replace(job, transaction)
            except DriverError as error:
                if error.undo_failures or not error.out_of_memory:
                    raise
                self._waiting.append(job)

    def finish(self) -> None:
        """After the commit: give back what was taken out, and do the replacements that waited for it."""
        self._settle()
        for job in self._waiting:
            try:
                self._replace(job, Transaction())
            except DriverError as error:
                if error.undo_failures:
                    raise
                self.refused.append((job, error))
            self._settle()
        self.freed = self._count_freed()

    def _count_freed(self) -> Freed:
        kept = sum(buffer.stray_bytes + sum(job.num_excess_bytes for job in buffer.cut()) for buffer in self.buffers)
        reasons = [str(error) for _, error in self.refused] + [str(failure) for failure in self.failures]
        return Freed(self._held_before - self._held_bytes(), kept, reasons)

    def require_all(self, operation: str) -> None:
        """Raise `OutOfMemory` if a replacement was refused for lack of memory, else the driver's error."""
        if not self.refused:
            return
        job, error = self.refused[0]
        if not error.out_of_memory:
            raise error
        raise OutOfMemory(
            job.num_bytes,
            self.buffers[0].memory.memory_info()[0],
            detail=f"{operation}, which holds one handle twice for a moment ({len(self.refused)} handles to go)",
        ) from error

    @staticmethod
    def _replace(job: Replacement, transaction: Transaction) -> None:
        step = Transaction()
        with step:
            job.reservation.replace(job.old, job.spans, step)
            transaction.absorb(step)

    def _settle(self) -> None:
        for buffer in self.buffers:
            failures = buffer.settle_(pool=self._pool)
            warn(buffer.memory, "a handle could not be released yet", failures)
            self.failures += failures

    def _held_bytes(self) -> int:
        return sum(buffer.held_bytes for buffer in self.buffers)


def _check_int(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")

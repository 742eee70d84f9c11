"""The ranges and handles of one reservation of addresses, and what happens to them when their owner dies."""

from __future__ import annotations

import logging
import os
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from triton_kv.errors import Broken, Closed, Forked, raise_together
from triton_kv.memory.protocol import VirtualMemory
from triton_kv.memory.transaction import Transaction

logger = logging.getLogger(__name__)

ByteRange = tuple[int, int]  # offset from the reservation's start, number of bytes


class Run:
    """One handle and where it is mapped, in bytes from the reservation's start."""

    __slots__ = ("end", "handle", "mapped", "start")

    def __init__(self, start: int, end: int) -> None:
        self.start = start
        self.end = end
        self.handle: int | None = None
        self.mapped = False


def _start(run: Run) -> int:
    return run.start


class Estate:
    """Everything of a reservation that must be given back one day: addresses, mappings, handles.

    Failures are returned without their tracebacks, whose frames would keep the caller, and with it views, alive.
    """

    __slots__ = ("address", "memory", "num_bytes", "pid", "reported", "runs", "strays")

    def __init__(self, memory: VirtualMemory, address: int, num_bytes: int) -> None:
        self.memory = memory
        self.address = address  # 0 once it is free
        self.num_bytes = num_bytes
        self.runs: list[Run] = []  # mapped, sorted, disjoint
        self.strays: list[Run] = []  # not mapped, but their handle could not be released yet
        self.pid = os.getpid()
        self.reported = False

    def clear(self) -> list[BaseException]:
        """Wait for the device, unmap all, release all. What fails stays in the books and is returned."""
        failures: list[BaseException] = []
        if self.runs:
            try:
                self.memory.synchronize()
            except Exception as failure:  # a context that died cannot be waited for, and nothing runs in it any more
                failures.append(failure.with_traceback(None))
        stuck = []
        try:
            while self.runs:
                run = self.runs[-1]
                try:
                    self.memory.unmap(self.address + run.start, run.end - run.start)
                except Exception as failure:
                    failures.append(failure.with_traceback(None))
                    stuck.append(run)
                else:
                    run.mapped = False
                    self.strays.append(run)
                self.runs.pop()
        finally:
            self.runs.extend(reversed(stuck))
        return failures + self.release_strays()

    def release_strays(self) -> list[BaseException]:
        """Release the handles that are mapped nowhere. What fails stays in the books and is returned."""
        failures: list[BaseException] = []
        stuck = []
        try:
            while self.strays:
                run = self.strays[-1]
                try:
                    if run.handle is not None:
                        self.memory.release(run.handle)
                        run.handle = None
                except Exception as failure:
                    failures.append(failure.with_traceback(None))
                    stuck.append(run)
                self.strays.pop()
        finally:
            self.strays.extend(stuck)
        return failures

    def give_back(self) -> list[BaseException]:
        """Clear, and free the addresses if that went well."""
        try:
            with self.memory.activate():
                failures = self.clear()
                if self.address and not self.runs:
                    self.memory.free(self.address, self.num_bytes)
                    self.address = 0
                return failures
        except Exception as failure:
            return [failure.with_traceback(None)]


# What died without being closed, and closed ranges whose last view died. A finaliser only appends: a garbage collection
# may run anywhere, also inside a capture, where there must be no driver call and no waiting for the device.
_ORPHANS: deque[Estate] = deque()


class Lease:
    """Keeps a range of addresses reserved. The reservation holds it, and every view."""

    __slots__ = ("estate",)

    def __init__(self, estate: Estate) -> None:
        self.estate = estate

    # The default keeps the deque reachable while the interpreter takes modules apart.
    def __del__(self, inherit: Callable[[Estate], None] = _ORPHANS.append) -> None:
        inherit(self.estate)


def reap(memory: VirtualMemory) -> list[BaseException]:
    """Give back what dead owners left, whatever memory it is of; waits for a device that still has mappings among it.

    Returns the failures that concern `memory` (others are logged). What failed is tried again by the next call; what a
    forked child inherited is forgotten without a call; what belongs to a device whose current stream captures waits.
    """
    failures = []
    for _ in range(len(_ORPHANS)):
        try:
            estate = _ORPHANS.popleft()
        except IndexError:  # another thread reaps as well
            break
        if estate.pid != os.getpid():
            continue
        if estate.memory.is_capturing():
            _ORPHANS.append(estate)
            continue
        problems = estate.give_back()
        if estate.address or estate.strays:
            _ORPHANS.append(estate)
        if estate.memory is memory:
            failures += problems
        elif problems and not estate.reported:
            estate.reported = True
            _warn(estate.memory, f"{estate.num_bytes} bytes of a dead owner could not be given back yet", problems)
    return failures


class Reservation:
    """A range of addresses of which parts are backed by memory, in whole granules.

    Each missing run of an `ensure` becomes one handle, cut at the run's end. Ranges are `(offset, num_bytes)` pairs in
    bytes from the start, ascending and disjoint; they need not be whole granules. Not thread-safe: the owner locks.

    Args:
        memory: the driver.
        num_bytes: rounded up to whole granules.

    Raises:
        AddressSpaceExhausted: nothing is reserved then.
    """

    def __init__(self, memory: VirtualMemory, num_bytes: int) -> None:
        _warn(memory, "what a dead owner left could not be given back yet", reap(memory))
        self.memory = memory
        self.num_bytes = round_up(num_bytes, memory.granularity)
        with memory.activate():
            self.address = memory.reserve(self.num_bytes)
        self._estate = Estate(memory, self.address, self.num_bytes)
        self._lease: Lease | None = Lease(self._estate)
        self._closed = False
        self.broken = False  # an undo failed: the books are true, but not what the owner believes

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def mapped_bytes(self) -> int:
        """Physical bytes behind the reservation, in whole granules."""
        return sum(run.end - run.start for run in self._estate.runs)

    @property
    def num_handles(self) -> int:
        """Handles that were not released, mapped or not."""
        return len(self._estate.runs) + len(self._estate.strays)

    def view(self, offset: int, num_bytes: int) -> torch.Tensor:
        """uint8 `[num_bytes]` from `offset` on, with a storage of its own that keeps the addresses reserved."""
        self._check_usable()
        if offset < 0 or num_bytes < 0 or offset + num_bytes > self.num_bytes:
            raise ValueError(
                f"view of bytes [{offset}, {offset + num_bytes}) of a reservation of {self.num_bytes} bytes"
            )
        return self.memory.view(self.address + offset, num_bytes, self._lease)

    def ensure(
        self,
        ranges: Sequence[ByteRange],
        transaction: Transaction,
        on_mapped: Callable[[int], None] | None = None,
    ) -> None:
        """Map what is missing of `ranges`; each step's undo goes to `transaction`. Does not wait for the device.

        `on_mapped(index)` is called as soon as `ranges[index]` is accessible, so that zeroing overlaps the mapping of
        the next range.
        """
        self._check_usable()
        memory, address, runs = self.memory, self.address, self._estate.runs
        with memory.activate():
            _warn(memory, "an old handle could not be released yet", self._estate.release_strays())
            for index, (offset, num_bytes) in enumerate(ranges):
                for start, end in self._missing(offset, num_bytes):
                    run = Run(start, end)
                    transaction.undo(self._drop, run)
                    run.handle = memory.create(end - start)
                    memory.map(address + start, end - start, run.handle)
                    run.mapped = True
                    insort(runs, run, key=_start)
                    memory.set_access(address + start, end - start)
                if on_mapped is not None:
                    on_mapped(index)

    def release_outside(self, ranges: Sequence[ByteRange]) -> int:
        """Unmap and release the whole handles that meet none of `ranges`; returns their bytes.

        Waits for the device before it unmaps anything. A failure to unmap leaves all as it was. Handles that cannot be
        released are kept in the books, the error is raised with the range already unmapped, and the next call of any
        method tries them again.
        """
        self._check_usable()
        starts = [offset for offset, _ in ranges]
        kept = [(offset, num_bytes) for offset, num_bytes in ranges]

        def is_needed(run: Run) -> bool:
            index = bisect_left(starts, run.end) - 1
            return index >= 0 and sum(kept[index]) > run.start

        memory, estate = self.memory, self._estate
        doomed = [run for run in estate.runs if not is_needed(run)]
        with memory.activate():
            if doomed:
                memory.synchronize()
                with Transaction() as transaction:
                    for run in doomed:
                        memory.unmap(self.address + run.start, run.end - run.start)
                        run.mapped = False
                        transaction.undo(self._restore, run)
                estate.runs[:] = [run for run in estate.runs if run.mapped]
                estate.strays += doomed
            failures = estate.release_strays()
        raise_together(failures)
        return sum(run.end - run.start for run in doomed)

    def close(self) -> None:
        """Wait for the device, unmap and release everything; free the addresses once no view lives. Idempotent.

        From here on a touch of the range faults. What fails is raised after everything else was given back, and is
        tried again by the next `close`.
        """
        if os.getpid() != self._estate.pid:
            raise Forked(f"a reservation of {self.num_bytes} bytes")
        self._closed = True
        failures: list[BaseException] = []
        if self._lease is not None:
            with self.memory.activate():
                failures += self._estate.clear()
            if not (self._estate.runs or self._estate.strays):
                self._lease = None
        raise_together(failures + reap(self.memory))

    def _missing(self, offset: int, num_bytes: int) -> Iterator[ByteRange]:
        """The unmapped runs of whole granules in a range of bytes, as (start, end)."""
        assert min(offset, num_bytes) >= 0
        assert offset + num_bytes <= self.num_bytes
        granularity = self.memory.granularity
        position = offset // granularity * granularity
        end = round_up(offset + num_bytes, granularity) if num_bytes else position
        runs = self._estate.runs
        index = bisect_right(runs, position, key=_start)
        if index and runs[index - 1].end > position:
            position = runs[index - 1].end
        gaps = []
        while position < end:
            stop = min(end, runs[index].start) if index < len(runs) else end
            if stop > position:
                gaps.append((position, stop))
            position = runs[index].end if index < len(runs) else end
            index += 1
        return iter(gaps)

    def _drop(self, run: Run) -> None:
        """Undo of a run's growth, as far as it came."""
        estate = self._estate
        try:
            with self.memory.activate():
                if run.mapped:
                    self.memory.unmap(self.address + run.start, run.end - run.start)
                    run.mapped = False
                    estate.runs.remove(run)
                if run.handle is not None:
                    self.memory.release(run.handle)
                    run.handle = None
        except BaseException:
            self.broken = True
            if not run.mapped and run.handle is not None:
                estate.strays.append(run)
            raise

    def _restore(self, run: Run) -> None:
        """Undo of an unmap: the handle still holds its contents."""
        try:
            assert run.handle is not None
            with self.memory.activate():
                self.memory.map(self.address + run.start, run.end - run.start, run.handle)
                run.mapped = True
                self.memory.set_access(self.address + run.start, run.end - run.start)
        except BaseException:
            self.broken = True
            if not run.mapped:
                self._estate.runs.remove(run)
                self._estate.strays.append(run)
            raise

    def _check_usable(self) -> None:
        if os.getpid() != self._estate.pid:
            raise Forked(f"a reservation of {self.num_bytes} bytes")
        if self._closed:
            raise Closed(f"this reservation of {self.num_bytes} bytes was closed: reserve a new one")
        if self.broken:
            raise Broken("an earlier change failed and so did undoing it: only close() is left, it frees what it can")

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self.mapped_bytes} bytes mapped"
        return f"Reservation({self.address:#x}, {self.num_bytes} bytes, {state})"


def _warn(memory: VirtualMemory, text: str, failures: list[BaseException]) -> None:
    # As text: a log record that kept the exception would keep, through its traceback, the frames and thus the views.
    if failures:
        logger.warning("%s: %s: %s", repr(memory), text, "; ".join(str(failure) for failure in failures))


def round_up(num_bytes: int, granularity: int) -> int:
    """`num_bytes` in whole granules, in bytes."""
    return -(-num_bytes // granularity) * granularity


def granule_bytes(ranges: Sequence[ByteRange], granularity: int) -> int:
    """Bytes of the granules that ascending, disjoint ranges meet; a granule that several of them share counts once."""
    total = 0
    position = 0
    for offset, num_bytes in ranges:
        if num_bytes:
            start = max(position, offset // granularity * granularity)
            position = round_up(offset + num_bytes, granularity)
            total += max(0, position - start)
    return total

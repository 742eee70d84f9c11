"""The ranges and handles of one reservation of addresses."""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from triton_kv.errors import Broken, Closed, DriverError, Forked, raise_together
from triton_kv.memory.estate import Estate, Lease, Run, abandon, reap, unmap_run, warn
from triton_kv.memory.policy import HandlePolicy
from triton_kv.memory.protocol import VirtualMemory
from triton_kv.memory.transaction import Transaction

ByteRange = tuple[int, int]  # offset from the reservation's start, number of bytes
Span = tuple[int, int]  # start, end: whole granules


def _start(run: Run) -> int:
    return run.start


class Reservation:
    """A range of addresses of which parts are backed by memory, in whole granules.

    Each missing run of an `ensure` becomes handles as the policy says, cut at the run's end. Ranges are
    `(offset, num_bytes)` pairs in bytes from the start, ascending and disjoint; they need not be whole granules. Steps
    that take a transaction can be undone until it commits; what they take out is only given back by `settle`, which the
    owner calls afterwards. Not thread-safe: the owner locks.

    Args:
        memory: the driver.
        num_bytes: rounded up to whole granules.
        policy: how runs are cut into handles, and how many bytes of unused handles are kept.
        is_private: only the driver's own fills and copies touch it, and there are no views: closing waits for these
            copies alone.

    Raises:
        AddressSpaceExhausted: nothing is reserved then.
    """

    def __init__(
        self, memory: VirtualMemory, num_bytes: int, policy: HandlePolicy | None = None, *, is_private: bool = False
    ) -> None:
        if not is_private:  # reaping may wait for the whole device
            warn(memory, "what a dead owner left could not be given back yet", reap(memory))
        self.memory = memory
        self.num_bytes = round_up(num_bytes, memory.granularity)
        self.policy = policy or HandlePolicy()
        with memory.activate():
            self.address = memory.reserve(self.num_bytes)
        self._estate = Estate(memory, self.address, self.num_bytes, is_private=is_private)
        self._lease: Lease | None = Lease(self._estate)
        self._closed = False
        # Called when memory runs out: gives back spare handles of others too, and says whether there were any.
        self.relieve: Callable[[], bool] | None = None
        self.broken = False  # an undo failed: the books are true, but not what the owner believes

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def mapped_bytes(self) -> int:
        """Physical bytes behind the reservation, in whole granules; memory behind several addresses counts once."""
        return sum(run.num_bytes for run in self._estate.runs if not run.is_alias)

    @property
    def pooled_bytes(self) -> int:
        """Bytes of unused handles that are kept for the next growth."""
        return sum(run.num_bytes for run in self._estate.pool)

    @property
    def stray_bytes(self) -> int:
        """Bytes of handles that the driver refused to release; every change tries them again."""
        return sum(run.num_bytes for run in self._estate.strays if not run.is_alias)

    @property
    def held_bytes(self) -> int:
        """Bytes of all handles that were not released, mapped or not."""
        return sum(run.num_bytes for run in self._handles())

    @property
    def num_handles(self) -> int:
        """Handles that were not released, mapped or not."""
        return len(self._handles())

    def _handles(self) -> list[Run]:
        estate = self._estate
        runs = (*estate.runs, *estate.leaving, *estate.strays, *estate.pool)
        return [run for run in runs if not run.is_alias]

    @property
    def runs(self) -> tuple[Run, ...]:
        """The mapped handles, ascending."""
        return tuple(self._estate.runs)

    def view(self, offset: int, num_bytes: int) -> torch.Tensor:
        """uint8 `[num_bytes]` from `offset` on, with a storage of its own that keeps the addresses reserved."""
        self._check_usable()
        if offset < 0 or num_bytes < 0 or offset + num_bytes > self.num_bytes:
            raise ValueError(
                f"view of bytes [{offset}, {offset + num_bytes}) of a reservation of {self.num_bytes} bytes"
            )
        return self.memory.view(self.address + offset, num_bytes, self._lease)

    # Growing.

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
        with self.memory.activate():
            self._retry_strays()
            for index, (offset, num_bytes) in enumerate(ranges):
                for start, end in self._missing(offset, num_bytes):
                    chunk = self._chunk_bytes() or end - start
                    for chunk_start in range(start, end, chunk):
                        run = Run(chunk_start, min(chunk_start + chunk, end))
                        self._create(run, transaction)
                        self._map(run, transaction)
                if on_mapped is not None:
                    on_mapped(index)

    def missing_bytes(self, ranges: Sequence[ByteRange]) -> int:
        """What an `ensure` of these ranges would map, in whole granules."""
        total = position = 0
        for offset, num_bytes in ranges:
            for start, end in self._missing(offset, num_bytes):
                total += max(end - max(start, position), 0)  # two ranges may share a granule
                position = max(end, position)
        return total

    def alias(self, ranges: Sequence[ByteRange], transaction: Transaction) -> None:
        """Map one granule of memory, the same one, behind every missing granule of `ranges`.

        They all show the same bytes. A handle is mapped whole, so every granule is unmapped on its own later.
        """
        self._check_usable()
        granularity = self.memory.granularity
        with self.memory.activate():
            owner: Run | None = None
            for offset, num_bytes in ranges:
                for start, end in self._missing(offset, num_bytes):
                    for granule in range(start, end, granularity):
                        run = Run(granule, granule + granularity)
                        if owner is None:
                            owner = run
                            self._create(run, transaction)
                        else:
                            run.handle, run.is_alias = owner.handle, True
                        self._map(run, transaction)

    # Giving back.

    def unneeded(self, ranges: Sequence[ByteRange]) -> list[Run]:
        """The handles that meet none of `ranges`."""
        needed = self._meeting(ranges)
        return [run for run in self._estate.runs if run not in needed]

    def cut(self, ranges: Sequence[ByteRange]) -> list[tuple[list[Run], list[Span]]]:
        """The handles of which some granules meet none of `ranges`, each with the spans that are needed."""
        granularity = self.memory.granularity
        jobs = []
        for run, met in self._meeting(ranges).items():
            spans: list[Span] = []
            for offset, num_bytes in met:
                start = max(run.start, offset // granularity * granularity)
                end = min(run.end, round_up(offset + num_bytes, granularity))
                if spans and start <= spans[-1][1]:
                    spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
                else:
                    spans.append((start, end))
            if spans != [(run.start, run.end)]:
                jobs.append(([run], spans))
        return jobs

    def scattered(self, ranges: Sequence[ByteRange]) -> list[tuple[list[Run], list[Span]]]:
        """The ranges that several handles back, with those handles and the one span each should be.

        Spans are whole handles: a granule that two ranges share stays with the neighbour whose handle begins or ends
        there, and what a handle holds beyond its range stays with it.
        """
        granularity = self.memory.granularity
        runs = self._estate.runs
        jobs = []
        position = 0
        for offset, num_bytes in ranges:
            start = max(position, offset // granularity * granularity)
            end = round_up(offset + num_bytes, granularity)
            if not num_bytes or start >= end:
                continue
            first = runs[bisect_right(runs, start, key=_start) - 1]
            start = max(position, first.start)
            last = runs[bisect_right(runs, end - 1, key=_start) - 1]
            if last.end > end:
                begins_in_shared_granule = last.start == end - granularity and last.start > start
                end = last.start if begins_in_shared_granule else last.end
            position = end
            inside = runs[bisect_left(runs, start, key=_start) : bisect_left(runs, end, key=_start)]
            if len(inside) > 1:
                jobs.append((inside, [(start, end)]))
        return jobs

    def take_out(self, runs: Sequence[Run], transaction: Transaction) -> int:
        """Unmap whole handles; returns their bytes. The caller has waited for what may still touch them.

        They keep their contents until `settle`, so that an undo maps them again.
        """
        self._check_usable()
        estate = self._estate
        with self.memory.activate():
            for run in runs:
                transaction.undo(self._restore, run)
                with _unsure(run):
                    self.memory.unmap(self.address + run.start, run.num_bytes)
                    run.mapped = False
            estate.runs[:] = [run for run in estate.runs if run.mapped]
            estate.leaving += runs
        return sum(run.num_bytes for run in runs if not run.is_alias)

    def replace(self, old: Sequence[Run], spans: Sequence[Span], transaction: Transaction) -> None:
        """Back `spans` by one new handle each instead of the `old` handles, with the contents copied.

        The new memory is there before the old one goes, so this takes the spans' bytes for a moment. The caller has
        waited for the device, and nothing may touch the range before it returns.
        """
        self._check_usable()
        new = [Run(*span) for span in spans]
        with self.memory.activate():
            for run in new:
                self._create(run, transaction)
                self._copy_into(run, old, transaction)
            self.take_out(old, transaction)
            for run in new:
                self._map(run, transaction)

    def settle(self) -> list[BaseException]:
        """After a commit: pool or release what was taken out. Returns what failed.

        A handle that cannot be released stays in the books, and every later change tries it again.
        """
        self._sort_leaving()
        return self._release()

    def _sort_leaving(self) -> None:
        estate = self._estate
        room = self.policy.pool_bytes - self.pooled_bytes
        while estate.leaving:
            run = estate.leaving[-1]
            if not run.is_alias and run.num_bytes <= room:
                room -= run.num_bytes
                estate.pool.append(run)
            else:
                estate.strays.append(run)
            estate.leaving.pop()

    def trim(self, limit_bytes: int = 0) -> list[BaseException]:
        """Release unused handles until at most `limit_bytes` of them are kept. Returns what `settle` returns."""
        self._check_usable()
        self._sort_leaving()
        self._drain_pool(limit_bytes)
        return self._release()

    def close(self) -> None:
        """Wait for the device, unmap and release everything; free the addresses once no view lives. Idempotent.

        From here on a touch of the range faults. What fails is raised after everything else was given back, and is
        tried again by the next `close`.
        """
        if os.getpid() != self._estate.pid:
            raise Forked(f"a reservation of {self.num_bytes} bytes")
        self._closed = True
        failures: list[BaseException] = []
        if self._estate.is_private:  # no view keeps its addresses
            raise_together(self._estate.give_back())
            return
        if self._lease is not None:
            with self.memory.activate():
                failures += self._estate.clear()
            if not (self._estate.runs or self._estate.strays):
                self._lease = None
        raise_together(failures + reap(self.memory))

    def drain_pool(self) -> bool:
        """Release the spare handles; returns whether there were any. Leaves alone what a transaction took out."""
        had_some = bool(self._estate.pool)
        self._drain_pool(0)
        self._release()
        return had_some

    # Steps, each with its undo.

    def _create(self, run: Run, transaction: Transaction) -> None:
        transaction.undo(self._give_up, run)
        pool = self._estate.pool
        for index, spare in enumerate(pool):
            if spare.num_bytes == run.num_bytes:
                run.pooled = True
                run.handle = spare.handle
                del pool[index]
                return
        try:
            run.handle = self.memory.create(run.num_bytes)
        except DriverError as error:
            if not (error.out_of_memory and (self.relieve or self.drain_pool)()):
                raise
            run.handle = self.memory.create(run.num_bytes)

    def _map(self, run: Run, transaction: Transaction) -> None:
        assert run.handle is not None
        transaction.undo(self._drop, run)
        with _unsure(run):
            self.memory.map(self.address + run.start, run.num_bytes, run.handle)
            run.mapped = True
        insort(self._estate.runs, run, key=_start)
        self.memory.set_access(self.address + run.start, run.num_bytes)

    def _copy_into(self, new: Run, old: Sequence[Run], transaction: Transaction) -> None:
        """Copy what `old` has of the new handle's range, over addresses that are reserved for the moment."""
        memory = self.memory
        assert new.handle is not None
        scratch = Estate(memory, memory.reserve(new.num_bytes), new.num_bytes)
        transaction.undo(self._drop_scratch, scratch)
        mapping = Run(0, new.num_bytes)
        scratch.runs.append(mapping)
        try:
            with _unsure(mapping):
                memory.map(scratch.address, new.num_bytes, new.handle)
                mapping.mapped = True
        except DriverError:
            scratch.runs.clear()
            raise
        memory.set_access(scratch.address, new.num_bytes)
        for source in old:
            start, end = max(source.start, new.start), min(source.end, new.end)
            if start < end:
                memory.copy(scratch.address + start - new.start, self.address + start, end - start)
        self._clear_scratch(scratch)

    def _drop_scratch(self, scratch: Estate) -> None:
        """Undo of a copy, as far as it came."""
        try:
            self._clear_scratch(scratch)
        except BaseException:
            self.broken = True
            abandon(scratch)
            raise

    def _clear_scratch(self, scratch: Estate) -> None:
        if not scratch.address:
            return
        with self.memory.activate():
            self.memory.wait()
            for mapping in scratch.runs:
                unmap_run(self.memory, scratch.address, mapping)
            scratch.runs.clear()
            self.memory.free(scratch.address, scratch.num_bytes)
            scratch.address = 0

    def _drop(self, run: Run) -> None:
        """Undo of a mapping, as far as it came."""
        try:
            with self.memory.activate():
                unmap_run(self.memory, self.address, run)
                if run in self._estate.runs:
                    self._estate.runs.remove(run)
        except BaseException:
            self.broken = True
            raise

    def _give_up(self, run: Run) -> None:
        """Undo of a creation. A handle that an undo left mapped stays in the books until `close`."""
        if run.handle is None or run.mapped:
            return
        estate = self._estate
        if run.pooled:
            if all(spare.handle != run.handle for spare in estate.pool):
                estate.pool.insert(0, run)
            return
        try:
            with self.memory.activate():
                self.memory.release(run.handle)
                run.handle = None
        except BaseException:
            self.broken = True
            estate.strays.append(run)
            raise

    def _restore(self, run: Run) -> None:
        """Undo of an unmap: the handle still holds its contents."""
        if run.mapped and not run.unsure:
            return
        estate = self._estate
        if run in estate.leaving:
            estate.leaving.remove(run)
        index = bisect_left(estate.runs, run.start, key=_start)
        is_listed = index < len(estate.runs) and estate.runs[index] is run
        try:
            assert run.handle is not None
            with self.memory.activate():
                try:
                    self.memory.map(self.address + run.start, run.num_bytes, run.handle)
                except DriverError:
                    if not run.unsure:  # else the unmap was interrupted before it was done
                        raise
                run.mapped, run.unsure = True, False
                if not is_listed:
                    estate.runs.insert(index, run)
                self.memory.set_access(self.address + run.start, run.num_bytes)
        except BaseException:
            self.broken = True
            if not run.mapped:
                if is_listed:
                    estate.runs.remove(run)
                estate.strays.append(run)
            raise

    def _release(self) -> list[BaseException]:
        with self.memory.activate():
            return self._estate.release_strays()

    def _drain_pool(self, limit_bytes: int) -> None:
        pool = self._estate.pool
        while pool and self.pooled_bytes > limit_bytes:
            self._estate.strays.append(pool[0])
            del pool[0]

    def _retry_strays(self) -> None:
        warn(self.memory, "an old handle could not be released yet", self._estate.release_strays())

    def _chunk_bytes(self) -> int | None:
        chunk_bytes = self.policy.chunk_bytes
        return None if chunk_bytes is None else round_up(chunk_bytes, self.memory.granularity)

    def _meeting(self, ranges: Sequence[ByteRange]) -> dict[Run, list[ByteRange]]:
        """The handles that meet some of `ranges`, with those that each meets, both ascending."""
        starts = [offset for offset, _ in ranges]
        meeting = {}
        for run in self._estate.runs:
            index = bisect_right(starts, run.start) - 1
            first = index if index >= 0 and sum(ranges[index]) > run.start else index + 1
            met = [each for each in ranges[first : bisect_left(starts, run.end)] if each[1]]
            if met:
                meeting[run] = met
        return meeting

    def _missing(self, offset: int, num_bytes: int) -> Iterator[Span]:
        """The unmapped runs of whole granules in a range of bytes."""
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


@contextmanager
def _unsure(run: Run) -> Iterator[None]:
    """Around a map or unmap and the note of its outcome: an interrupt may strike between the two."""
    run.unsure = True
    try:
        yield
    except DriverError:  # not done
        run.unsure = False
        raise
    run.unsure = False


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


__all__ = ["ByteRange", "Reservation", "Span", "granule_bytes", "reap", "round_up"]

"""What must be given back one day: addresses, mappings, handles; and what happens to them when their owner dies."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable
from typing import Protocol

from triton_kv.errors import DriverError
from triton_kv.memory.protocol import VirtualMemory

logger = logging.getLogger(__name__)


class Run:
    """One handle and where it is mapped, in bytes from the reservation's start."""

    __slots__ = ("end", "handle", "is_alias", "mapped", "pooled", "start", "unsure")

    def __init__(self, start: int, end: int) -> None:
        self.start = start
        self.end = end
        self.handle: int | None = None
        self.mapped = False
        self.unsure = False  # a map or unmap is under way, or was interrupted: done or not, nobody knows
        self.is_alias = False  # the handle belongs to another run, which is mapped elsewhere too
        self.pooled = False  # the handle came out of the pool

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


def unmap_run(memory: VirtualMemory, address: int, run: Run) -> None:
    """Unmap a handle that is mapped or may be, in a reservation at `address`."""
    if not (run.mapped or run.unsure):
        return
    was_unsure = run.unsure
    run.unsure = True
    try:
        memory.unmap(address + run.start, run.num_bytes)
    except DriverError:
        if not was_unsure:
            run.unsure = False
            raise
    run.mapped = run.unsure = False


class Inheritance(Protocol):
    """What a dead owner leaves."""

    memory: VirtualMemory
    pid: int
    reported: bool
    num_bytes: int

    def give_back(self) -> list[BaseException]:
        """Give back what is possible; what failed stays and is returned."""

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left."""


class Estate:
    """Everything of a reservation that must be given back one day: addresses, mappings, handles.

    Failures are returned without their tracebacks, whose frames would keep the caller, and with it views, alive.
    """

    __slots__ = ("address", "is_private", "leaving", "memory", "num_bytes", "pid", "pool", "reported", "runs", "strays")

    def __init__(self, memory: VirtualMemory, address: int, num_bytes: int, *, is_private: bool = False) -> None:
        self.memory = memory
        self.is_private = is_private  # only the driver's own fills and copies touch it
        self.address = address  # 0 once it is free
        self.num_bytes = num_bytes
        self.runs: list[Run] = []  # mapped, sorted, disjoint
        self.leaving: list[Run] = []  # unmapped by a transaction that is not committed yet, which may put them back
        self.strays: list[Run] = []  # not mapped, but their handle could not be released yet
        self.pool: list[Run] = []  # not mapped, their handles wait for the next growth
        self.pid = os.getpid()
        self.reported = False

    @property
    def is_settled(self) -> bool:
        return not (self.address or self.strays)

    def clear(self) -> list[BaseException]:
        """Wait for what may touch it, unmap all, release all. What fails stays in the books and is returned."""
        failures: list[BaseException] = []
        if self.runs:
            try:
                # A wait for the whole device would end another thread's capture.
                (self.memory.wait if self.is_private else self.memory.synchronize)()
            except Exception as failure:  # a context that died cannot be waited for, and nothing runs in it any more
                failures.append(failure.with_traceback(None))
        stuck = []
        try:
            while self.runs:
                run = self.runs[-1]
                try:
                    unmap_run(self.memory, self.address, run)
                except Exception as failure:
                    failures.append(failure.with_traceback(None))
                    stuck.append(run)
                else:
                    self.strays.append(run)
                self.runs.pop()
        finally:
            self.runs.extend(reversed(stuck))
        self.strays += self.leaving + self.pool
        self.leaving.clear()
        self.pool.clear()
        return failures + self.release_strays()

    def release_strays(self) -> list[BaseException]:
        """Release the handles that are mapped nowhere. What fails stays in the books and is returned."""
        failures: list[BaseException] = []
        stuck = []
        try:
            while self.strays:
                run = self.strays[-1]
                try:
                    if run.handle is not None and not run.is_alias:
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
_ORPHANS: deque[Inheritance] = deque()


class Lease:
    """Keeps a range of addresses reserved. The reservation holds it, and every view."""

    __slots__ = ("estate",)

    def __init__(self, estate: Inheritance) -> None:
        self.estate = estate

    # The default keeps the deque reachable while the interpreter takes modules apart.
    def __del__(self, inherit: Callable[[Inheritance], None] = _ORPHANS.append) -> None:
        inherit(self.estate)


def abandon(estate: Inheritance) -> None:
    """Leave an estate to the next `reap`."""
    _ORPHANS.append(estate)


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
        try:
            problems = estate.give_back()
        finally:  # also after an interrupt, which would else lose it
            if not estate.is_settled:
                _ORPHANS.append(estate)
        if estate.memory is memory:
            failures += problems
        elif problems and not estate.reported:
            estate.reported = True
            warn(estate.memory, f"{estate.num_bytes} bytes of a dead owner could not be given back yet", problems)
    return failures


def warn(memory: VirtualMemory, text: str, failures: list[BaseException]) -> None:
    # As text: a log record that kept the exception would keep, through its traceback, the frames and thus the views.
    if failures:
        logger.warning("%s: %s: %s", repr(memory), text, "; ".join(str(failure) for failure in failures))


__all__ = ["Estate", "Inheritance", "Lease", "Run", "abandon", "reap", "unmap_run", "warn"]

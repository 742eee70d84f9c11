"""Device memory through which scattered blocks pass on their way to the host and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from triton_kv.memory.reservation import Reservation, round_up
from triton_kv.memory.transaction import Transaction

if TYPE_CHECKING:
    from collections.abc import Callable

    from triton_kv.memory.protocol import VirtualMemory

_ALIGNMENT_BYTES = 512  # of each half, so that kernels copy 16 bytes at a time whatever a batch holds


class Staging:
    """Two halves, of which one is copied over the link while kernels work on the other.

    Not torch's memory: its allocator would keep it. Not thread-safe: the owner locks.

    Args:
        memory: the driver.
        half_bytes: of each half, at least 1.

    Raises:
        DriverError: no memory, and nothing is held then.
    """

    def __init__(self, memory: VirtualMemory, half_bytes: int) -> None:
        half_bytes = round_up(half_bytes, _ALIGNMENT_BYTES)
        self.half_bytes = half_bytes
        self._reservation = Reservation(memory, 2 * half_bytes, is_private=True)
        try:
            with Transaction() as transaction:
                self._reservation.ensure([(0, 2 * half_bytes)], transaction)
        except BaseException:
            self._reservation.close()
            raise
        self.lanes = Lanes(memory)
        self._emptied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    @property
    def num_bytes(self) -> int:
        """Device memory held."""
        return self._reservation.held_bytes

    def pass_out(self, gather: Callable[[int], None], copy: Callable[[int], None]) -> None:
        """Queue `gather(address)` into the next half, and then `copy(address)` out of it."""
        address = self._next()
        self.lanes.launch_after(self._emptied[self._turn], lambda: gather(address))
        self.lanes.hold_copies()
        copy(address)
        self._emptied[self._turn] = self.lanes.copied()

    def pass_in(self, copy: Callable[[int], None], scatter: Callable[[int], None]) -> None:
        """Queue `copy(address)` into the next half, and then `scatter(address)` out of it."""
        address = self._next()
        self.lanes.hold_copies(self._emptied[self._turn])
        copy(address)
        self.lanes.launch_after(self.lanes.copied(), lambda: scatter(address))
        self._emptied[self._turn] = self.lanes.launched()

    def _next(self) -> int:
        self._turn = 1 - self._turn
        return self._reservation.address + self._turn * self.half_bytes

    def close(self) -> None:
        """Wait for the driver's copies and give the memory back. What fails is raised; the next call tries it again."""
        self._reservation.close()


class Lanes:
    """The driver's stream of copies and its stream of kernels beside them, ordered by events.

    Where a driver has no such streams (on the CPU) everything is in order anyway.
    """

    def __init__(self, memory: VirtualMemory) -> None:
        self._copies: torch.cuda.Stream | None = getattr(memory, "copy_stream", None)
        self._kernels: torch.cuda.Stream | None = getattr(memory, "kernel_stream", None)
        self._enqueue: Callable[..., None] | None = getattr(memory, "enqueue", None)

    def launch_after(self, event: torch.cuda.Event | None, launch: Callable[[], None]) -> None:
        """Call `launch`, whose kernels run once `event` has happened."""
        if self._kernels is not None and self._enqueue is not None:
            if event is not None:
                self._kernels.wait_event(event)
            self._enqueue(launch, beside=True)
        else:
            with torch.cuda.stream(self._copies):
                launch()

    def hold_copies(self, event: torch.cuda.Event | None = None) -> None:
        """Copies queued from now on wait for the event; without one, for all kernels launched so far."""
        if self._copies is not None and self._kernels is not None:
            self._copies.wait_event(event or self._kernels.record_event())

    def copied(self) -> torch.cuda.Event | None:
        """Happens once the copies queued so far are done."""
        return None if self._copies is None or self._kernels is None else self._copies.record_event()

    def launched(self) -> torch.cuda.Event | None:
        """Happens once the kernels launched so far are done."""
        return None if self._kernels is None else self._kernels.record_event()


__all__ = ["Lanes", "Staging"]

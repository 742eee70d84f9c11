"""Pinned host memory with an owner: what `sleep(keep="host")` copies to."""

from __future__ import annotations

import os

from triton_kv.errors import raise_together
from triton_kv.memory.estate import Lease
from triton_kv.memory.protocol import VirtualMemory


class _PinnedEstate:
    """The allocation, which outlives its owner until somebody may call the driver."""

    __slots__ = ("address", "memory", "num_bytes", "pid", "reported")

    def __init__(self, memory: VirtualMemory, address: int, num_bytes: int) -> None:
        self.memory = memory
        self.address = address  # 0 once it is given back
        self.num_bytes = num_bytes
        self.pid = os.getpid()
        self.reported = False

    @property
    def is_settled(self) -> bool:
        return not self.address

    def give_back(self) -> list[BaseException]:
        if not self.address:
            return []
        try:
            with self.memory.activate():
                self.memory.wait()  # for copies that an interrupted sleep or wake may have left in the queue
                self.memory.unpin(self.address, self.num_bytes)
        except Exception as failure:
            return [failure.with_traceback(None)]
        self.address = 0
        return []


class PinnedBuffer:
    """Host memory that the device copies to and from at the link's full speed.

    Args:
        memory: the driver.
        num_bytes: at least 1.

    Raises:
        DriverError: the host has not that much memory to pin.
    """

    def __init__(self, memory: VirtualMemory, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        with memory.activate():
            self.address = memory.pin(num_bytes)
        self._estate = _PinnedEstate(memory, self.address, num_bytes)
        self._lease = Lease(self._estate)

    def free(self) -> None:
        """Give it back. Idempotent; what fails is raised and tried again by the next call, or when the owner dies."""
        raise_together(self._estate.give_back())


__all__ = ["PinnedBuffer"]

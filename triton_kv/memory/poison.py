"""A wrapper whose fresh memory is never zero by luck, so that a missing zeroing is seen."""

from __future__ import annotations

from triton_kv.memory.protocol import VirtualMemory
from triton_kv.memory.wrapper import WrappedMemory

POISON = 0xFF  # NaN in every float format


class PoisonedMemory(WrappedMemory):
    """Any driver; a handle's bytes are all 0xFF when they first become accessible, before any zeroing."""

    def __init__(self, memory: VirtualMemory) -> None:
        super().__init__(memory)
        self._fresh: set[int] = set()  # handles that were never accessible
        self._pending: dict[int, tuple[int, int]] = {}  # address -> bytes, handle: mapped and not accessible yet

    def create(self, num_bytes: int) -> int:
        handle = super().create(num_bytes)
        self._fresh.add(handle)
        return handle

    def release(self, handle: int) -> None:
        super().release(handle)
        self._fresh.discard(handle)

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        super().map(address, num_bytes, handle)
        if handle in self._fresh:
            self._pending[address] = (num_bytes, handle)

    def set_access(self, address: int, num_bytes: int) -> None:
        super().set_access(address, num_bytes)
        for start in [start for start in list(self._pending) if address <= start < address + num_bytes]:
            handle_bytes, handle = self._pending.pop(start)
            if handle in self._fresh:
                self._fresh.discard(handle)
                self.memory.fill(start, handle_bytes, POISON)

    def unmap(self, address: int, num_bytes: int) -> None:
        self.memory.wait()  # for poison that is still queued
        super().unmap(address, num_bytes)
        for start in [start for start in list(self._pending) if address <= start < address + num_bytes]:
            del self._pending[start]

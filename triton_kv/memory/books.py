"""What a driver must remember: reservations, handles, mappings. Refuses what the CUDA driver refuses."""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from typing import NamedTuple

from triton_kv.errors import DriverError, format_bytes


class Live(NamedTuple):
    """What is not given back yet."""

    reservations: int
    handles: int  # created and not released
    mappings: int


class Mapping:
    """A handle mapped at an address."""

    __slots__ = ("accessible", "address", "end", "handle")

    def __init__(self, address: int, end: int, handle: int) -> None:
        self.address = address
        self.end = end
        self.handle = handle
        self.accessible = False


class _Handle:
    __slots__ = ("num_bytes", "num_mappings", "released")

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.num_mappings = 0
        self.released = False


def _start(mapping: Mapping) -> int:
    return mapping.address


class Books:
    """The records of one software driver and its rules; no memory behind them.

    Every change is checked first and recorded by `record_*` or `drop_*` afterwards, so that a driver can make its
    system call in between. `lock` covers both steps.
    """

    def __init__(self, granularity: int) -> None:
        self.granularity = granularity
        self.lock = threading.RLock()
        self.physical_bytes = 0  # released handles count until they are mapped nowhere
        self._reservations: dict[int, int] = {}  # address -> end
        self._starts: list[int] = []  # of the reservations, sorted
        self._handles: dict[int, _Handle] = {}
        self._mappings: list[Mapping] = []  # sorted by address, disjoint

    @property
    def live(self) -> Live:
        with self.lock:
            handles = sum(not handle.released for handle in self._handles.values())
            return Live(len(self._reservations), handles, len(self._mappings))

    def check_size(self, call: str, num_bytes: int) -> None:
        if num_bytes <= 0 or num_bytes % self.granularity:
            raise DriverError(call, "EINVAL", f"{num_bytes} bytes is not a positive multiple of {self.granularity}")

    def check_memory(self, num_bytes: int, free_bytes: int) -> None:
        if num_bytes > free_bytes:
            raise DriverError("create", "ENOMEM", f"asked for {format_bytes(num_bytes)}, {free_bytes} bytes free")

    def record_reservation(self, address: int, num_bytes: int) -> None:
        self._reservations[address] = address + num_bytes
        insort(self._starts, address)

    def check_free(self, address: int, num_bytes: int) -> None:
        if self._reservations.get(address) != address + num_bytes:
            raise DriverError("free", "EINVAL", f"{address:#x} + {num_bytes} is no reservation")
        if self._overlapping(address, address + num_bytes):
            raise DriverError("free", "EBUSY", f"something is still mapped in {address:#x} + {num_bytes}")

    def drop_reservation(self, address: int) -> None:
        del self._reservations[address]
        del self._starts[bisect_right(self._starts, address) - 1]

    def record_handle(self, handle: int, num_bytes: int) -> None:
        self._handles[handle] = _Handle(num_bytes)
        self.physical_bytes += num_bytes

    def release(self, handle: int) -> int:
        """Returns the bytes that are free now: 0 while the handle is still mapped."""
        record = self._handles.get(handle)
        if record is None or record.released:
            raise DriverError("release", "EINVAL", f"handle {handle} does not exist")
        record.released = True
        return self._reclaim(handle, record)

    def check_map(self, address: int, num_bytes: int, handle: int) -> None:
        self.check_size("map", num_bytes)
        record = self._handles.get(handle)
        if record is None or record.released:
            raise DriverError("map", "EINVAL", f"handle {handle} does not exist")
        if record.num_bytes != num_bytes:
            raise DriverError("map", "ENOTSUP", f"{num_bytes} bytes of a handle of {record.num_bytes}: map it whole")
        if address % self.granularity:
            raise DriverError("map", "EINVAL", f"address {address:#x} is not a multiple of {self.granularity}")
        index = bisect_right(self._starts, address) - 1
        if index < 0 or self._reservations[self._starts[index]] < address + num_bytes:
            raise DriverError("map", "EINVAL", f"{address:#x} + {num_bytes} is not reserved")
        if self._overlapping(address, address + num_bytes):
            raise DriverError("map", "EINVAL", f"something is already mapped in {address:#x} + {num_bytes}")

    def record_mapping(self, address: int, num_bytes: int, handle: int) -> None:
        insort(self._mappings, Mapping(address, address + num_bytes, handle), key=_start)
        self._handles[handle].num_mappings += 1

    def check_mapped(self, call: str, address: int, num_bytes: int, *, accessible: bool = False) -> list[Mapping]:
        """The mappings that cover the range without a hole."""
        mappings = self._overlapping(address, address + num_bytes)
        position = address
        for mapping in mappings:
            if mapping.address > position or (accessible and not mapping.accessible):
                break
            position = mapping.end
        if position < address + num_bytes:
            what = "accessible" if accessible else "mapped"
            raise DriverError(call, "EFAULT", f"{address:#x} + {num_bytes} is not {what} at {position:#x}")
        return mappings

    def check_unmap(self, address: int, num_bytes: int) -> list[Mapping]:
        mappings = self._overlapping(address, address + num_bytes)
        whole = mappings and mappings[0].address == address and mappings[-1].end == address + num_bytes
        if not whole or sum(mapping.end - mapping.address for mapping in mappings) != num_bytes:
            raise DriverError("unmap", "EINVAL", f"{address:#x} + {num_bytes} is not a run of whole handles")
        return mappings

    def drop_mappings(self, mappings: list[Mapping]) -> list[tuple[int, int]]:
        """Returns the handles, each with its bytes, that nobody needs any more."""
        dead = []
        first = bisect_right(self._mappings, mappings[0].address, key=_start) - 1
        del self._mappings[first : first + len(mappings)]
        for mapping in mappings:
            record = self._handles[mapping.handle]
            record.num_mappings -= 1
            if self._reclaim(mapping.handle, record):
                dead.append((mapping.handle, record.num_bytes))
        return dead

    def _reclaim(self, handle: int, record: _Handle) -> int:
        if not record.released or record.num_mappings:
            return 0
        del self._handles[handle]
        self.physical_bytes -= record.num_bytes
        return record.num_bytes

    def _overlapping(self, start: int, end: int) -> list[Mapping]:
        first = bisect_right(self._mappings, start, key=_start)
        if first and self._mappings[first - 1].end > start:
            first -= 1
        last = bisect_right(self._mappings, end - 1, key=_start)
        return self._mappings[first:last]


__all__ = ["Books", "Live", "Mapping"]

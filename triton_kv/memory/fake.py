"""A driver with books and no memory behind them: any size, instantly."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from triton_kv.errors import AddressSpaceExhausted, DriverError, Unavailable
from triton_kv.memory.booked import BookedMemory

ADDRESS_SPACE_BYTES = 1 << 47  # what a process has on x86-64


class FakeMemory(BookedMemory):
    """Keeps the rules and the accounts of a device, for tests of sizes that no machine has.

    `view` raises `Unavailable`, `fill` only checks that its range is accessible.
    `VirtualMemory` says what each call does.

    Args:
        granularity: bytes of a granule.
        budget_bytes: physical memory of the device; None is 128 TiB.
    """

    def __init__(self, granularity: int = 2 << 20, budget_bytes: int | None = None) -> None:
        if granularity <= 0:
            raise ValueError(f"granularity must be positive, got {granularity}")
        if budget_bytes is not None and budget_bytes < 0:
            raise ValueError(f"budget_bytes must not be negative, got {budget_bytes}")
        self.device = torch.device("cpu")
        super().__init__(granularity)
        self._budget_bytes = ADDRESS_SPACE_BYTES if budget_bytes is None else budget_bytes
        # No address is reused and a granule lies between two reservations, so that an overrun hits no neighbour.
        self._next_address = granularity
        self._pinned: dict[int, int] = {}  # address -> bytes

    @property
    def pinned_bytes(self) -> int:
        """Host memory that was not given back."""
        return sum(self._pinned.values())

    def reserve(self, num_bytes: int) -> int:
        self._check_process()
        self._books.check_size("reserve", num_bytes)
        with self._books.lock:
            if self._next_address + num_bytes > ADDRESS_SPACE_BYTES:
                raise AddressSpaceExhausted("reserve", "ENOMEM", f"asked for {num_bytes} bytes of addresses")
            address = self._next_address
            self._next_address += num_bytes + self.granularity
            self._books.record_reservation(address, num_bytes)
        return address

    def free(self, address: int, num_bytes: int) -> None:
        self._check_process()
        with self._books.lock:
            self._books.check_free(address, num_bytes)
            self._books.drop_reservation(address)

    def _check_memory(self, num_bytes: int) -> None:
        self._books.check_memory(num_bytes, self.memory_info()[0])

    def view(self, address: int, num_bytes: int, owner: object) -> torch.Tensor:
        raise Unavailable("FakeMemory keeps books only and has no bytes to look at: use HostMemory for contents")

    def fill(self, address: int, num_bytes: int, value: int = 0, *, stride: int = 0, count: int = 1) -> None:
        self._check_process()
        if num_bytes <= 0:
            return
        with self._books.lock:
            for index in range(count):
                self._books.check_mapped("fill", address + index * stride, num_bytes, accessible=True)

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        self._check_process()
        with self._books.lock:
            for address in (target, source) if num_bytes > 0 else ():
                pinned = any(start <= address and address + num_bytes <= start + n for start, n in self._pinned.items())
                if not pinned:
                    self._books.check_mapped("copy", address, num_bytes, accessible=True)

    def pin(self, num_bytes: int) -> int:
        self._check_process()
        with self._books.lock:
            address = self._next_address
            self._next_address += -(-num_bytes // self.granularity) * self.granularity + self.granularity
            self._pinned[address] = num_bytes
        return address

    def unpin(self, address: int, num_bytes: int) -> None:
        self._check_process()
        with self._books.lock:
            if self._pinned.get(address) != num_bytes:
                raise DriverError("unpin", "EINVAL", f"{address:#x} + {num_bytes} is not pinned")
            del self._pinned[address]

    def wait(self) -> None:
        self._check_process()

    def synchronize(self) -> None:
        self._check_process()

    def memory_info(self) -> tuple[int, int]:
        self._check_process()
        return max(0, self._budget_bytes - self._books.physical_bytes), self._budget_bytes

    def is_capturing(self) -> bool:
        return False

    def activate(self) -> AbstractContextManager[None]:
        return nullcontext()

    def __repr__(self) -> str:
        return f"FakeMemory(granularity={self.granularity}, budget_bytes={self._budget_bytes})"

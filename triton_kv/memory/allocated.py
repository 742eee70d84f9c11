"""Plain torch memory behind the same protocol, where the device has no virtual memory management."""

from __future__ import annotations

import ctypes
from contextlib import AbstractContextManager, nullcontext

import torch

from triton_kv.errors import DriverError, OutOfMemory
from triton_kv.memory.booked import BookedMemory
from triton_kv.memory.cuda import Span
from triton_kv.memory.machine import machine_memory

_GRANULARITY = 512  # bytes: what torch aligns allocations to


class AllocatedMemory(BookedMemory):
    """Every reservation is memory from the start; committing only writes books, and nothing is given back before close.

    Nothing is protected: a touch of what is not committed reads or writes our own memory instead of faulting.
    `VirtualMemory` says what each call does.

    Args:
        device: any device of torch's with a memory allocator.
        reason: why the device's own driver is not used.
    """

    elastic = False

    def __init__(self, device: torch.device | str, reason: str = "asked for") -> None:
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        super().__init__(_GRANULARITY)
        self.reason = reason
        self._blocks: dict[int, torch.Tensor] = {}  # address -> what torch allocated
        self._pinned: dict[int, torch.Tensor] = {}
        # Fills, copies, and what `HostCopy` gathers for them are in order on it.
        self.copy_stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    @property
    def pinned_bytes(self) -> int:
        """Host memory that was not given back."""
        return sum(pinned.numel() for pinned in self._pinned.values())

    def reserve(self, num_bytes: int) -> int:
        self._check_process()
        self._books.check_size("reserve", num_bytes)
        with self._books.lock:
            try:
                block = torch.empty(num_bytes + _GRANULARITY, dtype=torch.uint8, device=self.device)
            except RuntimeError as error:  # torch.OutOfMemoryError on a GPU
                raise OutOfMemory(num_bytes, self.memory_info()[0], detail="fallback allocation") from error
            if self.device.type == "cuda":  # the allocator may hand out memory that queued work still writes
                torch.cuda.current_stream(self.device).synchronize()
            address = -(-block.data_ptr() // _GRANULARITY) * _GRANULARITY
            self._blocks[address] = block
            self._books.record_reservation(address, num_bytes)
        return address

    def free(self, address: int, num_bytes: int) -> None:
        self._check_process()
        with self._books.lock:
            self._books.check_free(address, num_bytes)
            self._books.drop_reservation(address)
            del self._blocks[address]

    def view(self, address: int, num_bytes: int, owner: object) -> torch.Tensor:
        self._check_process()
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=self.device)
        if self.device.type == "cuda":
            return torch.as_tensor(Span(address, num_bytes, owner), device=self.device)
        array = (ctypes.c_uint8 * num_bytes).from_address(address)
        array.owner = owner  # type: ignore[attr-defined]
        return torch.frombuffer(array, dtype=torch.uint8)

    def fill(self, address: int, num_bytes: int, value: int = 0, *, stride: int = 0, count: int = 1) -> None:
        self._check_process()
        for index in range(count if num_bytes > 0 else 0):
            with torch.cuda.stream(self.copy_stream):
                self.view(address + index * stride, num_bytes, None).fill_(value)

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        self._check_process()
        if num_bytes > 0:
            with torch.cuda.stream(self.copy_stream):
                self._bytes(target, num_bytes).copy_(self._bytes(source, num_bytes), non_blocking=True)

    def _bytes(self, address: int, num_bytes: int) -> torch.Tensor:
        for start, pinned in self._pinned.items():
            if start <= address < start + pinned.numel():
                return pinned[address - start : address - start + num_bytes]
        return self.view(address, num_bytes, None)

    def pin(self, num_bytes: int) -> int:
        self._check_process()
        pinned = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=self.device.type == "cuda")
        self._pinned[pinned.data_ptr()] = pinned
        return pinned.data_ptr()

    def unpin(self, address: int, num_bytes: int) -> None:
        self._check_process()
        if address not in self._pinned:
            raise DriverError("unpin", "EINVAL", f"{address:#x} + {num_bytes} is not pinned")
        del self._pinned[address]

    def wait(self) -> None:
        self._check_process()
        if self.copy_stream is not None:
            self.copy_stream.synchronize()

    def synchronize(self) -> None:
        self._check_process()
        if self.copy_stream is not None:
            torch.cuda.synchronize(self.device)

    def memory_info(self) -> tuple[int, int]:
        self._check_process()
        return torch.cuda.mem_get_info(self.device) if self.copy_stream is not None else machine_memory()

    def is_capturing(self) -> bool:
        if self.copy_stream is None:
            return False
        with torch.cuda.device(self.device):
            return bool(torch.cuda.is_current_stream_capturing())

    def activate(self) -> AbstractContextManager[None]:
        return torch.cuda.device(self.device) if self.copy_stream is not None else nullcontext()

    def __repr__(self) -> str:
        return f"AllocatedMemory({str(self.device)!r}, reason={self.reason!r})"


__all__ = ["AllocatedMemory"]

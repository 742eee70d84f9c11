"""The base of drivers whose handles and mappings exist in books alone."""

from __future__ import annotations

import os

from triton_kv.errors import Forked
from triton_kv.memory.books import Books, Live


class BookedMemory:
    """Handles and mappings as entries that are checked like CUDA's. A subclass gives addresses, bytes and sizes."""

    def __init__(self, granularity: int) -> None:
        self.granularity = granularity
        self._books = Books(granularity)
        self._next_handle = 1
        self._pid = os.getpid()

    @property
    def live(self) -> Live:
        """Reservations, handles and mappings that were not given back."""
        return self._books.live

    def create(self, num_bytes: int) -> int:
        self._check_process()
        self._books.check_size("create", num_bytes)
        with self._books.lock:
            self._check_memory(num_bytes)
            handle = self._next_handle
            self._next_handle += 1
            self._books.record_handle(handle, num_bytes)
        return handle

    def release(self, handle: int) -> None:
        self._check_process()
        with self._books.lock:
            self._books.release(handle)

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        self._check_process()
        with self._books.lock:
            self._books.check_map(address, num_bytes, handle)
            self._books.record_mapping(address, num_bytes, handle)

    def set_access(self, address: int, num_bytes: int) -> None:
        self._check_process()
        with self._books.lock:
            for mapping in self._books.check_mapped("set_access", address, num_bytes):
                mapping.accessible = True

    def unmap(self, address: int, num_bytes: int) -> None:
        self._check_process()
        with self._books.lock:
            self._books.drop_mappings(self._books.check_unmap(address, num_bytes))

    def _check_memory(self, num_bytes: int) -> None:
        """Raises `DriverError` where a handle of `num_bytes` would take more than there is."""

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise Forked(f"this {type(self).__name__}")

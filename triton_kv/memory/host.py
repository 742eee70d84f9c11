"""The host driver: the same promises on any Linux machine, a memfd for physical memory and mmap for the page table."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch

from triton_kv.errors import AddressSpaceExhausted, DriverError, Forked, format_bytes
from triton_kv.memory.books import Books, Live
from triton_kv.memory.machine import machine_memory

logger = logging.getLogger(__name__)

_MAX_ADDRESS_BYTES = 1 << 47
_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value
_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2
_MADV_REMOVE = 9
_ACCESS = mmap.PROT_READ | mmap.PROT_WRITE
_HOLE_BYTES = 1 << 20  # from here on a hole, which reads as zero, is cheaper than writing zeros


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    address, size, offset = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64
    libc.mmap.argtypes = (address, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, offset)
    libc.mmap.restype = ctypes.c_void_p
    libc.munmap.argtypes = (address, size)
    libc.mprotect.argtypes = (address, size, ctypes.c_int)
    libc.madvise.argtypes = (address, size, ctypes.c_int)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, offset, offset)
    return libc


class HostMemory:
    """Memory of the machine behind reserved addresses; a touch of anything not accessible is a SIGSEGV.

    All handles are ranges of one sparse file in memory, so there is no descriptor per handle. Pages are taken from the
    machine when they are first written. Two mappings of one handle alias.
    `VirtualMemory` says what each call does.

    Args:
        granularity: bytes of a granule, a multiple of the page size.
        budget_bytes: physical memory that handles may take together; None is what the machine (or the process's
            control group) has.
    """

    def __init__(self, granularity: int = 2 << 20, budget_bytes: int | None = None) -> None:
        if granularity <= 0 or granularity % mmap.PAGESIZE:
            raise ValueError(f"granularity must be a multiple of the page size {mmap.PAGESIZE}, got {granularity}")
        if budget_bytes is not None and budget_bytes < 0:
            raise ValueError(f"budget_bytes must not be negative, got {budget_bytes}")
        self.device = torch.device("cpu")
        self.granularity = granularity
        self._budget_bytes = budget_bytes
        self._books = Books(granularity)
        self._pid = os.getpid()
        self._next_offset = granularity  # in the file; a handle is its offset, and none is ever used twice
        self._pinned: dict[int, int] = {}  # address -> bytes
        self._refused: list[tuple[int, int]] = []  # handles that could not be punched out of the file yet
        self._file = os.memfd_create("triton_kv", os.MFD_CLOEXEC)

    def __del__(self, close=os.close) -> None:  # type: ignore[no-untyped-def]
        file = self.__dict__.get("_file")
        if file is not None:
            self._file = -1  # what dies later, in a cycle with this, has nothing to give back any more
            close(file)

    @property
    def live(self) -> Live:
        """Reservations, handles and mappings that were not given back."""
        return self._books.live

    @property
    def pinned_bytes(self) -> int:
        """Memory of `pin` that was not given back."""
        return sum(self._pinned.values())

    def reserve(self, num_bytes: int) -> int:
        self._check_process()
        self._books.check_size("reserve", num_bytes)
        slack = self.granularity - mmap.PAGESIZE
        if num_bytes + slack > _MAX_ADDRESS_BYTES:  # ctypes would cut the number
            raise AddressSpaceExhausted("mmap", "ENOMEM", f"asked for {num_bytes} bytes of addresses")
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        with self._books.lock:
            base = _libc().mmap(None, num_bytes + slack, _PROT_NONE, flags, -1, 0)
            if base == _MAP_FAILED:
                detail = f"asked for {num_bytes} bytes of addresses"
                raise AddressSpaceExhausted("mmap", errno.errorcode[ctypes.get_errno()], detail)
            address = -(-base // self.granularity) * self.granularity
            tail = base + slack - address
            if address > base:
                _libc().munmap(base, address - base)
            if tail:
                _libc().munmap(address + num_bytes, tail)
            self._books.record_reservation(address, num_bytes)
        return address

    def free(self, address: int, num_bytes: int) -> None:
        self._check_process()
        with self._books.lock:
            self._books.check_free(address, num_bytes)
            self._call("munmap", address, num_bytes)
            self._books.drop_reservation(address)

    def create(self, num_bytes: int) -> int:
        self._check_process()
        self._books.check_size("create", num_bytes)
        with self._books.lock:
            self._books.check_memory(num_bytes, self.memory_info()[0])
            handle = self._next_offset
            try:
                os.ftruncate(self._file, handle + num_bytes)
            except OSError as error:
                code = errno.errorcode.get(error.errno or 0, str(error.errno))
                raise DriverError("ftruncate", code, f"{num_bytes} bytes") from error
            self._next_offset += num_bytes
            self._books.record_handle(handle, num_bytes)
        return handle

    def release(self, handle: int) -> None:
        self._check_process()
        with self._books.lock:
            num_bytes = self._books.release(handle)
            if num_bytes:
                self._give_back([(handle, num_bytes)])

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        self._check_process()
        with self._books.lock:
            self._books.check_map(address, num_bytes, handle)
            flags = mmap.MAP_SHARED | _MAP_FIXED
            self._call("mmap", address, num_bytes, _PROT_NONE, flags, self._file, handle, failed=_MAP_FAILED)
            self._books.record_mapping(address, num_bytes, handle)

    def set_access(self, address: int, num_bytes: int) -> None:
        self._check_process()
        with self._books.lock:
            mappings = self._books.check_mapped("set_access", address, num_bytes)
            self._call("mprotect", address, num_bytes, _ACCESS)
            for mapping in mappings:
                mapping.accessible = True

    def unmap(self, address: int, num_bytes: int) -> None:
        self._check_process()
        with self._books.lock:
            mappings = self._books.check_unmap(address, num_bytes)
            # Not munmap: the addresses must stay reserved.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
            self._call("mmap", address, num_bytes, _PROT_NONE, flags, -1, 0, failed=_MAP_FAILED)
            self._give_back(self._books.drop_mappings(mappings))

    def view(self, address: int, num_bytes: int, owner: object) -> torch.Tensor:
        self._check_process()
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        # torch.frombuffer keeps the array alive, and the array its owner; an mmap object would not be kept.
        array = (ctypes.c_uint8 * num_bytes).from_address(address)
        array.owner = owner  # type: ignore[attr-defined]
        return torch.frombuffer(array, dtype=torch.uint8)

    def fill(self, address: int, num_bytes: int, value: int = 0, *, stride: int = 0, count: int = 1) -> None:
        self._check_process()
        for index in range(count if num_bytes > 0 else 0):
            start = address + index * stride
            end = start + num_bytes
            if value == 0:
                first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
                last = end // mmap.PAGESIZE * mmap.PAGESIZE
                # Where it does not apply (a range that is not mapped) memset faults, as it should.
                if last - first >= _HOLE_BYTES and _libc().madvise(first, last - first, _MADV_REMOVE) == 0:
                    ctypes.memset(start, 0, first - start)
                    start = last
            ctypes.memset(start, value, end - start)

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        self._check_process()
        ctypes.memmove(target, source, num_bytes)

    def pin(self, num_bytes: int) -> int:
        self._check_process()
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        with self._books.lock:
            address = _libc().mmap(None, num_bytes, _ACCESS, flags, -1, 0)
            if address == _MAP_FAILED:
                raise DriverError("pin", errno.errorcode[ctypes.get_errno()], f"asked for {format_bytes(num_bytes)}")
            self._pinned[address] = num_bytes
        return address

    def unpin(self, address: int, num_bytes: int) -> None:
        self._check_process()
        with self._books.lock:
            if self._pinned.get(address) != num_bytes:
                raise DriverError("unpin", "EINVAL", f"{address:#x} + {num_bytes} is not pinned")
            self._call("munmap", address, num_bytes)
            del self._pinned[address]

    def wait(self) -> None:
        self._check_process()

    def synchronize(self) -> None:
        self._check_process()

    def memory_info(self) -> tuple[int, int]:
        self._check_process()
        committed = self._books.physical_bytes
        if self._budget_bytes is not None:
            return max(0, self._budget_bytes - committed), self._budget_bytes
        free, total = machine_memory()
        untouched = committed - self._file_bytes()  # ours already, though the machine calls it free
        return max(0, min(free - untouched, total - committed)), total

    def is_capturing(self) -> bool:
        return False

    def activate(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _call(self, name: str, *arguments: int, failed: int | None = -1) -> None:
        if getattr(_libc(), name)(*arguments) == failed:
            raise DriverError(name, errno.errorcode[ctypes.get_errno()], f"at {arguments[0]:#x} + {arguments[1]}")

    def _give_back(self, dead: list[tuple[int, int]]) -> None:
        """Punch dead handles out of the file. What the machine refuses is tried again with the next ones."""
        self._refused += dead
        dead, self._refused = self._refused if self._file >= 0 else [], []
        for handle, num_bytes in dead:
            if _libc().fallocate(self._file, _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, handle, num_bytes):
                code = errno.errorcode[ctypes.get_errno()]
                logger.warning("%d bytes could not be given back to the machine yet: %s", num_bytes, code)
                self._refused.append((handle, num_bytes))

    def _file_bytes(self) -> int:
        """What handles take from the machine so far."""
        return os.fstat(self._file).st_blocks * 512

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise Forked("this HostMemory")

    def __repr__(self) -> str:
        return f"HostMemory(granularity={self.granularity}, budget_bytes={self._budget_bytes})"

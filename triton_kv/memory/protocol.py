"""The contract between everything above memory and the drivers below it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

import torch


@runtime_checkable
class VirtualMemory(Protocol):
    """Address space and physical memory of one device, as two things that are joined by `map`.

    It follows the CUDA virtual memory management calls. All sizes and addresses are in bytes and whole granules,
    except those of `view` and `fill`. Failures raise `DriverError` with the call and the driver's code. Calls are made
    inside `with memory.activate():`, from any thread. In a forked child every call raises `Forked`.

    A handle is one physical allocation: mapped whole and unmapped whole, at one or more addresses. Fresh memory holds
    anything. None of the calls waits for the device unless it says so; whoever unmaps must first make sure that no
    queued work touches the range.
    """

    device: torch.device
    granularity: int  # bytes of the smallest mappable unit

    def reserve(self, num_bytes: int) -> int:
        """Reserve addresses, which nothing backs yet. Raises `AddressSpaceExhausted`."""

    def free(self, address: int, num_bytes: int) -> None:
        """Give a whole reservation back. Nothing may be mapped in it."""

    def create(self, num_bytes: int) -> int:
        """Allocate physical memory and return its handle. `DriverError.out_of_memory` is true where none is left."""

    def release(self, handle: int) -> None:
        """Drop a handle. Its memory is freed once it is mapped nowhere."""

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        """Put the whole handle behind reserved addresses that nothing backs. They are not accessible yet."""

    def set_access(self, address: int, num_bytes: int) -> None:
        """Make a mapped range, of one or many handles, readable and writable by the device."""

    def unmap(self, address: int, num_bytes: int) -> None:
        """Take whole handles out of a range again. A touch of it faults from now on. Does not wait for the device."""

    def view(self, address: int, num_bytes: int, owner: object) -> torch.Tensor:
        """A uint8 tensor `[num_bytes]` on `device` over addresses, mapped or not, without touching them.

        Its storage starts at `address` and keeps `owner` alive as long as any view of it lives.
        """

    def fill(self, address: int, num_bytes: int, value: int = 0, *, stride: int = 0, count: int = 1) -> None:
        """Queue: bytes `[address + i * stride, + num_bytes)` become `value` for every i below `count`.

        Asynchronous on a GPU, on a stream of the driver's own, in order with earlier fills and nothing else.
        """

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Queue: bytes from `source` on to `target` on, in order with fills and other copies.

        Each address is the device's, mapped and accessible, or `pin`'s. The ranges do not overlap. Asynchronous on a
        GPU.
        """

    def pin(self, num_bytes: int) -> int:
        """Allocate host memory that `copy` reaches at the link's full speed; returns its address. May take seconds."""

    def unpin(self, address: int, num_bytes: int) -> None:
        """Give pinned memory back. No queued copy may touch it."""

    def wait(self) -> None:
        """The host waits for the queued fills and copies."""

    def synchronize(self) -> None:
        """The host waits for all work on the device."""

    def memory_info(self) -> tuple[int, int]:
        """Free and total physical memory, in bytes."""

    def is_capturing(self) -> bool:
        """Whether the calling thread's current stream captures a CUDA graph."""

    def activate(self) -> AbstractContextManager[None]:
        """Makes the device current in the calling thread and puts the former one back. May be nested."""

"""The base of drivers that stand in front of another driver."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from triton_kv.memory.protocol import VirtualMemory


class WrappedMemory:
    """Any driver, passed through; a subclass overrides the calls that it is about."""

    def __init__(self, memory: VirtualMemory) -> None:
        self.memory = memory
        self.device = memory.device
        self.granularity = memory.granularity

    def reserve(self, num_bytes: int) -> int:
        return self.memory.reserve(num_bytes)

    def free(self, address: int, num_bytes: int) -> None:
        self.memory.free(address, num_bytes)

    def create(self, num_bytes: int) -> int:
        return self.memory.create(num_bytes)

    def release(self, handle: int) -> None:
        self.memory.release(handle)

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        self.memory.map(address, num_bytes, handle)

    def set_access(self, address: int, num_bytes: int) -> None:
        self.memory.set_access(address, num_bytes)

    def unmap(self, address: int, num_bytes: int) -> None:
        self.memory.unmap(address, num_bytes)

    def view(self, address: int, num_bytes: int, owner: object) -> torch.Tensor:
        return self.memory.view(address, num_bytes, owner)

    def fill(self, address: int, num_bytes: int, value: int = 0, *, stride: int = 0, count: int = 1) -> None:
        self.memory.fill(address, num_bytes, value, stride=stride, count=count)

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        self.memory.copy(target, source, num_bytes)

    def pin(self, num_bytes: int) -> int:
        return self.memory.pin(num_bytes)

    def unpin(self, address: int, num_bytes: int) -> None:
        self.memory.unpin(address, num_bytes)

    def wait(self) -> None:
        self.memory.wait()

    def synchronize(self) -> None:
        self.memory.synchronize()

    def memory_info(self) -> tuple[int, int]:
        return self.memory.memory_info()

    def is_capturing(self) -> bool:
        return self.memory.is_capturing()

    def activate(self) -> AbstractContextManager[None]:
        return self.memory.activate()

    def __getattr__(self, name: str) -> Any:
        """What only the wrapped driver has, such as `live`."""
        if name == "memory":  # not set yet: a half-built wrapper must not recurse
            raise AttributeError(name)
        return getattr(self.memory, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.memory!r})"

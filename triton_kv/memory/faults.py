"""A wrapper that makes chosen driver calls fail, so that code above it can be tested against every single failure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from triton_kv.errors import AddressSpaceExhausted, DriverError
from triton_kv.memory.protocol import VirtualMemory
from triton_kv.memory.wrapper import WrappedMemory

CALLS = (
    "reserve",
    "create",
    "map",
    "set_access",
    "unmap",
    "release",
    "free",
    "fill",
    "copy",
    "pin",
    "unpin",
    "wait",
    "synchronize",
)


class FaultyMemory(WrappedMemory):
    """Any driver, with failures on demand. A call that fails does not reach the driver.

    `calls` counts the calls of each name since the wrapper was made, failed ones included.
    """

    def __init__(self, memory: VirtualMemory) -> None:
        super().__init__(memory)
        self.calls: Counter[str] = Counter()
        self._planned: list[tuple[str, int, str | BaseException]] = []  # call or "any", calls still to go, code

    def fail(self, call: str, nth: int = 1, code: str | BaseException | None = None) -> None:
        """Make the `nth` next `call` raise what the driver would raise for `code`. Several may be planned.

        Args:
            call: one of `CALLS`, or "any" for the `nth` next of them all.
            nth: 1 is the very next.
            code: None is out of memory for `reserve`, `create` and `pin`, and an unknown error for others. An exception
                (such as `KeyboardInterrupt()`) is raised as it is.
        """
        if call not in CALLS and call != "any":
            raise ValueError(f"unknown call {call!r}: choose one of {', '.join(CALLS)} or 'any'")
        if nth < 1:
            raise ValueError(f"nth must be at least 1, got {nth}")
        self._planned.append((call, nth, code or ""))

    def heal(self) -> None:
        """Forget the planned failures."""
        self._planned.clear()

    @property
    def num_planned(self) -> int:
        """Failures that have not happened yet."""
        return len(self._planned)

    def _pass(self, call: str) -> None:
        self.calls[call] += 1
        failing: str | BaseException | None = None
        remaining = []
        for name, nth, code in self._planned:
            if name not in (call, "any"):
                remaining.append((name, nth, code))
            elif nth > 1 or failing is not None:
                remaining.append((name, max(nth - 1, 1), code))
            else:
                failing = code
        self._planned = remaining
        if failing is None:
            return
        if isinstance(failing, BaseException):
            raise failing
        unknown = "CUDA_ERROR_UNKNOWN" if self.device.type == "cuda" else "EIO"
        exhausted = "CUDA_ERROR_OUT_OF_MEMORY" if self.device.type == "cuda" else "ENOMEM"
        if call == "reserve" and failing in ("", exhausted):
            raise AddressSpaceExhausted(call, exhausted, "injected")
        raise DriverError(call, failing or (exhausted if call in ("create", "pin") else unknown), "injected")

    def reserve(self, num_bytes: int) -> int:
        self._pass("reserve")
        return super().reserve(num_bytes)

    def free(self, address: int, num_bytes: int) -> None:
        self._pass("free")
        super().free(address, num_bytes)

    def create(self, num_bytes: int) -> int:
        self._pass("create")
        return super().create(num_bytes)

    def release(self, handle: int) -> None:
        self._pass("release")
        super().release(handle)

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        self._pass("map")
        super().map(address, num_bytes, handle)

    def set_access(self, address: int, num_bytes: int) -> None:
        self._pass("set_access")
        super().set_access(address, num_bytes)

    def unmap(self, address: int, num_bytes: int) -> None:
        self._pass("unmap")
        super().unmap(address, num_bytes)

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if name != "enqueue":
            return found

        def enqueue(work: Callable[[], object], **options: Any) -> None:
            self._pass("fill")  # a launch, as a fill is
            found(work, **options)

        return enqueue

    def fill(self, address: int, num_bytes: int, value: int = 0, *, stride: int = 0, count: int = 1) -> None:
        self._pass("fill")
        super().fill(address, num_bytes, value, stride=stride, count=count)

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        self._pass("copy")
        super().copy(target, source, num_bytes)

    def pin(self, num_bytes: int) -> int:
        self._pass("pin")
        return super().pin(num_bytes)

    def unpin(self, address: int, num_bytes: int) -> None:
        self._pass("unpin")
        super().unpin(address, num_bytes)

    def wait(self) -> None:
        self._pass("wait")
        super().wait()

    def synchronize(self) -> None:
        self._pass("synchronize")
        super().synchronize()

"""The exceptions of the package: one family, each text says what to do next.

A caller's mistake (a wrong size, dtype, shape) is a ``ValueError`` or ``TypeError``; everything that can happen to a
correct caller is a :class:`TritonKVError`.
"""

# ruff: noqa: N818 - the names say what happened: `except OutOfMemory`, `except Closed`.

from __future__ import annotations

OUT_OF_MEMORY_CODES = frozenset({"CUDA_ERROR_OUT_OF_MEMORY", "ENOMEM"})


def format_bytes(num_bytes: int) -> str:
    """``num_bytes`` for people and machines: the exact number, and MiB or GiB where that reads better."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20)):
        if abs(num_bytes) >= size:
            return f"{num_bytes} bytes ({num_bytes / size:.2f} {unit})"
    return f"{num_bytes} bytes"


class TritonKVError(RuntimeError):
    """Base of every error of this package that is not a caller's mistake.

    ``undo_failures`` holds what failed while an operation that raised this error was being undone (normally empty);
    each of them is also in the traceback as a note.
    """

    undo_failures: tuple[BaseException, ...] = ()


class DriverError(TritonKVError):
    """A driver call failed. ``call`` names it and ``code`` is the driver's name of the reason.

    The codes are CUDA's (``"CUDA_ERROR_OUT_OF_MEMORY"``) on a GPU and errno's (``"ENOMEM"``) on a host.
    """

    def __init__(self, call: str, code: str, detail: str = "") -> None:
        self.call = call
        self.code = code
        self.detail = detail
        super().__init__(f"{call} failed with {code}" + (f": {detail}" if detail else ""))

    @property
    def out_of_memory(self) -> bool:
        """Whether physical memory was asked for and there was not enough of it."""
        return self.code in OUT_OF_MEMORY_CODES and not isinstance(self, AddressSpaceExhausted)

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return type(self), (self.call, self.code, self.detail)


class AddressSpaceExhausted(DriverError):
    """No room to *reserve* addresses. It is not about memory: nothing physical was asked for."""

    def __init__(self, call: str, code: str, detail: str = "") -> None:
        detail = detail or "the address space is exhausted"
        hint = "address space, not memory, ran out: reserve a smaller capacity or close other reservations"
        super().__init__(call, code, detail if hint in detail else f"{detail} ({hint})")


class OutOfMemory(TritonKVError):
    """Committing needs more physical memory than is free.

    Args:
        asked_bytes: what the operation would have had to allocate, in bytes (whole granules).
        free_bytes: what was free on the device when it failed, in bytes; None where unknown.
        would_fit: the largest size that would have fitted, in ``unit``; None where unknown.
        unit: what ``would_fit`` counts, for example ``"blocks"``.
        detail: who asked, for example ``"extend(4096)"``.
    """

    def __init__(
        self,
        asked_bytes: int,
        free_bytes: int | None = None,
        would_fit: int | None = None,
        unit: str = "bytes",
        detail: str = "",
    ) -> None:
        self.asked_bytes = asked_bytes
        self.free_bytes = free_bytes
        self.would_fit = would_fit
        self.unit = unit
        self.detail = detail
        super().__init__(asked_bytes, free_bytes, would_fit, unit, detail)

    def __str__(self) -> str:
        text = f"{self.detail}: out of memory" if self.detail else "out of memory"
        text += f": asked for {format_bytes(self.asked_bytes)}"
        text += f", {format_bytes(self.free_bytes)} free" if self.free_bytes is not None else ", free memory unknown"
        if self.would_fit is not None:
            text += f", {self.would_fit} {self.unit} would fit"
        if self.undo_failures:
            return text + "; undoing it failed too: only close() is left, it frees what it can"
        return text + "; nothing was changed: ask for less, or free memory on the device and try again"

    def __reduce__(self) -> tuple[type, tuple[int, int | None, int | None, str, str]]:
        return type(self), (self.asked_bytes, self.free_bytes, self.would_fit, self.unit, self.detail)


class CaptureError(TritonKVError):
    """The cache was to be changed while the current stream captures a CUDA graph. The capture stays valid."""

    def __init__(self, operation: str) -> None:
        self.operation = operation
        super().__init__(
            f"{operation} while the current stream captures a CUDA graph: memory must not change during a capture. "
            "The capture is still valid; call it before the capture begins or after it ends"
        )

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return type(self), (self.operation,)


class Closed(TritonKVError):
    """The object was closed. Reserve a new one."""


class NothingCommitted(TritonKVError):
    """An operation on a cache that has no block yet: call ``extend(1)`` (or more) first."""


class Asleep(TritonKVError):
    """The cache sleeps: its addresses are reserved and nothing is behind them. Call ``wake()`` first."""

    def __init__(self, operation: str) -> None:
        self.operation = operation
        super().__init__(f"{operation} while the cache sleeps: no memory is behind its addresses; call wake() first")

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return type(self), (self.operation,)


class BadAccess(TritonKVError):
    """A checked cache found that a kernel met a block id or slot outside the watermark; it was masked or dropped."""


class Broken(TritonKVError):
    """An earlier operation failed and undoing it failed too. Only ``close()`` is left; it frees all it can."""


class Forked(TritonKVError):
    """Used in a forked child. Device memory does not survive a fork: create it after the fork, or spawn."""

    def __init__(self, what: str = "this memory") -> None:
        self.what = what
        super().__init__(
            f"{what} belongs to the parent process and cannot be used after a fork: "
            "create it in the child, or start the child with the 'spawn' method"
        )

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return type(self), (self.what,)


class Unavailable(TritonKVError):
    """The device cannot back reservations. ``reason`` says why."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class RankError(TritonKVError):
    """Something failed, or did not fit together, on one rank or more; raised on every rank, all of them as before.

    Args:
        operation: what the ranks did together, for example ``"extend"``.
        failures: what is wrong, by rank in the group.
    """

    def __init__(self, operation: str, failures: dict[int, str]) -> None:
        self.operation = operation
        self.failures = dict(failures)
        text = "; ".join(f"rank {rank}: {failure}" for rank, failure in sorted(failures.items()))
        super().__init__(f"{operation}: every rank stays as it was, because of {text}")

    def __reduce__(self) -> tuple[type, tuple[str, dict[int, str]]]:
        return type(self), (self.operation, self.failures)


class RankLost(TritonKVError):
    """A rank gave no answer in the group's timeout, or its process is gone. This rank is as before the call."""

    _outcome = "this rank is as it was, others may have gone on"

    def __init__(self, operation: str, reason: str) -> None:
        self.operation = operation
        self.reason = reason
        super().__init__(f"{operation}: a rank did not go along ({reason}); {self._outcome}: restart the group")

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.operation, self.reason)


class InconsistentRanks(RankLost):
    """A rank was lost, or failed, after this one had published its change: the group is inconsistent."""

    _outcome = "this rank had changed already and the group is inconsistent"


def raise_together(failures: list[BaseException]) -> None:
    """Empty ``failures`` and raise the first of them, if any, with the others as notes and ``undo_failures``."""
    if failures:
        first, *others = failures
        failures.clear()
        attach_failures(first, others)
        try:
            raise first
        finally:
            del first  # else this frame and the error keep each other, and all the frames above, alive


def attach_failures(error: BaseException, failures: list[BaseException]) -> None:
    """Note on ``error`` what else failed because of it, so that one traceback reports everything."""
    if not failures:
        return
    for failure in failures:
        error.add_note(f"and then {type(failure).__name__}: {failure}")
    known = getattr(error, "undo_failures", ())
    error.undo_failures = (*known, *failures)  # type: ignore[attr-defined]

"""How a run of granules is cut into handles, and what becomes of handles that are not needed any more."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HandlePolicy:
    """One handle per missing run by default: commits cost per handle, not per byte (docs/memory.md has the table).

    Smaller handles make growth slower and shrinking cheaper: a handle is unmapped whole, so one that is cut in the
    middle must be replaced by a smaller one, with its kept part copied.
    """

    chunk_bytes: int | None = None  # of a handle at most, rounded up to whole granules; None: one handle per run
    pool_bytes: int = 0  # unused handles that a reservation keeps for its next growth instead of releasing them

    def __post_init__(self) -> None:
        if self.chunk_bytes is not None and self.chunk_bytes <= 0:
            raise ValueError(f"chunk_bytes must be positive or None, got {self.chunk_bytes}")
        if self.pool_bytes < 0:
            raise ValueError(f"pool_bytes must not be negative, got {self.pool_bytes}")


__all__ = ["HandlePolicy"]

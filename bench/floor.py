"""The least time a case can take on this run's hardware."""

from __future__ import annotations

from typing import Any


def floor_us(
    rooflines: dict[str, Any],
    *,
    bytes_read: float = 0,
    bytes_written: float = 0,
    flops: float = 0,
    kind: str = "read",
) -> float | None:
    """The larger of the memory's and the matrix unit's time, in microseconds; None without rooflines (on a CPU).

    `kind` names the bandwidth that bounds the case: "read", "write" or "copy" (which counts both directions).
    """
    gbps, tflops = rooflines.get(f"{kind}_gbps"), rooflines.get("matmul_tflops")
    if not gbps or not tflops:
        return None
    return round(max((bytes_read + bytes_written) / (gbps * 1e3), flops / (tflops * 1e6)), 3)

"""How many blocks fit: a pure function of measured numbers, and the reading that feeds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from triton_kv.errors import OutOfMemory

if TYPE_CHECKING:
    from collections.abc import Callable

    from triton_kv.cache import KVCache

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True)
class Plan:
    """How many blocks a cache may hold, and the numbers that say so. `KVCache.extend` takes it as it is."""

    num_blocks: int
    bound_by: str  # "capacity", "max_blocks", "utilization" or "free"
    mapped_bytes: int  # physical bytes of the cache at num_blocks, whole granules
    limit_bytes: int  # what the cache may map at most
    total_bytes: int  # of the device
    free_bytes: int  # when it was read
    activation_bytes: int  # that a step needs again and nobody holds now
    headroom_bytes: int
    utilization: float

    def __str__(self) -> str:
        return (
            f"{self.num_blocks} blocks, {self.mapped_bytes / GIB:.2f} GiB of at most {self.limit_bytes / GIB:.2f} GiB "
            f"(bound by {self.bound_by}; free {self.free_bytes / GIB:.2f} of {self.total_bytes / GIB:.2f} GiB, "
            f"activations {self.activation_bytes / GIB:.2f} GiB, headroom {self.headroom_bytes / GIB:.2f} GiB, "
            f"utilization {self.utilization})"
        )


def largest_fit(mapped_bytes_at: Callable[[int], int], limit_bytes: int, max_blocks: int) -> int:
    """The largest n in 0..max_blocks with `mapped_bytes_at(n) <= limit_bytes`; `mapped_bytes_at` must not fall."""
    low, high = 0, max_blocks
    while low < high:
        middle = (low + high + 1) // 2
        if mapped_bytes_at(middle) <= limit_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def fit_blocks(
    mapped_bytes_at: Callable[[int], int],
    *,
    capacity: int,
    mapped_bytes: int,
    total_bytes: int,
    free_bytes: int,
    utilization: float = 0.92,
    activation_bytes: int = 0,
    headroom_bytes: int = 0,
    max_blocks: int | None = None,
) -> Plan:
    """The largest number of blocks that keeps the device within its budget. Pure: reads no device.

    `mapped_bytes_at(n)` is the physical bytes of the cache at n blocks, whole granules; `mapped_bytes` what it maps
    now.
    Two limits hold at once: everything in use on the device (all processes, the cache's growth, activations, headroom)
    stays within `utilization * total_bytes`, and the growth fits what is free now. All sizes in bytes.

    Raises `ValueError` for a utilization outside (0, 1] or negative sizes, `OutOfMemory` if not even one block fits.
    """
    if not 0.0 < utilization <= 1.0:
        raise ValueError(f"utilization must lie in (0, 1], got {utilization}")
    for name, value in (("activation_bytes", activation_bytes), ("headroom_bytes", headroom_bytes)):
        if value < 0:
            raise ValueError(f"{name} must not be negative, got {value}")
    if max_blocks is not None and max_blocks < 1:
        raise ValueError(f"max_blocks must be at least 1, got {max_blocks}")
    used_bytes = max(total_bytes - free_bytes, 0)
    reserve_bytes = activation_bytes + headroom_bytes
    by_utilization = int(utilization * total_bytes) - used_bytes - reserve_bytes + mapped_bytes
    by_free = free_bytes - reserve_bytes + mapped_bytes
    limit_bytes = min(by_utilization, by_free)
    most = capacity if max_blocks is None else min(capacity, max_blocks)
    num_blocks = largest_fit(mapped_bytes_at, limit_bytes, most)
    if num_blocks == 0:
        raise OutOfMemory(
            mapped_bytes_at(1),
            free_bytes,
            would_fit=0,
            unit="blocks",
            detail=(
                f"plan: not even one block fits in the {max(limit_bytes, 0)} bytes left (total {total_bytes}, "
                f"activations {activation_bytes}, headroom {headroom_bytes}, utilization {utilization}; "
                "raise utilization or lower headroom_bytes)"
            ),
        )
    if num_blocks < most:
        bound_by = "utilization" if by_utilization <= by_free else "free"
    else:
        bound_by = "capacity" if most == capacity else "max_blocks"
    return Plan(
        num_blocks=num_blocks,
        bound_by=bound_by,
        mapped_bytes=mapped_bytes_at(num_blocks),
        limit_bytes=limit_bytes,
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        activation_bytes=activation_bytes,
        headroom_bytes=headroom_bytes,
        utilization=utilization,
    )


def plan_blocks(
    cache: KVCache,
    *,
    utilization: float = 0.92,
    headroom_bytes: int = 150 * MIB,
    activation_bytes: int | None = None,
    max_blocks: int | None = None,
) -> Plan:
    """Reads the cache's device and says how many blocks it may hold; call it after warm-up and capture.

    `activation_bytes` defaults to what torch's allocator needed at its peak and no longer holds. Synchronises the
    device, so that memory which queued work still frees is counted. Raises what `fit_blocks` raises, and `Closed`.
    """
    free_bytes, total_bytes = cache.memory_info()
    if activation_bytes is None:
        activation_bytes = _peak_not_held(cache.device)
    return fit_blocks(
        cache.mapped_bytes_at,
        capacity=cache.capacity,
        mapped_bytes=cache.mapped_bytes,
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        utilization=utilization,
        activation_bytes=activation_bytes,
        headroom_bytes=headroom_bytes,
        max_blocks=max_blocks,
    )


def _peak_not_held(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return max(torch.cuda.max_memory_allocated(device) - torch.cuda.memory_reserved(device), 0)

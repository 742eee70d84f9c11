"""The drivers that one suite of tests runs against."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from triton_kv.memory import FakeMemory, FaultyMemory, HostMemory, PoisonedMemory, VirtualMemory, open_memory

MIB = 1 << 20
GRANULARITY = 64 << 10  # small, so that a buffer of many granules stays cheap
BUDGET = 64 * MIB

MAKERS: dict[str, Callable[[], VirtualMemory]] = {
    "host": lambda: HostMemory(GRANULARITY, BUDGET),
    "fake": lambda: FakeMemory(GRANULARITY, BUDGET),
    "faulty": lambda: FaultyMemory(HostMemory(GRANULARITY, BUDGET)),
    "poisoned": lambda: PoisonedMemory(HostMemory(GRANULARITY, BUDGET)),
    "cuda": lambda: open_memory("cuda"),
}

without_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def drivers(*names: str) -> list:
    """Parameters for `memory_name`; those of a GPU are skipped where there is none."""
    return [pytest.param(name, marks=without_gpu if name == "cuda" else (), id=name) for name in names]


def has_contents(memory: VirtualMemory) -> bool:
    return not isinstance(memory, FakeMemory)


def nothing_live(memory: VirtualMemory) -> bool:
    """Nothing is left in the books; a GPU has none, there its free memory is compared by the caller."""
    return getattr(memory, "live", (0, 0, 0)) == (0, 0, 0)

"""Tests on a GPU. Everything here is skipped, with the reason, where there is none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
# Files whose tests all size a cache by the device's free memory: nothing else may run meanwhile.
ALONE = ("engine", "sizing")


def _reason_to_skip() -> str | None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "run without TRITON_INTERPRET=1: the interpreter is for tests/interpret"
    if not torch.cuda.is_available():
        built_for = torch.version.cuda or torch.version.hip
        return "no GPU: torch " + (f"built for {built_for} finds no device" if built_for else "is a CPU build")
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _reason_to_skip()
    for item in items:
        if HERE not in item.path.parents:
            continue
        if item.path.stem in [f"test_{name}_gpu" for name in ALONE]:
            item.add_marker(pytest.mark.alone)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _clean_device() -> None:
    """Large buffers of one test must not starve the next one's memory measurements."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

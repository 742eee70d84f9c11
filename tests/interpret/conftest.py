"""Kernels in Triton's interpreter, which is chosen when they are imported: these tests need a process of their own."""

from __future__ import annotations

import os
from pathlib import Path

import numpy
import pytest
import triton

HERE = Path(__file__).parent


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


def _reason_to_skip() -> str | None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "run with TRITON_INTERPRET=1"
    if _version(triton.__version__) <= (3, 6) and _version(numpy.__version__) >= (2, 4):
        return (
            f"the interpreter of triton {triton.__version__} cannot run dynamic loops with numpy {numpy.__version__}: "
            "install numpy < 2.4"
        )
    return None


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "quick: the part that is repeated on every supported Triton release")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _reason_to_skip()
    for item in items:
        if reason is not None and HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))

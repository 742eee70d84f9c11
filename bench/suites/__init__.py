"""The suites by name. Each module holds one: its cases as data, and how one of them is measured."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.suite import Suite

NAMES = (
    "vmm",
    "states",
    "zero",
    "shrink",
    "sleep",
    "decode",
    "ratios",
    "prefill",
    "write",
    "mixed",
    "host",
    "engine",
    "sizing",
)


def load_suite(name: str) -> Suite:
    """Imports one suite. Raises `KeyError` with the names that exist."""
    if name not in NAMES:
        raise KeyError(f"no suite {name!r}: there are {', '.join(NAMES)}")
    suite: Suite = importlib.import_module(f"bench.suites.{name}").SUITE
    return suite


def load_suites(names: Sequence[str]) -> list[Suite]:
    """The named suites, or all of them, in the registry's order."""
    for name in names:
        load_suite(name)
    return [load_suite(name) for name in NAMES if not names or name in names]

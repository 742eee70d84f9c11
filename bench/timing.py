"""Samples of a duration and what is said about them."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass
class Samples:
    """Durations of one call, in microseconds."""

    values_us: list[float] = field(default_factory=list)
    skip: int = 0  # samples still to be left out: they warm up

    def add(self, duration_us: float) -> None:
        if self.skip:
            self.skip -= 1
        else:
            self.values_us.append(duration_us)

    @contextmanager
    def lap(self) -> Iterator[None]:
        """Adds the host's time for the body."""
        start = time.perf_counter()
        yield
        self.add((time.perf_counter() - start) * 1e6)

    @property
    def median_us(self) -> float:
        return float(np.median(self.values_us))

    def summary(self) -> dict[str, Any]:
        """`median_us`, `p20_us`, `p80_us` and how many samples there were."""
        p20, median, p80 = np.percentile(self.values_us, (20, 50, 80))
        return {
            "median_us": round(float(median), 3),
            "p20_us": round(float(p20), 3),
            "p80_us": round(float(p80), 3),
            "samples": len(self.values_us),
        }


def host_samples(call: Callable[[], object], *, calls: int, groups: int, between: Callable[[], object]) -> Samples:
    """The host's time per call over `groups` groups of `calls`; `between` (a device synchronisation) is not counted."""
    samples = Samples()
    call()
    for _ in range(groups):
        between()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        samples.add((time.perf_counter() - start) * 1e6 / calls)
    between()
    return samples

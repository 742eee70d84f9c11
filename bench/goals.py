"""What a case should reach, as numbers in its record, and what of that a record shows.

A case's `goals` map "floor_share" to the least share of the run's own floor, "us" to the most microseconds, "best" to
the most of the best peer's time, and a peer's name to the most of that peer's time. They are data: nothing is judged
while measuring, so a record can be read against other goals later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bench.case_result import best_peer

Goals = Mapping[str, float]


@dataclass(frozen=True)
class Outcome:
    """One goal and what was measured: a share, microseconds or a ratio of times, None where one of them is missing."""

    name: str
    goal: float
    value: float | None

    @property
    def reached(self) -> bool:
        if self.value is None:
            return False
        return self.value >= self.goal if self.name == "floor_share" else self.value <= self.goal

    @property
    def missed(self) -> bool:
        return self.value is not None and not self.reached

    @property
    def text(self) -> str:
        """As in "fa3 0.7441 > 0.7", "floor 92.31% < 93%" or "best not measured"."""
        name = "floor" if self.name == "floor_share" else self.name
        if self.value is None:
            return f"{name} not measured"
        sign = ("<" if self.missed else "≥") if self.name == "floor_share" else (">" if self.missed else "≤")
        if self.name == "floor_share":
            return f"floor {self.value:.2%} {sign} {100 * self.goal:g}%"
        if self.name == "us":
            return f"{self.value:.2f} {sign} {self.goal:g} µs"
        return f"{name} {self.value:.4f} {sign} {self.goal:.4g}"


def outcomes(case: dict[str, Any]) -> list[Outcome]:
    """Every goal of a record's case; none for records from before goals were kept."""
    return [Outcome(name, goal, _measured(case, name)) for name, goal in case.get("goals", {}).items()]


def goals_cell(case: dict[str, Any]) -> str:
    """ "reached", or the goals that were not, with what was measured instead; "-" for a case without goals."""
    found = outcomes(case)
    if not found:
        return "-"
    return "; ".join(outcome.text for outcome in found if not outcome.reached) or "reached"


def _measured(case: dict[str, Any], name: str) -> float | None:
    if not case["ok"]:
        return None
    ours = float(case["ours"]["median_us"])
    if name == "us":
        return ours
    if name == "floor_share":
        return case["floor_us"] / ours if case.get("floor_us") else None
    if name == "best":  # with a required peer missing, the best of the others is not the best
        best = best_peer(case) if case.get("compared") else None
        return ours / best[1] if best else None
    peer = case["peers"].get(name, {})
    return ours / peer["median_us"] if peer.get("ok") else None

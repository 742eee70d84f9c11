"""What a suite is: cases as data and a function that measures one of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.session import Session


class Case(Protocol):
    """A suite's case: frozen data with an id that starts with the suite's name and a slash.

    `goals` (bench/goals.py), where a case has them, go into its record as they are.
    """

    @property
    def id(self) -> str: ...

    @property
    def quick(self) -> bool:
        """Whether `--quick` runs it."""


@dataclass(frozen=True)
class Suite:
    """A registry entry."""

    name: str
    about: str
    cases: tuple[Any, ...]
    smoke_cases: tuple[Any, ...]  # tiny ones for a CPU
    run: Callable[[Session, Any], dict[str, Any]]  # one case's part of the record
    case_s: float  # estimated seconds a case on an H200, on average
    quick_case_s: float | None = None  # the same with `--quick`, where its cases or samples are fewer
    setup_s: float = 0.0  # estimated seconds before the first case: compiling kernels, with the peers' builds at hand
    modules: Callable[[Sequence[Any]], list[str]] | None = None  # what FlashInfer has to build for these cases
    warm: Callable[[Session, Any], None] | None = None  # compiles a case's kernels on small inputs

    def selected(self, *, quick: bool = False, smoke: bool = False) -> tuple[Any, ...]:
        """The cases of one kind of run."""
        if smoke:
            return self.smoke_cases
        return tuple(case for case in self.cases if case.quick or not quick)

    def seconds(self, *, quick: bool = False) -> float:
        """The estimated time of a run on an H200."""
        return self.setup_s + self.seconds_of(self.selected(quick=quick), quick=quick)

    def seconds_of(self, cases: Sequence[Any], *, quick: bool = False) -> float:
        """The estimated time of some cases, without what comes before them."""
        average = self.quick_case_s if quick and self.quick_case_s is not None else self.case_s
        return average * len(cases)

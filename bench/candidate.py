"""What is measured side by side in one case: ours and the peers."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

OURS = "ours"


@dataclass(frozen=True)
class Candidate:
    """One way to do a case's work.

    `run(i)` does it once over input set i and returns what is to be checked (or None, where the case looks at memory).
    """

    name: str
    run: Callable[[int], Any]
    settings: str = ""  # how it was called, for the record
    plan: Callable[[], object] | None = None  # a host step before each batch, timed beside the run
    sets: int | None = None  # input sets this candidate has, if fewer than the case's
    check_sets: bool = True  # False: its output is checked on set 0 only
    capturing: Callable[[], AbstractContextManager[object]] = nullcontext  # entered while its graph is captured


class NotApplicableError(Exception):
    """This candidate cannot do this case; the text says why."""


class WrongResultError(Exception):
    """A candidate's output differs from the reference."""


class DeviceLostError(Exception):
    """The CUDA context is unusable after `candidate` ran; only a new process can go on."""

    def __init__(self, candidate: str, text: str) -> None:
        super().__init__(text)
        self.candidate = candidate

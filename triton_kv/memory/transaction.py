"""One undo stack for driver work of many steps, over any number of reservations."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from triton_kv.errors import attach_failures


class Transaction:
    """All or nothing: every step appends its undo; leaving the block normally forgets them, an exception runs them.

    The undos run in reverse, each of them even if others fail. What fails there is collected in `undo_failures`, here
    and on the exception that goes on, and in the exception's notes. Never synchronises by itself.

    ```python
    with Transaction() as transaction:
        handle = memory.create(num_bytes)
        transaction.undo(memory.release, handle)
        ...
    ```
    """

    def __init__(self) -> None:
        self.undo_failures: list[BaseException] = []
        self._undos: list[tuple[Callable[..., object], tuple[Any, ...]]] = []

    def undo(self, function: Callable[..., object], *arguments: Any) -> None:
        """Have `function(*arguments)` called if the transaction fails later."""
        self._undos.append((function, arguments))

    def absorb(self, step: Transaction) -> None:
        """Take over the undos of a step that succeeded on its own."""
        self._undos += step._undos
        step._undos.clear()

    def commit(self) -> None:
        """Forget the undos: what was done stays."""
        self._undos.clear()

    def rollback(self) -> None:
        """Run the undos now, the latest first."""
        while self._undos:
            function, arguments = self._undos.pop()
            try:
                function(*arguments)
            except BaseException as failure:  # the remaining undos matter more, also than an interrupt
                self.undo_failures.append(failure)

    def __enter__(self) -> Transaction:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.commit()
            return
        self.rollback()
        attach_failures(error, self.undo_failures)

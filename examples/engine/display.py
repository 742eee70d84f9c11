"""What the demo prints: with colours where `rich` is installed, in plain text elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import triton_kv as tkv

from .engine import Engine
from .scheduler import Request

try:
    from rich.console import Console
    from rich.text import Text

    HAS_RICH = True
except ModuleNotFoundError:
    HAS_RICH = False

COLOURS = ("cyan", "green", "yellow", "magenta")
MIB = 1 << 20


class Display:
    def __init__(self, quiet: bool = False) -> None:
        self._console = Console(soft_wrap=True, quiet=quiet) if HAS_RICH else None
        self._quiet = quiet
        self._shown: dict[int, int] = {}  # stream: characters printed

    def line(self, text: str, style: str = "") -> None:
        if self._console:
            self._console.print(Text(text, style=style))
        elif not self._quiet:
            print(text, flush=True)

    def progress(self, text: str) -> Callable[[int, int], None]:
        """`update(done, total)` that prints a line for every quarter."""

        def update(done: int, total: int) -> None:
            if 4 * done // total > 4 * (done - 1) // total:
                self.line(f"{text} [{'#' * (20 * done // total):<20}] {done}/{total}")

        return update

    def stage(self, stage: tkv.StageRecord) -> None:
        cache = f"{stage.num_blocks:>6} blocks {stage.cache_bytes / MIB:>8.0f} MiB"
        free = f"free {stage.free_bytes / MIB:>8.0f} MiB"
        self.line(f"{stage.name:<18} {stage.seconds:>7.3f} s   {cache}   {free}   {stage.note}")

    def stream(self, index: int, text: str, finished: bool, width: int = 80) -> None:
        """Shows stream `index`, whose text so far is given: whole lines, so that several at once stay legible."""
        start = self._shown.get(index, 0)
        while (pending := text[start:]) and (finished or "\n" in pending or len(pending) > width):
            head = pending.split("\n", 1)[0]
            cut = len(head) if len(head) <= width else max(head.rfind(" ", 1, width + 1), 0) or width
            self.line(f"[{index + 1}] {head[:cut].strip()}".rstrip(), COLOURS[index % len(COLOURS)])
            start += cut + (pending[cut : cut + 1] == "\n")
        self._shown[index] = start

    def summary(self, engine: Engine, requests: Sequence[Request], seconds: float, num_steps: int) -> None:
        """How fast the requests were served, and at the end the plan's table."""
        prompt = sum(len(request.prompt_ids) for request in requests)
        new = sum(len(request.output_ids) for request in requests)
        self.line(
            f"\nserved {len(requests)} requests, {prompt} prompt tokens and {new} new ones, in {num_steps} steps and "
            f"{seconds:.2f} s: {new / seconds:.1f} tokens/s, {engine.runner.num_replays} graph replays\n"
        )
        self.line(str(engine.plan))

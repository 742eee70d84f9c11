"""What the demo prints: with colours and a moving bar where `rich` is installed, in plain text elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from .engine import Engine, Stage
from .scheduler import Request

try:
    from rich.console import Console
    from rich.progress import Progress
    from rich.text import Text

    HAS_RICH = True
except ModuleNotFoundError:
    HAS_RICH = False

COLOURS = ("cyan", "green", "yellow", "magenta")
MIB = 1 << 20


class Display:
    def __init__(self) -> None:
        self._console = Console(soft_wrap=True) if HAS_RICH else None
        self._shown: dict[int, int] = {}  # stream: characters printed

    def line(self, text: str, style: str = "") -> None:
        if self._console:
            self._console.print(Text(text, style=style))
        else:
            print(text, flush=True)

    @contextmanager
    def bar(self, text: str) -> Iterator[Callable[[int, int], None]]:
        """Yields `update(done, total)`; where nobody can watch a bar move, it prints a line for every quarter."""
        if self._console and self._console.is_terminal:
            with Progress(console=self._console, transient=True) as progress:
                task = progress.add_task(text, total=None)
                yield lambda done, total: progress.update(task, completed=done, total=total)
            return

        def report(done: int, total: int) -> None:
            if 4 * done // total > 4 * (done - 1) // total:
                self.line(f"{text} [{'#' * (20 * done // total):<20}] {done}/{total}")

        yield report

    def stage(self, stage: Stage) -> None:
        cache = f"{stage.num_blocks:>6} blocks {stage.mapped_bytes / MIB:>8.0f} MiB"
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
        """The table of stages and bytes, and how fast the requests were served."""
        self.line(f"\n{'stage':<18} {'seconds':>8} {'blocks':>8} {'cache bytes':>16} {'free bytes':>16}  note", "bold")
        for s in engine.stages:
            numbers = f"{s.seconds:>8.3f} {s.num_blocks:>8} {s.mapped_bytes:>16,} {s.free_bytes:>16,}"
            self.line(f"{s.name:<18} {numbers}  {s.note}")
        cache, tokens = engine.cache, engine.cache.num_blocks * engine.cache.block_size
        self.line(
            f"\ncache: {cache.num_blocks} of {cache.capacity} blocks ({tokens} tokens); bytes: "
            f"{cache.reserved_bytes:,} of addresses, {cache.mapped_bytes:,} mapped, {cache.committed_bytes:,} in blocks"
        )
        prompt = sum(len(request.prompt_ids) for request in requests)
        new = sum(len(request.output_ids) for request in requests)
        self.line(
            f"served {len(requests)} requests, {prompt} prompt tokens and {new} new ones, in {num_steps} steps and "
            f"{seconds:.2f} s: {new / seconds:.1f} tokens/s, {engine.runner.num_replays} graph replays"
        )

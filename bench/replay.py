"""Device time of repeated launches: a captured graph on a GPU, plain calls on a CPU."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

SLEEP_CYCLES_PER_US = 2000  # torch.cuda._sleep counts SM clock cycles; about 2 GHz at most


@dataclass
class Replay:
    """`launches` calls that are started together and timed as one sample."""

    start: Callable[[], None]
    launches: int
    last_set: int  # the input set of the last call
    output: Any  # what the last call returned


def graph_replay(run: Callable[[int], Any], *, launches: int, sets: int) -> Replay:
    """A CUDA graph of `launches` calls `run(0), run(1), ...` over `sets` input sets in turn.

    Warms up each set on a side stream first, as capture needs it. Synchronises.
    """
    current = torch.cuda.current_stream()
    side = torch.cuda.Stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        for index in range(sets):
            run(index)
    current.wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    output = None
    with torch.cuda.graph(graph):
        for index in range(launches):
            output = run(index % sets)
    return Replay(graph.replay, launches, (launches - 1) % sets, output)


def eager_replay(run: Callable[[int], Any], *, launches: int, sets: int) -> Replay:
    """Eager calls, for what capture would change. On a GPU a sleeping kernel in front hides the host's time."""

    def start() -> None:
        for index in range(launches):
            run(index % sets)

    return Replay(start, launches, (launches - 1) % sets, None)


def cuda_group_us(replay: Replay, *, samples: int, hide_us: float = 0.0) -> list[float]:
    """Times `samples` replays with events, after one that is not counted. Microseconds per launch. Synchronises.

    The replays are queued together, so the device never waits for the host between them. `hide_us` puts a kernel that
    sleeps so long in front of each, for launches that the host queues slower than the device runs them.
    """
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(samples)]
    replay.start()
    for begin, end in pairs:
        if hide_us:
            torch.cuda._sleep(int(hide_us * SLEEP_CYCLES_PER_US))
        begin.record()
        replay.start()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) * 1e3 / replay.launches for begin, end in pairs]


def cpu_group_us(replay: Replay, *, samples: int) -> list[float]:
    """Times `samples` replays with the host's clock. Microseconds per launch."""
    times = []
    for _ in range(samples):
        begin = time.perf_counter()
        replay.start()
        times.append((time.perf_counter() - begin) * 1e6 / replay.launches)
    return times

"""Real processes in a gloo group: each runs one function, and what came of it comes back."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 5.0  # of the group
DEADLINE_S = 40.0  # of a whole scenario: far beyond every timeout in it


@dataclass(frozen=True)
class Outcome:
    """What a rank's function returned or raised. A killed process has neither."""

    value: Any = None
    error: str | None = None  # the type's name
    text: str = ""
    failures: dict[int, str] = field(default_factory=dict)  # of a RankError
    seconds: float = 0.0
    exit_code: int | None = None


# A server that has imported torch once and runs nothing forks every rank: a process of its own in milliseconds.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "triton_kv", "rank_processes"])


def run_ranks(
    function: Callable[..., Any], world_size: int, *arguments: Any, timeout_s: float = TIMEOUT_S, backend: str = "gloo"
) -> list[Outcome]:
    """`function(rank, *arguments)` on `world_size` ranks of a fresh group over the loopback; outcomes by rank."""
    with tempfile.TemporaryDirectory() as folder:
        ends, processes = [], []
        for rank in range(world_size):
            here, there = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_run_rank, args=(there, folder, rank, world_size, timeout_s, backend, function, arguments)
            )
            process.start()
            there.close()
            ends.append(here)
            processes.append(process)
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + DEADLINE_S
        try:
            while len(outcomes) < world_size and (left := deadline - time.monotonic()) > 0:
                open_ends = [end for rank, end in enumerate(ends) if rank not in outcomes]
                for end in wait(open_ends, left):
                    rank = ends.index(end)
                    outcomes[rank] = _receive(end)
        finally:
            for process in processes:
                process.join(max(0.1, min(5.0, deadline - time.monotonic())))
                if process.is_alive():
                    process.kill()
                    process.join()
        hung = [rank for rank in range(world_size) if rank not in outcomes]
        assert not hung, f"ranks {hung} gave no answer in {DEADLINE_S} s"
        return [
            Outcome(**{**vars(outcomes[rank]), "exit_code": processes[rank].exitcode}) for rank in range(world_size)
        ]


def _receive(end: Connection) -> Outcome:
    try:
        return end.recv()
    except EOFError:  # the process died
        return Outcome()


def _run_rank(
    end: Connection,
    folder: str,
    rank: int,
    world_size: int,
    timeout_s: float,
    backend: str,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    if backend != "gloo":
        register_backend_without_host_memory(backend)
    # A file instead of a port: nothing to choose, nothing to collide with.
    dist.init_process_group(
        backend,
        init_method=f"file://{Path(folder) / 'rendezvous'}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    started = time.perf_counter()
    try:
        outcome = Outcome(value=function(rank, *arguments), seconds=time.perf_counter() - started)
    except BaseException as error:
        outcome = Outcome(
            error=type(error).__name__,
            text=str(error),
            failures=getattr(error, "failures", {}),
            seconds=time.perf_counter() - started,
        )
    end.send(outcome)
    end.close()
    dist.destroy_process_group()


def register_backend_without_host_memory(name: str) -> None:
    """A backend that serves CUDA tensors alone, as NCCL does."""

    def create(store: Any, rank: int, world_size: int, timeout: timedelta) -> Any:
        return dist.ProcessGroupGloo(store, rank, world_size, timeout)

    dist.Backend.register_backend(name, create, devices=["cuda"])

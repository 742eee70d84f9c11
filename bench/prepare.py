"""Before the first case: FlashInfer's modules and the Triton kernels of all cases, compiled side by side."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from bench.peers import flashinfer, flashinfer_build

if TYPE_CHECKING:
    from bench.run import RunOptions
    from bench.session import Session
    from bench.suite import Suite

MAX_WORKERS = 8


def prepare(session: Session, options: RunOptions, chosen: list[tuple[Suite, tuple[Any, ...]]]) -> None:
    """Takes at most `options.prepare_s` seconds. What is not ready is absent (FlashInfer) or compiles in its case."""
    deadline = time.monotonic() + options.prepare_s
    modules: list[str] = []
    if session.peer_available("flashinfer"):
        for suite, cases in chosen:
            if suite.modules is not None:
                modules += [name for name in suite.modules(cases) if name not in modules]
    build = flashinfer_build.start(modules) if modules else None
    workers = _start_workers(options, chosen) if options.warm else []
    if workers:
        print(f"  compiling kernels ahead in {len(workers)} processes", flush=True)
    for worker in workers:
        try:
            worker.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
    if workers:
        failed = sum(worker.returncode != 0 for worker in workers)
        print(f"  kernels compiled ({failed} processes failed)  t={session.elapsed_s:.0f}s", flush=True)
    if build is None:
        return
    outcome = flashinfer_build.wait(build, max(1.0, deadline - time.monotonic()))
    for name in modules:
        text = outcome.get(name, f"not built within {options.prepare_s:.0f} s")
        print(f"  flashinfer {name}: {text}", flush=True)
        if text.startswith("built"):
            flashinfer.built.add(name)
    session.peers["flashinfer"]["modules"] = {name: outcome.get(name, "not built in time") for name in modules}
    print(f"  flashinfer ready  t={session.elapsed_s:.0f}s", flush=True)


def _start_workers(options: RunOptions, chosen: list[tuple[Suite, tuple[Any, ...]]]) -> list[subprocess.Popen[bytes]]:
    cases = sum(len(cases) for suite, cases in chosen if suite.warm is not None)
    count = min(MAX_WORKERS, (os.cpu_count() or 2) // 2, -(-cases // 2))
    return [
        subprocess.Popen(
            [sys.executable, "-m", "bench.warm", options.to_json(), str(share), str(count)],
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        for share in range(count)
    ]

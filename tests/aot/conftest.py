"""Compilation for GPUs that are not here. Needs compiled kernels, so a process without the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Set in processes that fill the disk cache ahead of the tests: "2/8" compiles every eighth job from the third on.
PART = os.environ.get("AOT_PART")
# A process takes some seconds to start: fewer compilations than this are not worth one.
FEW = 30
MOST_PROCESSES = 16


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "quick: the part that is repeated on every supported Triton release")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="run without TRITON_INTERPRET=1"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compile the selected jobs in several processes first; the tests then find them in Triton's disk cache.

    Not under pytest-xdist, whose workers are several processes already.
    """
    if hasattr(session.config, "workerinput") or session.config.getoption("numprocesses", None):
        return
    jobs = [item for item in session.items if HERE in item.path.parents and "job" in getattr(item, "fixturenames", ())]
    if PART is not None:
        part, num_parts = map(int, PART.split("/"))
        session.items[:] = jobs[part::num_parts]
        return
    num_processes = min(len(os.sched_getaffinity(0)), len(jobs) // FEW, MOST_PROCESSES)
    if num_processes < 2 or session.config.option.collectonly or os.environ.get("TRITON_INTERPRET") == "1":
        return
    command = [
        sys.executable,
        "-m",
        "pytest",
        *session.config.invocation_params.args,
        "-p",
        "no:cacheprovider",
        "--maxfail=999999",
    ]
    workers = [
        subprocess.Popen(
            command,
            cwd=session.config.invocation_params.dir,
            env={**os.environ, "AOT_PART": f"{part}/{num_processes}"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for part in range(num_processes)
    ]
    for worker in workers:  # what fails in them fails again in the test, and is reported there
        worker.wait()

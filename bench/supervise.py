"""Runs the measuring process, and starts another where a candidate took it down."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.candidate import OURS
from bench.run import DEVICE_LOST, RunOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_RESTARTS = 12
WORKER = (sys.executable, "-m", "bench", "worker")


def supervise(options: RunOptions, worker: Sequence[str] = WORKER) -> int:
    """Runs to the end. A candidate that kills the process is left out of its case from then on, and marked as failed.

    Returns the last process's exit code: 0 once every case is recorded.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        state = Path(folder)
        for _ in range(MAX_RESTARTS):
            process = subprocess.Popen([*worker, options.to_json(), str(state)])
            try:
                code = process.wait()
            except KeyboardInterrupt:
                process.wait()
                raise
            if code == 0:
                return 0
            place = _read(state / "place.json")
            if not place.get("case"):
                return code
            ban(state, place["case"], place.get("candidate") or OURS, code)
            options = replace(options, warm=False)  # done by the first process
            print(f"  {place['case']}: the process ended ({code}) in {place.get('candidate')}; going on", flush=True)
        return code


def ban(state: Path, case_id: str, candidate: str, code: int) -> None:
    """Leaves a candidate out of a case in the next process; a second death there ends the case."""
    known: dict[str, Any] = _read(state / "state.json") or {"bans": {}, "done": []}
    how = "took the device down" if code == DEVICE_LOST else f"ended the process ({describe_code(code)})"
    key = f"{case_id} {candidate}"
    if key in known["bans"]:
        key = f"{case_id} {OURS}"
    known["bans"][key] = f"{candidate} {how}"
    (state / "state.json").write_text(json.dumps(known), encoding="utf-8")


def describe_code(code: int) -> str:
    """An exit code in words."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _read(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return value
    except (OSError, ValueError):
        return {}

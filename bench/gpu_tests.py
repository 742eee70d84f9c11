"""Runs tests/gpu and writes a record: `python -m bench.gpu_tests --out bench/results/<gpu>/gpu_tests.json`.

Tests share the GPU among several processes where pytest-xdist is installed; those marked `alone` (they read free
memory) run by themselves. `--memcheck` runs the others, the kernels' tests among them, under `compute-sanitizer`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

from bench.provenance import provenance, source_id

ROOT = Path(__file__).parents[1]
TESTS = ["tests/gpu"]
SANITIZER = (
    *("compute-sanitizer", "--tool", "memcheck"),
    # Not what libraries ask the driver for and handle: cuda-python looks up functions that older drivers lack.
    *("--report-api-errors", "no"),
    *("--target-processes", "all", "--error-exitcode", "99"),
)


def run_pytest(
    files: list[str], *, prefix: tuple[str, ...] = (), processes: int = 1, more: list[str]
) -> dict[str, Any]:
    """One pytest run: its exit code, seconds, and every test's outcome by id."""
    has_xdist = importlib.util.find_spec("xdist") is not None
    parallel = ["-n", str(processes)] if processes > 1 and has_xdist else []
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [*prefix, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        # Several processes with a thread for each core would only wait for each other.
        environment = {**os.environ, "OMP_NUM_THREADS": "1"} if parallel else None
        started = time.perf_counter()
        done = subprocess.run(
            [*command, *parallel, *files, *more], cwd=ROOT, capture_output=bool(prefix), text=True, env=environment
        )
        outcomes: dict[str, str] = {}
        for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
            found = {child.tag for child in case}
            outcome = "failed" if found & {"failure", "error"} else "skipped" if "skipped" in found else "passed"
            outcomes[f"{case.get('classname')}::{case.get('name')}"] = outcome
    run: dict[str, Any] = {
        "command": shlex.join(["python", *command[len(prefix) + 1 : -1], *parallel, *files, *more]),
        "exit_code": done.returncode,
        "seconds": round(time.perf_counter() - started, 1),
        "outcomes": outcomes,
    }
    if prefix:
        run["command"] = " ".join([*prefix, run["command"]])
        run["summaries"] = sorted({line for line in done.stdout.splitlines() if "ERROR SUMMARY" in line})
        run["errors"] = errors_of(done.stdout)
        print(done.stdout[-2000:], *run["errors"].items(), sep="\n")
    return run


def errors_of(report: str) -> dict[str, int]:
    """The sanitizer's errors by their headlines, each with its number: the lines that follow each are indented more."""
    counted: Counter[str] = Counter()
    for line in report.splitlines():
        text = line.removeprefix("========= ")
        if text != line and text[:1].isalpha() and not text.startswith(("COMPUTE-SANITIZER", "ERROR SUMMARY")):
            counted[text.partition(" at ")[0]] += 1
    return dict(counted.most_common(20))


def run_again(record: dict[str, Any], more: list[str]) -> list[dict[str, Any]]:
    """The record's runs without their failed tests, and a run of those: for tests that were wrong, not the sources."""
    if record["source_id"] != source_id():
        raise SystemExit(f"the record's sources {record['source_id']} are not these, {source_id()}: run all tests")
    failed: list[str] = []
    for run in record["runs"]:
        for name, outcome in list(run["outcomes"].items()):
            if outcome == "failed":
                module, _, test = name.partition("::")
                del run["outcomes"][name]
                failed.append(f"{module.replace('.', '/')}.py::{test}")
        run["exit_code"] = 0  # what failed is judged by the new run
    return [*record["runs"], run_pytest(failed, more=more)]


def main() -> int:
    """Exit code 0 if every run passed."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_tests", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--memcheck", action="store_true", help="the tests that are not alone, under compute-sanitizer")
    parser.add_argument("--again", type=Path, help="a record of the same sources whose failed tests are to run again")
    parser.add_argument("--processes", type=int, default=6)
    parser.add_argument("more", nargs="*", help="passed on to pytest, after --")
    options = parser.parse_args()
    prefix = SANITIZER if options.memcheck else ()
    if options.again:
        runs = run_again(json.loads(options.again.read_text()), options.more)
    else:
        shared = ["-m", "not alone", *options.more]
        runs = [run_pytest(TESTS, prefix=prefix, processes=options.processes, more=shared)]
        if not options.memcheck:
            write(runs, options)  # what is known already, should the rest not come to its end
            runs.append(run_pytest(TESTS, more=["-m", "alone", *options.more]))
    write(runs, options)
    return 0 if all(run["exit_code"] == 0 for run in runs) else 1


def write(runs: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Writes the record and prints its counts."""
    counts: dict[str, int] = {"passed": 0, "failed": 0, "skipped": 0}
    for run in runs:
        for outcome in run["outcomes"].values():
            counts[outcome] += 1
    environment = provenance(["python", "-m", "bench.gpu_tests", *sys.argv[1:]])
    record = {
        "suite": "memcheck" if options.memcheck else "gpu_tests",
        "source_id": environment["source_id"],
        "env": environment,
        "counts": counts,
        "runs": runs,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{record['suite']}: {counts}, source {record['source_id']}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())

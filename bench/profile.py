"""Hardware counters of attention kernels, by Nsight Compute: `python -m bench profile [--case PATTERN] [--out FILE]`.

Ours and FlashAttention-3 run once each over a case's inputs, in a process of their own under `ncu`. A kernel profiled
runs several times with cold caches and clocks left alone: its duration is no timing, its shares say what limits it.
"""

from __future__ import annotations

import csv
import fnmatch
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench.attention_inputs import AttentionInputs
from bench.attention_suite import ours
from bench.candidate import Candidate
from bench.measure import describe
from bench.peers.registry import peer_candidates, probe_peer
from bench.provenance import provenance
from bench.session import Session
from bench.suites.decode import SUITE as DECODE
from bench.suites.prefill import SUITE as PREFILL

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bench.attention_case import AttentionCase

DEFAULT_CASES = (
    "decode/B1-L8k,decode/B8-L32k,decode/B64-L8k,decode/B64-L8k-b256,decode/skew,prefill/1x8k,prefill/1x8k-d64"
)
SECTIONS = ("SpeedOfLight", "LaunchStats", "Occupancy", "SchedulerStats", "MemoryWorkloadAnalysis")
# Nsight Compute's names, with the unit where it matters, and what the record calls them.
METRICS = {
    ("Duration", "ns"): "duration_ns",
    ("DRAM Throughput", "%"): "dram_percent",
    ("L1/TEX Cache Throughput", "%"): "l1_percent",
    ("L2 Cache Throughput", "%"): "l2_percent",
    ("Compute (SM) Throughput", "%"): "sm_percent",
    ("Memory Throughput", "byte/s"): "dram_bytes_per_s",
    ("L2 Hit Rate", "%"): "l2_hit_percent",
    ("Issued Warp Per Scheduler", None): "issued_warps_a_cycle",
    ("Achieved Occupancy", "%"): "occupancy_percent",
    ("Registers Per Thread", None): "registers",
    ("Grid Size", None): "programs",
    ("Block Size", None): "threads",
}
MARK = "spin_kernel"  # torch's sleep, launched in front of each candidate


def profile(pattern: str, out: Path | None) -> dict[str, Any]:
    """Profiles and returns the record, printing a line for each kernel. Raises `RuntimeError` where ncu gives none."""
    cases = [case.id for case in cases_of(pattern)]
    with tempfile.TemporaryDirectory() as folder:
        log, order = Path(folder, "ncu.csv"), Path(folder, "order.json")
        sections = [word for section in SECTIONS for word in ("--section", section)]
        command = ["ncu", *sections, "--page", "details", "--csv", "--print-units", "base", "--log-file", str(log)]
        inner = [sys.executable, "-m", "bench.profile", str(order), *cases]
        try:
            done = subprocess.run(
                [*command, "--clock-control", "none", "--profile-from-start", "off", *inner], check=False
            )
        except FileNotFoundError:
            raise RuntimeError("no ncu on the PATH: Nsight Compute reads the counters") from None
        if done.returncode or not order.exists():
            raise RuntimeError(f"ncu ended with {done.returncode}:\n{log.read_text()[-2000:] if log.exists() else ''}")
        kernels = kernels_of(log.read_text(encoding="utf-8").splitlines())
        runs = json.loads(order.read_text(encoding="utf-8"))
    environment = provenance(["python", "-m", "bench", "profile", "--case", pattern])
    record = {
        "suite": "profile",
        "source_id": environment.pop("source_id"),
        "env": environment,
        "profiles": by_candidate(kernels, runs),
    }
    for entry in record["profiles"]:
        print(f"{entry['id']} {entry['candidate']}")
        for kernel in entry["kernels"]:
            print("   ", ", ".join(f"{name} {value}" for name, value in kernel.items()))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return record


def cases_of(pattern: str) -> list[AttentionCase]:
    """The cases of decode and prefill whose ids match one of the patterns, separated by commas."""
    parts = pattern.split(",")
    cases = (*DECODE.cases, *PREFILL.cases)
    return [case for case in cases if any(fnmatch.fnmatch(case.id, part) for part in parts)]


def kernels_of(lines: Iterable[str]) -> list[dict[str, Any]]:
    """The kernels in ncu's CSV of details, in the order in which they ran, each with its `METRICS`."""
    rows = iter(lines)
    header = next((row for row in rows if row.startswith('"ID"')), None)
    if header is None:
        raise RuntimeError("ncu profiled no kernel")
    kernels: dict[str, dict[str, Any]] = {}
    for row in csv.DictReader([header, *rows]):
        kernel = kernels.setdefault(row["ID"], {"kernel": row["Kernel Name"].partition("(")[0]})
        unit, text = row["Metric Unit"], row["Metric Value"].replace(",", "")
        for (metric, wanted), name in METRICS.items():
            if row["Metric Name"] == metric and (wanted is None or unit.endswith(wanted)):
                number = float(text)
                kernel[name] = (
                    int(number) if number.is_integer() and unit in ("", "register/thread", "thread") else number
                )
                if name in ("duration", "dram_rate"):
                    kernel[f"{name}_unit"] = unit
    return list(kernels.values())


def by_candidate(kernels: list[dict[str, Any]], runs: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Kernels shared out to the runs they belong to: each run begins with a mark."""
    entries: list[dict[str, Any]] = []
    for kernel in kernels:
        if MARK in kernel["kernel"]:
            if len(entries) == len(runs):
                raise RuntimeError(f"more than {len(runs)} marks among the kernels that ncu saw")
            case_id, candidate = runs[len(entries)]
            entries.append({"id": case_id, "candidate": candidate, "kernels": []})
        elif entries:
            entries[-1]["kernels"].append(kernel)
    if len(entries) != len(runs):
        raise RuntimeError(f"{len(runs)} runs, but ncu saw {len(entries)} marks")
    return entries


def _run(order: Path, ids: list[str]) -> None:
    """What runs under ncu: each case's candidates once, behind a mark."""
    session = Session(torch.device("cuda", 0))
    session.peers = {"fa3": probe_peer("fa3")}
    cases = {case.id: case for case in cases_of("*")}
    runs: list[tuple[str, str]] = []
    for case_id in ids:
        with AttentionInputs(session, cases[case_id]) as inputs:
            peers = peer_candidates(session, ("fa3",), lambda module: module.attention(inputs))
            for candidate in (ours(inputs), *peers):
                if _profiled(session, case_id, candidate, inputs.sets):
                    runs.append((case_id, candidate.name))
    order.write_text(json.dumps(runs), encoding="utf-8")


def _profiled(session: Session, case_id: str, candidate: Candidate, sets: int) -> bool:
    try:
        if candidate.plan is not None:
            candidate.plan()
        candidate.run(0)  # compiles
        session.synchronize()
    except Exception as error:
        print(f"{case_id} {candidate.name}: {describe(error)}", flush=True)
        return False
    torch.cuda.profiler.start()
    torch.cuda._sleep(1000)
    candidate.run(sets - 1)
    session.synchronize()
    torch.cuda.profiler.stop()
    return True


if __name__ == "__main__":
    _run(Path(sys.argv[1]), sys.argv[2:])

"""One process of a run: prepares peers and kernels, measures the rooflines, then one case after the other."""

from __future__ import annotations

import fnmatch
import gc
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from bench.candidate import OURS, DeviceLostError
from bench.case_result import failed_case
from bench.measure import describe
from bench.provenance import gpu_state, provenance
from bench.record import new_record, put_case, read_record, write_record
from bench.rooflines import measure_rooflines
from bench.session import Session
from bench.suites import load_suites
from bench.table import bar, case_line

if TYPE_CHECKING:
    from bench.suite import Suite

DEVICE_LOST = 75  # exit code: start a new process and go on
RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True)
class RunOptions:
    """What `python -m bench run` was asked for."""

    suites: tuple[str, ...] = ()
    quick: bool = False
    smoke: bool = False
    peers: bool = True
    warm: bool = True
    case: str | None = None  # a pattern for ids
    out: str | None = None
    prepare_s: float = 240.0  # for compiling and for the peers' builds
    command: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RunOptions:
        values = json.loads(text)
        return cls(**{**values, "suites": tuple(values["suites"])})

    def selected(self) -> list[tuple[Suite, tuple[Any, ...]]]:
        """The suites with the cases to run."""
        chosen = []
        for suite in load_suites(self.suites):
            cases = suite.selected(quick=self.quick, smoke=self.smoke)
            if self.case:
                cases = tuple(case for case in cases if fnmatch.fnmatch(case.id, self.case))
            if cases:
                chosen.append((suite, cases))
        return chosen

    def seconds(self) -> float:
        """The estimated time on an H200. What is prepared is prepared once, for all suites together."""
        chosen = self.selected()
        prepared = max((suite.setup_s for suite, _ in chosen), default=0.0)
        return prepared + sum(suite.seconds_of(cases, quick=self.quick) for suite, cases in chosen)

    def path_of(self, suite: str, gpu: str) -> Path:
        """Where a suite's record goes. Parts and quick runs do not replace the full record."""
        if self.out is None:
            suffix = ("-quick" if self.quick else "") + ("-part" if self.case else "")
            return RESULTS / gpu / f"{suite}{suffix}.json"
        out = Path(self.out)
        return out if out.suffix == ".json" else out / f"{suite}.json"


def gpu_folder() -> str:
    """`h200` for an NVIDIA H200, `cpu` without a GPU."""
    if not torch.cuda.is_available():
        return "cpu"
    return torch.cuda.get_device_name(0).lower().removeprefix("nvidia ").replace(" ", "-")


def run(options: RunOptions, state: Path) -> list[Path]:
    """Measures what `state` does not list as done; writes the records after every case. Returns their paths.

    Ends the process with `DEVICE_LOST` when a candidate took the device down; `state` then says which.
    """
    device = torch.device("cpu") if options.smoke or not torch.cuda.is_available() else torch.device("cuda", 0)
    if device.type == "cpu" and not options.smoke:
        raise SystemExit("no CUDA device: only --smoke runs here")
    known = _read(state / "state.json", {"bans": {}, "done": []})
    session = Session(
        device,
        quick=options.quick,
        smoke=options.smoke,
        use_peers=options.peers and not options.smoke,
        bans=known["bans"],
        place=state / "place.json",
    )
    chosen = options.selected()
    session.enter("", "preparing")
    env = _prepare(session, options, chosen, known)
    gpu, total, number = gpu_folder(), sum(len(cases) for _, cases in chosen), 0
    paths = []
    for suite, cases in chosen:
        path = options.path_of(suite.name, gpu)
        paths.append(path)
        if str(path) in known["done"]:
            record = read_record(path)
        else:
            record = new_record(suite.name, env, session.rooflines, session.peers)
            write_record(record, path)
            known["done"].append(str(path))
            (state / "state.json").write_text(json.dumps(known), encoding="utf-8")
        have = {case["id"] for case in record["cases"]}
        for case in cases:
            number += 1
            if case.id in have:
                continue
            put_case(record, _one(session, suite, case))
            write_record(record, path)
            line = case_line(record["cases"][-1])
            print(f"{bar(number, total)} {line}  t={session.elapsed_s:.0f}s", flush=True)
            gc.collect()
            if session.on_gpu:
                torch.cuda.empty_cache()
    session.enter("", "done")
    return paths


def _prepare(
    session: Session, options: RunOptions, chosen: list[tuple[Suite, tuple[Any, ...]]], known: dict[str, Any]
) -> dict[str, Any]:
    """Peers, kernels and rooflines into the session. Returns the environment for the records."""
    if session.use_peers:
        from bench.peers.registry import probe_peers

        session.peers = probe_peers()
        for name, peer in session.peers.items():
            print(f"  peer {name}: {peer.get('version') or 'absent: ' + peer['reason']}", flush=True)
    if session.on_gpu:
        from bench.prepare import prepare

        prepare(session, options, chosen)
    session.rooflines = known.get("rooflines") or measure_rooflines(session.device, quick=options.quick)
    known["rooflines"] = session.rooflines  # a process that takes over keeps them
    print(f"  rooflines: {session.rooflines}  t={session.elapsed_s:.0f}s", flush=True)
    env = {**provenance(options.command or sys.argv), "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    env |= gpu_state()  # clocks right after the matrix products
    if session.on_gpu:
        env["gpu"] = env["gpu"] or torch.cuda.get_device_name(session.device)
    return {**env, "quick": options.quick, "smoke": options.smoke}


def _one(session: Session, suite: Suite, case: Any) -> dict[str, Any]:
    result = _measured(session, suite, case)
    if goals := getattr(case, "goals", None):
        result["goals"] = dict(goals)
    return result


def _measured(session: Session, suite: Suite, case: Any) -> dict[str, Any]:
    reason = session.bans.get(f"{case.id} {OURS}")
    if reason:
        return failed_case(case.id, reason)
    session.enter(case.id, OURS)  # until a candidate is at work, a crash is ours
    started = time.monotonic()
    try:
        result = suite.run(session, case)
    except DeviceLostError as lost:
        _give_up(session, case.id, lost.candidate, str(lost))
    except Exception as error:
        try:
            session.synchronize()
        except Exception:
            _give_up(session, case.id, OURS, describe(error))
        result = failed_case(case.id, describe(error))
    result["seconds"] = round(time.monotonic() - started, 2)
    return result


def _give_up(session: Session, case_id: str, candidate: str, text: str) -> NoReturn:
    """Ends the process at once: finalisers would only meet the broken context."""
    print(f"  {case_id}: {candidate} took the device down: {text}", flush=True)
    session.enter(case_id, candidate)
    sys.stderr.flush()
    os._exit(DEVICE_LOST)


def _read(path: Path, default: dict[str, Any]) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else default

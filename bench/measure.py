"""Measures the candidates of one case side by side: checked first, then timed in turn with idle in between."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from bench.candidate import OURS, Candidate, DeviceLostError, NotApplicableError
from bench.replay import Replay, cpu_group_us, cuda_group_us, eager_replay, graph_replay
from bench.timing import Samples, host_samples

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.session import Session


@dataclass(frozen=True)
class Effort:
    """How long a case is measured."""

    rounds: int = 4  # times that every candidate gets its turn
    samples: int = 6  # replays a turn, at most
    replay_us: float = 1000.0  # a replay holds as many launches as the floor says fit into this
    max_launches: int = 64
    idle_s: float = 0.01  # between turns: power moves long prefill by 10% (H200)
    turn_us: float = 40_000.0  # a turn stops taking samples after about this long
    captured: bool = True  # a CUDA graph; False: eager launches queued behind a sleeping kernel
    host_calls: int = 20  # eager calls for the host's time; 0: not taken


SMOKE_EFFORT = Effort(rounds=2, samples=2, max_launches=2, idle_s=0.0, host_calls=2)


@dataclass
class _Entry:
    candidate: Candidate
    result: dict[str, Any]
    samples: Samples
    replay: Replay | None = None
    count: int = 0  # samples a turn
    hide_us: float = 0.0  # how long a sleeping kernel hides the host's launches


def measure(
    session: Session,
    case_id: str,
    candidates: Sequence[Candidate],
    *,
    sets: int,
    floor_us: float | None,
    effort: Effort,
    verify: Callable[[Any, int], float],
    poison: Callable[[int], None] | None = None,
) -> dict[str, dict[str, Any]]:
    """Results by candidate name, each with `ok` and either times or an `error`.

    `verify(output, set)` returns the error against the reference or raises `WrongResultError`; it runs on the first
    input set by an eager call, and on the replay's last set once more. `poison(set)` spoils outputs before each.
    Raises `DeviceLostError` where a candidate leaves the device unusable.
    """
    if session.smoke:
        effort = SMOKE_EFFORT
    elif session.quick:
        effort = replace(effort, rounds=min(effort.rounds, 3))
    entries = []
    for candidate in candidates:
        if session.is_banned(case_id, candidate.name):
            result = {"ok": False, "error": session.ban_reason(case_id, candidate.name)}
            entries.append(_Entry(candidate, result, Samples()))
            continue
        session.enter(case_id, candidate.name)
        entry = _Entry(candidate, {"ok": True}, Samples())
        entries.append(entry)
        try:
            _prepare(session, entry, sets=sets, floor_us=floor_us, effort=effort, verify=verify, poison=poison)
        except Exception as error:
            entry.replay = None
            entry.result = {"ok": False, "error": describe(error)}
            if isinstance(error, NotApplicableError):
                entry.result["not_applicable"] = True
            require_device(session, candidate.name, error)
    ready = [entry for entry in entries if entry.replay is not None]
    ours = next((entry for entry in ready if entry.candidate.name == OURS), None)
    again = Samples()  # of the same code: what differs is noise
    turns = [(entry, entry.samples) for entry in ready]
    if ours is not None:
        turns.append((ours, again))
    for turn in range(effort.rounds):
        shift = turn % max(len(turns), 1)
        for entry, samples in turns[shift:] + turns[:shift]:
            session.enter(case_id, entry.candidate.name)
            time.sleep(effort.idle_s)
            try:
                for duration in _group(session, entry):
                    samples.add(duration)
            except Exception as error:
                raise DeviceLostError(entry.candidate.name, describe(error)) from error
    for entry in ready:
        entry.result.update(entry.samples.summary())
    if ours is not None:
        ours.result["again_us"] = round(again.median_us, 3)
        ours.result["noise"] = round(abs(again.median_us / ours.samples.median_us - 1), 4)
    session.enter(case_id, "")
    return {entry.candidate.name: entry.result for entry in entries}


def _prepare(
    session: Session,
    entry: _Entry,
    *,
    sets: int,
    floor_us: float | None,
    effort: Effort,
    verify: Callable[[Any, int], float],
    poison: Callable[[int], None] | None,
) -> None:
    candidate, result = entry.candidate, entry.result
    sets = min(sets, candidate.sets or sets)
    if candidate.settings:
        result["settings"] = candidate.settings
    if candidate.plan is not None:
        candidate.plan()
        result["plan_host_us"] = _host_us(session, candidate.plan, effort)
    result["error_norm"] = _checked(session, lambda: candidate.run(0), 0, verify, poison)
    if effort.host_calls:
        result["host_us"] = _host_us(session, lambda: candidate.run(0), effort)
    launches = _launches(sets, floor_us, effort)
    if not session.on_gpu:
        with candidate.capturing():
            entry.replay = eager_replay(candidate.run, launches=launches, sets=sets)
        entry.count = effort.samples
        return
    make = graph_replay if effort.captured else eager_replay
    with candidate.capturing():
        replay = make(candidate.run, launches=launches, sets=sets)
    if effort.captured and candidate.check_sets:

        def again() -> Any:
            replay.start()
            return replay.output

        result["error_norm"] = max(result["error_norm"], _checked(session, again, replay.last_set, verify, poison))
    if not effort.captured:
        entry.hide_us = 100.0 + 2.0 * result.get("host_us", 20.0) * replay.launches
    once = cuda_group_us(replay, samples=1, hide_us=entry.hide_us)[0] * replay.launches
    entry.count = max(1, min(effort.samples, int(effort.turn_us / max(once, 1.0))))
    result["launches"] = replay.launches
    entry.replay = replay


def _checked(
    session: Session,
    run: Callable[[], Any],
    index: int,
    verify: Callable[[Any, int], float],
    poison: Callable[[int], None] | None,
) -> float:
    if poison is not None:
        poison(index)
    output = run()
    session.synchronize()
    return float(f"{verify(output, index):.3g}")


def _group(session: Session, entry: _Entry) -> list[float]:
    assert entry.replay is not None
    if not session.on_gpu:
        return cpu_group_us(entry.replay, samples=entry.count)
    return cuda_group_us(entry.replay, samples=entry.count, hide_us=entry.hide_us)


def _host_us(session: Session, call: Callable[[], object], effort: Effort) -> float:
    start = time.perf_counter()
    call()
    session.synchronize()
    long = time.perf_counter() - start > 0.01  # then a few calls must do
    calls, groups = (2, 1) if long else (max(effort.host_calls, 1), 3)
    return round(host_samples(call, calls=calls, groups=groups, between=session.synchronize).median_us, 2)


def _launches(sets: int, floor_us: float | None, effort: Effort) -> int:
    """A multiple of `sets`, so that every replay goes over each input set equally often."""
    wanted = int(effort.replay_us / max(floor_us or 0.0, 5.0))
    return max(1, min(wanted, effort.max_launches) // sets) * sets


def require_device(session: Session, candidate: str, error: BaseException) -> None:
    """Raises `DeviceLostError` if the device no longer answers after `error`."""
    if not session.on_gpu:
        return
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device=session.device).add_(1).item()
    except Exception as after:
        raise DeviceLostError(candidate, describe(error)) from after


def describe(error: BaseException) -> str:
    """An error's type and text on one line, at most 400 characters."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:400]

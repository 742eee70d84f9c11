"""Two records of one suite beside each other, each against its own rooflines: cards differ by 3%, ratios do not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bench.record import BadRecordError
from bench.table import duration, text_table

if TYPE_CHECKING:
    from collections.abc import Mapping


def compare(
    before: Mapping[str, Any], after: Mapping[str, Any], *, fail_below: float | None = None
) -> tuple[str, bool]:
    """The table, and whether it is good: no case that was ok fails now or is gone, none is slower than `fail_below`.

    The speed of a case is its floor over its time, both of one run; without floors (host times) it is the time alone.
    """
    if before["suite"] != after["suite"]:
        raise BadRecordError(f"records of different suites: {before['suite']} and {after['suite']}")
    old_cases = {case["id"]: case for case in before["cases"]}
    new_cases = {case["id"]: case for case in after["cases"]}
    rows, bad = [], []
    for name in [*old_cases, *(name for name in new_cases if name not in old_cases)]:
        old, new = old_cases.get(name), new_cases.get(name)
        ratio = speed_ratio(old, new) if old and new else None
        verdict = _verdict(old, new, ratio, fail_below)
        if verdict in ("slower", "fails now", "gone"):
            bad.append(name)
        rows.append((name, _time(old), _time(new), f"{ratio:.3f}" if ratio else "-", verdict))
    lines = [
        f"before: {before['source_id']}  {before['env'].get('gpu') or 'CPU'}",
        f"after:  {after['source_id']}  {after['env'].get('gpu') or 'CPU'}",
        text_table(rows, ("case", "before us", "after us", "speed", "verdict")),
    ]
    gpus = [str(record["env"].get("gpu") or "CPU") for record in (before, after)]
    if gpus[0] != gpus[1]:
        lines.append(f"these ran on different devices, {gpus[0]} and {gpus[1]}: the verdicts say little")
    if bad:
        lines.append(f"worse: {', '.join(bad)}")
    return "\n".join(lines), not bad


def speed_ratio(old: Mapping[str, Any], new: Mapping[str, Any]) -> float | None:
    """New speed over old speed, or None where one of them failed."""
    if not (old["ok"] and new["ok"]):
        return None
    ratio = old["ours"]["median_us"] / new["ours"]["median_us"]
    if old.get("floor_us") and new.get("floor_us"):
        ratio *= new["floor_us"] / old["floor_us"]
    return float(ratio)


def _verdict(
    old: Mapping[str, Any] | None, new: Mapping[str, Any] | None, ratio: float | None, fail_below: float | None
) -> str:
    if new is None:
        return "gone"
    if old is None:
        return "new"
    if ratio is None:
        return "fails now" if old["ok"] else ("works now" if new["ok"] else "fails still")
    noise = max(case["ours"].get("noise") or 0.0 for case in (old, new))
    if fail_below is not None and ratio < fail_below:
        return "slower"
    return "same" if abs(ratio - 1) <= max(noise, 0.01) else ("faster" if ratio > 1 else "a little slower")


def _time(case: Mapping[str, Any] | None) -> str:
    if case is None:
        return "-"
    return duration(case["ours"]["median_us"]) if case["ok"] else "failed"

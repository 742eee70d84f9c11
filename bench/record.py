"""The JSON record of one suite: its schema, reading and writing."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

ROOFLINES = ("read_gbps", "write_gbps", "copy_gbps", "matmul_tflops")
OTHERS = ("gpu_tests", "memcheck", "profile", "tune", "demo")  # records of another form
TIMES = ("median_us", "p20_us", "p80_us")


class BadRecordError(ValueError):
    """A file that is no record of this harness; the text says what is wrong."""


def new_record(suite: str, env: dict[str, Any], rooflines: dict[str, Any], peers: dict[str, Any]) -> dict[str, Any]:
    """An empty record. `source_id` is taken out of the environment; `peers` says which were there and how they ran."""
    env = dict(env)
    return {
        "suite": suite,
        "source_id": env.pop("source_id"),
        "env": env,
        "rooflines": rooflines,
        "peers": peers,
        "cases": [],
    }


def put_case(record: dict[str, Any], case: dict[str, Any]) -> None:
    """Adds a case, or replaces the one with its id."""
    for index, old in enumerate(record["cases"]):
        if old["id"] == case["id"]:
            record["cases"][index] = case
            return
    record["cases"].append(case)


def write_record(record: dict[str, Any], path: Path) -> None:
    """Writes in one step, so that a killed run leaves the file as it was after some case."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(partial, path)


def read_record(path: Path | str) -> dict[str, Any]:
    """Reads and checks a record. Raises `BadRecordError` with the file's name."""
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadRecordError(f"{path}: {error}") from error
    problems = problems_of(record)
    if problems:
        raise BadRecordError(f"{path}: " + "; ".join(problems[:5]))
    return record


def has_timings(path: Path | str) -> bool:
    """Whether a file is not plainly one of the `OTHERS`; what else is wrong with it, reading it says."""
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return True
    return not isinstance(record, dict) or record.get("suite") not in OTHERS


def problems_of(record: Any) -> list[str]:
    """What keeps `record` from being one: an empty list if nothing does."""
    if not isinstance(record, dict):
        return ["not an object"]
    problems = [
        f"{name} is missing" for name in ("suite", "source_id", "env", "rooflines", "cases") if name not in record
    ]
    if problems:
        return problems
    if not re.fullmatch(r"[0-9a-f]{16,}", str(record["source_id"])):
        problems.append(f"source_id {record['source_id']!r} is not at least 16 hexadecimal digits")
    for name in ROOFLINES:
        if not _is_number_or_none(record["rooflines"].get(name, "")):
            problems.append(f"rooflines.{name} is missing")
    seen = set()
    for case in record["cases"]:
        problems += [f"{case.get('id')}: {text}" for text in _case_problems(case, record["suite"])]
        if case.get("id") in seen:
            problems.append(f"{case['id']} occurs twice")
        seen.add(case.get("id"))
    return problems


def _case_problems(case: dict[str, Any], suite: str) -> list[str]:
    problems = []
    if not str(case.get("id", "")).startswith(suite + "/"):
        problems.append(f"id does not start with {suite}/")
    if not isinstance(case.get("ok"), bool):
        problems.append("ok is not true or false")
    if not isinstance(case.get("peers"), dict):
        problems.append("peers is not an object")
    for name in ("bytes", "flops", "floor_us"):
        if not _is_number_or_none(case.get(name, "")):
            problems.append(f"{name} is missing")
    problems += _goals_problems(case.get("goals", {}))
    if not case.get("ok"):
        if not case.get("error"):
            problems.append("failed without an error text")
        return problems
    problems += _times_problems("ours", case.get("ours"))
    for name, peer in (case.get("peers") or {}).items():
        if peer.get("ok"):
            problems += _times_problems(name, peer)
        elif not peer.get("error"):
            problems.append(f"peer {name} failed without an error text")
    return problems


def _times_problems(name: str, times: Any) -> list[str]:
    if not isinstance(times, dict):
        return [f"{name} is not an object"]
    bad = [f"{name}.{field}" for field in TIMES if not _is_number_or_none(times.get(field, "")) or times[field] is None]
    if bad:
        return [f"{', '.join(bad)} missing"]
    if not 0 <= times["p20_us"] <= times["median_us"] <= times["p80_us"]:
        return [f"{name}: p20, median and p80 are out of order"]
    return []


def _goals_problems(goals: Any) -> list[str]:
    if not isinstance(goals, dict):
        return ["goals is not an object"]
    return [
        f"goals.{name} is not a number" for name, goal in goals.items() if goal is None or not _is_number_or_none(goal)
    ]


def _is_number_or_none(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))

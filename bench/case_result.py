"""One case's part of a record, put together from the candidates' results."""

from __future__ import annotations

from typing import Any

from bench.candidate import OURS


def case_result(
    case_id: str,
    results: dict[str, dict[str, Any]],
    *,
    required: tuple[str, ...],
    bytes_moved: float,
    flops: float,
    floor: float | None,
    parameters: dict[str, Any],
) -> dict[str, Any]:
    """The record of a case. It is ok if ours is; it is `compared` if every required peer family gave a right result.

    Bandwidth (GB/s) and rate (TFLOP/s) are added to each timed candidate.
    """
    for result in results.values():
        if not result.get("ok"):
            continue
        if bytes_moved:
            result["gbps"] = round(bytes_moved / result["median_us"] / 1e3, 1)
        if flops:
            result["tflops"] = round(flops / result["median_us"] / 1e6, 2)
    results = dict(results)
    ours = results.pop(OURS)
    case: dict[str, Any] = {"id": case_id, "ok": bool(ours.get("ok"))}
    if not case["ok"]:
        case["error"] = ours.get("error", "not measured")
    case["ours"] = ours
    case["peers"] = {name: result for name, result in results.items() if not result.get("not_applicable")}
    left_out = {name: result["error"] for name, result in results.items() if result.get("not_applicable")}
    if left_out:
        case["not_applicable"] = left_out
    case["compared"] = case["ok"] and is_compared(case["peers"], required)
    case |= {"bytes": int(bytes_moved), "flops": int(flops), "floor_us": floor, "parameters": parameters}
    return case


def is_compared(peers: dict[str, dict[str, Any]], required: tuple[str, ...]) -> bool:
    """Whether each required family has at least one member ("flashinfer-fa3" is one of "flashinfer") that worked."""
    worked = [name for name, result in peers.items() if result.get("ok")]
    return bool(required) and all(any(_family(name) == family for name in worked) for family in required)


def put_ratio(case: dict[str, Any], against: str, goal: float | None, field: str = "median_us") -> None:
    """Where a case's point is ours over another time of ours: `ratio`, and the `goal` that it should not exceed.

    `field` names the times that are compared; the record has it as `ratio_of`.
    """
    other = case["peers"].get(against, {})
    if case["ok"] and other.get("ok"):
        ratio = round(case["ours"][field] / other[field], 4)
        case |= {"against": against, "goal": goal, "ratio": ratio, "ratio_of": field}


def failed_case(case_id: str, error: str) -> dict[str, Any]:
    """A case that could not be measured."""
    return {
        "id": case_id,
        "ok": False,
        "error": error,
        "ours": {"ok": False, "error": error},
        "peers": {},
        "compared": False,
        "bytes": None,
        "flops": None,
        "floor_us": None,
    }


def best_peer(case: dict[str, Any]) -> tuple[str, float] | None:
    """The fastest peer that was right, and its median in microseconds.

    What stands beside ours for orientation (`aside`: it does less, or is another way to call ours) is no peer here.
    """
    times = [
        (peer["median_us"], name) for name, peer in case["peers"].items() if peer.get("ok") and not peer.get("aside")
    ]
    if not times:
        return None
    median, name = min(times)
    return name, median


def _family(name: str) -> str:
    return name.split("-")[0]

"""Results as text: a line a case while running, a table at the end, Markdown for the standing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bench.case_result import best_peer
from bench.goals import goals_cell

if TYPE_CHECKING:
    from collections.abc import Sequence

HEADER = ("case", "ours us", "best peer", "peer us", "speed-up", "of floor", "noise")
RATIO_HEADER = ("case", "ours us", "against", "its us", "ours / its", "goal", "noise")


def row_of(case: dict[str, Any]) -> tuple[str, ...]:
    """One case's cells: our median, the best peer's, its time over ours, the floor over ours, and the noise."""
    name = case["id"]
    if not case["ok"]:
        return (name, "failed", "-", "-", "-", "-", "-")
    ours, peer, floor = case["ours"]["median_us"], best_peer(case), case.get("floor_us")
    noise = case["ours"].get("noise")
    return (
        name,
        duration(ours),
        peer[0] if peer else "-",
        duration(peer[1]) if peer else "-",
        f"{peer[1] / ours:.3f}" if peer and case.get("compared") else "not compared",
        f"{floor / ours:.1%}" if floor else "-",
        f"{noise:.1%}" if noise is not None else "-",
    )


def ratio_row_of(case: dict[str, Any]) -> tuple[str, ...]:
    """The cells of a case that compares ours with ours: both times, their ratio and the most it should be."""
    noise, goal, field = case["ours"].get("noise"), case["goal"], case["ratio_of"]
    return (
        case["id"] + ("" if field == "median_us" else f", {field.removesuffix('_us')}"),
        duration(case["ours"][field]),
        case["against"],
        duration(case["peers"][case["against"]][field]),
        f"{case['ratio']:.3f}",
        f"{goal:.2f}" if goal is not None else "-",
        f"{noise:.1%}" if noise is not None else "-",
    )


def is_loss(case: dict[str, Any]) -> bool:
    """Whether a right peer was faster than ours by more than this case's noise, or a ratio is above its goal."""
    if "ratio" in case:
        return case["goal"] is not None and case["ratio"] > case["goal"]
    peer = best_peer(case)
    if not case["ok"] or peer is None:
        return False
    return bool(peer[1] < case["ours"]["median_us"] * (1 - (case["ours"].get("noise") or 0.0)))


def duration(value_us: float) -> str:
    """Microseconds with about four digits."""
    return f"{value_us:.2f}" if value_us < 100 else f"{value_us:.1f}" if value_us < 10_000 else f"{value_us:.0f}"


def text_table(rows: Sequence[Sequence[str]], header: Sequence[str] = HEADER) -> str:
    """Columns padded with spaces; the first is left-aligned."""
    rows = [list(header), *map(list, rows)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i in (0, 2, 7) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def record_table(record: dict[str, Any]) -> str:
    """A suite's table with its rooflines and peers above."""
    roof = "  ".join(f"{name} {value}" for name, value in record["rooflines"].items() if value)
    absent = [f"{name} ({peer['reason']})" for name, peer in record.get("peers", {}).items() if not peer["available"]]
    lines = [f"{record['suite']}: {record['env'].get('gpu') or 'CPU'}, source {record['source_id']}"]
    if roof:
        lines.append(roof)
    if absent:
        lines.append("absent: " + "; ".join(absent))
    for ratios, header in ((False, HEADER), (True, RATIO_HEADER)):
        cases = [case for case in record["cases"] if ("ratio" in case) is ratios]
        if cases:
            names, rows = [*header], [(ratio_row_of if ratios else row_of)(case) for case in cases]
            if any(case.get("goals") for case in cases):
                names, rows = [*names, "goals"], [(*row, goals_cell(case)) for row, case in zip(rows, cases)]
            lines.append(text_table(rows, names))
    return "\n".join(lines + [f"  {text}" for text in failures_of(record)])


def failures_of(record: dict[str, Any]) -> list[str]:
    """A line for each candidate that failed: ours, then the peers."""
    ours = [f"{case['id']}: ours failed: {case['error']}" for case in record["cases"] if not case["ok"]]
    peers = [
        f"{case['id']}: {name} failed: {peer['error']}"
        for case in record["cases"]
        for name, peer in case["peers"].items()
        if not peer.get("ok")
    ]
    return ours + peers


def case_line(case: dict[str, Any]) -> str:
    """One case on one line, while a run goes on."""
    name, ours, peer, peer_us, ratio, share, _ = row_of(case)
    if not case["ok"]:
        return f"{name:34} FAILED {case.get('error', '')}"
    if "ratio" in case:
        goal = f", goal {case['goal']:.2f}" if case["goal"] is not None else ""
        return f"{name:34} {ours:>9} us  {case['ratio']:.3f} of {case['against']}{goal}"
    beside = f"{peer} {peer_us} us" if peer != "-" else ""
    compared = f"{beside} ({ratio}x)" if case.get("compared") else f"{beside} (not compared)"
    return f"{name:34} {ours:>9} us  {compared.strip():38} {share + ' of floor' if share != '-' else ''}".rstrip()


def bar(done: int, total: int, width: int = 20) -> str:
    """A progress bar."""
    filled = width * done // max(total, 1)
    return f"[{'#' * filled}{'.' * (width - filled)}] {done}/{total}"

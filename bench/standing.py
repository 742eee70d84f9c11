"""The current standing as a Markdown table between two markers of a file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bench.case_result import best_peer
from bench.goals import goals_cell, outcomes
from bench.table import duration, is_loss, ratio_row_of, row_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

BEGIN, END = "<!-- standing: begin -->", "<!-- standing: end -->"
HEADER = ("case", "ours µs", "best peer", "peer µs", "peer / ours", "floor / ours", "noise")
RATIO_HEADER = ("case", "ours µs", "against", "its µs", "ours / its", "goal", "noise")
WAYS_HEADER = ("another way to call ours", "µs", "ours / it", "FA3 / it", "best peer", "peer / it")


def write_standing(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Replaces what stands between the markers. Raises `KeyError` if they are missing."""
    text = path.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise KeyError(f"{path} has no {BEGIN} and {END}")
    before, rest = text.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    path.write_text(f"{before}{BEGIN}\n{standing(records)}\n{END}{after}", encoding="utf-8")


def standing(records: Iterable[dict[str, Any]]) -> str:
    """A section a suite: where it ran, then ours, the best peer and the share of the floor. Losses are in bold.

    Where cases have goals, the last column says "reached", or what was measured instead: in bold what missed its goal.
    Cases that compare ours with ours have a table with the ratio and its goal; other ways to call ours have one too.
    """
    sections = []
    for record in records:
        env, roof = record["env"], record["rooflines"]
        peers = sorted({name for case in record["cases"] for name, p in case["peers"].items() if p.get("ok")})
        lines = [
            f"### {record['suite']}",
            "",
            f"{env.get('gpu') or 'CPU'}, driver {env.get('driver')}, torch {env.get('torch')}, "
            f"triton {env.get('triton')}, source `{record['source_id']}`, {env.get('started', '')[:10]}. "
            + _rooflines(roof)
            + f"Beside ours: {', '.join(peers) or 'nothing'}.",
        ]
        for ratios, header in ((False, HEADER), (True, RATIO_HEADER)):
            cases = [case for case in record["cases"] if ("ratio" in case) is ratios]
            names, rule, rows = [*header], "|---|---:|---|---:|---:|---:|---:|", [_cells(case) for case in cases]
            if any(case.get("goals") for case in cases):
                names, rule = [*names, "goals"], f"{rule}---|"
                rows = [[*row, _goals(case)] for row, case in zip(rows, cases)]
            lines += _table(names, rule, rows)
        lines += _table(WAYS_HEADER, "|---|---:|---:|---:|---|---:|", _ways(record))
        lines += ["", f"Made by `{str(env.get('command')).partition(' --out')[0]}`."]
        sections.append("\n".join(lines))
    return "\n\n".join(sections)


def _table(header: Sequence[str], rule: str, rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    return ["", "| " + " | ".join(header) + " |", rule, *("| " + " | ".join(row) + " |" for row in rows)]


def _cells(case: dict[str, Any]) -> list[str]:
    cells = list(ratio_row_of(case) if "ratio" in case else row_of(case))
    if is_loss(case):
        cells[4] = f"**{cells[4]}**"
    return cells


def _goals(case: dict[str, Any]) -> str:
    cell = goals_cell(case)
    return f"**{cell}**" if any(outcome.missed for outcome in outcomes(case)) else cell


def _ways(record: dict[str, Any]) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = []
    for case in record["cases"]:
        peer = best_peer(case) if case["ok"] else None
        fa3 = min(
            (p["median_us"] for name, p in case["peers"].items() if name[:3] == "fa3" and p.get("ok")), default=None
        )
        for name, way in case["peers"].items():
            if not (name.startswith("ours-") and way.get("ok") and case["ok"]):
                continue
            rows.append(
                (
                    f"{case['id']}, {name}",
                    duration(way["median_us"]),
                    f"{case['ours']['median_us'] / way['median_us']:.3f}",
                    f"{fa3 / way['median_us']:.3f}" if fa3 else "-",
                    peer[0] if peer else "-",
                    f"{peer[1] / way['median_us']:.3f}" if peer and case.get("compared") else "not compared",
                )
            )
    return rows


def _rooflines(roof: dict[str, Any]) -> str:
    if not roof.get("read_gbps"):
        return ""
    return (
        f"Rooflines: read {roof['read_gbps']:.0f}, write {roof['write_gbps']:.0f}, copy {roof['copy_gbps']:.0f} GB/s, "
        f"bf16 product {roof['matmul_tflops']:.0f} TFLOP/s. "
    )

"""The current standing as a Markdown table between two markers of a file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bench.table import is_loss, row_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

BEGIN, END = "<!-- standing: begin -->", "<!-- standing: end -->"
HEADER = ("case", "ours µs", "best peer", "peer µs", "peer / ours", "floor / ours", "noise")


def write_standing(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Replaces what stands between the markers. Raises `KeyError` if they are missing."""
    text = path.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise KeyError(f"{path} has no {BEGIN} and {END}")
    before, rest = text.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    path.write_text(f"{before}{BEGIN}\n{standing(records)}\n{END}{after}", encoding="utf-8")


def standing(records: Iterable[dict[str, Any]]) -> str:
    """A section a suite: where it ran, then ours, the best peer and the share of the floor. Losses are in bold."""
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
            "",
            "| " + " | ".join(HEADER) + " |",
            "|---|---:|---|---:|---:|---:|---:|",
        ]
        for case in record["cases"]:
            cells = list(row_of(case))
            if is_loss(case):
                cells[4] = f"**{cells[4]}**"
            lines.append("| " + " | ".join(cells) + " |")
        lines += ["", f"Made by `{str(env.get('command')).partition(' --out')[0]}`."]
        sections.append("\n".join(lines))
    return "\n\n".join(sections)


def _rooflines(roof: dict[str, Any]) -> str:
    if not roof.get("read_gbps"):
        return ""
    return (
        f"Rooflines: read {roof['read_gbps']:.0f}, write {roof['write_gbps']:.0f}, copy {roof['copy_gbps']:.0f} GB/s, "
        f"bf16 product {roof['matmul_tflops']:.0f} TFLOP/s. "
    )

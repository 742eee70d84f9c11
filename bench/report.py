"""One HTML page of records that needs nothing else: pictures, tables, environment, losses marked."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from bench.goals import outcomes
from bench.plots import PICTURES, inline_svgs
from bench.table import duration, failures_of, is_loss

if TYPE_CHECKING:
    from collections.abc import Sequence

STYLE = """
:root { color-scheme: light dark; --paper: #fbfaf7; --ink: #222; --line: #d9d6cf; --loss: #b91c1c; --win: #15803d; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #16181b; --ink: #e8e6e1; --line: #3a3d42; --loss: #f87171; --win: #4ade80; } }
body { background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; max-width: 76rem;
  margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .6rem; text-align: right; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
th:first-child, td:first-child { text-align: left; }
.loss { color: var(--loss); font-weight: 600; } .win { color: var(--win); } .small { font-size: .85em; opacity: .85; }
.pictures svg { max-width: 100%; height: auto; border-radius: 6px; margin: .5rem 0; }
"""


def html_report(records: Sequence[dict[str, Any]]) -> str:
    """The page's text."""
    body = [_section(record) for record in records]
    suites = ", ".join(record["suite"] for record in records)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>triton_kv bench: {escape(suites)}</title>'
        f"<style>{STYLE}</style></head><body>\n<h1>triton_kv bench</h1>\n"
        "<p>Time in microseconds, median (20th to 80th percentile). Beside each peer its time over ours: above 1 ours "
        "is faster. The floor is what the run's own rooflines allow. <span class='loss'>Losses</span> are cases where "
        "a peer was faster by more than the noise, or ours was wrong. Goals stand beside what was measured.</p>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _section(record: dict[str, Any]) -> str:
    pictures = inline_svgs([record]) if record["suite"] in PICTURES else {}
    losses = [case["id"] for case in record["cases"] if is_loss(case) or not case["ok"]]
    uncompared = [case["id"] for case in record["cases"] if case["ok"] and not case.get("compared")]
    parts = [f"<h2>{escape(record['suite'])}</h2>", _environment(record)]
    goals = [outcome for case in record["cases"] for outcome in outcomes(case)]
    reached = f", {sum(goal.reached for goal in goals)} of {len(goals)} goals reached" if goals else ""
    parts.append(f"<p>{len(record['cases'])} cases, {len(losses)} losses, {len(uncompared)} not compared{reached}.</p>")
    if losses:
        parts.append(f"<p class='loss'>Losses: {escape(', '.join(losses))}</p>")
    parts.append(f"<div class='pictures'>{''.join(pictures.values())}</div>" if pictures else "")
    parts.append(_table(record))
    failures = failures_of(record)
    if failures:
        parts.append("<ul class='small'>" + "".join(f"<li>{escape(text)}</li>" for text in failures) + "</ul>")
    parts.append(_settings(record))
    return "\n".join(part for part in parts if part)


def _environment(record: dict[str, Any]) -> str:
    facts = {"source_id": record["source_id"], **record["env"], **record["rooflines"]}
    shown = "; ".join(f"{name} {value}" for name, value in facts.items() if value is not None)
    absent = [f"{name} ({peer['reason']})" for name, peer in record.get("peers", {}).items() if not peer["available"]]
    text = f"<p class='small'>{escape(shown)}</p>"
    if absent:
        text += f"<p class='small'>Absent peers: {escape('; '.join(absent))}</p>"
    return text


def _table(record: dict[str, Any]) -> str:
    peers = list(dict.fromkeys(name for case in record["cases"] for name in case["peers"]))
    header = ["case", "ours", "of floor", *(escape(name) for name in peers), "noise", "GB/s", "TFLOP/s", "host µs"]
    with_goals = any(case.get("goals") for case in record["cases"])
    header += ["goals"] * with_goals
    rows = ["<tr>" + "".join(f"<th>{cell}</th>" for cell in header) + "</tr>"]
    for case in record["cases"]:
        ours = case["ours"]
        mark = " class='loss'" if is_loss(case) or not case["ok"] else ""
        cells = [f"<td{mark}>{escape(case['id'])}{_ratio(case)}</td>"]
        if not case["ok"]:
            cells.append(f"<td class='loss' colspan='{len(header) - 1}'>failed</td>")
        else:
            share = case["floor_us"] / ours["median_us"] if case.get("floor_us") else None
            cells.append(f"<td>{_times(ours)}</td><td>{f'{share:.1%}' if share else '-'}</td>")
            cells += [_peer_cell(case["peers"].get(name), case) for name in peers]
            noise = ours.get("noise")
            cells.append(f"<td>{f'{noise:.1%}' if noise is not None else '-'}</td>")
            cells += [f"<td>{ours.get(name, '-')}</td>" for name in ("gbps", "tflops", "host_us")]
            cells += [_goals_cell(case)] * with_goals
        rows.append("<tr>" + "".join(cells) + "</tr>")
    return "<table>" + "\n".join(rows) + "</table>"


def _ratio(case: dict[str, Any]) -> str:
    if "ratio" not in case:
        return ""
    goal = f", goal {case['goal']:.2f}" if case["goal"] is not None else ""
    return f" <span class='small'>({case['ratio']:.3f} of {escape(case['against'])}{goal})</span>"


def _goals_cell(case: dict[str, Any]) -> str:
    kinds = [("win" if each.reached else "loss" if each.missed else "small", each.text) for each in outcomes(case)]
    return "<td>" + ("; ".join(f"<span class='{kind}'>{escape(text)}</span>" for kind, text in kinds) or "-") + "</td>"


def _times(result: dict[str, Any]) -> str:
    median, low, high = (duration(result[name]) for name in ("median_us", "p20_us", "p80_us"))
    return f"{median} <span class='small'>({low}–{high})</span>"


def _peer_cell(peer: dict[str, Any] | None, case: dict[str, Any]) -> str:
    if peer is None:
        return "<td>-</td>"
    if not peer.get("ok"):
        return f"<td title='{escape(peer['error'], quote=True)}'>failed</td>"
    ratio = peer["median_us"] / case["ours"]["median_us"]
    if "ratio" in case:
        kind = "small"
    elif ratio < 1 - (case["ours"].get("noise") or 0.0) and not peer.get("aside"):
        kind = "loss"
    else:
        kind = "win" if case["compared"] and not peer.get("aside") else "small"
    return f"<td>{duration(peer['median_us'])} <span class='{kind}'>{ratio:.3f}</span></td>"


def _settings(record: dict[str, Any]) -> str:
    settings: dict[str, str] = {}
    for case in record["cases"]:
        for name, result in [("ours", case["ours"]), *case["peers"].items()]:
            if result.get("settings"):
                settings.setdefault(name, result["settings"])
    items = "".join(f"<li>{escape(name)}: {escape(text)}</li>" for name, text in settings.items())
    return f"<ul class='small'>{items}</ul>" if items else ""

"""Pictures of records: bandwidth against context, bars against peers, memory while an engine starts."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any

from bench.table import is_loss

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# A card of its own colour with dark ink: legible on light and on dark pages alike.
PAPER, INK, GRID = "#fbfaf7", "#2b2b2b", "#d9d6cf"
COLOURS = {
    "ours": "#c2410c",
    "fa3": "#1d4ed8",
    "flashinfer": "#15803d",
    "vllm": "#7c3aed",
    "sglang": "#be185d",
    "sdpa": "#0e7490",
    "flex": "#a16207",
    "memset": "#1d4ed8",
    "torch": "#15803d",
    "perlayer": "#7c3aed",
    "legacy": "#1d4ed8",
}
OTHER = "#6b7280"
MOST_BARS = 16  # cases in one picture
GIB = 1 << 30


def save_plots(records: Sequence[dict[str, Any]], folder: Path, kind: str = "svg") -> list[Path]:
    """Saves every picture that the records have data for, as `<name>.svg` or `.png`. Returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in figures(records):
        path = folder / f"{name}.{kind}"
        figure.savefig(path, format=kind, dpi=160, facecolor=PAPER)
        paths.append(path)
    return paths


def inline_svgs(records: Sequence[dict[str, Any]]) -> dict[str, str]:
    """The same pictures as SVG elements for an HTML page, by name."""
    pictures = {}
    for name, figure in figures(records):
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", facecolor=PAPER)
        svg = buffer.getvalue()
        svg = svg[svg.index("<svg") :]
        # Ids must be unique over the page.
        svg = re.sub(r'(id="|#)([A-Za-z])', rf"\g<1>{name}-\g<2>", svg)
        pictures[name] = svg
    return pictures


def figures(records: Sequence[dict[str, Any]]) -> list[tuple[str, Figure]]:
    """Name and figure of what the records can show. Of several records of one suite the full one is drawn."""
    made: list[tuple[str, Figure]] = []
    for record in _fullest(records):
        for name, draw in PICTURES.get(record["suite"], {}).items():
            figure = _figure()
            if draw(figure.gca(), record):
                figure.tight_layout()
                made.append((name, figure))
    return made


def _fullest(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One record a suite: no `--quick` one if there is another, then that with the most good cases."""
    best: dict[str, dict[str, Any]] = {}
    for record in records:
        other = best.get(record["suite"])
        if other is None or _fullness(record) > _fullness(other):
            best[record["suite"]] = record
    return list(best.values())


def _fullness(record: dict[str, Any]) -> tuple[bool, int]:
    return not record["env"].get("quick"), sum(case["ok"] for case in record["cases"])


def draw_context(axes: Axes, record: dict[str, Any]) -> bool:
    """Decode GB/s against context: one line a candidate, for the batch size with the most lengths."""
    sweep = _sweep(record)
    if len(sweep) < 3:
        return False
    names = list(
        dict.fromkeys(name for case in sweep for name, r in _results(case) if r.get("ok") and not r.get("aside"))
    )
    for name in names:
        points = [
            (case["parameters"]["max_seq_len"], dict(_results(case))[name]["gbps"])
            for case in sweep
            if dict(_results(case)).get(name, {}).get("ok")
        ]
        axes.plot(*zip(*points), label=name, **_style(name))
    roof = record["rooflines"].get("read_gbps")
    if roof:
        axes.axhline(roof, color=INK, linewidth=1, linestyle=(0, (4, 3)))
        first = sweep[0]["parameters"]["max_seq_len"]
        axes.annotate("read roofline", (first, roof), (0, 4), textcoords="offset points")
        axes.set_ylim(top=roof * 1.12)
    axes.set_xscale("log", base=2)
    lengths = [case["parameters"]["max_seq_len"] for case in sweep]
    axes.set_xticks(lengths, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lengths])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("context, tokens a sequence")
    axes.set_ylabel("K and V read, GB/s")
    batch = sweep[0]["parameters"]["num_seqs"]
    axes.set_title(f"Decode, {batch} sequences{_where(record)}", loc="left")
    axes.legend(frameon=False, ncols=2, loc="lower right")
    return True


def _sweep(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Uniform batches of the common geometry and of one size, by length."""
    common = (32, 8, 128, 16, "LTBNHD", False)
    by_size: dict[int, list[dict[str, Any]]] = {}
    for case in record["cases"]:
        p = case.get("parameters", {})
        keys = ("num_query_heads", "num_kv_heads", "head_dim", "block_size", "layout", "warm")
        if not case["ok"] or tuple(p.get(key) for key in keys) != common or "gbps" not in case["ours"]:
            continue
        if p["context"] == p["num_seqs"] * p["max_seq_len"]:
            by_size.setdefault(p["num_seqs"], []).append(case)
    best = max(by_size.values(), key=len, default=[])
    return sorted(best, key=lambda case: case["parameters"]["max_seq_len"])


def draw_rates(unit: str, label: str, roof: str | None) -> Callable[[Axes, dict[str, Any]], bool]:
    """Horizontal bars a case, one a candidate, with the roofline as a line."""

    def draw(axes: Axes, record: dict[str, Any]) -> bool:
        cases = [case for case in record["cases"] if case["ok"] and unit in case["ours"]]
        if not cases:
            return False
        label_of_cases = ""
        if len(cases) > MOST_BARS:  # the first ones, and in any case what we lose
            losses = [case for case in cases if is_loss(case)]
            shown = [case for case in cases if case not in losses][: max(MOST_BARS - len(losses), 0)] + losses
            cases = [case for case in cases if case in shown]
            label_of_cases = f" ({len(cases)} of {len(record['cases'])} cases, all losses among them)"
        names = list(dict.fromkeys(name for case in cases for name, result in _results(case) if result.get(unit)))
        height = 0.8 / len(names)
        for index, name in enumerate(names):
            rows, values = [], []
            for row, case in enumerate(cases):
                value = dict(_results(case)).get(name, {}).get(unit)
                if value:
                    rows.append(row + (index - (len(names) - 1) / 2) * height)
                    values.append(value)
            style = _style(name)
            hatched: dict[str, Any] = (
                {"hatch": "////", "edgecolor": PAPER, "linewidth": 0} if style.get("linestyle") else {}
            )
            alpha = 1.0 if name == "ours" else 0.75
            axes.barh(rows, values, height * 0.9, label=name, color=style["color"], alpha=alpha, **hatched)
        if roof and record["rooflines"].get(roof):
            axes.axvline(record["rooflines"][roof], color=INK, linewidth=1, linestyle=(0, (4, 3)), label="roofline")
        axes.set_yticks(range(len(cases)), [case["id"].split("/", 1)[1] for case in cases])
        axes.invert_yaxis()
        axes.set_xlabel(label + label_of_cases)
        axes.set_title(f"{record['suite'].capitalize()}{_where(record)}", loc="left", pad=30)
        axes.grid(visible=False, axis="y")
        axes.legend(frameon=False, fontsize="small", loc="lower left", bbox_to_anchor=(-0.01, 0.99), ncols=6)
        height_inches = max(3.2, 0.9 + len(cases) * max(0.42, 0.12 * len(names)))
        axes.get_figure(root=True).set_size_inches(8, height_inches)  # type: ignore[union-attr]
        return True

    return draw


def draw_startup(axes: Axes, record: dict[str, Any]) -> bool:
    """Memory of the cache, and what is free, after each stage of an engine's start-up."""
    cases = [case for case in record["cases"] if case["ok"] and case["ours"].get("stages")]
    if not cases:
        return False
    shown = [(name, result["stages"]) for name, result in _results(cases[0]) if result.get("stages")]
    names: list[str] = []
    for _, stages in shown:
        for index, stage in enumerate(stages):
            if stage["name"] not in names:
                before = names.index(stages[index - 1]["name"]) + 1 if index else 0
                names.insert(before, stage["name"])
    for name, stages in shown:
        places = [names.index(stage["name"]) for stage in stages]
        label = "cache, all committed before capture" if name == "legacy" else "cache, extended after capture"
        axes.step(places, [stage["mapped_bytes"] / GIB for stage in stages], where="post", label=label, **_style(name))
        if name == "ours":
            free = [stage["free_bytes"] / GIB for stage in stages]
            axes.step(places, free, where="post", label="free", color=OTHER, linewidth=1.2, linestyle="--")
    ours = {stage["name"]: stage["seconds"] for stage in shown[0][1]}
    labels = [f"{name}\n{ours[name]:.2g} s" if name in ours else name for name in names]
    axes.set_xticks(range(len(names)), labels, rotation=35, ha="right", fontsize="small")
    axes.set_ylabel("GiB after the stage")
    axes.set_ylim(bottom=0)
    axes.set_title(f"Start-up of the example engine{_where(record)}", loc="left", pad=24)
    axes.legend(frameon=False, fontsize="small", loc="lower left", bbox_to_anchor=(-0.01, 0.99), ncols=3)
    return True


def draw_ledger(axes: Axes, record: dict[str, Any]) -> bool:
    """A ledger: who holds the device's memory after each stage of a start-up, stacked up to its total."""
    cases = [case for case in record["cases"] if case["ok"] and case["ours"].get("stages")]
    if not cases:
        return False
    stages = cases[0]["ours"]["stages"]
    owners = {
        "before the start, and neighbours": ("outside_bytes", OTHER),
        "torch: weights, activations, graph pools": ("torch_bytes", COLOURS["fa3"]),
        "others: workspaces, the driver's part of graphs": ("other_bytes", COLOURS["vllm"]),
        "cache": ("cache_bytes", COLOURS["ours"]),
        "free": ("free_bytes", GRID),
    }
    bottom = [0.0] * len(stages)
    for label, (key, colour) in owners.items():
        heights = [stage[key] / GIB for stage in stages]
        axes.bar(range(len(stages)), heights, 0.72, bottom=bottom, label=label, color=colour)
        bottom = [low + height for low, height in zip(bottom, heights)]
    labels = [f"{stage['name']}\n{stage['seconds']:.2g} s" for stage in stages]
    axes.set_xticks(range(len(stages)), labels, rotation=35, ha="right", fontsize="small")
    axes.set_ylabel("GiB after the stage")
    axes.grid(visible=False, axis="x")
    axes.set_title(f"Start-up of {cases[0]['id'].split('/', 1)[1]}{_where(record)}", loc="left", pad=46)
    axes.legend(frameon=False, fontsize="small", loc="lower left", bbox_to_anchor=(-0.01, 0.99), ncols=2)
    return True


PICTURES: dict[str, dict[str, Callable[[Any, dict[str, Any]], bool]]] = {
    "decode": {"decode-context": draw_context, "decode": draw_rates("gbps", "K and V read, GB/s", "read_gbps")},
    "prefill": {"prefill": draw_rates("tflops", "TFLOP/s", "matmul_tflops")},
    "mixed": {"mixed": draw_rates("tflops", "TFLOP/s", None)},
    "zero": {"zero": draw_rates("gbps", "written, GB/s", "write_gbps")},
    "write": {"write": draw_rates("gbps", "read and written, GB/s", "copy_gbps")},
    "engine": {"engine-startup": draw_startup},
    "sizing": {"sizing-ledger": draw_ledger},
}


def _figure() -> Figure:
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams["svg.fonttype"] = "none"
    rcParams["svg.hashsalt"] = "bench"
    figure = Figure(figsize=(8, 4.5), facecolor=PAPER)
    axes = figure.add_subplot()
    axes.set_facecolor(PAPER)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("bottom", "left"):
        axes.spines[side].set_color(INK)
    axes.tick_params(colors=INK)
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    return figure


def _style(name: str, marker: str | None = "o") -> dict[str, Any]:
    family = name.split("-")[0]
    style: dict[str, Any] = {"color": COLOURS.get(family, OTHER), "linewidth": 2.4 if name == "ours" else 1.4}
    if marker:
        style |= {"marker": marker, "markersize": 4}
    if "-" in name and name.split("-")[1] in ("planned", "fa2", "flash"):
        style["linestyle"] = "--"
    return style


def _results(case: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [("ours", case["ours"]), *case["peers"].items()]


def _where(record: dict[str, Any]) -> str:
    gpu = record["env"].get("gpu")
    return f", {gpu}" if gpu else ""

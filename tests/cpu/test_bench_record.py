"""Records: the schema, comparing two, the pages and pictures made of them."""

import copy
import json
from html.parser import HTMLParser

import pytest

from bench.__main__ import main
from bench.case_result import put_ratio
from bench.compare import compare
from bench.goals import goals_cell
from bench.plots import draw_ledger, save_plots
from bench.record import BadRecordError, problems_of, put_case, read_record, write_record
from bench.report import html_report
from bench.standing import BEGIN, END, standing, write_standing
from bench.table import case_line, is_loss, record_table


def times(median):
    return {"ok": True, "median_us": median, "p20_us": median * 0.99, "p80_us": median * 1.01, "samples": 24}


def decode_case(length, ours, fa3, ok=True):
    case = {
        "id": f"decode/B16-L{length}",
        "ok": ok,
        "ours": {**times(ours), "noise": 0.004, "gbps": 4000.0, "again_us": ours, "settings": "<planned>"},
        "peers": {
            "fa3": {**times(fa3), "gbps": 3900.0},
            "flashinfer": {"ok": False, "error": "RuntimeError: <no> module"},
        },
        "compared": True,
        "bytes": 1,
        "flops": 1,
        "floor_us": ours * 0.9,
        "parameters": {
            "num_seqs": 16,
            "max_seq_len": length,
            "context": 16 * length,
            "num_query_heads": 32,
            "num_kv_heads": 8,
            "head_dim": 128,
            "block_size": 16,
            "layout": "LTBNHD",
            "warm": False,
        },
    }
    if not ok:
        case["error"] = "WrongResultError: row 3"
    return case


def make_record(cases):
    return {
        "suite": "decode",
        "source_id": "0123456789abcdef",
        "env": {"gpu": "NVIDIA H200", "command": "python -m bench run decode", "started": "2026-01-02T03:04:05Z"},
        "rooflines": {"read_gbps": 4500.0, "write_gbps": 4600.0, "copy_gbps": 4300.0, "matmul_tflops": 780.0},
        "peers": {"fa3": {"available": True, "version": "1"}, "sglang": {"available": False, "reason": "<absent>"}},
        "cases": cases,
    }


@pytest.fixture
def record():
    return make_record([decode_case(n, n / 10, n / 11 if n == 2048 else n / 9) for n in (512, 1024, 2048, 4096)])


def without(*path):
    def change(record):
        *parents, last = path
        for key in parents:
            record = record[key]
        del record[last]

    return change


def setting(value, *path):
    def change(record):
        *parents, last = path
        for key in parents:
            record = record[key]
        record[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "text"),
    [
        pytest.param(without("rooflines", "copy_gbps"), "rooflines.copy_gbps", id="roofline"),
        pytest.param(without("env"), "env is missing", id="env"),
        pytest.param(setting("xyz", "source_id"), "source_id", id="source-id"),
        pytest.param(without("cases", 0, "ours", "p20_us"), "ours.p20_us", id="percentile"),
        pytest.param(setting(1e9, "cases", 0, "ours", "p20_us"), "out of order", id="percentile-order"),
        pytest.param(setting("prefill/x", "cases", 0, "id"), "does not start with decode/", id="id"),
        pytest.param(setting("decode/B16-L1024", "cases", 0, "id"), "occurs twice", id="twice"),
        pytest.param(setting(False, "cases", 0, "ok"), "failed without an error", id="failed-without-text"),
        pytest.param(without("cases", 0, "peers", "flashinfer", "error"), "peer flashinfer failed", id="peer-failed"),
        pytest.param(without("cases", 0, "floor_us"), "floor_us", id="floor"),
        pytest.param(setting({"best": "0.99"}, "cases", 0, "goals"), "goals.best is not a number", id="goal"),
    ],
)
def test_schema(record, change, text):
    assert problems_of(record) == []
    change(record)
    assert text in "; ".join(problems_of(record))


def test_write_and_read(tmp_path, record):
    path = tmp_path / "a" / "decode.json"
    write_record(record, path)
    assert read_record(path) == record
    assert [p.name for p in path.parent.iterdir()] == ["decode.json"]
    path.write_text("{")
    with pytest.raises(BadRecordError, match=r"decode\.json"):
        read_record(path)


def test_put_case_replaces(record):
    put_case(record, decode_case(512, 7.0, 8.0))
    assert len(record["cases"]) == 4
    assert record["cases"][0]["ours"]["median_us"] == 7.0


def slow_down(case):
    for name in ("median_us", "p20_us", "p80_us"):
        case["ours"][name] *= 1.05


def slower_card(record):
    """Everything 5% slower, the card too."""
    for case in record["cases"]:
        slow_down(case)
        case["floor_us"] *= 1.05


def slower_code(record):
    slow_down(record["cases"][1])


def failing(record):
    record["cases"][1] |= {"ok": False, "error": "wrong"}


def shorter(record):
    del record["cases"][0]


@pytest.mark.parametrize(
    ("change", "good"),
    [
        pytest.param(lambda record: None, True, id="same"),
        pytest.param(slower_card, True, id="slower-card"),
        pytest.param(slower_code, False, id="slower-code"),
        pytest.param(failing, False, id="fails-now"),
        pytest.param(shorter, False, id="case-gone"),
    ],
)
def test_compare(tmp_path, record, change, good):
    after = copy.deepcopy(record)
    change(after)
    text, found = compare(record, after, fail_below=0.97)
    assert found is good, text
    assert compare(after, after, fail_below=0.97)[1]
    for name, which in (("a.json", record), ("b.json", after)):
        (tmp_path / name).write_text(json.dumps(which))
    arguments = ["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--fail-below", "0.97"]
    assert main(arguments) == (0 if good else 1)


def test_compare_wants_one_suite(record):
    with pytest.raises(BadRecordError, match="different suites"):
        compare(record, {**record, "suite": "prefill"})


class Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.links = [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [value for name, value in attributes if name in ("src", "href") and not value.startswith("#")]


def test_report_is_one_page_with_losses_marked(record):
    pytest.importorskip("matplotlib")
    record["cases"].append(decode_case(8192, 1.0, 1.0, ok=False))
    text = html_report([record])
    page = Page()
    page.feed(text)
    assert page.links == []
    assert page.tags.count("svg") >= 2
    assert "http" not in text.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    ).replace("https://matplotlib.org", "")
    assert "Losses: decode/B16-L2048, decode/B16-L8192" in text
    assert "WrongResultError: row 3" in text
    assert "&lt;no&gt; module" in text
    assert "&lt;absent&gt;" in text


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_plots(tmp_path, record, kind):
    pytest.importorskip("matplotlib")
    paths = save_plots([record], tmp_path, kind)
    assert {path.name for path in paths} == {f"decode-context.{kind}", f"decode.{kind}"}
    assert all(path.stat().st_size > 5000 for path in paths)
    if kind == "svg":
        text = (tmp_path / "decode-context.svg").read_text()
        for words in ("GB/s", "tokens a sequence", "read roofline", "ours", "fa3"):
            assert words in text


def engine_record(quick, stages, ok=True):
    case = decode_case(512, 100.0, 90.0, ok)
    shown = [{"name": name, "seconds": 0.1, "free_bytes": 1 << 30, "mapped_bytes": 1 << 30} for name in stages]
    case |= {"id": "engine/135m", "ours": {**times(100.0), "stages": shown}}
    record = make_record([case])
    return {**record, "suite": "engine", "env": {**record["env"], "quick": quick}}


@pytest.mark.parametrize("full_first", [pytest.param(True, id="full-first"), pytest.param(False, id="quick-first")])
def test_the_picture_of_a_suite_is_of_its_full_record(tmp_path, full_first):
    pytest.importorskip("matplotlib")
    records = [engine_record(False, ["reserve", "capture"]), engine_record(True, ["reserve", "extend"])]
    (path,) = save_plots(records if full_first else records[::-1], tmp_path)
    assert path.name == "engine-startup.svg"
    assert "capture" in path.read_text()
    assert "extend" not in path.read_text().replace("extended", "")
    (path,) = save_plots([engine_record(True, ["reserve", "extend"])], tmp_path)
    assert "capture" not in path.read_text().replace("after capture", "")


def test_the_picture_of_a_ledger(tmp_path):
    """Stages as they were on the x axis, and every owner's bytes stacked up to the total."""
    pytest.importorskip("matplotlib")
    owners = ("outside_bytes", "torch_bytes", "other_bytes", "cache_bytes", "free_bytes")
    stages = [
        {"name": name, "seconds": 0.25, **{owner: gib << 30 for owner, gib in zip(owners, amounts, strict=True)}}
        for name, amounts in {"weights": (1, 4, 0, 0, 5), "capture": (1, 5, 2, 0, 2), "extend": (1, 5, 2, 1, 1)}.items()
    ]
    case = {**decode_case(512, 100.0, 90.0), "id": "sizing/8b", "ours": {**times(100.0), "stages": stages}}
    record = {**make_record([case]), "suite": "sizing"}
    (path,) = save_plots([record], tmp_path)
    assert path.name == "sizing-ledger.svg"
    text = path.read_text()
    for words in ("weights", "0.25 s", "capture", "extend", "GiB after the stage", "cache", "free", "Start-up of 8b"):
        assert words in text
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    assert draw_ledger(axes, record)
    tops = [max(bar.get_y() + bar.get_height() for bar in bars) for bars in zip(*axes.containers)]
    assert tops == [10.0, 10.0, 10.0]
    assert [bar.get_height() for bar in axes.containers[1]] == [4.0, 5.0, 5.0]
    assert not draw_ledger(axes, make_record([decode_case(512, 100.0, 90.0)])), "no case has stages"


def test_standing_is_put_between_the_markers(tmp_path, record):
    page = tmp_path / "README.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_standing([record], page)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| decode/B16-L2048 | 204.8 | fa3 | 186.2 | **0.909** | 90.0% | 0.4% |" in text
    write_standing([record], page)
    assert page.read_text() == text
    (tmp_path / "none.md").write_text("nothing")
    with pytest.raises(KeyError):
        write_standing([record], tmp_path / "none.md")


def ratio_case(ours, goal):
    case = decode_case(512, ours, 100.0)
    case["peers"] = {"default": times(100.0)}
    put_ratio(case, "default", goal)
    return case


@pytest.mark.parametrize(
    ("ours", "goal", "cells", "text"),
    [
        pytest.param(140.0, 1.5, "1.400 | 1.50", "1.400 of default, goal 1.50", id="met"),
        pytest.param(160.0, 1.5, "**1.600** | 1.50", "1.600 of default, goal 1.50", id="missed"),
        pytest.param(160.0, None, "1.600 | -", "1.600 of default", id="no-goal"),
    ],
)
def test_a_ratio_is_shown_with_its_goal(tmp_path, ours, goal, cells, text):
    pytest.importorskip("matplotlib")
    record = make_record([ratio_case(ours, goal), decode_case(1024, 90.0, 99.0)])
    assert is_loss(record["cases"][0]) is (goal is not None and ours > 100 * goal)
    shown = standing([record])
    assert f"| decode/B16-L512 | {ours:.1f} | default | 100.0 | {cells} | 0.4% |" in shown
    assert "| decode/B16-L1024 | 90.00 | fa3 | 99.00 | 1.100 | 90.0% | 0.4% |" in shown
    assert f"({text})" in html_report([record])
    assert text in case_line(record["cases"][0])
    table = record_table(record)
    assert table.index("speed-up") < table.index("ours / its")
    assert problems_of(record) == []


@pytest.mark.parametrize(
    ("goals", "cell"),
    [
        pytest.param({"best": 0.99}, "reached", id="best-reached"),
        pytest.param({"fa3": 0.9, "floor_share": 0.9, "us": 90.0}, "reached", id="just-reached"),
        pytest.param({"best": 0.89, "fa3": 0.9}, "**best 0.9000 > 0.89**", id="best-missed"),
        pytest.param({"floor_share": 0.975, "best": 0.99}, "**floor 90.00% < 97.5%**", id="floor-missed"),
        pytest.param({"us": 35, "fa3": 0.7}, "**90.00 > 35 µs; fa3 0.9000 > 0.7**", id="two-missed"),
        pytest.param({"flashinfer": 0.9, "best": 0.99}, "flashinfer not measured", id="peer-failed"),
    ],
)
def test_goals_stand_beside_what_was_measured(goals, cell):
    case = {**decode_case(1024, 90.0, 100.0), "goals": goals}
    record = make_record([decode_case(512, 50.0, 60.0), case])
    assert problems_of(record) == []
    shown = standing([record])
    assert "| noise | goals |\n|---|---:|---|---:|---:|---:|---:|---|\n" in shown
    assert f"| decode/B16-L1024 | 90.00 | fa3 | 100.0 | 1.111 | 90.0% | 0.4% | {cell} |\n" in shown
    assert "| decode/B16-L512 | 50.00 | fa3 | 60.00 | 1.200 | 90.0% | 0.4% | - |\n" in shown
    assert cell.strip("*") in record_table(record)
    assert "goals" not in standing([make_record([decode_case(512, 50.0, 60.0)])])


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"compared": False}, id="a-required-peer-is-missing"),
        pytest.param({"ok": False, "error": "wrong", "ours": {"ok": False, "error": "wrong"}}, id="ours-failed"),
    ],
)
def test_no_goal_is_reached_by_what_was_not_compared(change):
    case = {**decode_case(1024, 90.0, 100.0), "goals": {"best": 0.99}, **change}
    assert goals_cell(case) == "best not measured"


def test_report_shows_every_goal_and_counts_them(record):
    pytest.importorskip("matplotlib")
    record["cases"][0]["goals"] = {"best": 0.99, "floor_share": 0.93}
    text = html_report([record])
    assert "1 of 2 goals reached" in text
    assert "<span class='win'>best 0.9000 ≤ 0.99</span>; <span class='loss'>floor 90.00% &lt; 93%</span>" in text
    assert "goals reached" not in html_report([make_record([decode_case(512, 50.0, 60.0)])])


def test_a_ratio_of_other_times_names_them():
    case = decode_case(512, 90.0, 99.0)
    case["ours"]["p99_us"], case["peers"]["fa3"]["p99_us"] = 130.0, 100.0
    put_ratio(case, "fa3", 1.2, "p99_us")
    assert "| decode/B16-L512, p99 | 130.0 | fa3 | 100.0 | **1.300** | 1.20 | 0.4% |" in standing([make_record([case])])


def test_a_ratio_needs_both_times():
    case = decode_case(512, 90.0, 99.0)
    put_ratio(case, "flashinfer", 1.0)
    assert "ratio" not in case
    put_ratio(case, "fa3", 1.0)
    assert case["ratio"] == pytest.approx(0.9091)


def test_other_ways_to_call_ours_have_a_table_of_their_own(record):
    record["cases"][0]["peers"]["ours-portable"] = {**times(102.4), "aside": True}
    shown = standing([record])
    assert "| decode/B16-L512, ours-portable | 102.4 | 0.500 | 0.556 | fa3 | 0.556 |" in shown
    assert standing([make_record([decode_case(512, 1.0, 2.0)])]).count("another way") == 0


def test_repository_page_has_the_markers():
    from bench.provenance import ROOT

    text = (ROOT / "bench" / "README.md").read_text()
    assert text.index(BEGIN) < text.index(END)

"""Every suite runs on a CPU with tiny cases and writes a record that keeps the schema."""

from pathlib import Path

import pytest

import bench.run
from bench.__main__ import QUICK_PREPARE_S, main
from bench.record import has_timings, problems_of, read_record
from bench.run import RunOptions, run
from bench.suites import NAMES, load_suite


@pytest.mark.parametrize("name", NAMES)
def test_smoke(name, tmp_path):
    (state := tmp_path / "state").mkdir()
    options = RunOptions(suites=(name,), smoke=True, out=str(tmp_path / "out"), command="python -m bench run --smoke")
    (path,) = run(options, state)
    record = read_record(path)
    assert [case["id"] for case in record["cases"]] == [case.id for case in load_suite(name).smoke_cases]
    for case in record["cases"]:
        assert case["ok"], f"{case['id']}: {case.get('error')}"
        for way in (peer for other, peer in case["peers"].items() if other.startswith("ours-")):
            assert way["ok"], way
            assert way["aside"]
        (asked,) = (each for each in load_suite(name).smoke_cases if each.id == case["id"])
        assert case.get("goals", {}) == getattr(asked, "goals", {})
        if name in ("decode", "prefill", "mixed", "ratios"):
            assert case["ours"]["error_norm"] < 1e-5
            assert case["ours"]["torch_error_norm"] < 1e-5
        if name == "ratios":
            assert case["ratio"] > 0
            assert case["compared"]
    assert problems_of(record) == []
    assert record["env"]["command"] == "python -m bench run --smoke"


@pytest.mark.parametrize(
    ("name", "case", "ways"),
    [
        pytest.param("decode", "B1-L8k", ("planned",), id="decode"),
        pytest.param("prefill", "16x1k", ("planned",), id="prefill"),
        pytest.param("prefill", "1x8k", ("planned", "portable"), id="portable"),
        pytest.param("prefill", "4x2k-ctx14k-b64", ("planned", "portable"), id="portable-in-large-blocks"),
        pytest.param("mixed", "64x4-at-4k", ("planned", "apart"), id="mixed"),
    ],
)
def test_other_ways_to_call_ours(name, case, ways):
    (found,) = (each for each in load_suite(name).cases if each.id == f"{name}/{case}")
    assert found.ways == ways


def test_all_suites_by_the_command_line(tmp_path, capsys):
    arguments = ["run", "zero", "vmm", "--smoke", "--out", str(tmp_path)]
    assert main(arguments) == 0
    assert {path.name for path in tmp_path.glob("*.json")} == {"zero.json", "vmm.json"}
    assert "zero/64KiB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        pytest.param(["run", "nothing", "--smoke"], "no suite 'nothing'", id="unknown-suite"),
        pytest.param(["run", "zero", "--smoke", "--case", "decode/*"], "no case matches", id="no-case"),
        pytest.param(["run", "zero", "vmm", "--smoke", "--out", "a.json"], "holds one suite", id="one-file-two-suites"),
        pytest.param(["compare", "missing.json", "missing.json"], "missing.json", id="no-record"),
    ],
)
def test_bad_usage(arguments, text, capsys):
    assert main(arguments) == 2
    assert text in capsys.readouterr().err


def test_list_names_every_suite(capsys):
    assert main(["list", "--cases"]) == 0
    shown = capsys.readouterr().out
    for name in NAMES:
        suite = load_suite(name)
        assert suite.cases[-1].id in shown


REQUIRED_IDS = {
    "decode": "B1-L8k B1-L8k-warm B1-L128k B8-L32k B16-L4k B64-L8k B256-L1k ragged256 skew",
    "ratios": "captured-short-B1-L128k captured-short-B8-L128k 4-tokens-B1-L64k invariant-B8-L32k invariant-B64-L8k",
    "prefill": "1x8k 1x32k 16x1k 4x2k-ctx14k 64x128-ctx4k 64x32-ctx4k 64x16-ctx4k 1x8k-d64",
}


@pytest.mark.parametrize("name", NAMES)
def test_cases_are_well_named(name):
    suite = load_suite(name)
    ids = [case.id for case in suite.cases]
    assert len(set(ids)) == len(ids)
    assert all(identity.startswith(f"{name}/") for identity in ids)
    assert {f"{name}/{case}" for case in REQUIRED_IDS.get(name, "").split()} <= set(ids)
    assert suite.selected(quick=True)


GOALS = {
    "decode/B1-L8k": {"fa3": 0.79, "best": 0.99},
    "decode/B1-L8k-warm": {"fa3": 0.70, "best": 0.99},
    "decode/B1-L128k": {"floor_share": 0.93, "best": 0.99},
    "decode/B8-L32k": {"floor_share": 0.975, "best": 0.99},
    "decode/B16-L4k": {"floor_share": 0.88, "best": 0.99},
    "decode/B64-L8k": {"floor_share": 0.985, "best": 0.99},
    "decode/B256-L1k": {"floor_share": 0.955, "best": 0.99},
    "decode/ragged256": {"floor_share": 0.97, "best": 0.99},
    "decode/skew": {"floor_share": 0.945, "best": 0.99},
    "decode/B64-L8k-interleaved": {"best": 0.99},
    "host/attention-decode": {"us": 35},
    "host/fill-B256-L1k": {"us": 60},
    "vmm/extend-64GiB-64seg": {"memset": 1.15},
    "zero/64MiB": {},
    "zero/1GiB": {"memset": 1.0309, "torch-zero_": 0.8},
    "zero/64x16MiB-in-8GiB": {"memset": 1.0309, "torch-zero_": 0.8},
}


@pytest.mark.parametrize("identity", GOALS)
def test_goals(identity):
    (case,) = (each for each in load_suite(identity.partition("/")[0]).cases if each.id == identity)
    assert case.goals == GOALS[identity]


def test_every_ratio_has_a_goal():
    assert all(case.goal is not None for case in load_suite("ratios").cases)
    assert all(case.goals["best"] == 0.99 for case in load_suite("decode").cases)


@pytest.mark.parametrize(
    ("suites", "quick", "seconds"),
    [
        pytest.param(("vmm", "zero"), False, 100, id="memory"),
        pytest.param(("states", "shrink", "sleep"), False, 150, id="states"),
        pytest.param(("shrink",), False, 60, id="shrink"),
        pytest.param(("sleep",), False, 60, id="sleep"),
        pytest.param(("decode", "ratios"), False, 120, id="decode"),
        pytest.param(("prefill", "mixed"), False, 180, id="prefill"),
        pytest.param(("write", "host", "engine"), False, 120, id="engine"),
        pytest.param(("sizing",), False, 240, id="sizing"),
        pytest.param((), True, 180, id="quick"),
        pytest.param((), False, 1500, id="all"),
    ],
)
def test_time_budget(suites, quick, seconds):
    options = RunOptions(suites=suites, quick=quick)
    assert options.seconds() < seconds


def test_a_quick_run_that_uses_up_its_preparation_is_in_time():
    chosen = RunOptions(quick=True).selected()
    assert QUICK_PREPARE_S + sum(suite.seconds_of(cases, quick=True) for suite, cases in chosen) < 180


RECORDS = sorted((Path(bench.run.RESULTS) / "h200").glob("*.json"))


@pytest.mark.parametrize("path", [path for path in RECORDS if has_timings(path)], ids=lambda path: path.stem)
def test_estimates_are_those_of_the_records(path):
    """What the cases of a record took is at most a fifth above the suite's estimate for as many."""
    record = read_record(path)
    suite = load_suite(record["suite"])
    took = [case["seconds"] for case in record["cases"]]
    assert sum(took) <= 1.2 * suite.seconds_of(took, quick=record["env"]["quick"]) + 1

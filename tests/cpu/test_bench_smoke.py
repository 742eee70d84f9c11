"""Every suite runs on a CPU with tiny cases and writes a record that keeps the schema."""

import pytest

from bench.__main__ import main
from bench.record import problems_of, read_record
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
        planned = case["peers"].get("ours-planned")
        assert (planned is not None) == (name in ("prefill", "mixed"))
        assert planned is None or (planned["ok"] and planned["aside"])
    assert problems_of(record) == []
    assert record["env"]["command"] == "python -m bench run --smoke"


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


def test_time_budget():
    assert RunOptions(suites=("decode",)).seconds() < 360
    assert RunOptions(suites=("prefill", "mixed")).seconds() < 360
    assert RunOptions(suites=("vmm", "zero", "write", "host", "engine")).seconds() < 360
    assert RunOptions(suites=("states",)).seconds() < 360
    assert RunOptions(suites=("shrink",)).seconds() < 60
    assert RunOptions(suites=("sleep",)).seconds() < 60

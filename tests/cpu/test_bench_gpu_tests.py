"""The record of GPU tests: outcomes as pytest saw them, and no mixing of sources."""

import pytest

from bench.gpu_tests import errors_of, run_again, run_pytest
from bench.provenance import source_id

TESTS = """
import pytest

def test_right(): pass
def test_wrong(): assert False
def test_left_out(): pytest.skip("reason")
@pytest.mark.xfail
def test_known(): assert False
"""


def test_outcomes(tmp_path):
    file = tmp_path / "test_sample.py"
    file.write_text(TESTS)
    run = run_pytest([str(file)], more=["--rootdir", str(tmp_path)])
    assert run["exit_code"] == 1
    assert {name.partition("::")[2]: outcome for name, outcome in run["outcomes"].items()} == {
        "test_right": "passed",
        "test_wrong": "failed",
        "test_left_out": "skipped",
        "test_known": "skipped",
    }


def test_running_again_refuses_other_sources():
    with pytest.raises(SystemExit, match="run all tests"):
        run_again({"source_id": "0" * 16, "runs": []}, [])


def test_running_again_runs_what_failed_and_keeps_the_rest(monkeypatch):
    ran = []
    monkeypatch.setattr("bench.gpu_tests.run_pytest", lambda files, more: ran.extend(files) or {"outcomes": {}})
    outcomes = {"tests.gpu.test_x::test_a[1]": "failed", "tests.gpu.test_x::test_b": "passed"}
    runs = run_again({"source_id": source_id(), "runs": [{"outcomes": outcomes, "exit_code": 1}]}, [])
    assert ran == ["tests/gpu/test_x.py::test_a[1]"]
    assert runs[0] == {"outcomes": {"tests.gpu.test_x::test_b": "passed"}, "exit_code": 0}
    assert len(runs) == 2


def test_the_sanitizers_errors_are_counted_by_headline():
    report = """
========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 2 bytes
=========     at decode_kernel+0x120
=========     Host Frame: main
========= Program hit CUDA_ERROR_INVALID_VALUE (error 1) due to "invalid argument" on CUDA API call to cuFoo.
=========     Saved host backtrace up to driver entry point at error
========= Program hit CUDA_ERROR_INVALID_VALUE (error 1) due to "invalid argument" on CUDA API call to cuFoo.
===== test output =========
========= ERROR SUMMARY: 3 errors
"""
    assert errors_of(report) == {
        'Program hit CUDA_ERROR_INVALID_VALUE (error 1) due to "invalid argument" on CUDA API call to cuFoo.': 2,
        "Invalid __global__ read of size 2 bytes": 1,
    }

"""`bench profile`: what is read out of Nsight Compute's CSV."""

import pytest

from bench.__main__ import main
from bench.profile import by_candidate, cases_of, kernels_of

HEADER = '"ID","Kernel Name","Block Size","Grid Size","Section Name","Metric Name","Metric Unit","Metric Value"'


def row(number, kernel, metric, unit, value):
    return f'"{number}","{kernel}","(128, 1, 1)","(264, 1, 1)","some section","{metric}","{unit}","{value}"'


LINES = [
    "==PROF== Connected to process 7",
    HEADER,
    row(0, "at::cuda::spin_kernel(long)", "Duration", "ns", "1200"),
    row(1, "decode_kernel", "Duration", "ns", "1,249,500"),
    row(1, "decode_kernel", "DRAM Throughput", "%", "93.4"),
    row(1, "decode_kernel", "Memory Throughput", "%", "93.4"),
    row(1, "decode_kernel", "Memory Throughput", "byte/s", "4,412,000,000,000.5"),
    row(1, "decode_kernel", "Registers Per Thread", "register/thread", "168"),
    row(1, "decode_kernel", "Theoretical Occupancy", "%", "12.5"),
    row(2, "join_kernel", "Grid Size", "", "2,048"),
    row(3, "at::cuda::spin_kernel(long)", "Duration", "ns", "1200"),
    row(4, "void flash::FlashAttnFwdSm90<int>(Params)", "Duration", "ns", "1250000"),
]
RUNS = [["decode/a", "ours"], ["decode/a", "fa3"]]


def test_kernels_are_read_with_their_units_and_shared_out_by_marks():
    ours, fa3 = by_candidate(kernels_of(LINES), RUNS)
    assert (ours["id"], ours["candidate"]) == ("decode/a", "ours")
    assert ours["kernels"] == [
        {
            "kernel": "decode_kernel",
            "duration_ns": 1249500,
            "dram_percent": 93.4,
            "dram_bytes_per_s": 4412000000000.5,
            "registers": 168,
        },
        {"kernel": "join_kernel", "programs": 2048},
    ]
    assert fa3["kernels"] == [
        {"kernel": "void flash::FlashAttnFwdSm90<int>", "duration_ns": 1250000},
    ]


@pytest.mark.parametrize("runs", [RUNS[:1], [*RUNS, ["decode/b", "ours"]]], ids=["fewer", "more"])
def test_marks_that_do_not_fit_the_runs_are_no_record(runs):
    with pytest.raises(RuntimeError, match="marks"):
        by_candidate(kernels_of(LINES), runs)


def test_without_kernels_and_without_ncu(monkeypatch, capsys):
    with pytest.raises(RuntimeError, match="no kernel"):
        kernels_of(["==ERROR== no permission"])
    monkeypatch.setenv("PATH", "")
    assert main(["profile", "--case", "decode/B64-L8k"]) == 2
    assert "no ncu on the PATH" in capsys.readouterr().err


def test_patterns():
    assert [case.id for case in cases_of("decode/B64-L8k,prefill/1x8k")] == ["decode/B64-L8k", "prefill/1x8k"]

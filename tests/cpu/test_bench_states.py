"""The states suite: what its cases say beside their times."""

import ctypes

import pytest
import torch

import bench.suites.states as states
from bench.session import Session
from bench.table import ratio_row_of


@pytest.mark.parametrize("case", states.SUITE.smoke_cases, ids=lambda case: case.id.split("/")[1])
def test_an_extension_has_its_ratio_to_filling_the_same_ranges(case, monkeypatch):
    filled = []

    def memset(address: int, num_bytes: int) -> None:
        ctypes.memset(address, 0, num_bytes)
        filled.append(num_bytes)

    monkeypatch.setattr(states, "memset", memset)
    session = Session(torch.device("cpu"), smoke=True, peers={"memset": {"available": True}})
    result = states.run(session, case)
    assert result["ok"]
    assert result["compared"]
    assert sum(filled) % result["bytes"] == 0  # all ranges, some times
    assert ("ratio" in result) == (case.what == "extend")
    if case.what == "extend":
        ours, other = result["ours"]["median_us"], result["peers"]["memset"]["median_us"]
        assert result["ratio"] == pytest.approx(ours / other, abs=1e-4)
        assert ratio_row_of(result)[2] == "memset"
        assert ratio_row_of(result)[5] == "1.20"

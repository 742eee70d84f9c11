"""Zeroing over a table of segments, in the interpreter."""

import pytest
import torch

from tests import zero_blocks_cases as cases

pytestmark = pytest.mark.quick

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("ids", cases.IDS, ids=str)
@pytest.mark.parametrize("case", cases.CASES[:2], ids=str)
def test_blocks_of_every_segment(case, ids, dtype):
    cases.check_blocks(case, ids, dtype, CPU)


def test_blocks_in_several_pieces():
    cases.check_blocks(cases.CASES[2], [3, -1, 0, 9], torch.int32, CPU)


@pytest.mark.parametrize("first_and_count", [(0, 1), (2, 3), (0, 6)], ids=str)
@pytest.mark.parametrize("limit", [1 << 20, 8192], ids=["all", "short_ones"])
@pytest.mark.parametrize("case", cases.CASES[:2], ids=str)
def test_new_blocks_of_short_ranges(case, first_and_count, limit):
    cases.check_range(case, *first_and_count, limit, CPU)

"""Zeroing of byte ranges on the CPU, and how a launch is cut for a grid."""

import pytest
import torch

from tests import zero_cases
from triton_kv.blocks import zero_launches, zero_ranges

CPU = torch.device("cpu")


@pytest.mark.parametrize("case", zero_cases.CASES, ids=str)
def test_only_the_ranges_become_zero(case):
    zero_cases.check(case, CPU)


@pytest.mark.parametrize(
    ("num_bytes", "stride", "count", "grids"),
    [
        (1, 0, 1, [(1, 1)]),
        (4096, 0, 1, [(1, 1)]),
        (4097, 8192, 3, [(2, 3)]),
        (64 << 30, 0, 1, [((64 << 30) // 4096, 1)]),
        (16, 16, 65536, [(1, 65535), (1, 1)]),
        (9 << 40, 0, 1, [(2**31 - 1, 1), (268435457, 1)]),
        (0, 0, 1, []),
        (16, 16, 0, []),
    ],
    ids=["byte", "one_program", "three_ranges", "64_GiB", "many_ranges", "beyond_grid_0", "nothing", "no_range"],
)
def test_launches(num_bytes, stride, count, grids):
    launches = zero_launches(1 << 40, num_bytes, stride=stride, count=count)
    assert [launch.grid for launch in launches] == grids
    covered = sum(launch.arguments["num_bytes"] * launch.grid[1] for launch in launches)
    assert covered == num_bytes * count
    for launch in launches:  # an address and sizes, but one specialisation
        assert set(launch.arguments) == {"address", "num_bytes", "stride", "BLOCK_WORDS"}
        assert launch.arguments["BLOCK_WORDS"] == 1024


def test_launches_follow_each_other():
    first, second = zero_launches(1 << 40, 16, stride=32, count=65536)
    assert second.arguments["address"] == first.arguments["address"] + 65535 * 32
    first, second = zero_launches(1 << 40, 9 << 40, stride=0, count=1)
    assert second.arguments["address"] == first.arguments["address"] + first.arguments["num_bytes"]


@pytest.mark.parametrize(
    ("address", "num_bytes", "count"), [(-1, 1, 1), (0, -1, 1), (0, 1, -1)], ids=["address", "num_bytes", "count"]
)
def test_negative_numbers(address, num_bytes, count):
    with pytest.raises(ValueError, match=f"must not be negative, got {address}, {num_bytes} and {count}"):
        zero_ranges(address, num_bytes, stride=0, count=count, device=CPU)

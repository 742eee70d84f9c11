"""Gathering blocks: the reference, and the launches as numbers."""

import pytest
import torch

from tests import gather_cases
from triton_kv.gathering import BlockPlaces, gather_launch


@pytest.mark.parametrize("case", gather_cases.CASES, ids=str)
def test_reference(case):
    gather_cases.check(case, torch.device("cpu"))


@pytest.mark.parametrize(
    ("places", "packed", "alignment", "words", "grid"),
    [
        pytest.param(BlockPlaces(1 << 40, 64, 1 << 30, 32768), 1 << 41, 16, 2048, (64 * 9, 4), id="pages"),
        pytest.param(BlockPlaces(1 << 40, 2, 1 << 30, 8192), (1 << 41) + 4, 4, 2048, (18, 1), id="packed-by-four"),
        pytest.param(BlockPlaces(1 << 40, 1, 48, 48), 1 << 41, 16, 16, (9, 1), id="small"),
        pytest.param(BlockPlaces(1 << 40, 1, 37, 37), 1 << 41, 1, 64, (9, 1), id="odd"),
        pytest.param(BlockPlaces(1 << 40, 1 << 20, 4096, 16), 1 << 41, 16, 4, (9 << 20, 1), id="many-segments"),
    ],
)
@pytest.mark.parametrize("scatter", [False, True], ids=["gather", "scatter"])
def test_launches(places, packed, alignment, words, grid, scatter):
    launch = gather_launch(places, 1 << 42, 9, packed, scatter=scatter)
    constants = {name: value for name, value in launch.arguments.items() if name.isupper()}
    assert constants == {"BLOCK_WORDS": words, "ALIGNMENT": alignment, "SCATTER": scatter}
    assert launch.grid == grid

"""The kernel that gathers and scatters blocks, in the interpreter."""

import pytest
import torch

from tests import gather_cases
from triton_kv.kernels.gather import gather_blocks_kernel
from triton_kv.launch import interpreted

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("case", gather_cases.CASES, ids=str)
def test_blocks_are_gathered_and_scattered(case):
    assert interpreted(gather_blocks_kernel)
    gather_cases.check(case, torch.device("cpu"))

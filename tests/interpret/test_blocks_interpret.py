"""The kernel that copies blocks, in the interpreter."""

import pytest
import torch

from tests import copy_cases
from triton_kv.kernels.blocks import copy_blocks_kernel
from triton_kv.launch import interpreted

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("case", copy_cases.CASES, ids=str)
def test_blocks_are_copied(case):
    assert interpreted(copy_blocks_kernel)
    copy_cases.check(case, torch.device("cpu"))

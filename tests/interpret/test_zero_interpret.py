"""The zero kernel in the interpreter: every alignment of start and end, several programs, several ranges."""

import pytest
import torch

from tests import zero_cases
from triton_kv.blocks import zero_ranges
from triton_kv.errors import Unavailable
from triton_kv.kernels.zero import zero_kernel
from triton_kv.launch import interpreted

pytestmark = pytest.mark.quick

CPU = torch.device("cpu")


@pytest.mark.parametrize("case", zero_cases.CASES, ids=str)
def test_only_the_ranges_become_zero(case):
    assert interpreted(zero_kernel)
    zero_cases.check(case, CPU)


@pytest.mark.parametrize("num_bytes", [1, 2, 4, 8, 15, 16, 17, 31, 32, 33, 63, 4097])
def test_every_alignment(num_bytes):
    zero_cases.check_every_alignment(num_bytes, CPU)


def test_device_memory_is_out_of_reach():
    with pytest.raises(
        Unavailable, match="TRITON_INTERPRET=1 runs kernels on the CPU and cannot write to cuda:0: unset it"
    ):
        zero_ranges(1 << 40, 16, stride=0, count=1, device=torch.device("cuda", 0))

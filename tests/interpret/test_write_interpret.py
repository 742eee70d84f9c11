"""The write kernel in the interpreter, over every layout, source stride and kind of slot."""

import pytest
import torch

from tests.write_cases import CASES, assert_written, make_tensors
from triton_kv.kernels.write import write_kernel
from triton_kv.launch import interpreted
from triton_kv.writing import write_kv

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("case", CASES, ids=str)
def test_write_kernel(case):
    assert interpreted(write_kernel)
    tensors = make_tensors(case)
    expected = tensors.expected()
    write_kv(tensors.k, tensors.v, tensors.layer, tensors.slot_mapping)
    assert_written(case, tensors, expected)


def test_no_token_launches_nothing():
    case = CASES[1]
    tensors = make_tensors(case)
    expected = tuple(view.clone() for view in tensors.views)
    write_kv(tensors.k[:0], tensors.v[:0], tensors.layer, tensors.slot_mapping[:0])
    for view, wanted in zip(tensors.views, expected):
        torch.testing.assert_close(view, wanted, rtol=0, atol=0)

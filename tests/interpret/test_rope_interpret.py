"""The fused norm, rotation and write in the interpreter, over every style, stride and kind of slot and position."""

import pytest
import torch

from tests.rope_cases import CASES, assert_roped, make_rope
from triton_kv.kernels.rope import rope_write_kernel
from triton_kv.launch import interpreted
from triton_kv.rope import rope_and_write_kv

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rope_write_kernel(case):
    assert interpreted(rope_write_kernel)
    tensors = make_rope(case)
    expected = tensors.expected()
    positional, named = tensors.arguments()
    queries = rope_and_write_kv(*positional, **named)
    assert_roped(tensors, queries, expected)


def test_no_token_launches_nothing():
    tensors = make_rope(CASES[0])
    (q, k, v, layer, slots, positions, cos_sin), named = tensors.arguments()
    expected = [view.clone() for view in tensors.write.views]
    assert rope_and_write_kv(q[:0], k[:0], v[:0], layer, slots[:0], positions[:0], cos_sin, **named).shape[0] == 0
    for view, wanted in zip(tensors.write.views, expected):
        torch.testing.assert_close(view, wanted, rtol=0, atol=0)

"""The merge kernel in the interpreter."""

import pytest
import torch

from tests.merge_cases import SHAPES, assert_merged, make
from triton_kv.kernels.merge import merge_kernel
from triton_kv.launch import interpreted
from triton_kv.merging import merge_attention


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["f32", "f16"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_kernel_equals_float64(shape, dtype):
    assert interpreted(merge_kernel)
    tensors = make(shape, dtype)
    assert_merged(tensors, merge_attention(*tensors))

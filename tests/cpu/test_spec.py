"""AttentionSpec: sizes, derived bytes and refusals."""

import numpy as np
import pytest
import torch

from triton_kv.spec import AttentionSpec


@pytest.mark.parametrize(
    ("spec", "value_dim", "token_bytes"),
    [
        (AttentionSpec(8, 128, torch.bfloat16), 128, 8 * 256 * 2),
        (AttentionSpec(8, 128, torch.float32), 128, 8 * 256 * 4),
        (AttentionSpec(2, 192, torch.float16, 128), 128, 2 * 320 * 2),
        (AttentionSpec(np.int64(3), np.int32(64), torch.bfloat16), 64, 3 * 128 * 2),
    ],
    ids=["bf16", "f32", "different_dims", "numpy_sizes"],
)
def test_derived_sizes(spec, value_dim, token_bytes):
    assert spec.value_dim == spec.v_head_dim == value_dim
    assert spec.token_bytes == token_bytes
    assert type(spec.num_kv_heads) is type(spec.head_dim) is int


def test_an_equal_value_dim_may_be_left_out():
    left_out, given = AttentionSpec(8, 128, torch.bfloat16), AttentionSpec(8, 128, torch.bfloat16, v_head_dim=128)
    assert left_out == given
    assert hash(left_out) == hash(given)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, 128, torch.bfloat16), ValueError, "num_kv_heads must be at least 1, got 0"),
        ((8, -1, torch.bfloat16), ValueError, "head_dim must be at least 1, got -1"),
        ((8, 128, torch.bfloat16, 0), ValueError, "v_head_dim must be at least 1, got 0"),
        ((8.0, 128, torch.bfloat16), TypeError, "num_kv_heads must be an integer, got 8.0"),
        ((True, 128, torch.bfloat16), TypeError, "num_kv_heads must be an integer, got True"),
        ((8, 128, "bfloat16"), TypeError, "dtype must be a torch.dtype .* got 'bfloat16'"),
        ((8, 128, torch.int8), ValueError, "cache of torch.int8 is not possible; use float32, float16 or bfloat16"),
        ((8, 128, torch.float8_e4m3fn), NotImplementedError, "float8_e4m3fn is not supported yet; use float32"),
        ((8, 128, torch.float8_e5m2), NotImplementedError, "float8_e5m2 is not supported yet"),
    ],
    ids=["heads_0", "dim_negative", "v_dim_0", "heads_float", "heads_bool", "dtype_name", "int8", "e4m3", "e5m2"],
)
def test_refusals(arguments, error, message):
    with pytest.raises(error, match=message):
        AttentionSpec(*arguments)

"""The attention kernels in the interpreter: shapes, strides, groups, block sizes, and all that must not be read."""

import pytest

from tests.attention_cases import DECODE_CASES, VARLEN_CASES, assert_attention, make_tensors
from triton_kv import attention
from triton_kv.attention import paged_attention
from triton_kv.choices import Hardware
from triton_kv.kernels.decode import decode_kernel
from triton_kv.launch import interpreted

QUICK = {"skew", "f16", "group_3", "block_12", "over_watermark", "dim_80", "mixed", "padding_tokens", "many_seqs"}


def cases(kind, table):
    return [pytest.param(case, id=f"{kind}-{case}", marks=[pytest.mark.quick] * (case.name in QUICK)) for case in table]


@pytest.mark.parametrize("case", [*cases("decode", DECODE_CASES), *cases("varlen", VARLEN_CASES)])
def test_kernels_equal_the_naive_loop(case, monkeypatch):
    assert interpreted(decode_kernel)
    monkeypatch.setattr(attention, "hardware_of", lambda device: Hardware(case.num_sms, 80))
    tensors = make_tensors(case)
    out = tensors.out()
    returned, lse = paged_attention(
        tensors.q, tensors.layer, tensors.metadata, out=out, causal=case.causal, scale=case.scale, return_lse=True
    )
    assert returned is out
    assert_attention(tensors, out, lse)

"""merge_attention on the CPU: against float64, as a registered op, over a shared prefix, and with bad input."""

import re

import pytest
import torch

from tests.attention_cases import decode, make_tensors
from tests.merge_cases import SHAPES, assert_merged, make
from triton_kv import merging
from triton_kv.attention import paged_attention
from triton_kv.merging import merge_attention
from triton_kv.metadata import AttentionMetadata


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["f32", "f16", "bf16"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_reference_equals_float64(shape, dtype):
    tensors = make(shape, dtype)
    assert_merged(tensors, merge_attention(*tensors))


def test_no_rows():
    out, lse = merge_attention(*make((0, 4, 16), torch.float32))
    assert (out.shape, lse.shape) == ((0, 4, 16), (0, 4))


def test_opcheck():
    out_a, lse_a, out_b, lse_b = make((7, 3, 80), torch.float32)
    tensors = [torch.nan_to_num(tensor, 0.0) for tensor in (out_a, lse_a, out_b, lse_b)]
    torch.library.opcheck(merging._OP, (*tensors, torch.zeros_like(out_a), torch.zeros_like(lse_a)))


def test_a_shared_prefix_is_read_once_for_all_sequences():
    """The recipe of docs/decode.md: all queries are one sequence over the prefix, and each has its own suffix."""
    prefix, suffixes, block_size = 64, (5, 16, 33), 16
    tensors = make_tensors(decode("whole", *(prefix + suffix for suffix in suffixes), num_kv_heads=2, group=3))
    table, k, v = tensors.metadata.block_table, tensors.layer.k, tensors.layer.v
    shared = table[0, : prefix // block_size].clone()
    for row in range(1, len(suffixes)):  # the same prefix in all of them
        for ours, theirs in zip(table[row, : prefix // block_size].tolist(), shared.tolist()):
            k[ours], v[ours] = k[theirs], v[theirs]
    whole, whole_lse = paged_attention(tensors.q, tensors.layer, tensors.metadata, return_lse=True)

    num_seqs = len(suffixes)
    over_prefix = AttentionMetadata(
        block_table=shared[None],
        seq_lens=torch.tensor([prefix], dtype=torch.int32),
        query_start_loc=torch.tensor([0, num_seqs], dtype=torch.int32),
        slot_mapping=torch.full((num_seqs,), -1),
        num_tokens=num_seqs,
        num_seqs=1,
        max_query_len=num_seqs,
    )
    over_suffix = AttentionMetadata(
        block_table=table[:, prefix // block_size :],
        seq_lens=torch.tensor(suffixes, dtype=torch.int32),
        slot_mapping=torch.full((num_seqs,), -1),
        num_tokens=num_seqs,
        num_seqs=num_seqs,
        max_query_len=1,
    )
    of_prefix = paged_attention(tensors.q, tensors.layer, over_prefix, causal=False, return_lse=True)
    of_suffix = paged_attention(tensors.q, tensors.layer, over_suffix, return_lse=True)
    out, lse = merge_attention(*of_prefix, *of_suffix)
    torch.testing.assert_close(out, whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-5, atol=1e-5)


OUT, LSE = torch.zeros(3, 2, 16), torch.zeros(3, 2)
BAD_INPUT = {
    "no_tensor": ((OUT, LSE, None, LSE), TypeError, "out_b must be a tensor, not NoneType"),
    "rank": ((OUT[0], LSE, OUT, LSE), ValueError, "out_a must be 3-D [num_tokens, num_query_heads, head_dim], got"),
    "shape": ((OUT, LSE, torch.zeros(3, 2, 8), LSE), ValueError, "out_b must be [3, 2, 16] like out_a, got [3, 2, 8]"),
    "lse_shape": ((OUT, LSE, OUT, torch.zeros(2, 3)), ValueError, "lse_b must be [3, 2], got [2, 3]"),
    "lse_dtype": ((OUT, LSE.double(), OUT, LSE), TypeError, "lse_a must be float32, got torch.float64"),
    "dtype": ((OUT, LSE, OUT.half(), LSE), TypeError, "out_a and out_b must both be float16, bfloat16 or float32"),
    "strides": ((OUT, LSE, torch.zeros(3, 16, 2).mT, LSE), ValueError, "out_b must be contiguous, got strides"),
    "device": ((OUT, LSE, OUT, LSE.to("meta")), ValueError, "lse_b is on meta, but out_a is on cpu"),
}


@pytest.mark.parametrize(("arguments", "error", "message"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input(arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        merge_attention(*arguments)

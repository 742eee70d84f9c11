"""paged_attention on the CPU: the reference against a naive loop, the registered op, compilation, and bad input."""

import re
from dataclasses import replace

import pytest
import torch

from tests.attention_cases import (
    BF16,
    DECODE_CASES,
    VARLEN_CASES,
    assert_attention,
    chain_words,
    decode,
    make_tensors,
    varlen,
)
from triton_kv import attention
from triton_kv.attention import paged_attention, paged_attention_reference
from triton_kv.batch import Batch
from triton_kv.cache import KVCache
from triton_kv.errors import Closed, NothingCommitted
from triton_kv.kernels.decode import decode_kernel
from triton_kv.launch import interpreted
from triton_kv.layer import operands_of
from triton_kv.memory import HostMemory
from triton_kv.metadata import AttentionBuffers
from triton_kv.scoring import Scoring
from triton_kv.spec import AttentionSpec

OTHER_DTYPES = (
    decode("bf16", 70, 0, 9, dtype=BF16),
    varlen("bf16", (9, 70), (3, 3), dtype=BF16),
    decode("f64", 70, 0, 9, dtype=torch.float64, layout="pair"),
    varlen("f64", (9, 70), (3, 3), dtype=torch.float64, layout="pair"),
)
CASES = [
    pytest.param(case, id=f"{'decode' if case.queries is None else 'varlen'}-{case}")
    for case in DECODE_CASES + VARLEN_CASES + OTHER_DTYPES
]
NAMED = {case.name: case for case in VARLEN_CASES + DECODE_CASES}


@pytest.mark.parametrize("case", CASES)
def test_the_reference_equals_the_naive_loop(case):
    assert not interpreted(decode_kernel)
    tensors = make_tensors(case)
    attend = paged_attention_reference if case.dtype == torch.float64 else paged_attention
    out = tensors.out()
    returned, lse = attend(tensors.q, tensors.layer, tensors.metadata, out=out, return_lse=True, **tensors.arguments)
    assert returned is out
    assert lse.dtype == torch.float32
    if case.dtype == torch.float64:
        lse = lse.to(torch.float64)
        expected_out, expected_lse = tensors.expected()
        torch.testing.assert_close(out, expected_out, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=1e-6)  # the LSE is float32
    else:
        assert_attention(tensors, out, lse)


def test_out_is_allocated_and_the_lse_left_out_by_default():
    tensors = make_tensors(NAMED["mixed"])
    out = paged_attention(tensors.q, tensors.layer, tensors.metadata)
    assert out.shape == (*tensors.q.shape[:2], tensors.case.v_head_dim)
    assert out.dtype == tensors.q.dtype
    expected, _ = tensors.expected()
    torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2e-5)


def test_out_may_be_a_slice():
    tensors = make_tensors(NAMED["mixed"])
    wide = torch.full((tensors.case.num_tokens, 9, 50), torch.nan)
    out = wide[:, 2:6, 8:40]
    assert paged_attention(tensors.q, tensors.layer, tensors.metadata, out=out) is out
    expected, _ = tensors.expected()
    torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2e-5)
    assert wide.isnan().sum() == wide.numel() - out.numel()


def test_no_tokens():
    case = decode("none")
    tensors = make_tensors(case)
    out, lse = paged_attention(tensors.q, tensors.layer, tensors.metadata, return_lse=True)
    assert out.shape == (0, 4, 32)
    assert lse.shape == (0, 4)


def test_errors_add_up_and_the_first_one_stays():
    tensors = make_tensors(NAMED["over_watermark"])
    for _ in range(2):
        paged_attention(tensors.q, tensors.layer, tensors.metadata)
    control = tensors.layer.control.tolist()
    assert control[1] == 2 * len(tensors.bad)
    assert (control[3], control[4]) == tensors.bad[0]


def test_blocks_in_reach_of_a_smaller_watermark_are_left_out():
    """The bound is the control block's word, not the shape of the views."""
    tensors = make_tensors(NAMED["fresh"])
    tensors.layer.control[0] = 0
    out, lse = paged_attention(tensors.q, tensors.layer, tensors.metadata, return_lse=True)
    assert out.abs().max() == 0
    assert lse.max() == -torch.inf
    assert tensors.layer.control[1] == 4  # 40 and 7 tokens in blocks of 16


OP_NAMES = ("skew", "mixed", "pair_padded", "over_watermark", "table_rows", "everything", "tree_window")
OP_CASES = [NAMED[name] for name in OP_NAMES]
SCORING_TENSORS = ("sinks", "alibi_slopes", "tree_mask")


@pytest.mark.parametrize("case", OP_CASES, ids=str)
@pytest.mark.parametrize("has_lse", [False, True], ids=["no_lse", "lse"])
def test_opcheck(case, has_lse):
    tensors = make_tensors(case)
    operands, metadata = operands_of(tensors.layer), tensors.metadata
    lse = torch.empty(tensors.q.shape[:2]) if has_lse else None
    for cache in (operands.k_cache, operands.v_cache):
        if cache is not None:
            cache.nan_to_num_(0.0)  # opcheck compares with equality
    torch.library.opcheck(
        attention._OP,
        (
            tensors.q,
            *Batch.of(metadata),
            torch.zeros(*tensors.q.shape[:2], case.v_head_dim),
            lse,
            None,
            None,
            False,
            *Scoring(0.5, True, case.window or 0, case.softcap, *(tensors.arguments[name] for name in SCORING_TENSORS)),
            *operands,
        ),
    )


@pytest.mark.parametrize("name", ["skew", "mixed", "pair", "tree_few", "tree_window"])
def test_compiles_as_one_graph(name):
    tensors = make_tensors(NAMED[name])

    def step(q):
        out, lse = paged_attention(q * 1.0, tensors.layer, tensors.metadata, return_lse=True, **tensors.arguments)
        return out + 0.0, lse

    out, lse = torch.compile(step, fullgraph=True, backend="aot_eager")(tensors.q)
    assert_attention(tensors, out, lse)


def test_a_call_goes_past_the_dispatcher_unless_a_mode_is_active(monkeypatch):
    tensors = make_tensors(NAMED["fresh"])
    calls = []
    monkeypatch.setattr(attention, "_OP", lambda *arguments: calls.append(arguments))
    paged_attention(tensors.q, tensors.layer, tensors.metadata)
    assert not calls
    with torch._subclasses.fake_tensor.FakeTensorMode(allow_non_fake_inputs=True):
        paged_attention(tensors.q, tensors.layer, tensors.metadata)
    assert len(calls) == 1


@pytest.mark.parametrize("name", ["context", "window", "window_1", "speculative_window", "softcap", "sinks"])
def test_a_chain_is_the_causal_mask(name):
    tensors = make_tensors(NAMED[name])
    expected = paged_attention(tensors.q, tensors.layer, tensors.metadata, return_lse=True, **tensors.arguments)
    arguments = {**tensors.arguments, "tree_mask": chain_words(tensors.case)}
    out, lse = paged_attention(tensors.q, tensors.layer, tensors.metadata, return_lse=True, **arguments)
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])


HEADS = torch.zeros(4)
WORDS = torch.ones(1, dtype=torch.int64)
BAD_SCORING = {
    "window_0": ({"window": 0}, ValueError, "window must be at least 1 .*None sees everything"),
    "window_float": ({"window": 2.5}, TypeError, "window must be an int or None, got 2.5"),
    "softcap": ({"softcap": -1.0}, ValueError, "softcap must be positive, or 0 for none, got -1.0"),
    "sinks_shape": ({"sinks": torch.zeros(3)}, ValueError, r"sinks must be \[num_query_heads\] = \[4\], got \[3\]"),
    "sinks_dtype": ({"sinks": HEADS.int()}, TypeError, "sinks must be floating point, got torch.int32"),
    "slopes_stride": ({"alibi_slopes": torch.zeros(8)[::2]}, ValueError, "alibi_slopes must be contiguous, got stride"),
    "tree_kind": ({"tree_mask": [1]}, TypeError, "tree_mask must be a tensor, not list"),
    "tree_dtype": (
        {"tree_mask": WORDS.int()},
        TypeError,
        r"tree_mask must be int64 \(bit j: the sequence's j-th query token\), got torch\.int32",
    ),
    "tree_bools": ({"tree_mask": WORDS.bool()}, TypeError, r"tree_mask must be int64 .* got torch\.bool"),
    "tree_shape": ({"tree_mask": WORDS[None]}, ValueError, r"tree_mask must be \[num_tokens\] = \[1\], got \[1, 1\]"),
    "tree_device": ({"tree_mask": WORDS.to("meta")}, ValueError, "tree_mask is on meta, but q is on cpu"),
    "tree_not_causal": (
        {"tree_mask": WORDS, "causal": False},
        ValueError,
        "a tree_mask stands in place of the causal mask: leave causal at True",
    ),
    "tree_alibi": ({"tree_mask": WORDS, "alibi_slopes": HEADS}, ValueError, "tree_mask does not go with alibi_slopes"),
    "slopes_device": ({"alibi_slopes": HEADS.to("meta")}, ValueError, "alibi_slopes is on meta, but q is on cpu"),
}


@pytest.mark.parametrize(("asked", "kind", "match"), BAD_SCORING.values(), ids=BAD_SCORING)
@pytest.mark.parametrize("attend", [paged_attention, paged_attention_reference], ids=["op", "reference"])
def test_bad_scoring(attend, asked, kind, match):
    tensors = make_tensors(NAMED["one"])
    with pytest.raises(kind, match=match):
        attend(tensors.q, tensors.layer, tensors.metadata, **asked)


def test_more_query_tokens_than_a_word_has_bits():
    tensors = make_tensors(varlen("65", (65, 70), (3, 9)))
    words = torch.ones(68, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"for 64 query tokens a sequence, but .* max_query_len is 65: pass the true"):
        paged_attention(tensors.q, tensors.layer, tensors.metadata, tree_mask=words)


def test_words_that_stand_apart():
    tensors = make_tensors(NAMED["tree"])
    words = torch.ones(2 * tensors.case.num_tokens, dtype=torch.int64)[::2]
    with pytest.raises(ValueError, match="tree_mask must be contiguous, got stride 2"):
        paged_attention(tensors.q, tensors.layer, tensors.metadata, tree_mask=words)


def pair(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)


BAD_INPUT = {
    "rank": (
        {"q": torch.zeros(3, 128)},
        ValueError,
        "q must be 3-D [num_tokens, num_query_heads, head_dim], got (3, 128)",
    ),
    "head_dim": ({"q": torch.zeros(3, 4, 64)}, ValueError, "q has head_dim 64, but the cache holds keys of 32"),
    "heads": (
        {"q": torch.zeros(3, 3, 32)},
        ValueError,
        "q has 3 heads, which must be a multiple of the cache's 2 KV heads",
    ),
    "no_heads": ({"q": torch.zeros(3, 0, 32)}, ValueError, "q has 0 heads"),
    "group": ({"q": torch.zeros(3, 258, 32)}, ValueError, "at most 128 query heads may share a KV head"),
    "dtype": ({"q": torch.zeros(3, 4, 32).half()}, TypeError, "q is torch.float16, but the cache holds torch.float32"),
    "device": ({"q": torch.zeros(3, 4, 32, device="meta")}, ValueError, "q is on meta, but the cache is on cpu"),
    "tokens": ({"q": torch.zeros(2, 4, 32)}, ValueError, "q has 2 tokens, but the metadata describes 3"),
    "strides": (
        {"q": torch.zeros(3, 32, 4).transpose(1, 2)},
        ValueError,
        "q's channels must be contiguous, got strides (128, 1, 4)",
    ),
    "float64": (
        {"q": torch.zeros(3, 4, 32).double(), "layer": pair(5, 16, 2, 32, dtype=torch.float64)},
        TypeError,
        "q must be float16, bfloat16 or float32, got torch.float64",
    ),
    "wide_heads": (
        {"q": torch.zeros(3, 4, 520), "layer": pair(5, 16, 2, 520)},
        ValueError,
        "head_dim 520 and v_head_dim 520 may be at most 512",
    ),
    "no_pair": (
        {"layer": torch.zeros(5, 16, 2, 32)},
        TypeError,
        "layer must be a LayerCache or a pair (k, v) of tensors",
    ),
    "out_shape": ({"out": torch.zeros(3, 4, 16)}, ValueError, "out must be [3, 4, 32], got [3, 4, 16]"),
    "out_dtype": (
        {"out": torch.zeros(3, 4, 32).half()},
        ValueError,
        "out must be torch.float32 on cpu like q, got torch.float16 on cpu",
    ),
    "out_strides": (
        {"out": torch.zeros(3, 32, 4).transpose(1, 2)},
        ValueError,
        "out's channels must be contiguous, got strides (128, 1, 4)",
    ),
}


@pytest.mark.parametrize(("given", "error", "message"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input(given, error, message):
    tensors = make_tensors(decode("three", 5, 6, 7))
    arguments = {"q": tensors.q, "layer": tensors.layer, "metadata": tensors.metadata, **given}
    with pytest.raises(error, match=re.escape(message)):
        paged_attention(**arguments)


def test_a_block_table_that_is_not_int32():
    metadata = make_tensors(NAMED["one"]).metadata
    with pytest.raises(TypeError, match=r"block_table must be int32, got torch\.int64"):
        replace(metadata, block_table=metadata.block_table.long())


def test_a_cache_that_is_not_usable():
    spec = AttentionSpec(num_kv_heads=2, head_dim=32, dtype=torch.float32)
    cache = KVCache.reserve(spec, num_layers=2, block_size=16, capacity=8, memory=HostMemory(granularity=4096))
    layer = cache[1]
    metadata = AttentionBuffers(2, 2, 1, "cpu").dummy(2, 2)
    q = torch.zeros(2, 4, 32)
    with pytest.raises(NothingCommitted):
        paged_attention(q, layer, metadata)
    cache.extend(1)
    assert paged_attention(q, layer, metadata).shape == q.shape
    cache.close()
    with pytest.raises(Closed):
        paged_attention(q, layer, metadata)

"""What the attention cases say about themselves: bytes, operations, and the lengths that the facts name."""

import pytest

from bench.attention_case import AttentionCase
from bench.suites.decode import SUITE as DECODE
from bench.suites.prefill import SUITE as PREFILL

CASES = {case.id: case for case in DECODE.cases + PREFILL.cases}


@pytest.mark.parametrize(
    ("name", "mebibytes"),
    [
        pytest.param("decode/B1-L8k", 32, id="B1-L8k"),
        pytest.param("decode/B64-L8k", 2048, id="B64-L8k"),
        pytest.param("decode/skew", 764, id="skew"),
        pytest.param("decode/ragged256", 1843, id="ragged256"),
    ],
)
def test_kv_bytes(name, mebibytes):
    assert CASES[name].kv_bytes / 2**20 == pytest.approx(mebibytes, rel=2e-3)


@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [
        pytest.param((1,), (7,), id="decode"),
        pytest.param((5,), (5,), id="prompt"),
        pytest.param((3, 1, 4), (9, 2, 4), id="mixed"),
    ],
)
def test_flops_are_those_of_the_visible_pairs(query_lens, seq_lens):
    case = AttentionCase("x/y", query_lens, seq_lens, num_query_heads=6, num_kv_heads=2, head_dim=16)
    pairs = sum(n - q + i + 1 for q, n in zip(query_lens, seq_lens) for i in range(q))
    assert case.flops == pairs * 6 * 16 * 2 * 2


def test_context_is_on_top_of_the_new_tokens():
    case = CASES["prefill/4x2k-ctx14k"]
    assert (case.query_lens, case.seq_lens) == ((2048,) * 4, (16384,) * 4)


@pytest.mark.parametrize(
    ("choices", "text"),
    [
        pytest.param({"query_lens": (1, 1), "seq_lens": (1,)}, "2 query lengths", id="counts"),
        pytest.param({"query_lens": (3,), "seq_lens": (2,)}, "more queries than tokens", id="too-many-queries"),
        pytest.param({"query_lens": (1,), "seq_lens": (2,), "num_query_heads": 9}, "9 query heads", id="heads"),
    ],
)
def test_impossible_cases(choices, text):
    with pytest.raises(ValueError, match=text):
        AttentionCase("x/y", **choices)

"""The check of attention: references in float64, torch's own error beside ours, shared prefixes and windows."""

from dataclasses import replace

import pytest
import torch

from bench.attention_inputs import AttentionInputs
from bench.attention_suite import run_case
from bench.candidate import OURS, WrongResultError
from bench.measure import SMOKE_EFFORT
from bench.session import Session
from bench.suites import ratios
from bench.suites.decode import uniform
from bench.suites.prefill import prompts

SESSION = Session(torch.device("cpu"), smoke=True)
SMALL = {"num_query_heads": 4, "num_kv_heads": 2, "head_dim": 32}


def answer(inputs, index=0):
    """Causal attention over the block table, in f64, without a word of the harness's own reference."""
    case, rows = inputs.case, []
    layer = inputs.layers[index]
    for sequence, (queries, length) in enumerate(zip(case.query_lens, case.seq_lens)):
        table = inputs.block_table[sequence, : -(-length // case.block_size)].long()
        k, v = (x[table].flatten(0, 1)[:length].double() for x in (layer.k, layer.v))
        k, v = (x.repeat_interleave(case.num_query_heads // case.num_kv_heads, 1) for x in (k, v))
        begin = inputs.query_starts[sequence]
        q = inputs.q[index][begin : begin + queries].double()
        scores = torch.einsum("qhd,lhd->hql", q, k) * inputs.scale
        position, key = torch.arange(length - queries, length)[:, None], torch.arange(length)
        seen = (key <= position) & (key > position - (case.window or length))
        rows.append(torch.einsum("hql,lhd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v))
    return torch.cat(rows)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(uniform(3, 70, **SMALL), id="decode"),
        pytest.param(uniform(2, 70, window=9, **SMALL), id="window"),
        pytest.param(uniform(3, 70, shared_tokens=48, **SMALL), id="shared"),
        pytest.param(prompts("2x5", 2, 5, 60, window=33, **SMALL), id="prefill-window"),
    ],
)
def test_the_reference_is_right_and_torch_is_near(case, dtype):
    with AttentionInputs(SESSION, replace(case, dtype=dtype)) as inputs:
        right = answer(inputs)
        for token, row in inputs.reference(0):
            torch.testing.assert_close(row, right[token], rtol=1e-12, atol=1e-12)
        low, high = (5e-4, 5e-3) if dtype == "bfloat16" else (1e-9, 1e-6)
        assert low < inputs.torch_error() < high


@pytest.mark.parametrize(
    ("times", "ok"), [pytest.param(1.9, True, id="near-enough"), pytest.param(2.2, False, id="too-far")]
)
def test_ours_may_be_twice_as_far_off_as_torch(times, ok):
    with AttentionInputs(SESSION, uniform(2, 70, **SMALL)) as inputs:
        error = inputs.verify(answer(inputs) * (1 + times * inputs.torch_error()), 0)
        result = {"ok": True, "error_norm": error}
        inputs.judge(result)
    assert result["torch_error_norm"] == pytest.approx(inputs.torch_error(), rel=1e-2)
    assert result["ok"] is ok
    if not ok:
        assert "at most 2 times allowed" in result["error"]


def test_a_wrong_result_is_seen():
    with AttentionInputs(SESSION, uniform(2, 70, **SMALL)) as inputs, pytest.raises(WrongResultError):
        inputs.verify(answer(inputs) * 1.01, 0)


def test_a_case_above_the_limit_fails(monkeypatch):
    monkeypatch.setattr(AttentionInputs, "torch_error", lambda self: 1e-9)
    case = run_case(SESSION, uniform(2, 40, dtype="bfloat16", ways=("planned",), **SMALL), SMOKE_EFFORT)
    assert not case["ok"]
    assert "torch's own bfloat16 attention" in case["error"]
    assert not case["peers"]["ours-planned"]["ok"]


def test_bytes_of_windows_and_shared_tokens():
    plain = uniform(64, 17408)
    shared = replace(plain, shared_tokens=16384)
    assert shared.kv_bytes == (16384 + 64 * 1024) * 4096
    assert shared.num_blocks == 1024 + 64 * 64 + 1
    assert uniform(8, 131072, window=4096).bytes_moved == uniform(8, 4096).bytes_moved
    assert uniform(1, 131072, window=4096).flops == uniform(1, 4096).flops
    with pytest.raises(ValueError, match="24 shared tokens are no whole blocks"):
        replace(plain, shared_tokens=24)


def test_captured_at_length_1():
    """The lengths are one while captured, and the case's own again after it."""
    with AttentionInputs(SESSION, uniform(2, 40, **SMALL)) as inputs:
        candidate = ratios.captured(inputs)
        assert candidate.name == OURS
        with candidate.capturing():
            assert inputs.seq_lens.tolist() == [1, 1]
        assert inputs.seq_lens.tolist() == [40, 40]


@pytest.mark.parametrize("case", ratios.CASES, ids=lambda case: case.id)
def test_ratio_cases_are_fair(case):
    """Both sides read the same bytes, but for the further queries of a speculative batch."""
    if case.other is not None:
        assert case.batch.kv_bytes == pytest.approx(case.other.kv_bytes, rel=1e-3)
    assert case.batch.num_query_heads // case.batch.num_kv_heads == 4

"""AttentionPlan on the CPU: its size, what it refuses, and that the reference goes through it."""

import pytest
import torch

from tests.attention_cases import decode, make_tensors, varlen
from triton_kv import plan as plan_module
from triton_kv.attention import paged_attention
from triton_kv.batch import Batch
from triton_kv.choices import Hardware
from triton_kv.decode import choice_of, decodes, make_workspace
from triton_kv.layer import operands_of
from triton_kv.plan import AttentionPlan

TENSORS = make_tensors(decode("three", 5, 6, 7))
HEADS = TENSORS.case.num_query_heads


def make_plan(**fields) -> AttentionPlan:
    return AttentionPlan(TENSORS.layer, HEADS, **{"max_seqs": 8, "max_query_len": 4, **fields})


def test_the_reference_goes_through_a_plan():
    plan = make_plan()
    plan.prepare(TENSORS.metadata)
    out = paged_attention(TENSORS.q, TENSORS.layer, TENSORS.metadata, plan=plan)
    assert torch.equal(out, paged_attention(TENSORS.q, TENSORS.layer, TENSORS.metadata))
    assert plan.num_bytes == 0  # nothing to keep where no kernel runs
    assert repr(plan).startswith("AttentionPlan(max_seqs=8, max_query_len=4, max_tokens=None, num_query_heads=4, ")


def test_a_plan_must_be_prepared_for_the_batch():
    plan = make_plan()
    with pytest.raises(ValueError, match=r"prepared for .* None, but the metadata has \(3, 1\): call plan.prepare"):
        paged_attention(TENSORS.q, TENSORS.layer, TENSORS.metadata, plan=plan)


@pytest.mark.parametrize(
    ("fields", "case", "match"),
    [
        pytest.param({"max_seqs": 2}, decode("3", 5, 6, 7), "of 3 sequences, but the plan was made for 2", id="seqs"),
        pytest.param(
            {"max_query_len": 2}, varlen("3", (3, 9)), "3 query tokens a sequence, but the plan .* for 2", id="queries"
        ),
        pytest.param(
            {"max_tokens": 40},
            varlen("41", (40, 70), (1, 9)),
            "a batch of 41 tokens, but the plan was made for max_tokens 40",
            id="tokens",
        ),
        pytest.param(
            {"batch_invariant": True, "max_blocks_per_seq": 1},
            decode("long", 70),
            "a block table of 6 entries a row, but the plan was made for 1",
            id="table",
        ),
    ],
)
def test_steps_that_are_too_large(fields, case, match):
    with pytest.raises(ValueError, match=match):
        make_plan(**fields).prepare(make_tensors(case).metadata)


@pytest.mark.parametrize(
    ("planned", "asked", "match"),
    [
        pytest.param({}, {"window": 9}, "window is 9, but the plan was made for 0", id="window"),
        pytest.param({}, {"batch_invariant": True}, "batch_invariant is True, but the plan", id="invariant"),
    ],
)
def test_calls_that_do_not_fit_the_plan(planned, asked, match):
    plan = make_plan(**planned)
    plan.prepare(TENSORS.metadata)
    with pytest.raises(ValueError, match=match):
        paged_attention(TENSORS.q, TENSORS.layer, TENSORS.metadata, plan=plan, **asked)


def test_another_geometry_needs_another_plan():
    plan = make_plan()
    other = make_tensors(decode("other", 5, 6, 7, head_dim=16, v_head_dim=16))
    plan.prepare(other.metadata)
    with pytest.raises(ValueError, match=r"the layer's geometry is .* make another one"):
        paged_attention(other.q, other.layer, other.metadata, plan=plan)


def test_layers_with_other_bounds_need_another_plan():
    """What a step's marks and counts say of block ids holds for one bound and one control block."""
    layers = [tuple(torch.zeros(blocks, 16, 1, 16) for _ in range(2)) for blocks in (64, 8)]
    case = make_tensors(decode("short", 5, 6, num_kv_heads=1, head_dim=16, v_head_dim=16))
    plan = AttentionPlan(layers[0], case.q.shape[1], max_seqs=2)
    plan.prepare(case.metadata)
    paged_attention(case.q, layers[0], case.metadata, plan=plan)
    with pytest.raises(ValueError, match=r"the layer's geometry is .* make another one"):
        paged_attention(case.q, layers[1], case.metadata, plan=plan)


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        pytest.param({"max_tokens": 0}, ValueError, "max_tokens must be at least 1", id="tokens"),
        pytest.param({"max_seqs": 0}, ValueError, "max_seqs must be at least 1", id="seqs"),
        pytest.param({"batch_invariant": True}, ValueError, "pass max_blocks_per_seq", id="invariant"),
        pytest.param({"window": 0}, ValueError, "window must be at least 1", id="window"),
    ],
)
def test_bad_plans(fields, error, match):
    with pytest.raises(error, match=match):
        make_plan(**fields)


def test_heads_must_divide():
    with pytest.raises(ValueError, match="num_query_heads 5 must be a multiple of the layer's 2 KV heads"):
        AttentionPlan(TENSORS.layer, 5, max_seqs=1)


def test_a_batch_that_was_refused_is_not_prepared():
    plan = make_plan(max_seqs=2)
    with pytest.raises(ValueError, match="of 3 sequences, but the plan was made for 2"):
        plan.prepare(TENSORS.metadata)
    with pytest.raises(ValueError, match=r"call plan\.prepare"):
        paged_attention(TENSORS.q, TENSORS.layer, TENSORS.metadata, plan=plan)


@pytest.mark.parametrize("max_query_len", [1, 2, 3, 16])
@pytest.mark.parametrize("max_seqs", [1, 40, 64, 300])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_the_workspace_holds_every_batch_that_prepare_takes(monkeypatch, max_query_len, max_seqs, batch_invariant):
    """Of an H200, whose choices differ by the number of sequences and of query tokens."""
    hardware = Hardware(132, 90)
    monkeypatch.setattr(plan_module, "hardware_of", lambda device: hardware)
    monkeypatch.setattr(plan_module, "interpreted", lambda kernel: True)
    width = 9
    plan = AttentionPlan(
        TENSORS.layer,
        HEADS,
        max_seqs=max_seqs,
        max_query_len=max_query_len,
        max_blocks_per_seq=width,
        batch_invariant=batch_invariant,
    )
    operands = operands_of(TENSORS.layer)
    for num_seqs in {1, min(2, max_seqs), min(63, max_seqs), min(64, max_seqs), max_seqs}:
        for query_len in (None, *range(1, max_query_len + 1)):
            starts = None if query_len is None else torch.empty(num_seqs + 1, device="meta")
            table = torch.empty(num_seqs, width, device="meta")
            batch = Batch(table, torch.empty(num_seqs, device="meta"), starts, None, query_len or 1)
            if not decodes(batch, HEADS // operands.num_kv_heads):
                continue
            choice = choice_of(batch, HEADS, operands, hardware, batch_invariant)
            needed = make_workspace(batch, HEADS, operands, choice, torch.device("meta")).partials.numel()
            assert needed <= plan._partials.numel()
            assert choice.num_chunks <= len(plan._chunks)

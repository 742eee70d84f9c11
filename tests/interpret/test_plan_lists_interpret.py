"""A plan's work list of the Hopper prefill kernel: the one that a call would make, at an address that stays."""

import pytest
import torch

from tests.attention_cases import F16, OVER, make_tensors, varlen
from triton_kv import plan, prefill_hopper
from triton_kv.attention import prefill_launches
from triton_kv.batch import Batch
from triton_kv.choices import HOPPER_TRITONS, Hardware, choose_hopper
from triton_kv.layer import operands_of
from triton_kv.prefill_hopper import use_prefill_kernel, work_launch
from triton_kv.scoring import Scoring

H200 = Hardware(num_sms=132, architecture=90)
HEADS = {"num_kv_heads": 2, "group": 4, "head_dim": 64, "v_head_dim": 64, "dtype": F16}
LONG = varlen("long", (70, 300), (1, 40), (33, 33), **HEADS, padding_tokens=3)
BAD = varlen("bad", (40, 300), (1, 40), **HEADS, bad_entries=((0, 5, OVER),))
SHORT = varlen("short", (16, 300), (1, 40), **HEADS)
FEW = varlen("few", (8, 300), (1, 40), **HEADS)


@pytest.fixture(autouse=True)
def _on_hopper(monkeypatch):
    monkeypatch.setattr(plan, "hardware_of", lambda device: H200)
    monkeypatch.setattr(prefill_hopper, "TRITON_VERSION", HOPPER_TRITONS[0])


def make_plan(tensors, **fields):
    sizes = {"max_seqs": 5, "max_tokens": 200, "max_query_len": 8}
    return plan.AttentionPlan(tensors.layer, tensors.case.num_query_heads, **{**sizes, **fields})


def workspace_of(owner, tensors, causal=True, layer=None):
    layer = tensors.layer if layer is None else layer  # a step's metadata may serve another cache's layers
    return owner.workspace_for(tensors.q, operands_of(layer), tensors.metadata, 0, causal, False)


@pytest.mark.parametrize("case", [LONG, BAD], ids=str)
def test_the_list_is_that_of_a_call(case):
    tensors = make_tensors(case)
    batch, operands = Batch.of(tensors.metadata), operands_of(tensors.layer)
    choice = choose_hopper(batch.num_seqs, batch.max_query_len, case.group, case.head_dim, H200)
    sizes = (case.num_tokens, batch.num_seqs, case.num_kv_heads)
    own = torch.zeros(choice.work_words(*sizes), dtype=torch.int32)
    work_launch(operands, batch, True, choice, own, num_tokens=case.num_tokens).run()
    errors = int(tensors.layer.control[1])
    owner = make_plan(tensors)
    owner.prepare(tensors.metadata)
    shared = workspace_of(owner, tensors).chunks
    assert torch.equal(shared[: len(own)], own)
    assert own[0] > 0
    assert int(tensors.layer.control[1]) == 2 * errors == 2 * len(tensors.bad)


def test_calls_use_the_list_and_its_address_stays():
    tensors, others = make_tensors(LONG), make_tensors(BAD)
    owner = make_plan(tensors)
    owner.prepare(others.metadata)
    first = workspace_of(owner, others, layer=tensors.layer).chunks
    owner.prepare(tensors.metadata)
    work = workspace_of(owner, tensors).chunks
    assert work.data_ptr() == first.data_ptr()
    assert owner.num_bytes >= work.nbytes > 0
    scoring = Scoring(0.1, True, 0, 0.0, None, None)
    (launch,) = prefill_launches(
        tensors.q,
        operands_of(tensors.layer),
        Batch.of(tensors.metadata),
        tensors.out(),
        None,
        scoring,
        hardware=H200,
        work=work,
    )
    assert launch.arguments["work_ptr"].data_ptr() == work.data_ptr()


@pytest.mark.parametrize(
    ("case", "fields", "kernel"),
    [
        pytest.param(LONG, {"max_tokens": None}, None, id="no_max_tokens"),
        pytest.param(LONG, {"window": 50}, None, id="window"),
        pytest.param(LONG, {}, "portable", id="portable_forced"),
        pytest.param(SHORT, {}, None, id="64_rows"),
    ],
)
def test_nothing_is_listed_where_the_portable_kernel_runs(case, fields, kernel):
    tensors = make_tensors(case)
    owner = make_plan(tensors, **fields)
    with use_prefill_kernel(kernel):
        owner.prepare(tensors.metadata)
        assert (
            owner.workspace_for(tensors.q, operands_of(tensors.layer), tensors.metadata, owner.window, True, False)
            is None
        )


def test_a_call_without_the_causal_mask_makes_its_own_list():
    tensors = make_tensors(LONG)
    owner = make_plan(tensors)
    owner.prepare(tensors.metadata)
    assert workspace_of(owner, tensors, causal=False) is None
    assert workspace_of(owner, tensors) is not None


def test_a_list_of_another_kernel_or_batch_is_not_used():
    tensors, few = make_tensors(LONG), make_tensors(FEW)
    owner = make_plan(tensors)
    with use_prefill_kernel("hopper"):
        owner.prepare(few.metadata)
        assert workspace_of(owner, few, layer=tensors.layer).chunks.data_ptr() == owner._work.data_ptr()
    with pytest.raises(ValueError, match="under the same choice as the layers"):
        workspace_of(owner, few, layer=tensors.layer)
    owner.prepare(few.metadata)  # now chunks of the decode kernels
    assert workspace_of(owner, few, layer=tensors.layer).chunks.data_ptr() == owner._chunks.data_ptr()
    with use_prefill_kernel("hopper"):
        assert workspace_of(owner, few, layer=tensors.layer) is None
    owner.prepare(tensors.metadata)
    tensors.metadata.query_start_loc[-1] -= 1  # contents are the device's own business
    assert workspace_of(owner, tensors) is not None
    owner._listed = (3, 100, 70)
    with pytest.raises(ValueError, match=r"the plan lists work of .* call plan.prepare"):
        workspace_of(owner, tensors)

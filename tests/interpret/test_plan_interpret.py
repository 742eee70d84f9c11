"""A plan's prepared chunks give the same bits as planning inside the call, and count bad entries once a step."""

import pytest
import torch

from tests.attention_cases import DECODE_CASES, VARLEN_CASES, assert_attention, make_tensors
from triton_kv import attention, plan
from triton_kv.attention import paged_attention
from triton_kv.choices import Hardware
from triton_kv.layer import LayerCache
from triton_kv.plan import AttentionPlan

NAMES = (
    "skew",
    "empty_rows",
    "over_watermark",
    "table_rows_bad",
    "many_seqs",
    "window_over_watermark",
    "window_many_chunks",
    "everything",
    "invariant",
    "pair",
    "speculative",
    "speculative_over",
    "speculative_window",
    "mixed",
    "tree_few",
    "tree_few_window",
    "tree_few_invariant",
    "tree",
)
CASES = [case for case in (*DECODE_CASES, *VARLEN_CASES) if case.name in NAMES]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{'decode' if case.queries is None else 'varlen'}-{case}")
def test_prepared_steps_equal_those_that_plan_for_themselves(case, monkeypatch):
    for module in (attention, plan):
        monkeypatch.setattr(module, "hardware_of", lambda device: Hardware(case.num_sms, 80))
    tensors = make_tensors(case)
    metadata = tensors.metadata
    owner = AttentionPlan(
        tensors.layer,
        case.num_query_heads,
        max_seqs=metadata.num_seqs + 3,
        max_query_len=16,
        max_blocks_per_seq=metadata.block_table.shape[1],
        window=case.window,
        batch_invariant=case.batch_invariant,
    )
    own = paged_attention(tensors.q, tensors.layer, metadata, return_lse=True, **tensors.arguments)
    if isinstance(tensors.layer, LayerCache):
        tensors.layer.control[1:].zero_()
    owner.prepare(metadata)
    out = tensors.out()
    _, lse = paged_attention(
        tensors.q, tensors.layer, metadata, plan=owner, out=out, return_lse=True, **tensors.arguments
    )
    assert torch.equal(out, own[0])
    assert torch.equal(lse, own[1])
    assert_attention(tensors, out, lse)

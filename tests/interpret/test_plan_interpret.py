"""A plan's prepared chunks give the same bits as planning inside the call, and count bad entries once a step."""

import pytest
import torch

from tests.attention_cases import (
    BF16,
    DECODE_CASES,
    VARLEN_CASES,
    AttentionShape,
    assert_attention,
    make_tensors,
    shape_operands,
)
from triton_kv import attention, plan
from triton_kv.attention import paged_attention, paged_attention_reference
from triton_kv.batch import Batch
from triton_kv.choices import Hardware, choose_decode
from triton_kv.decode import CHUNK_WORDS, prepare_launch
from triton_kv.layer import LayerCache
from triton_kv.metadata import AttentionMetadata
from triton_kv.plan import AttentionPlan

NAMES = (
    "skew",
    "empty_rows",
    "over_watermark",
    "table_rows_bad",
    "many_seqs",
    "idle_chunk",
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


@pytest.mark.parametrize(
    ("lengths", "whole"),
    [
        pytest.param([8192] * 64, 1, id="a_sequence_a_chunk"),
        pytest.param([1024] * 256, 4, id="four_sequences_a_chunk"),
        pytest.param([8192] * 63 + [8160], None, id="one_is_shorter"),
        pytest.param([8192] * 100, None, id="whole_ones_would_be_uneven"),
        pytest.param([0] * 64, 1, id="all_empty"),
    ],
)
def test_even_batches_are_cut_between_sequences(lengths, whole):
    shape = AttentionShape(8, 4, 128, 128, 16, BF16, has_control=False)
    choice = choose_decode(len(lengths), 8, 4, 128, 128, 16, 2, Hardware(132, 90))
    assert (choice.num_chunks, choice.tile) == (66, 32)
    batch = Batch(
        torch.zeros(len(lengths), 512, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32), None, None, 1
    )
    chunks = torch.full((choice.num_chunks, CHUNK_WORDS.value), -1, dtype=torch.int32)
    prepare_launch(shape_operands(shape), batch, 0, choice, chunks).run()
    units = [max(-(-length // 32), 1) for length in lengths]
    per_chunk = -(-sum(units) // 66) if whole is None else whole * units[0]
    covered = 0
    for found, first, end, seq, seq_first in chunks[:, :5].tolist():
        assert found == per_chunk
        if first < end:
            assert (first, end) == (covered, min(covered + per_chunk, sum(units)))
            assert sum(units[:seq]) == seq_first <= first < seq_first + units[seq]
            assert whole is None or first == seq_first
            covered = end
    assert covered == sum(units)


def short_batch(lengths, width):
    count = len(lengths)
    return AttentionMetadata(
        block_table=torch.zeros(count, width, dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        slot_mapping=torch.zeros(count, dtype=torch.int32),
        num_tokens=count,
        num_seqs=count,
        max_query_len=1,
    )


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_lengths_past_the_block_table_stay_inside_the_workspace(batch_invariant):
    """Such a length is a mistake that no host sees: the row attends to what its table has, the others to theirs."""
    layer = (torch.randn(4, 16, 1, 16), torch.randn(4, 16, 1, 16))
    q, metadata = torch.randn(3, 2, 16), short_batch([9, 2**31 - 1, 16], 1)
    owner = AttentionPlan(layer, 2, max_seqs=3, max_blocks_per_seq=1, batch_invariant=batch_invariant)
    num_words = owner._partials.numel()
    guarded = torch.full((num_words + 4096,), -7.0)
    owner._partials = guarded[:num_words]
    owner.prepare(metadata)
    expected = paged_attention_reference(q, layer, short_batch([9, 16, 16], 1))
    for plan_of_step in (owner, None):
        out = paged_attention(q, layer, metadata, plan=plan_of_step, batch_invariant=batch_invariant)
        torch.testing.assert_close(out, expected, rtol=0, atol=2e-5)
    assert (guarded[num_words:] == -7).all()


def test_a_step_that_was_not_prepared_writes_nothing_outside_its_rows():
    """Lengths fell since: what comes out is not attention, but it stays in its place."""
    layer = (torch.randn(64, 16, 1, 16), torch.randn(64, 16, 1, 16))
    metadata = short_batch([600, 600], 64)
    owner = AttentionPlan(layer, 2, max_seqs=2)
    owner.prepare(metadata)
    metadata.seq_lens[:] = 5
    guarded = torch.full((64, 2, 16), -7.0)
    paged_attention(torch.randn(2, 2, 16), layer, metadata, plan=owner, out=guarded[:2])
    assert (guarded[2:] == -7).all()

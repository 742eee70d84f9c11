"""The work list of the Hopper prefill kernel: every tile once, in the order that `work_kernel` promises."""

import itertools

import pytest
import torch

from tests.attention_cases import NEGATIVE, OVER, make_tensors, varlen
from triton_kv import prefill_hopper
from triton_kv.batch import Batch
from triton_kv.choices import HopperChoice
from triton_kv.layer import LayerCache, operands_of
from triton_kv.prefill_hopper import work_launch

HEADS = {"num_kv_heads": 3, "group": 1, "head_dim": 16, "v_head_dim": 16}
CASES = (
    varlen("one", (70, 70), **HEADS),
    varlen("mixed", (1, 170), (33, 33), (1, 5), (70, 260), (16, 64), (1, 65), **HEADS),
    varlen("equal", (40, 90), (40, 90), (40, 90), **HEADS),
    varlen("see_nothing", (0, 0), (9, 3), (20, 0), (33, 20), (0, 50), **HEADS),
    varlen("padding", (9, 20), (3, 3), padding_tokens=37, **HEADS),
    varlen("padding_only", (0, 0), padding_tokens=4, **HEADS),
    varlen("non_causal", (40, 90), (33, 33), (5, 0), causal=False, **HEADS),
    varlen("one_token_each", *((1, 11 * i) for i in range(1, 17)), (90, 200), **HEADS),
    varlen("table_rows", (40, 90), (0, 0), (5, 33), table_rows=True, **HEADS),
    varlen("bad_ids", (9, 70), (5, 33), (0, 20), (4, 16), **HEADS, bad_entries=((0, 1, OVER), (1, 2, NEGATIVE))),
    varlen("bad_ids_far_in", (9, 400), (5, 290), **HEADS, bad_entries=((0, 17, OVER), (0, 9, OVER), (1, 18, NEGATIVE))),
    varlen("bad_ids_of_a_pair", (9, 70), (5, 33), **HEADS, layout="pair", bad_entries=((1, 0, OVER),)),
    varlen("many", *((i % 7 * 5, 5 + i * 7 % 90) for i in range(18)), **HEADS),
)
CHOICES = {
    "one_span": HopperChoice(2, 8, 32, 2, span=100_000, items=8, scan=16),
    "small_spans": HopperChoice(2, 8, 32, 2, span=4, items=2, scan=64),
    "wide_tiles": HopperChoice(3, 2, 64, 2, span=7, items=32, scan=16),
}


def expected_items(case, rows, choice):
    """Items that see keys, in their order, and the others: first token, tokens, position, length, row, head, seq, n."""
    starts = [0, *itertools.accumulate(case.query_lens)]
    sequences = [*zip(starts, case.query_lens, case.lengths, rows), (starts[-1], case.padding_tokens, 0, 0)]
    seeing, blind, tiles_before = [], [], 0
    for seq, (start, queries, length, row) in enumerate(sequences):
        length = length if queries else 0
        length_tiles = -(-length // choice.keys)
        for head in range(case.num_kv_heads):
            span = (tiles_before * case.num_kv_heads + head * length_tiles) // choice.span
            for first in range(0, queries, choice.tokens):
                tokens = min(choice.tokens, queries - first)
                position = length - queries + first
                end = min(position + tokens, length) if case.causal else length
                n = -(-max(end, 0) // choice.keys)
                item = (start + first, tokens, position, length, row, head, seq, n)
                if n:
                    seeing.append(((span, -n, seq, head, first), item))
                else:
                    blind.append(item)
        tiles_before += length_tiles
    return [item for _, item in sorted(seeing)], blind


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_tile_is_listed_once_and_in_order(case, choice, monkeypatch):
    # Rows of the table in many pieces, or in one.
    monkeypatch.setattr(prefill_hopper, "_ENTRIES", 1024 if choice is CHOICES["one_span"] else 2)
    tensors = make_tensors(case)
    batch, operands = Batch.of(tensors.metadata), operands_of(tensors.layer)
    heads = case.num_kv_heads
    work = torch.full((choice.work_words(case.num_tokens, batch.num_seqs, heads) + 3,), -7, dtype=torch.int32)
    suspects = work[choice.suspects_start(case.num_tokens, batch.num_seqs, heads) :]
    work_launch(operands, batch, case.causal, choice, work, num_tokens=case.num_tokens).run()
    rows = range(len(case.lengths)) if batch.table_rows is None else batch.table_rows.tolist()
    seeing, blind = expected_items(case, rows, choice)
    assert work[:2].tolist() == [len(seeing), len(blind)]
    num_items = len(seeing) + len(blind)
    assert num_items <= choice.most_items(case.num_tokens, batch.num_seqs, case.num_kv_heads)
    found = [tuple(item) for item in work[8 : 8 + 8 * num_items].view(-1, 8).tolist()]
    assert [tuple(item[:5]) + item[5:] for item in found[: len(seeing)]] == seeing
    # Those that see nothing have no order, and no row of the table.
    hide_row = [item[:4] + item[5:] for item in blind]
    assert sorted(item[:4] + item[5:] for item in found[len(seeing) :]) == sorted(hide_row)
    expected_suspects = {sequence for sequence, _, _ in case.bad_entries if case.query_lens[sequence]}
    asked = [i for i, (queries, length) in enumerate(zip(case.query_lens, case.lengths)) if queries and length]
    assert {i for i in asked if suspects[i]} == expected_suspects
    assert suspects[batch.num_seqs :].tolist() == [-7] * 3
    if isinstance(tensors.layer, LayerCache):
        assert int(tensors.layer.control[1]) == len(tensors.bad)


def test_the_list_fits_however_tokens_are_shared_out():
    random = torch.Generator().manual_seed(0)
    choice = CHOICES["one_span"]
    for _ in range(200):
        queries = torch.randint(0, 70, (int(torch.randint(1, 9, (1,), generator=random)),), generator=random).tolist()
        padding = int(torch.randint(0, 40, (1,), generator=random))
        tiles = sum(-(-count // choice.tokens) for count in (*queries, padding))
        assert tiles * 3 <= choice.most_items(sum(queries) + padding, len(queries), 3)

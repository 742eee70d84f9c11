"""AttentionMetadata and AttentionBuffers: what a step leaves in the static tensors, and what is refused."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.metadata_cases import (
    BLOCK_SIZE,
    MAX_BLOCKS,
    MAX_SEQS,
    STEPS,
    as_rectangle,
    check_step,
    large_step,
    make_buffers,
    make_large_buffers,
)
from triton_kv.errors import Unavailable
from triton_kv.metadata import AttentionBuffers, AttentionMetadata

STEP = pytest.mark.parametrize(
    ("block_tables", "seq_lens", "slots", "query_lens"), [step[1:] for step in STEPS], ids=[step[0] for step in STEPS]
)


FORMS = {
    "lists": lambda rows: rows,
    "tuples": lambda rows: tuple(tuple(row) for row in rows),
    "int32_rows": lambda rows: [np.array(row, dtype=np.int32) for row in rows],
    "int64_rows": lambda rows: [np.array(row, dtype=np.int64) for row in rows],
    "tensor_rows": lambda rows: [torch.tensor(row, dtype=torch.int32) for row in rows],
    "array_then_lists": lambda rows: [np.array(row, dtype=np.int32) if i == 0 else row for i, row in enumerate(rows)],
    "lists_then_array": lambda rows: [row if i == 0 else np.array(row, dtype=np.int32) for i, row in enumerate(rows)],
}


@STEP
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("block_size", [None, BLOCK_SIZE], ids=["rows_as_given", "needed_entries"])
def test_fill_from_rows(block_tables, seq_lens, slots, query_lens, form, block_size):
    buffers = make_buffers(block_size)
    metadata = buffers.fill(FORMS[form](block_tables), seq_lens, slots, query_lens)
    check_step(buffers, block_tables, seq_lens, slots, query_lens)
    assert (metadata.num_tokens, metadata.num_seqs) == (len(slots), len(seq_lens))
    assert metadata.max_query_len == max(query_lens or [1])


@STEP
@pytest.mark.parametrize(
    "form",
    [
        lambda table: table,
        lambda table: table.astype(np.int64),
        lambda table: np.maximum(table, 0).astype(np.uint32),
        lambda table: np.asfortranarray(table),
        lambda table: np.repeat(np.repeat(table, 2, axis=0), 2, axis=1)[::2, ::2],
        torch.from_numpy,
    ],
    ids=["int32", "int64", "uint32", "fortran", "strided", "tensor"],
)
@pytest.mark.parametrize("block_size", [None, BLOCK_SIZE], ids=["rows_as_given", "needed_entries"])
def test_fill_from_a_rectangle(block_tables, seq_lens, slots, query_lens, form, block_size):
    buffers = make_buffers(block_size)
    table = form(as_rectangle(block_tables))
    buffers.fill(table, np.array(seq_lens), torch.tensor(slots, dtype=torch.int64), query_lens)
    check_step(buffers, table, seq_lens, slots, query_lens, block_size)


def test_only_needed_entries_of_a_rectangle_are_written():
    buffers = make_buffers(BLOCK_SIZE)
    buffers.fill(np.arange(10, dtype=np.int32).reshape(2, 5), [9, 4], [0, 1])
    table = buffers.view(2, 2).block_table
    assert table.tolist() == [[0, 1, 2, -777, -777], [5, -777, -777, -777, -777]]


def test_a_long_row_among_short_ones(monkeypatch):
    """Only used entries are sent: 1063 of them, not the 64000 of the rectangle."""
    sent = []
    send = AttentionBuffers._send
    monkeypatch.setattr(AttentionBuffers, "_send", lambda *args: (sent.append(args[-1]), send(*args)))
    buffers = AttentionBuffers(64, 64, 1000, "cpu", block_size=BLOCK_SIZE)
    lens = np.full(64, 3)
    lens[5] = 4000
    table = np.arange(64 * 1000, dtype=np.int64).reshape(64, 1000)
    view = buffers.fill(table, lens, np.arange(64))
    assert view.block_table[5].tolist() == table[5].tolist()
    assert view.block_table[:, 0].tolist() == table[:, 0].tolist()
    assert view.block_table[6, 1:].eq(0).all()
    assert sent == [32 + 2 * 64 + 4 * 64 + 1 + 1063]


def test_a_large_step():
    buffers, (table, lens, slots, query_lens) = make_large_buffers(), large_step()
    buffers.fill(table, lens, slots, query_lens)
    check_step(buffers, table, lens, slots, query_lens, BLOCK_SIZE)


def test_padding_is_complete_after_a_longer_step():
    buffers = make_buffers()
    for _, *longer in (STEPS[5], STEPS[1], STEPS[2]):
        for _, *step in STEPS:
            buffers.fill(*longer)
            buffers.fill(*step)
            check_step(buffers, *step)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), block_size=st.none() | st.integers(1, 6))
def test_random_steps(data, block_size):
    buffers = make_buffers(block_size)
    for _ in range(3):
        num_seqs = data.draw(st.integers(0, MAX_SEQS))
        queries = data.draw(st.lists(st.integers(0, 4), min_size=num_seqs, max_size=num_seqs))
        decode = data.draw(st.booleans())
        if decode:
            queries = [1] * num_seqs
        longest = 20 if block_size is None else MAX_BLOCKS * block_size
        lens = [max(data.draw(st.integers(0, longest)), min(query, longest)) for query in queries]
        queries = [min(query, length) for query, length in zip(queries, lens, strict=True)]
        ids = st.integers(-1, 2**31 - 1)
        rows = []
        for length in lens:
            least = 0 if block_size is None else -(-length // block_size)
            rows.append(data.draw(st.lists(ids, min_size=least, max_size=MAX_BLOCKS)))
        slots = data.draw(st.lists(st.integers(-1, 2**40), min_size=sum(queries), max_size=sum(queries)))
        query_lens = None if decode and sum(queries) == num_seqs else queries
        if data.draw(st.booleans()):
            table = as_rectangle(rows)
            buffers.fill(table, lens, slots, query_lens)
            check_step(buffers, table, lens, slots, query_lens, block_size)
        else:
            buffers.fill(rows, lens, slots, query_lens)
            check_step(buffers, rows, lens, slots, query_lens)


def addresses(metadata: AttentionMetadata) -> list[int]:
    tensors = (metadata.block_table, metadata.seq_lens, metadata.slot_mapping, metadata.query_start_loc)
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


@pytest.mark.parametrize(("num_tokens", "num_seqs", "max_query_len"), [(6, 6, None), (24, 6, None), (12, 3, 8)])
def test_addresses_never_change(num_tokens, num_seqs, max_query_len):
    buffers = make_buffers()
    captured = buffers.view(num_tokens, num_seqs, max_query_len)
    before = addresses(captured)
    for _, *step in STEPS:
        filled = buffers.fill(*step)
        assert addresses(buffers.view(num_tokens, num_seqs, max_query_len)) == before
        assert filled.block_table.data_ptr() in (before[0], 0)  # an empty slice has no address
        buffers._views.clear()
        assert addresses(buffers.view(num_tokens, num_seqs, max_query_len)) == before
    buffers.fill(*STEPS[0][1:])
    assert captured.seq_lens.tolist() == [8, 9, 1, 0, 0, 0][:num_seqs]


def test_inputs_may_change_once_fill_returns():
    buffers = make_buffers()
    tables, lens, slots = np.array([[1, 2], [3, 4]], dtype=np.int32), np.array([5, 6]), np.array([7, 8])
    buffers.fill(tables, lens, slots)
    for array in (tables, lens, slots):
        array[...] = 99
    check_step(buffers, [[1, 2], [3, 4]], [5, 6], [7, 8])


@pytest.mark.parametrize(
    ("num_tokens", "num_seqs", "max_query_len", "expected_max", "has_starts"),
    [
        (3, 3, None, 1, False),
        (8, 3, None, 8, True),
        (8, 3, 5, 5, True),
        (3, 3, 2, 2, True),
        (2, 3, 1, 1, True),
        (0, 0, None, 1, False),
    ],
    ids=["decode", "mixed", "mixed_with_bound", "as_many_but_uneven", "idle_sequence", "empty"],
)
def test_views(num_tokens, num_seqs, max_query_len, expected_max, has_starts):
    view = make_buffers().view(num_tokens, num_seqs, max_query_len)
    assert view.max_query_len == expected_max
    assert view.slot_mapping.shape == (num_tokens,)
    assert view.block_table.shape == (num_seqs, MAX_BLOCKS)
    assert view.seq_lens.shape == (num_seqs,)
    assert (view.query_start_loc is not None) == has_starts
    if has_starts:
        assert view.query_start_loc.shape == (num_seqs + 1,)


def test_views_stay_bounded():
    buffers = AttentionBuffers(2000, 1, 1, "cpu")
    for num_tokens in range(2000):
        buffers.view(num_tokens, 1)
    assert len(buffers._views) <= 1024


@pytest.mark.parametrize(
    ("num_tokens", "num_seqs", "lens"),
    [(6, 6, [1] * 6), (24, 6, [4] * 6), (20, 3, [7, 7, 6]), (5, 1, [5])],
    ids=["decode", "even", "uneven", "one"],
)
@pytest.mark.parametrize("block_size", [None, BLOCK_SIZE], ids=["any_block", "block_4"])
def test_dummy(num_tokens, num_seqs, lens, block_size):
    buffers = make_buffers(block_size)
    view = buffers.dummy(num_tokens, num_seqs)
    rows = [[0] * -(-length // BLOCK_SIZE) for length in lens]
    check_step(buffers, rows, lens, [0] * num_tokens, lens)
    assert (view.num_tokens, view.num_seqs, view.max_query_len) == (num_tokens, num_seqs, max(lens))


BAD_FILLS = [
    ("too_many_sequences", ([[1]] * 7, [1] * 7, [0] * 7), ValueError, "7 sequences do not fit .* max_seqs 6"),
    ("too_many_tokens", ([[1]], [30], [0] * 25, [25]), ValueError, "25 tokens do not fit .* max_tokens 24"),
    ("too_many_blocks", ([[1] * 6], [1], [0]), ValueError, "a row of 6 blocks .* max_blocks_per_seq 5"),
    ("too_wide", (np.ones((1, 6), np.int32), [1], [0]), ValueError, "a row of 6 blocks .* max_blocks_per_seq 5"),
    ("rows_missing", ([[1]], [1, 1], [0, 1]), ValueError, "block_tables has 1 rows and seq_lens 2 entries"),
    ("rows_over", (np.ones((3, 1), np.int32), [1, 1], [0, 1]), ValueError, "block_tables has 3 rows and seq_lens 2"),
    ("slots_missing", ([[1], [1]], [1, 1], [0]), ValueError, "2 sequences and 1 slots; pass query_lens"),
    ("queries_missing", ([[1], [1]], [4, 4], [0, 1], [2]), ValueError, "query_lens has 1 entries and seq_lens 2"),
    ("queries_do_not_add_up", ([[1]], [4], [0, 1], [3]), ValueError, "add up to 3 tokens, but slot_mapping has 2"),
    ("query_past_context", ([[1]], [2], [0] * 3, [3]), ValueError, "sequence 0 has query_len 3 and seq_len 2"),
    ("negative_query", ([[1], [1]], [4, 4], [0], [2, -1]), ValueError, "sequence 1 has query_len -1 and seq_len 4"),
    ("negative_length", ([[1]], [-2], [0]), ValueError, "seq_lens must not be negative, got -2"),
    ("long_length", ([[1]], [2**31], [0]), ValueError, "seq_lens must fit into int32, got 2147483648"),
    ("large_id", ([[2**31]], [1], [0]), ValueError, "block_tables must fit into int32"),
    ("large_id_array", (np.full((1, 1), 2**31), [1], [0]), ValueError, "block_tables must fit .*, got 2147483648"),
    ("large_id_rows", ([np.array([-(2**40)])], [1], [0]), ValueError, "block_tables must fit .*, got -1099511627776"),
    ("float_id", ([[1.5]], [1], [0]), TypeError, "block_tables must hold integers"),
    ("float_table", (np.ones((1, 1)), [1], [0]), TypeError, "block_tables must hold integers, got float64"),
    ("float_rows", ([np.ones(1)], [1], [0]), TypeError, "block_tables must hold integers"),
    ("float_length", ([[1]], [1.0], [0]), TypeError, "seq_lens must hold integers, got float64"),
    ("float_slot", ([[1]], [1], torch.zeros(1)), TypeError, "slot_mapping must hold integers, got float32"),
    ("flat_table", (np.ones(1, np.int32), [1], [0]), ValueError, "block_tables must have 2 dimensions, got shape"),
    ("nested_slots", ([[1]], [1], [[0]]), ValueError, r"slot_mapping must have 1 dimension, got shape \(1, 1\)"),
    ("ragged_slots", ([[1]], [1], [[0], [1, 2]]), ValueError, "slot_mapping must have 1 dimension, got rows"),
    ("on_a_device", ([[1]], torch.ones(1, device="meta"), [0]), TypeError, "seq_lens is on meta; pass a host list"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "error", "message"), [row[1:] for row in BAD_FILLS], ids=[row[0] for row in BAD_FILLS]
)
def test_a_refused_fill_changes_nothing(arguments, error, message):
    buffers = make_buffers()
    buffers.fill(*STEPS[1][1:])
    with pytest.raises(error, match=message):
        buffers.fill(*arguments)
    check_step(buffers, *STEPS[1][1:])


@pytest.mark.parametrize("form", [list, np.array], ids=["rows", "rectangle"])
def test_a_row_too_short_for_its_length(form):
    buffers = make_buffers(BLOCK_SIZE)
    with pytest.raises(ValueError, match="sequence 1 of 9 tokens needs 3 blocks of 4, but its block table row has 2"):
        buffers.fill(form([[1, 2], [3, 4]]), [8, 9], [0, 1])


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32])
def test_the_longest_length_does_not_wrap_around(dtype):
    buffers = make_buffers(BLOCK_SIZE)
    with pytest.raises(ValueError, match="sequence 0 of 2147483647 tokens needs 536870912 blocks of 4"):
        buffers.fill([[1]], np.array([2**31 - 1], dtype=dtype), [0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda buffers: buffers.view(25, 6), r"num_tokens 25 is outside of 0\.\.24 \(max_tokens\)"),
        (lambda buffers: buffers.view(7, 7), r"num_seqs 7 is outside of 0\.\.6 \(max_seqs\)"),
        (lambda buffers: buffers.view(4, 2, 5), r"max_query_len 5 is outside of 1\.\.4 \(num_tokens\)"),
        (lambda buffers: buffers.dummy(2, 3), "sequences with a token each, got 3 sequences and 2 tokens"),
        (lambda buffers: buffers.dummy(3, 0), "got 0 sequences and 3 tokens"),
        (lambda buffers: buffers.dummy(25, 1), "25 tokens do not fit"),
        (lambda _: AttentionBuffers(0, 1, 1, "cpu"), "max_tokens must be at least 1, got 0"),
        (lambda _: AttentionBuffers(1, 1, -1, "cpu"), "max_blocks_per_seq must be at least 1, got -1"),
        (lambda _: AttentionBuffers(1, 1, 1, "cpu", block_size=0), "block_size must be at least 1, got 0"),
    ],
    ids=["tokens", "seqs", "max_query", "dummy_short", "dummy_none", "dummy_long", "tokens_0", "blocks_-1", "block_0"],
)
def test_bad_views(call, message):
    with pytest.raises(ValueError, match=message):
        call(make_buffers())


def meta(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """A tensor without contents: reading one would raise."""
    return torch.empty(shape, dtype=dtype, device="meta")


def good_metadata() -> dict:
    """Three sequences of 5 tokens."""
    return {
        "block_table": meta(3, 4),
        "seq_lens": meta(3),
        "slot_mapping": meta(5, dtype=torch.int64),
        "query_start_loc": meta(4),
        "num_tokens": 5,
        "num_seqs": 3,
        "max_query_len": 2,
    }


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"slot_mapping": meta(5)},
        {"block_table": meta(3, 9)[:, :4]},
        {"block_table": meta(100, 4), "table_rows": meta(3)},
        {"slot_mapping": meta(3), "query_start_loc": None, "num_tokens": 3, "max_query_len": 1},
    ],
    ids=["mixed", "int32_slots", "row_stride", "table_rows", "decode"],
)
def test_good_metadata_reads_no_content(change):
    metadata = AttentionMetadata(**{**good_metadata(), **change})
    assert metadata.device.type == "meta"


I64, I16, F32 = torch.int64, torch.int16, torch.float32
BAD_DTYPES = [
    ("table_int64", "block_table", meta(3, 4, dtype=I64), "block_table must be int32, got torch.int64"),
    ("table_float", "block_table", meta(3, 4, dtype=F32), "block_table must be int32, got torch.float32"),
    ("table_list", "block_table", [[1]], "block_table must be a tensor .* got list"),
    ("lens_none", "seq_lens", None, "seq_lens must be a tensor"),
    ("lens_int64", "seq_lens", meta(3, dtype=I64), "seq_lens must be int32"),
    ("slots_int16", "slot_mapping", meta(5, dtype=I16), "slot_mapping must be int32 or int64, got torch.int16"),
    ("starts_int64", "query_start_loc", meta(4, dtype=I64), "query_start_loc must be int32"),
    ("rows_int64", "table_rows", meta(3, dtype=I64), "table_rows must be int32"),
]
CPU_TABLE, CPU_SLOTS = torch.empty(3, 4, dtype=torch.int32), torch.empty(5, dtype=torch.int32)
BAD_SIZES = [
    ("table_rank", "block_table", meta(3), r"block_table must have 2 dimensions, got shape \(3,\)"),
    ("table_rows", "block_table", meta(2, 4), "block_table has 2 entries in dimension 0, but num_seqs is 3"),
    ("table_columns", "block_table", meta(4, 3).T, r"contiguous in its last dimension, got strides \(1, 3\)"),
    ("table_device", "block_table", CPU_TABLE, "block_table is on cpu and seq_lens on meta"),
    ("lens_count", "seq_lens", meta(4), "seq_lens has 4 entries in dimension 0, but num_seqs is 3"),
    ("slots_count", "slot_mapping", meta(6), "slot_mapping has 6 entries in dimension 0, but num_tokens is 5"),
    ("slots_device", "slot_mapping", CPU_SLOTS, "slot_mapping is on cpu and seq_lens on meta"),
    ("starts_count", "query_start_loc", meta(3), r"query_start_loc has 3 entries .* num_seqs \+ 1 is 4"),
    ("starts_missing", "query_start_loc", None, "num_tokens is 5, num_seqs 3 and max_query_len 2; pass query_start"),
    ("rows_count", "table_rows", meta(2), "table_rows has 2 entries in dimension 0, but num_seqs is 3"),
    ("max_query_0", "max_query_len", 0, r"max_query_len 0 is outside of 1\.\.5"),
    ("max_query_6", "max_query_len", 6, r"max_query_len 6 is outside of 1\.\.5"),
    ("tokens_negative", "num_tokens", -1, "num_tokens -1 and num_seqs 3 must not be negative"),
]


@pytest.mark.parametrize(
    ("field", "value", "message", "error"),
    [(*row[1:], TypeError) for row in BAD_DTYPES] + [(*row[1:], ValueError) for row in BAD_SIZES],
    ids=[row[0] for row in BAD_DTYPES + BAD_SIZES],
)
def test_bad_metadata(field, value, message, error):
    with pytest.raises(error, match=message):
        AttentionMetadata(**{**good_metadata(), field: value})


@pytest.mark.parametrize(
    ("tables", "lens", "slots", "error", "match"),
    [
        pytest.param(None, [1], [0], TypeError, "block_tables must be rows of block ids, one a sequence", id="none"),
        pytest.param([1], [1], [0], TypeError, "a row of block ids for each sequence, not single ids", id="ids"),
        pytest.param([[1]], [1], np.array([2**63], dtype=np.uint64), ValueError, "must fit into int64", id="uint64"),
    ],
)
def test_fill_says_what_is_wrong_with_its_arguments(tables, lens, slots, error, match):
    buffers = AttentionBuffers(8, 4, 4, "cpu", block_size=16)
    with pytest.raises(error, match=match):
        buffers.fill(tables, lens, slots)


def test_lengths_of_one_byte_are_lengths():
    buffers = AttentionBuffers(8, 4, 4, "cpu", block_size=257)
    metadata = buffers.fill([[3]], np.array([100], dtype=np.int8), [0])
    assert (int(metadata.seq_lens[0]), int(metadata.block_table[0, 0])) == (100, 3)


def test_buffers_made_in_inference_mode_are_filled_outside():
    with torch.inference_mode():
        buffers = AttentionBuffers(8, 4, 4, "cpu")
    assert int(buffers.fill([[3]], [5], [7]).slot_mapping[0]) == 7


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu():
    with pytest.raises(Unavailable, match="torch finds no GPU here: pass device='cpu'"):
        AttentionBuffers(8, 4, 4, "cuda")


def test_counts_are_ints():
    with pytest.raises(TypeError, match="num_tokens must be an int on the host, got float"):
        AttentionMetadata(
            block_table=torch.zeros(2, 1, dtype=torch.int32),
            seq_lens=torch.ones(2, dtype=torch.int32),
            slot_mapping=torch.zeros(2, dtype=torch.int64),
            num_tokens=2.0,
            num_seqs=2,
            max_query_len=1,
        )

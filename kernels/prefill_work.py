"""The work of one prefill step as a list on the device: tiles of query tokens, in the order in which they are computed.

A persistent kernel walks the list, so its grid depends on shapes only. No sort and no atomics: because a sequence's
tiles see more and more keys, "how many tiles of sequence s see more than n tiles of keys" has a closed form, and the
place of a tile in the list is a sum of such counts over the sequences.
"""

import triton
import triton.language as tl

from .paging import count_bad_blocks

# Words of the list: a header, then the items.
HEADER_WORDS = tl.constexpr(8)  # 0: items that see keys; 1: items that see none, which follow them
ITEM_WORDS = tl.constexpr(8)
FIRST_TOKEN = tl.constexpr(0)  # of the tile, a row of q
NUM_TOKENS = tl.constexpr(1)
POSITION = tl.constexpr(2)  # of the first token in its sequence; negative if it sees nothing
SEQ_LEN = tl.constexpr(3)
TABLE_ROW = tl.constexpr(4)
KV_HEAD = tl.constexpr(5)
SEQ = tl.constexpr(6)
KEY_TILES = tl.constexpr(7)  # tiles of keys that some token of the tile sees
CHECKERS = tl.constexpr(4)  # programs that share a sequence's block ids: each has a byte of the sequence's mark


@triton.jit
def _sequence(query_start_loc_ptr, seq_lens_ptr, seq, num_tokens, num_seqs):
    """First query token, query tokens and keys of sequences; sequence num_seqs stands for the padding tokens."""
    start = tl.load(query_start_loc_ptr + seq, mask=seq <= num_seqs, other=0)
    end = tl.load(query_start_loc_ptr + seq + 1, mask=seq < num_seqs, other=0)
    length = tl.load(seq_lens_ptr + seq, mask=seq < num_seqs, other=0)
    end = tl.minimum(tl.where(seq < num_seqs, end, num_tokens), num_tokens)
    queries = tl.maximum(tl.where(seq <= num_seqs, end - start, 0), 0)
    return start, queries, tl.where(queries > 0, tl.maximum(length, 0), 0)


@triton.jit
def _tiles_beyond(queries, length, n, TOKENS: tl.constexpr, KEYS: tl.constexpr, IS_CAUSAL: tl.constexpr):
    """How many of a sequence's query tiles see more than n tiles of keys: its last ones."""
    tiles = (queries + TOKENS - 1) // TOKENS
    if IS_CAUSAL:
        tiles -= tl.maximum(n * KEYS - (length - queries), 0) // TOKENS
    return tl.where(length > n * KEYS, tiles, 0)


@triton.jit
def _heads_before(limit, length_tiles, NUM_KV_HEADS: tl.constexpr):
    """How many of a sequence's heads start before `limit`, counted in head tiles from the sequence's first head."""
    heads = (tl.maximum(limit, 0) + length_tiles - 1) // tl.maximum(length_tiles, 1)
    return tl.minimum(heads, NUM_KV_HEADS)


@triton.jit
def _check_block_ids(
    block_table_ptr,
    seq_lens_ptr,
    query_start_loc_ptr,
    table_rows_ptr,
    control_ptr,
    marks_ptr,
    seq,
    checker,
    num_tokens,
    num_seqs,
    table_width,
    num_blocks,
    table_stride_row,
    BLOCK_SIZE: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """Every CHECKERS-th piece of a sequence's table row: counts ids at or past the bound, and sets its byte of the mark
    if one is missing, negative, or at or past the bound."""
    _, _, length = _sequence(query_start_loc_ptr, seq_lens_ptr, seq, num_tokens, num_seqs)
    table_row = seq
    if table_rows_ptr is not None:
        table_row = tl.load(table_rows_ptr + seq)
    table_row_ptr = block_table_ptr + table_row.to(tl.int64) * table_stride_row
    if control_ptr is not None:
        bound = tl.load(control_ptr)
    else:
        bound = num_blocks
    need = (length + BLOCK_SIZE - 1) // BLOCK_SIZE
    num_entries = tl.minimum(need, table_width)
    lanes = tl.arange(0, ENTRIES)
    lowest = tl.zeros([ENTRIES], tl.int32)
    highest = tl.full([ENTRIES], -1, tl.int32)
    for first in range(checker * ENTRIES, num_entries, CHECKERS * ENTRIES):
        is_entry = first + lanes < num_entries
        block = tl.load(table_row_ptr + first + lanes, mask=is_entry, other=0)
        lowest = tl.minimum(lowest, block)
        highest = tl.maximum(highest, tl.where(is_entry, block, -1))
    is_over = tl.max(highest, 0) >= bound
    if control_ptr is not None:  # noqa: SIM102 (known at compile time)
        if is_over:
            for first in range(checker * ENTRIES, num_entries, CHECKERS * ENTRIES):
                end = tl.minimum(first + ENTRIES, num_entries)
                count_bad_blocks(control_ptr, table_row_ptr, table_row, first, end, bound)
    is_suspect = is_over | (tl.min(lowest, 0) < 0) | (need > table_width)
    tl.store(marks_ptr + seq * CHECKERS + checker, is_suspect.to(tl.int8), mask=length > 0)


@triton.jit(
    do_not_specialize=["num_tokens", "num_seqs", "num_groups", "table_width", "num_blocks", "table_stride_row"],
    do_not_specialize_on_alignment=[
        "block_table_ptr",
        "seq_lens_ptr",
        "query_start_loc_ptr",
        "table_rows_ptr",
        "control_ptr",
        "marks_ptr",
    ],
)
def work_kernel(
    block_table_ptr,  # [rows, table_width] int32
    seq_lens_ptr,  # [num_seqs] int32
    query_start_loc_ptr,  # [num_seqs + 1] int32
    table_rows_ptr,  # [num_seqs] int32, or None: sequence i has row i
    control_ptr,  # [8] int32, or None: num_blocks is the bound and nothing is counted
    work_ptr,  # int32: the list
    marks_ptr,  # [num_seqs, CHECKERS] int8: whether a needed block id is missing, negative, or at or past the bound
    num_tokens: tl.int32,
    num_seqs: tl.int32,
    num_groups: tl.int32,
    table_width: tl.int32,
    num_blocks: tl.int32,
    table_stride_row: tl.int64,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    TOKENS: tl.constexpr,  # query tokens a tile
    KEYS: tl.constexpr,  # keys a tile
    SPAN: tl.constexpr,  # tiles of keys, over heads, that fit into the L2: so many are finished before the next
    ITEMS: tl.constexpr,  # items that a program places: a group, of one sequence and head
    SCAN: tl.constexpr,  # sequences that it looks at at a time
    ENTRIES: tl.constexpr,  # block ids that a program checks at a time
):
    """Programs below num_groups * NUM_KV_HEADS place one group of items each; the others check block ids.

    Order: spans of (sequence, head) pairs whose K and V share the L2; in a span the tiles that see the most keys first;
    equal ones by sequence, head and token, so that neighbours share K and V. Each program looks at all sequences twice:
    to find its own, then to count what comes before its items.
    """
    program = tl.program_id(0)
    num_placing = num_groups * NUM_KV_HEADS
    if program >= num_placing:
        check = program - num_placing
        _check_block_ids(
            block_table_ptr,
            seq_lens_ptr,
            query_start_loc_ptr,
            table_rows_ptr,
            control_ptr,
            marks_ptr,
            check // CHECKERS,
            check % CHECKERS,
            num_tokens,
            num_seqs,
            table_width,
            num_blocks,
            table_stride_row,
            BLOCK_SIZE,
            ENTRIES,
        )
        return

    # Sequences stand in one row of groups, as each sequence's tiles make up whole groups of every head.
    group = program // NUM_KV_HEADS
    head = program % NUM_KV_HEADS
    lanes = tl.arange(0, SCAN)
    groups_so_far = 0
    seq = 0
    first_group = 0
    tiles_before = 0  # tiles of keys of earlier sequences
    num_seeing = 0  # query tiles that see keys, of all sequences, and others
    num_blind = 0
    blind_before = 0
    for first in range(0, num_seqs + 1, SCAN):
        _, queries_of, length_of = _sequence(query_start_loc_ptr, seq_lens_ptr, first + lanes, num_tokens, num_seqs)
        groups_of = (queries_of + TOKENS * ITEMS - 1) // (TOKENS * ITEMS)
        seeing_of = _tiles_beyond(queries_of, length_of, 0, TOKENS, KEYS, IS_CAUSAL)
        blind_of = (queries_of + TOKENS - 1) // TOKENS - seeing_of
        ends = groups_so_far + tl.cumsum(groups_of, 0)
        is_before = (ends <= group) & (first + lanes <= num_seqs)
        seq += tl.sum(is_before.to(tl.int32), 0)
        first_group += tl.sum(tl.where(is_before, groups_of, 0), 0)
        tiles_before += tl.sum(tl.where(is_before, (length_of + KEYS - 1) // KEYS, 0), 0)
        blind_before += tl.sum(tl.where(is_before, blind_of, 0), 0)
        num_seeing += tl.sum(seeing_of, 0)
        num_blind += tl.sum(blind_of, 0)
        groups_so_far += tl.sum(groups_of, 0)
    if program == 0:
        tl.store(work_ptr, num_seeing * NUM_KV_HEADS)
        tl.store(work_ptr + 1, num_blind * NUM_KV_HEADS)
    if seq > num_seqs:
        return

    start, queries, length = _sequence(query_start_loc_ptr, seq_lens_ptr, seq, num_tokens, num_seqs)
    table_row = seq
    if table_rows_ptr is not None:
        table_row = tl.load(table_rows_ptr + seq, mask=seq < num_seqs, other=0)
    tiles = (queries + TOKENS - 1) // TOKENS
    length_tiles = (length + KEYS - 1) // KEYS
    span_begin = (tiles_before * NUM_KV_HEADS + head * length_tiles) // SPAN * SPAN
    tile = (group - first_group) * ITEMS + tl.arange(0, ITEMS)
    if IS_CAUSAL:
        end = tl.minimum(length - queries + tl.minimum((tile + 1) * TOKENS, queries), length)
    else:
        end = tl.zeros_like(tile) + length
    n = (tl.maximum(end, 0) + KEYS - 1) // KEYS
    place = tl.zeros([ITEMS], tl.int32)
    tiles_so_far = 0
    for first in range(0, num_seqs + 1, SCAN):
        seqs = first + lanes
        _, queries_of, length_of = _sequence(query_start_loc_ptr, seq_lens_ptr, seqs, num_tokens, num_seqs)
        length_tiles_of = (length_of + KEYS - 1) // KEYS
        heads_begin = (tiles_so_far + tl.cumsum(length_tiles_of, 0) - length_tiles_of) * NUM_KV_HEADS
        tiles_so_far += tl.sum(length_tiles_of, 0)
        # Heads in earlier spans, and in this one.
        earlier = _heads_before(span_begin - heads_begin, length_tiles_of, NUM_KV_HEADS)
        inside = _heads_before(span_begin + SPAN - heads_begin, length_tiles_of, NUM_KV_HEADS) - earlier
        seeing_of = _tiles_beyond(queries_of, length_of, 0, TOKENS, KEYS, IS_CAUSAL)
        place += tl.sum(earlier * seeing_of, 0)
        # Of equal tiles those of earlier sequences come first, and of this one those of earlier heads.
        equal_heads = tl.where(seqs < seq, inside, tl.where(seqs == seq, head - earlier, 0))
        # [ITEMS, SCAN]
        longer = _tiles_beyond(queries_of[None, :], length_of[None, :], n[:, None], TOKENS, KEYS, IS_CAUSAL)
        no_shorter = _tiles_beyond(queries_of[None, :], length_of[None, :], n[:, None] - 1, TOKENS, KEYS, IS_CAUSAL)
        place += tl.sum(inside[None, :] * longer + equal_heads[None, :] * (no_shorter - longer), 1)
    # Among the equal tiles of the same sequence and head.
    place += tile - (tiles - _tiles_beyond(queries, length, n - 1, TOKENS, KEYS, IS_CAUSAL))
    own_blind = tiles - _tiles_beyond(queries, length, 0, TOKENS, KEYS, IS_CAUSAL)
    first_blind = (num_seeing + blind_before) * NUM_KV_HEADS
    place = tl.where(n > 0, place, first_blind + head * own_blind + tile)

    # Whole items at a time: what the memory takes is 32 bytes.
    word = tl.arange(0, ITEM_WORDS)[None, :]
    value = tl.where(word == FIRST_TOKEN, (start + tile * TOKENS)[:, None], 0)
    value = tl.where(word == NUM_TOKENS, tl.minimum(queries - tile * TOKENS, TOKENS)[:, None], value)
    value = tl.where(word == POSITION, (length - queries + tile * TOKENS)[:, None], value)
    value = tl.where(word == SEQ_LEN, length, value)
    value = tl.where(word == TABLE_ROW, table_row, value)
    value = tl.where(word == KV_HEAD, head, value)
    value = tl.where(word == SEQ, seq, value)
    value = tl.where(word == KEY_TILES, n[:, None], value)
    items_ptr = work_ptr + HEADER_WORDS
    tl.store(items_ptr + place[:, None] * ITEM_WORDS + word, value, mask=(tile < tiles)[:, None])

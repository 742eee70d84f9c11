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


@triton.jit
def _sequence(query_start_loc_ptr, seq_lens_ptr, seq, num_tokens, num_seqs):
    """First query token, query tokens and keys of sequences; sequence num_seqs stands for the padding tokens."""
    start = tl.load(query_start_loc_ptr + seq, mask=seq <= num_seqs, other=0)
    end = tl.load(query_start_loc_ptr + seq + 1, mask=seq < num_seqs, other=0)
    end = tl.minimum(tl.where(seq < num_seqs, end, num_tokens), num_tokens)
    queries = tl.maximum(tl.where(seq <= num_seqs, end - start, 0), 0)
    length = tl.load(seq_lens_ptr + seq, mask=seq < num_seqs, other=0)
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
def _check_table_row(
    table_row_ptr,
    table_row,
    control_ptr,
    length,
    table_width,
    num_blocks,
    BLOCK_SIZE: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """Whether a block id that the sequence needs is missing, negative, or at or past the bound. Those are counted."""
    if control_ptr is not None:
        bound = tl.load(control_ptr)
    else:
        bound = num_blocks
    need = (length + BLOCK_SIZE - 1) // BLOCK_SIZE
    num_entries = tl.minimum(need, table_width)
    lanes = tl.arange(0, ENTRIES)
    lowest = tl.zeros([ENTRIES], tl.int32)
    highest = tl.full([ENTRIES], -1, tl.int32)
    for first in range(0, num_entries, ENTRIES):
        is_entry = first + lanes < num_entries
        block = tl.load(table_row_ptr + first + lanes, mask=is_entry, other=0)
        lowest = tl.minimum(lowest, block)
        highest = tl.maximum(highest, tl.where(is_entry, block, -1))
    is_over = tl.max(highest, 0) >= bound
    if control_ptr is not None:  # noqa: SIM102 (known at compile time)
        if is_over:
            count_bad_blocks(control_ptr, table_row_ptr, table_row, 0, num_entries, bound)
    return is_over | (tl.min(lowest, 0) < 0) | (need > table_width)


@triton.jit(
    do_not_specialize=["num_tokens", "num_seqs", "table_width", "num_blocks", "table_stride_row"],
    do_not_specialize_on_alignment=[
        "block_table_ptr",
        "seq_lens_ptr",
        "query_start_loc_ptr",
        "table_rows_ptr",
        "control_ptr",
        "suspects_ptr",
    ],
)
def work_kernel(
    block_table_ptr,  # [rows, table_width] int32
    seq_lens_ptr,  # [num_seqs] int32
    query_start_loc_ptr,  # [num_seqs + 1] int32
    table_rows_ptr,  # [num_seqs] int32, or None: sequence i has row i
    control_ptr,  # [8] int32, or None: num_blocks is the bound and nothing is counted
    work_ptr,  # int32: the list
    suspects_ptr,  # [num_seqs] int32: whether a needed block id is missing, negative, or at or past the bound
    num_tokens: tl.int32,
    num_seqs: tl.int32,
    table_width: tl.int32,
    num_blocks: tl.int32,
    table_stride_row: tl.int64,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    TOKENS: tl.constexpr,  # query tokens a tile
    KEYS: tl.constexpr,  # keys a tile
    SPAN: tl.constexpr,  # tiles of keys, over heads, that fit into the L2: so many are finished before the next
    ITEMS: tl.constexpr,  # items that a program places at a time
    SCAN: tl.constexpr,  # sequences that it looks at at a time
    ENTRIES: tl.constexpr,  # block ids that it checks at a time
    USE_PDL: tl.constexpr,
):
    """Program (s, p) places every `num_programs(1)`-th group of items of sequence s.

    Order: spans of (sequence, head) pairs whose K and V share the L2; in a span the tiles that see the most keys first;
    equal ones by sequence, head and token, so that neighbours share K and V.
    """
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
    seq = tl.program_id(0)
    part = tl.program_id(1)
    start, queries, length = _sequence(query_start_loc_ptr, seq_lens_ptr, seq, num_tokens, num_seqs)
    tiles = (queries + TOKENS - 1) // TOKENS
    num_items = tiles * NUM_KV_HEADS
    is_last = (seq == num_seqs) & (part == 0)  # this program writes the header
    if (part * ITEMS >= num_items) & (not is_last):
        return
    table_row = seq
    if table_rows_ptr is not None:
        table_row = tl.load(table_rows_ptr + seq, mask=seq < num_seqs, other=0)
    if (part == 0) & (length > 0):
        table_row_ptr = block_table_ptr + table_row.to(tl.int64) * table_stride_row
        is_suspect = _check_table_row(
            table_row_ptr, table_row, control_ptr, length, table_width, num_blocks, BLOCK_SIZE, ENTRIES
        )
        tl.store(suspects_ptr + seq, is_suspect.to(tl.int32))

    lanes = tl.arange(0, SCAN)
    before = tl.zeros([SCAN], tl.int32)  # tiles of keys of earlier sequences
    seeing = tl.zeros([SCAN], tl.int32)  # query tiles that see keys, of all sequences, and others
    blind = tl.zeros([SCAN], tl.int32)
    blind_before = tl.zeros([SCAN], tl.int32)
    for first in range(0, num_seqs + 1, SCAN):
        _, queries_of, length_of = _sequence(query_start_loc_ptr, seq_lens_ptr, first + lanes, num_tokens, num_seqs)
        seeing_of = _tiles_beyond(queries_of, length_of, 0, TOKENS, KEYS, IS_CAUSAL)
        blind_of = (queries_of + TOKENS - 1) // TOKENS - seeing_of
        is_before = first + lanes < seq
        before += tl.where(is_before, (length_of + KEYS - 1) // KEYS, 0)
        seeing += seeing_of
        blind += blind_of
        blind_before += tl.where(is_before, blind_of, 0)
    num_seeing = tl.sum(seeing, 0) * NUM_KV_HEADS
    if is_last:
        tl.store(work_ptr, num_seeing)
        tl.store(work_ptr + 1, tl.sum(blind, 0) * NUM_KV_HEADS)

    tiles_before = tl.sum(before, 0)
    length_tiles = (length + KEYS - 1) // KEYS
    own_blind = tiles - _tiles_beyond(queries, length, 0, TOKENS, KEYS, IS_CAUSAL)
    first_blind = num_seeing + tl.sum(blind_before, 0) * NUM_KV_HEADS
    items_ptr = work_ptr + HEADER_WORDS
    for first_item in range(part * ITEMS, num_items, tl.num_programs(1) * ITEMS):
        item = first_item + tl.arange(0, ITEMS)
        tile = item // NUM_KV_HEADS
        head = item % NUM_KV_HEADS
        if IS_CAUSAL:
            end = tl.minimum(length - queries + tl.minimum((tile + 1) * TOKENS, queries), length)
        else:
            end = tl.zeros_like(tile) + length
        n = (tl.maximum(end, 0) + KEYS - 1) // KEYS
        span = (tiles_before * NUM_KV_HEADS + head * length_tiles) // SPAN
        place = tl.zeros([ITEMS], tl.int32)
        tiles_so_far = 0
        for first in range(0, num_seqs + 1, SCAN):
            seqs = first + lanes
            _, queries_of, length_of = _sequence(query_start_loc_ptr, seq_lens_ptr, seqs, num_tokens, num_seqs)
            length_tiles_of = (length_of + KEYS - 1) // KEYS
            heads_begin = (tiles_so_far + tl.cumsum(length_tiles_of, 0) - length_tiles_of) * NUM_KV_HEADS
            tiles_so_far += tl.sum(length_tiles_of, 0)
            # [ITEMS, SCAN]
            limit = span[:, None] * SPAN - heads_begin[None, :]
            earlier = _heads_before(limit, length_tiles_of[None, :], NUM_KV_HEADS)
            inside = _heads_before(limit + SPAN, length_tiles_of[None, :], NUM_KV_HEADS) - earlier
            queries_2d, length_2d = queries_of[None, :], length_of[None, :]
            seeing_of = _tiles_beyond(queries_of, length_of, 0, TOKENS, KEYS, IS_CAUSAL)
            longer = _tiles_beyond(queries_2d, length_2d, n[:, None], TOKENS, KEYS, IS_CAUSAL)
            equal = _tiles_beyond(queries_2d, length_2d, n[:, None] - 1, TOKENS, KEYS, IS_CAUSAL) - longer
            number = earlier * seeing_of[None, :] + inside * longer
            number += tl.where(seqs[None, :] < seq, inside * equal, 0)
            number += tl.where(seqs[None, :] == seq, (head[:, None] - earlier) * equal, 0)
            place += tl.sum(number, 1)
        # Among the equal tiles of the same sequence and head.
        place += tile - (tiles - _tiles_beyond(queries, length, n - 1, TOKENS, KEYS, IS_CAUSAL))
        place = tl.where(n > 0, place, first_blind + head * own_blind + tile)
        item_ptr = items_ptr + place * ITEM_WORDS
        is_item = item < num_items
        tl.store(item_ptr + FIRST_TOKEN, start + tile * TOKENS, mask=is_item)
        tl.store(item_ptr + NUM_TOKENS, tl.minimum(queries - tile * TOKENS, TOKENS), mask=is_item)
        tl.store(item_ptr + POSITION, length - queries + tile * TOKENS, mask=is_item)
        tl.store(item_ptr + SEQ_LEN, tl.zeros_like(item) + length, mask=is_item)
        tl.store(item_ptr + TABLE_ROW, tl.zeros_like(item) + table_row, mask=is_item)
        tl.store(item_ptr + KV_HEAD, head, mask=is_item)
        tl.store(item_ptr + SEQ, tl.zeros_like(item) + seq, mask=is_item)
        tl.store(item_ptr + KEY_TILES, n, mask=is_item)

"""Paged attention for sequences with several query tokens on top of existing context, mixed lengths in one launch.

Rows are (token, query head of the group) pairs of one KV head, flattened, so any group size fills the tiles and K and V
are read once for the whole group. The grid depends on shapes only: a tile finds its sequence from `query_start_loc`.
"""

import triton
import triton.language as tl

from .decode import LN_2, LOWEST
from .paging import (
    block_of_token,
    cache_offset,
    count_bad_blocks,
    is_usable,
    largest_id,
    load_block_ids,
    position_in_block,
)


@triton.jit
def _first_tile_of(query_start_loc_ptr, seqs, num_seqs, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """An upper bound of the tiles before each sequence that needs no scan: a sequence may get one tile too many."""
    start = tl.load(query_start_loc_ptr + seqs, mask=seqs <= num_seqs, other=0)
    return start * GROUP // ROWS + seqs


@triton.jit
def _find_sequence(
    query_start_loc_ptr,
    num_seqs,
    tile,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SCAN: tl.constexpr,
    ONE_SCAN: tl.constexpr,
):
    """The sequence of a tile; `num_seqs` stands for the padding tokens past the last sequence."""
    lanes = tl.arange(0, SCAN)
    if ONE_SCAN:
        reached = _first_tile_of(query_start_loc_ptr, lanes, num_seqs, GROUP, ROWS) <= tile
        found = tl.sum((reached & (lanes <= num_seqs)).to(tl.int32), 0)
    else:
        found = 0
        for start in range(0, num_seqs + 1, SCAN):
            reached = _first_tile_of(query_start_loc_ptr, start + lanes, num_seqs, GROUP, ROWS) <= tile
            found += tl.sum((reached & (start + lanes <= num_seqs)).to(tl.int32), 0)
    return found - 1


@triton.jit
def _attend(
    q,  # [ROWS, K_LANES]
    accumulator,  # [ROWS, V_LANES] f32
    highest,  # [ROWS] f32, in units of log2
    exp_sum,  # [ROWS] f32
    largest,  # the largest block id seen
    k_head_ptr,
    v_head_ptr,
    table_row_ptr,
    num_entries,
    bound,
    start,
    end,
    last_key,  # [ROWS]: the last key that each row sees
    scale_log2,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    K_STRIDE_BLOCK: tl.constexpr,
    K_STRIDE_TOKEN: tl.constexpr,
    V_STRIDE_BLOCK: tl.constexpr,
    V_STRIDE_TOKEN: tl.constexpr,
    TILE: tl.constexpr,
    K_LANES: tl.constexpr,
    V_LANES: tl.constexpr,
    SCALAR_IDS: tl.constexpr,
    STAGES: tl.constexpr,
    COUNTS: tl.constexpr,
    MASKED: tl.constexpr,  # False: every row sees all keys of [start, end), which are whole tiles
):
    """Softmax state over the keys [start, end) added to the state so far."""
    NUM_IDS: tl.constexpr = (TILE + BLOCK_SIZE - 1) // BLOCK_SIZE if SCALAR_IDS else 1
    n = tl.arange(0, TILE)
    k_channel = tl.arange(0, K_LANES)
    v_channel = tl.arange(0, V_LANES)
    ids = load_block_ids(table_row_ptr, start, num_entries, BLOCK_SIZE, TILE, SCALAR_IDS)
    for s in tl.range(start, end, TILE, num_stages=STAGES):
        block = block_of_token(n, ids, BLOCK_SIZE, TILE, SCALAR_IDS)
        valid = is_usable(block, bound)
        if MASKED:
            valid = valid & (n < end - s)
        if COUNTS:
            largest = largest_id(largest, ids, NUM_IDS)
        position = position_in_block(s, n, BLOCK_SIZE, TILE, SCALAR_IDS)
        k_offset = cache_offset(block, position, K_STRIDE_BLOCK, K_STRIDE_TOKEN, BLOCK_SIZE)
        v_offset = cache_offset(block, position, V_STRIDE_BLOCK, V_STRIDE_TOKEN, BLOCK_SIZE)
        ids = load_block_ids(table_row_ptr, s + TILE, num_entries, BLOCK_SIZE, TILE, SCALAR_IDS)
        k_mask = valid[:, None]
        if HEAD_DIM != K_LANES:
            k_mask = k_mask & (k_channel < HEAD_DIM)[None, :]
        v_mask = valid[:, None]
        if V_HEAD_DIM != V_LANES:
            v_mask = v_mask & (v_channel < V_HEAD_DIM)[None, :]
        k = tl.load(k_head_ptr + k_offset[:, None] + k_channel[None, :], mask=k_mask, other=0.0)  # [TILE, K_LANES]
        v = tl.load(v_head_ptr + v_offset[:, None] + v_channel[None, :], mask=v_mask, other=0.0)
        scores = tl.dot(q, k.T, input_precision="ieee") * scale_log2  # [ROWS, TILE]
        seen = valid[None, :]
        if MASKED:
            seen = seen & (n[None, :] <= (last_key - s)[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_highest[:, None])
        shrink = tl.exp2(highest - new_highest)
        exp_sum = exp_sum * shrink + tl.sum(weights, 1)
        accumulator = accumulator * shrink[:, None]
        accumulator = tl.dot(weights.to(v.dtype), v, accumulator, input_precision="ieee")
        highest = new_highest
    return accumulator, highest, exp_sum, largest


@triton.jit(
    do_not_specialize=["v_offset", "num_tokens", "num_seqs", "table_width", "num_blocks", "table_stride_row"],
    do_not_specialize_on_alignment=[
        "block_table_ptr",
        "seq_lens_ptr",
        "query_start_loc_ptr",
        "table_rows_ptr",
        "control_ptr",
        "lse_ptr",
    ],
)
def prefill_kernel(
    q_ptr,  # [num_tokens, NUM_KV_HEADS * GROUP, HEAD_DIM]
    k_cache_ptr,  # [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM] in the cache's strides
    v_cache_ptr,  # [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, V_HEAD_DIM], v_offset elements on
    block_table_ptr,  # [rows, table_width] int32
    seq_lens_ptr,  # [num_seqs] int32
    query_start_loc_ptr,  # [num_seqs + 1] int32
    table_rows_ptr,  # [num_seqs] int32, or None: sequence i has row i
    control_ptr,  # [8] int32, or None: num_blocks is the bound and nothing is counted
    out_ptr,  # [num_tokens, NUM_KV_HEADS * GROUP, V_HEAD_DIM]
    lse_ptr,  # [num_tokens, NUM_KV_HEADS * GROUP] f32, or None
    v_offset: tl.int64,
    num_tokens: tl.int32,
    num_seqs: tl.int32,
    table_width: tl.int32,
    num_blocks: tl.int32,
    table_stride_row: tl.int64,
    q_stride_token,
    out_stride_token,
    scale_log2,  # softmax scale * log2(e)
    GROUP: tl.constexpr,  # query heads a KV head
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    K_STRIDE_BLOCK: tl.constexpr,
    K_STRIDE_TOKEN: tl.constexpr,
    K_STRIDE_HEAD: tl.constexpr,
    V_STRIDE_BLOCK: tl.constexpr,
    V_STRIDE_TOKEN: tl.constexpr,
    V_STRIDE_HEAD: tl.constexpr,
    V_DIVISOR: tl.constexpr,  # divides v_offset and V_STRIDE_HEAD; a power of two
    Q_STRIDE_HEAD: tl.constexpr,
    OUT_STRIDE_HEAD: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    ROWS: tl.constexpr,  # (token, query head) pairs a program
    TILE: tl.constexpr,  # keys
    K_LANES: tl.constexpr,  # HEAD_DIM padded to a power of two
    V_LANES: tl.constexpr,
    SCAN: tl.constexpr,
    ONE_SCAN: tl.constexpr,  # num_seqs + 1 <= SCAN
    SCALAR_IDS: tl.constexpr,
    STAGES: tl.constexpr,
):
    HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    COUNTS: tl.constexpr = control_ptr is not None
    # Late tiles see the most keys and go first. Tiles are the fast axis: those in flight together share a KV head.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = _find_sequence(query_start_loc_ptr, num_seqs, tile, GROUP, ROWS, SCAN, ONE_SCAN)
    is_padding = seq == num_seqs
    query_start = tl.load(query_start_loc_ptr + seq)
    query_end = tl.load(query_start_loc_ptr + seq + 1, mask=seq < num_seqs, other=0)
    query_end = tl.minimum(tl.where(is_padding, num_tokens, query_end), num_tokens)
    length = tl.load(seq_lens_ptr + seq, mask=seq < num_seqs, other=0)
    query_length = query_end - query_start
    first_row = (tile - (query_start * GROUP // ROWS + seq)) * ROWS
    if first_row >= query_length * GROUP:
        return
    if COUNTS:
        bound = tl.load(control_ptr)
    else:
        bound = num_blocks
    table_row = seq
    if table_rows_ptr is not None:
        table_row = tl.load(table_rows_ptr + seq, mask=seq < num_seqs, other=0)
    table_row_ptr = block_table_ptr + table_row.to(tl.int64) * table_stride_row
    num_entries = tl.minimum((length + BLOCK_SIZE - 1) // BLOCK_SIZE, table_width)

    row = first_row + tl.arange(0, ROWS)
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    is_row = token < query_length
    k_channel = tl.arange(0, K_LANES)
    v_channel = tl.arange(0, V_LANES)
    q_offset = (query_start + token).to(tl.int64) * q_stride_token + head * Q_STRIDE_HEAD
    q_mask = is_row[:, None] & (k_channel < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + q_offset[:, None] + k_channel[None, :], mask=q_mask, other=0.0)  # [ROWS, K_LANES]
    k_head_ptr = k_cache_ptr + kv_head.to(tl.int64) * K_STRIDE_HEAD
    v_head_ptr = v_cache_ptr + tl.multiple_of(v_offset + kv_head.to(tl.int64) * V_STRIDE_HEAD, V_DIVISOR)

    context = length - query_length  # negative where a sequence is shorter than its queries: those see nothing
    if IS_CAUSAL:
        last_token = tl.minimum((first_row + ROWS - 1) // GROUP, query_length - 1)
        last_key = context + token
        end = tl.minimum(context + last_token + 1, length)
        whole_end = tl.maximum(tl.minimum(context + first_row // GROUP + 1, end), 0) // TILE * TILE
    else:
        last_key = tl.zeros_like(token) + (length - 1)
        end = length
        whole_end = tl.maximum(end, 0) // TILE * TILE

    accumulator = tl.zeros([ROWS, V_LANES], tl.float32)
    highest = tl.full([ROWS], LOWEST, tl.float32)
    exp_sum = tl.zeros([ROWS], tl.float32)
    if SCALAR_IDS:
        largest = -1
    else:
        largest = tl.full([TILE], -1, tl.int32)
    accumulator, highest, exp_sum, largest = _attend(
        q,
        accumulator,
        highest,
        exp_sum,
        largest,
        k_head_ptr,
        v_head_ptr,
        table_row_ptr,
        num_entries,
        bound,
        0,
        whole_end,
        last_key,
        scale_log2,
        HEAD_DIM,
        V_HEAD_DIM,
        BLOCK_SIZE,
        K_STRIDE_BLOCK,
        K_STRIDE_TOKEN,
        V_STRIDE_BLOCK,
        V_STRIDE_TOKEN,
        TILE,
        K_LANES,
        V_LANES,
        SCALAR_IDS,
        STAGES,
        COUNTS,
        MASKED=False,
    )
    accumulator, highest, exp_sum, largest = _attend(
        q,
        accumulator,
        highest,
        exp_sum,
        largest,
        k_head_ptr,
        v_head_ptr,
        table_row_ptr,
        num_entries,
        bound,
        whole_end,
        end,
        last_key,
        scale_log2,
        HEAD_DIM,
        V_HEAD_DIM,
        BLOCK_SIZE,
        K_STRIDE_BLOCK,
        K_STRIDE_TOKEN,
        V_STRIDE_BLOCK,
        V_STRIDE_TOKEN,
        TILE,
        K_LANES,
        V_LANES,
        SCALAR_IDS,
        STAGES,
        COUNTS,
        MASKED=True,
    )

    safe = tl.where(exp_sum > 0, exp_sum, 1.0)  # nothing attended: zeros and minus infinity
    result = accumulator / safe[:, None]
    out_offset = (query_start + token).to(tl.int64) * out_stride_token + head * OUT_STRIDE_HEAD
    out_mask = is_row[:, None] & (v_channel < V_HEAD_DIM)[None, :]
    tl.store(out_ptr + out_offset[:, None] + v_channel[None, :], result.to(out_ptr.dtype.element_ty), mask=out_mask)
    if lse_ptr is not None:
        log_sum = tl.where(exp_sum > 0, (highest + tl.log2(safe)) * LN_2, float("-inf"))
        tl.store(lse_ptr + (query_start + token).to(tl.int64) * HEADS + head, log_sum, mask=is_row)

    if COUNTS:  # noqa: SIM102 (known at compile time)
        # The sequence's last tile sees every entry that the others see; every head reads the same.
        if (kv_head == 0) & (first_row + ROWS >= query_length * GROUP):
            if SCALAR_IDS:
                worst = largest
            else:
                worst = tl.max(largest, 0)
            if worst >= bound:
                end_entry = tl.minimum((end + BLOCK_SIZE - 1) // BLOCK_SIZE, num_entries)
                count_bad_blocks(control_ptr, table_row_ptr, table_row, 0, end_entry, bound)

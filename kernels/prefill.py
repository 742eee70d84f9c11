"""Paged attention for sequences with several query tokens on top of existing context, mixed lengths in one launch.

Rows are (token, query head of the group) pairs of one KV head, flattened, so any group size fills the tiles and K and V
are read once for the whole group. The grid depends on shapes only: a tile finds its sequence from `query_start_loc`.
"""

import triton
import triton.language as tl

from .paging import (
    block_of_token,
    count_bad_blocks,
    is_usable,
    largest_id,
    load_block_ids,
    load_box,
    load_tile,
    multiple_of_divisor,
    position_in_block,
)
from .scores import LN_2, LOWEST, biased, load_slopes, scaled, seen_in_tree, tree_positions, with_sink

ENTRIES: tl.constexpr = tl.constexpr(256)  # table entries that are checked at a time


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
    return tl.maximum(found - 1, 0)


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
    first_seen,  # the first key that any row of the program sees
    query,  # [ROWS]: positions
    last_key,  # [ROWS]: the last key that each row sees
    slope,  # [ROWS]: ALiBi's
    words,  # [ROWS]: the tree mask's
    context,  # tokens before the query tokens
    scale_log2,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    K_STRIDE_BLOCK: tl.constexpr,
    K_STRIDE_TOKEN: tl.constexpr,
    V_STRIDE_BLOCK: tl.constexpr,
    V_STRIDE_TOKEN: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP_LOG2: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_TREE: tl.constexpr,
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
    ids = load_block_ids(table_row_ptr, start, num_entries, BLOCK_SIZE, TILE, SCALAR_IDS)
    for s in tl.range(start, end, TILE, num_stages=STAGES):
        block = block_of_token(n, ids, BLOCK_SIZE, TILE, SCALAR_IDS)
        valid = is_usable(block, bound)
        if MASKED:
            valid = valid & (n < end - s)
            if WINDOW > 0:
                valid = valid & (n >= first_seen - s)
        if COUNTS:
            largest = largest_id(largest, ids, NUM_IDS)
        position = position_in_block(s, n, BLOCK_SIZE, TILE, SCALAR_IDS)
        ids = load_block_ids(table_row_ptr, s + TILE, num_entries, BLOCK_SIZE, TILE, SCALAR_IDS)
        k, v = load_tile(
            k_head_ptr,
            v_head_ptr,
            block,
            position,
            valid,
            HEAD_DIM,
            V_HEAD_DIM,
            BLOCK_SIZE,
            K_STRIDE_BLOCK,
            K_STRIDE_TOKEN,
            V_STRIDE_BLOCK,
            V_STRIDE_TOKEN,
            K_LANES,
            V_LANES,
        )
        scores = scaled(tl.dot(q, k.T, input_precision="ieee"), scale_log2, SOFTCAP_LOG2)  # [ROWS, TILE]
        if HAS_ALIBI:
            scores = biased(scores, slope, s + n, query)
        seen = valid[None, :]
        if MASKED:
            if HAS_TREE:
                seen = seen & seen_in_tree(words, s + n - context)
            else:
                seen = seen & (n[None, :] <= (last_key - s)[:, None])
            if WINDOW > 0:
                seen = seen & (n[None, :] > (query - WINDOW - s)[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_highest[:, None])
        shrink = tl.exp2(highest - new_highest)
        exp_sum = exp_sum * shrink + tl.sum(weights, 1)
        accumulator = accumulator * shrink[:, None]
        accumulator = tl.dot(weights.to(v.dtype), v, accumulator, input_precision="ieee")
        highest = new_highest
    return accumulator, highest, exp_sum, largest


@triton.jit
def _attend_boxes(
    q,  # [ROWS, K_LANES]
    accumulator,  # [ROWS, V_LANES] f32
    highest,  # [ROWS] f32, in units of log2
    exp_sum,  # [ROWS] f32
    largest,  # the largest block id seen
    k_desc,
    v_desc,
    kv_head,
    table_row_ptr,
    num_entries,
    bound,
    start,
    end,
    query,  # [ROWS]: positions
    slope,  # [ROWS]: ALiBi's
    scale_log2,
    BLOCK_SIZE: tl.constexpr,
    SOFTCAP_LOG2: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    TILE: tl.constexpr,
    BOX: tl.constexpr,
    K_LANES: tl.constexpr,
    V_LANES: tl.constexpr,
    STAGES: tl.constexpr,
    COUNTS: tl.constexpr,
):
    """`_attend` over whole tiles of [start, end) that every row sees, each brought in one or two boxes.

    Its slots all hold tokens, so nothing has to be cleared. A block that is not usable comes as zeros, whose scores
    are numbers: hiding it takes two instructions a row, not one a score.
    """
    BOXES: tl.constexpr = TILE // BOX
    n = tl.arange(0, BOX)
    ids = load_block_ids(table_row_ptr, start, num_entries, BLOCK_SIZE, TILE, True)
    for s in tl.range(start, end, TILE, num_stages=STAGES):
        if COUNTS:
            largest = largest_id(largest, ids, BOXES)
        usable = is_usable(ids[0], bound)
        k, v = load_box(k_desc, v_desc, kv_head, ids[0], s % BLOCK_SIZE, usable, BOX, K_LANES, V_LANES)
        if BOXES == 2:
            usable_2 = is_usable(ids[1], bound)
            k_2, v_2 = load_box(k_desc, v_desc, kv_head, ids[1], 0, usable_2, BOX, K_LANES, V_LANES)
        ids = load_block_ids(table_row_ptr, s + TILE, num_entries, BLOCK_SIZE, TILE, True)
        scores = scaled(tl.dot(q, k.T, input_precision="ieee"), scale_log2, SOFTCAP_LOG2)  # [ROWS, BOX]
        if BOXES == 2:
            scores_2 = scaled(tl.dot(q, k_2.T, input_precision="ieee"), scale_log2, SOFTCAP_LOG2)
        if HAS_ALIBI:
            scores = biased(scores, slope, s + n, query)
            if BOXES == 2:
                scores_2 = biased(scores_2, slope, s + BOX + n, query)
        new_highest = tl.where(usable, tl.maximum(highest, tl.max(scores, 1)), highest)
        if BOXES == 2:
            new_highest = tl.where(usable_2, tl.maximum(new_highest, tl.max(scores_2, 1)), new_highest)
        shrink = tl.exp2(highest - new_highest)
        accumulator = accumulator * shrink[:, None]
        weights = tl.exp2(scores - tl.where(usable, new_highest, float("inf"))[:, None])
        exp_sum = exp_sum * shrink + tl.sum(weights, 1)
        accumulator = tl.dot(weights.to(v.dtype), v, accumulator, input_precision="ieee")
        if BOXES == 2:
            weights = tl.exp2(scores_2 - tl.where(usable_2, new_highest, float("inf"))[:, None])
            exp_sum += tl.sum(weights, 1)
            accumulator = tl.dot(weights.to(v_2.dtype), v_2, accumulator, input_precision="ieee")
        highest = new_highest
    return accumulator, highest, exp_sum, largest


@triton.jit(
    do_not_specialize=[
        "v_offset",
        "num_tokens",
        "num_seqs",
        "table_width",
        "num_blocks",
        "table_stride_row",
        "q_stride_token",
        "out_stride_token",
    ],
    do_not_specialize_on_alignment=[
        "block_table_ptr",
        "seq_lens_ptr",
        "query_start_loc_ptr",
        "table_rows_ptr",
        "sinks_ptr",
        "alibi_slopes_ptr",
        "tree_mask_ptr",
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
    sinks_ptr,  # [NUM_KV_HEADS * GROUP], or None
    alibi_slopes_ptr,  # [NUM_KV_HEADS * GROUP], or None
    tree_mask_ptr,  # [num_tokens] int64: bit j for the j-th query token; or None
    control_ptr,  # [8] int32, or None: num_blocks is the bound and nothing is counted
    k_desc,  # K as [num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM] in boxes [1, 1, BOX, K_LANES]; None: by pointers
    v_desc,  # V as [num_blocks, NUM_KV_HEADS, BLOCK_SIZE, V_HEAD_DIM] in boxes [1, 1, BOX, V_LANES]; or None
    out_ptr,  # [num_tokens, NUM_KV_HEADS * GROUP, V_HEAD_DIM]
    lse_ptr,  # [num_tokens, NUM_KV_HEADS * GROUP] f32, or None
    v_offset: tl.int64,
    num_tokens: tl.int32,
    num_seqs: tl.int32,
    table_width: tl.int32,
    num_blocks: tl.int32,
    table_stride_row: tl.int64,
    q_stride_token: tl.int64,
    out_stride_token: tl.int64,
    scale_log2,  # softmax scale * log2(e), times 2 / cap with a soft cap
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
    Q_DIVISOR: tl.constexpr,  # divides q's token and head strides; a power of two
    OUT_STRIDE_HEAD: tl.constexpr,
    OUT_DIVISOR: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,  # keys that a query sees up to its own; 0: all
    SOFTCAP_LOG2: tl.constexpr,  # cap * log2(e); 0: none
    ROWS: tl.constexpr,  # (token, query head) pairs a program
    TILE: tl.constexpr,  # keys
    EDGE_TILE: tl.constexpr,  # keys, where not every row sees all of them; divides TILE
    BOX: tl.constexpr,  # keys of one block that a descriptor loads: TILE, or half of it; 0 without descriptors
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
    out_row = (query_start + token).to(tl.int64)
    q_offset = tl.multiple_of(out_row * q_stride_token + head.to(tl.int64) * Q_STRIDE_HEAD, Q_DIVISOR)
    q_mask = is_row[:, None] & (k_channel < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + q_offset[:, None] + k_channel[None, :], mask=q_mask, other=0.0)  # [ROWS, K_LANES]
    k_head_ptr = k_cache_ptr + kv_head.to(tl.int64) * K_STRIDE_HEAD
    v_head_ptr = v_cache_ptr + multiple_of_divisor(v_offset + kv_head.to(tl.int64) * V_STRIDE_HEAD, V_DIVISOR)

    context = length - query_length  # negative where a sequence is shorter than its queries: those see nothing
    query = context + token
    first_query = context + first_row // GROUP
    last_query = context + tl.minimum((first_row + ROWS - 1) // GROUP, query_length - 1)
    words = tl.zeros([ROWS], tl.int64)
    last_key = query
    if tree_mask_ptr is not None:
        words = tl.load(tree_mask_ptr + query_start + token, mask=is_row, other=0)
        first_query = context  # by depth, rows stand anywhere among the query tokens
        last_query = context + query_length - 1
        if WINDOW > 0:
            query = tree_positions(words, context, length)
        end = length
        whole_end = tl.maximum(tl.minimum(context, end), 0) // TILE * TILE
    elif IS_CAUSAL:
        end = tl.minimum(last_query + 1, length)
        whole_end = tl.maximum(tl.minimum(first_query + 1, end), 0) // TILE * TILE
    else:
        last_key = tl.zeros_like(token) + (length - 1)
        end = length
        whole_end = tl.maximum(end, 0) // TILE * TILE
    first_seen = length * 0
    start = first_seen
    whole_start = first_seen  # from here to whole_end every row sees every key
    if WINDOW > 0:
        first_seen = tl.maximum(first_query - WINDOW + 1, 0)
        start = first_seen // EDGE_TILE * EDGE_TILE
        whole_start = (tl.maximum(last_query - WINDOW + 1, 0) + TILE - 1) // TILE * TILE
        if tree_mask_ptr is not None:
            whole_start = tl.minimum(whole_start, whole_end)  # what is in front of it sees all of the query tokens
        else:
            whole_start = tl.minimum(whole_start, (tl.maximum(end, 0) + TILE - 1) // TILE * TILE)
        whole_end = tl.maximum(whole_end, whole_start)

    slope = tl.zeros([ROWS], tl.float32)
    if alibi_slopes_ptr is not None:
        slope = load_slopes(alibi_slopes_ptr, head, is_row)
    accumulator = tl.zeros([ROWS, V_LANES], tl.float32)
    highest = tl.full([ROWS], LOWEST, tl.float32)
    exp_sum = tl.zeros([ROWS], tl.float32)
    if SCALAR_IDS:
        largest = -1
    else:
        largest = tl.full([TILE], -1, tl.int32)
    # Before the window's whole tiles, the whole tiles, and behind them; without a window two parts.
    for part in tl.static_range(0 if WINDOW > 0 else 1, 3):
        if part == 0:
            part_start, part_end = start, tl.minimum(whole_start, end)
        elif part == 1:
            part_start, part_end = whole_start, whole_end
        else:
            part_start, part_end = whole_end, end
        if part == 1 and k_desc is not None:
            accumulator, highest, exp_sum, largest = _attend_boxes(
                q,
                accumulator,
                highest,
                exp_sum,
                largest,
                k_desc,
                v_desc,
                kv_head,
                table_row_ptr,
                num_entries,
                bound,
                part_start,
                part_end,
                query,
                slope,
                scale_log2,
                BLOCK_SIZE,
                SOFTCAP_LOG2,
                alibi_slopes_ptr is not None,
                TILE,
                BOX,
                K_LANES,
                V_LANES,
                STAGES,
                COUNTS,
            )
        else:
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
                part_start,
                part_end,
                first_seen,
                query,
                last_key,
                slope,
                words,
                context,
                scale_log2,
                HEAD_DIM,
                V_HEAD_DIM,
                BLOCK_SIZE,
                K_STRIDE_BLOCK,
                K_STRIDE_TOKEN,
                V_STRIDE_BLOCK,
                V_STRIDE_TOKEN,
                WINDOW,
                SOFTCAP_LOG2,
                alibi_slopes_ptr is not None,
                tree_mask_ptr is not None and part == 2,
                TILE if part == 1 else EDGE_TILE,
                K_LANES,
                V_LANES,
                SCALAR_IDS,
                STAGES,
                COUNTS,
                MASKED=part != 1,
            )

    if k_desc is not None:
        # Zero is added, as the compiler cannot know: it works rows out again and does not keep them through the loops.
        # 31 registers a thread at head_dim 128, which the loops need.
        first_row += tl.minimum(num_tokens, 0)
        row = first_row + tl.arange(0, ROWS)
        token = row // GROUP
        head = kv_head * GROUP + row % GROUP
        is_row = token < query_length
        out_row = (query_start + token).to(tl.int64)
    if sinks_ptr is not None:
        highest, shrink, exp_sum = with_sink(highest, exp_sum, sinks_ptr, head, is_row)
        accumulator = accumulator * shrink[:, None]
    safe = tl.where(exp_sum > 0, exp_sum, 1.0)  # nothing attended: zeros and minus infinity
    result = accumulator / safe[:, None]
    out_offset = tl.multiple_of(out_row * out_stride_token + head.to(tl.int64) * OUT_STRIDE_HEAD, OUT_DIVISOR)
    out_mask = is_row[:, None] & (v_channel < V_HEAD_DIM)[None, :]
    tl.store(out_ptr + out_offset[:, None] + v_channel[None, :], result.to(out_ptr.dtype.element_ty), mask=out_mask)
    if lse_ptr is not None:
        log_sum = tl.where(exp_sum > 0, (highest + tl.log2(safe)) * LN_2, float("-inf"))
        tl.store(lse_ptr + out_row * HEADS + head, log_sum, mask=is_row)

    if COUNTS:  # noqa: SIM102 (known at compile time)
        # The sequence's last tile sees every entry that the others see; every head reads the same.
        if (kv_head == 0) & (first_row + ROWS >= query_length * GROUP):
            if SCALAR_IDS:
                worst = largest
            else:
                worst = tl.max(largest, 0)
            first_entry = 0
            end_entry = tl.minimum((end + BLOCK_SIZE - 1) // BLOCK_SIZE, num_entries)
            if WINDOW > 0:  # earlier tiles have seen entries in front of this one's window
                first_entry = tl.maximum(context - WINDOW + 1, 0) // BLOCK_SIZE
                for entry in range(first_entry, end_entry, ENTRIES):
                    entries = entry + tl.arange(0, ENTRIES)
                    worst = tl.maximum(worst, tl.max(tl.load(table_row_ptr + entries, entries < end_entry, -1), 0))
            if worst >= bound:
                count_bad_blocks(control_ptr, table_row_ptr, table_row, first_entry, end_entry, bound)

"""Paged decode attention: one query token a sequence, all distribution of work computed on the device from the lengths.

The tiles (TILE tokens each) of all sequences of the batch stand in one row, sequence after sequence, and are cut into
NUM_CHUNKS equal chunks. Program (chunk, KV head) of `decode_kernel` walks its chunk: a sequence that lies wholly
inside is written straight to `out`; one that crosses a cut leaves a partial, at most two a chunk: in slot 2 * chunk
for a sequence that holds the chunk's first tile, in slot 2 * chunk + 1 for one that begins later. `join_kernel` has one
program for each (chunk, query head): it joins the sequence that began in an earlier chunk and ends in this one. No
atomics between programs, no counters, nothing to reset: a replayed graph gives the same bits.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .paging import (
    block_of_token,
    cache_offset,
    count_bad_blocks,
    is_usable,
    largest_id,
    load_block_ids,
    position_in_block,
)

# Stands for minus infinity in a running maximum: exp2(-inf - LOWEST) is 0 where exp2(-inf - -inf) would be NaN.
LOWEST: tl.constexpr = tl.constexpr(-(2.0**99))
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def _tiles_of(seq_lens_ptr, seqs, num_seqs, TILE: tl.constexpr):
    """Tiles of each sequence. An empty one owns one empty tile, so that some program writes its row."""
    lengths = tl.load(seq_lens_ptr + seqs, mask=seqs < num_seqs, other=0)
    return tl.where(seqs < num_seqs, tl.maximum((lengths + TILE - 1) // TILE, 1), 0)


@triton.jit
def _find_chunk(
    seq_lens_ptr,
    num_seqs,
    chunk,
    NUM_CHUNKS: tl.constexpr,
    TILE: tl.constexpr,
    SCAN: tl.constexpr,
    ONE_SCAN: tl.constexpr,
):
    """Where a chunk begins and ends in the row of tiles, and the sequence that its first tile belongs to.

    Returns (tiles a chunk, first tile, end tile, sequence, first tile of that sequence); a chunk without work has
    first tile >= end tile. Every program scans all lengths by itself, in pieces of SCAN if they are many.
    """
    lanes = tl.arange(0, SCAN)
    if ONE_SCAN:
        tiles = _tiles_of(seq_lens_ptr, lanes, num_seqs, TILE)
        total = tl.sum(tiles, 0)
        per_chunk = (total + NUM_CHUNKS - 1) // NUM_CHUNKS
        first = chunk * per_chunk
        before = tl.cumsum(tiles, 0) <= first
        seq = tl.sum(before.to(tl.int32), 0)
        seq_first = tl.sum(tl.where(before, tiles, 0), 0)
    else:
        total = 0
        for start in range(0, num_seqs, SCAN):
            total += tl.sum(_tiles_of(seq_lens_ptr, start + lanes, num_seqs, TILE), 0)
        per_chunk = (total + NUM_CHUNKS - 1) // NUM_CHUNKS
        first = chunk * per_chunk
        seq = 0
        seq_first = 0
        scanned = 0
        for start in range(0, num_seqs, SCAN):
            tiles = _tiles_of(seq_lens_ptr, start + lanes, num_seqs, TILE)
            before = (scanned + tl.cumsum(tiles, 0) <= first) & (start + lanes < num_seqs)
            seq += tl.sum(before.to(tl.int32), 0)
            seq_first += tl.sum(tl.where(before, tiles, 0), 0)
            scanned += tl.sum(tiles, 0)
    return per_chunk, first, tl.minimum(first + per_chunk, total), seq, seq_first


@triton.jit(
    do_not_specialize=["v_offset", "num_seqs", "table_width", "num_blocks", "table_stride_row"],
    do_not_specialize_on_alignment=["block_table_ptr", "seq_lens_ptr", "table_rows_ptr", "control_ptr", "lse_ptr"],
)
def decode_kernel(
    q_ptr,  # [num_seqs, NUM_KV_HEADS * GROUP, HEAD_DIM]
    k_cache_ptr,  # [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM] in the cache's strides
    v_cache_ptr,  # [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, V_HEAD_DIM], v_offset elements on
    block_table_ptr,  # [rows, table_width] int32
    seq_lens_ptr,  # [num_seqs] int32
    table_rows_ptr,  # [num_seqs] int32, or None: sequence i has row i
    control_ptr,  # [8] int32, or None: num_blocks is the bound and nothing is counted
    out_ptr,  # [num_seqs, NUM_KV_HEADS * GROUP, V_HEAD_DIM]
    lse_ptr,  # [num_seqs, NUM_KV_HEADS * GROUP] f32, or None
    partials_ptr,  # f32: [2 * NUM_CHUNKS, heads, V_HEAD_DIM], then the log2-sum-exps [2 * NUM_CHUNKS, heads]
    v_offset: tl.int64,
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
    ROWS: tl.constexpr,  # query heads a program, padded: a power of two, at least 16
    TILE: tl.constexpr,  # tokens
    K_LANES: tl.constexpr,  # HEAD_DIM padded to a power of two
    V_LANES: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    SCAN: tl.constexpr,
    ONE_SCAN: tl.constexpr,  # num_seqs <= SCAN
    SCALAR_IDS: tl.constexpr,
    STAGES: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    NUM_PARTS: tl.constexpr = (GROUP + ROWS - 1) // ROWS  # a large group is shared out to several programs
    NUM_IDS: tl.constexpr = (TILE + BLOCK_SIZE - 1) // BLOCK_SIZE if SCALAR_IDS else 1
    PARTIAL_LSE: tl.constexpr = 2 * NUM_CHUNKS * HEADS * V_HEAD_DIM
    # Heads are fastest: programs that read the same token rows run at the same time.
    chunk = tl.program_id(0) // (NUM_KV_HEADS * NUM_PARTS)
    kv_head = tl.program_id(0) % (NUM_KV_HEADS * NUM_PARTS) // NUM_PARTS
    part = tl.program_id(0) % NUM_PARTS
    if USE_PDL:
        gdc_wait()  # before the first read: lengths, table and cache may have been written just now
        gdc_launch_dependents()
    _, chunk_first, chunk_end, seq, seq_first = _find_chunk(
        seq_lens_ptr, num_seqs, chunk, NUM_CHUNKS, TILE, SCAN, ONE_SCAN
    )
    if chunk_first >= chunk_end:
        return
    if control_ptr is not None:
        bound = tl.load(control_ptr)
    else:
        bound = num_blocks

    row = part * ROWS + tl.arange(0, ROWS)  # query heads of the group
    head = kv_head * GROUP + row
    in_group = row < GROUP
    n = tl.arange(0, TILE)
    k_channel = tl.arange(0, K_LANES)
    v_channel = tl.arange(0, V_LANES)
    q_mask = in_group[:, None] & (k_channel < HEAD_DIM)[None, :]
    out_mask = in_group[:, None] & (v_channel < V_HEAD_DIM)[None, :]
    k_head_ptr = k_cache_ptr + kv_head.to(tl.int64) * K_STRIDE_HEAD
    v_head_ptr = v_cache_ptr + tl.multiple_of(v_offset + kv_head.to(tl.int64) * V_STRIDE_HEAD, V_DIVISOR)

    tile = chunk_first
    while tile < chunk_end:
        length = tl.load(seq_lens_ptr + seq)
        seq_tiles = tl.maximum((length + TILE - 1) // TILE, 1)
        end_tile = tl.minimum(seq_first + seq_tiles, chunk_end)
        start = (tile - seq_first) * TILE
        end = tl.minimum((end_tile - seq_first) * TILE, length)
        num_entries = tl.minimum((length + BLOCK_SIZE - 1) // BLOCK_SIZE, table_width)
        table_row = seq
        if table_rows_ptr is not None:
            table_row = tl.load(table_rows_ptr + seq)
        table_row_ptr = block_table_ptr + table_row.to(tl.int64) * table_stride_row
        ids = load_block_ids(table_row_ptr, start, num_entries, BLOCK_SIZE, TILE, SCALAR_IDS)

        q_offset = seq.to(tl.int64) * q_stride_token + head[:, None] * Q_STRIDE_HEAD + k_channel[None, :]
        q = tl.load(q_ptr + q_offset, mask=q_mask, other=0.0)  # [ROWS, K_LANES]
        accumulator = tl.zeros([ROWS, V_LANES], tl.float32)
        highest = tl.full([ROWS], LOWEST, tl.float32)
        if ROWS == 16:
            exp_sum = tl.zeros([ROWS, TILE], tl.float32)  # summed over tokens after the loop: no sum across warps in it
        else:
            exp_sum = tl.zeros([ROWS], tl.float32)
        largest = ids[0]
        for s in tl.range(start, end, TILE, num_stages=STAGES):
            block = block_of_token(n, ids, BLOCK_SIZE, TILE, SCALAR_IDS)
            valid = (n < end - s) & is_usable(block, bound)
            if control_ptr is not None:
                largest = largest_id(largest, ids, NUM_IDS)
            position = position_in_block(s, n, BLOCK_SIZE, TILE, SCALAR_IDS)
            k_offset = cache_offset(block, position, K_STRIDE_BLOCK, K_STRIDE_TOKEN, BLOCK_SIZE)
            v_offset_token = cache_offset(block, position, V_STRIDE_BLOCK, V_STRIDE_TOKEN, BLOCK_SIZE)
            ids = load_block_ids(table_row_ptr, s + TILE, num_entries, BLOCK_SIZE, TILE, SCALAR_IDS)
            k_mask = valid[:, None]
            if HEAD_DIM != K_LANES:
                k_mask = k_mask & (k_channel < HEAD_DIM)[None, :]
            v_mask = valid[:, None]
            if V_HEAD_DIM != V_LANES:
                v_mask = v_mask & (v_channel < V_HEAD_DIM)[None, :]
            k = tl.load(k_head_ptr + k_offset[:, None] + k_channel[None, :], mask=k_mask, other=0.0)  # [TILE, K_LANES]
            v = tl.load(v_head_ptr + v_offset_token[:, None] + v_channel[None, :], mask=v_mask, other=0.0)
            scores = tl.dot(q, k.T, input_precision="ieee") * scale_log2  # [ROWS, TILE]
            scores = tl.where(valid[None, :], scores, float("-inf"))
            new_highest = tl.maximum(highest, tl.max(scores, 1))
            weights = tl.exp2(scores - new_highest[:, None])
            shrink = tl.exp2(highest - new_highest)
            if ROWS == 16:
                exp_sum = exp_sum * shrink[:, None] + weights
            else:
                exp_sum = exp_sum * shrink + tl.sum(weights, 1)
            accumulator = accumulator * shrink[:, None]
            accumulator += tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            highest = new_highest

        if ROWS == 16:
            denominator = tl.sum(exp_sum, 1)
        else:
            denominator = exp_sum
        safe = tl.where(denominator > 0, denominator, 1.0)  # nothing attended: zeros and minus infinity
        result = accumulator / safe[:, None]
        log2_sum = tl.where(denominator > 0, highest + tl.log2(safe), float("-inf"))
        if (seq_first >= chunk_first) & (seq_first + seq_tiles <= chunk_end):
            out_offset = seq.to(tl.int64) * out_stride_token + head[:, None] * OUT_STRIDE_HEAD + v_channel[None, :]
            tl.store(out_ptr + out_offset, result.to(out_ptr.dtype.element_ty), mask=out_mask)
            if lse_ptr is not None:
                tl.store(lse_ptr + seq.to(tl.int64) * HEADS + head, log2_sum * LN_2, mask=in_group)
        else:
            slot = chunk * 2 + (seq_first > chunk_first).to(tl.int32)
            partial_offset = (slot * HEADS + head)[:, None] * V_HEAD_DIM + v_channel[None, :]
            tl.store(partials_ptr + partial_offset, result, mask=out_mask)
            tl.store(partials_ptr + PARTIAL_LSE + slot * HEADS + head, log2_sum, mask=in_group)

        if control_ptr is not None:  # noqa: SIM102 (known at compile time)
            if kv_head + part == 0:  # every head reads the same entries
                if SCALAR_IDS:
                    worst = largest
                else:
                    worst = tl.max(largest, 0)
                if worst >= bound:
                    first_entry = (start + BLOCK_SIZE - 1) // BLOCK_SIZE  # a block that begins in this part is ours
                    end_entry = tl.minimum((end + BLOCK_SIZE - 1) // BLOCK_SIZE, num_entries)
                    count_bad_blocks(control_ptr, table_row_ptr, table_row, first_entry, end_entry, bound)
        seq_first += seq_tiles
        seq += 1
        tile = end_tile


@triton.jit(
    do_not_specialize=["num_seqs"],
    do_not_specialize_on_alignment=["seq_lens_ptr", "lse_ptr"],
)
def join_kernel(
    seq_lens_ptr,  # [num_seqs] int32
    out_ptr,  # [num_seqs, HEADS, V_HEAD_DIM]
    lse_ptr,  # [num_seqs, HEADS] f32, or None
    partials_ptr,  # as decode_kernel left them
    num_seqs: tl.int32,
    out_stride_token,
    HEADS: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    OUT_STRIDE_HEAD: tl.constexpr,
    TILE: tl.constexpr,
    V_LANES: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    SCAN: tl.constexpr,
    ONE_SCAN: tl.constexpr,
    PARTS: tl.constexpr,  # partials read at a time
    USE_PDL: tl.constexpr,
):
    PARTIAL_LSE: tl.constexpr = 2 * NUM_CHUNKS * HEADS * V_HEAD_DIM
    chunk = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    # Under the decode kernel this runs early: it reads only what that kernel waited for.
    per_chunk, chunk_first, chunk_end, seq, seq_first = _find_chunk(
        seq_lens_ptr, num_seqs, chunk, NUM_CHUNKS, TILE, SCAN, ONE_SCAN
    )
    length = tl.load(seq_lens_ptr + tl.minimum(seq, num_seqs - 1))
    seq_end = seq_first + tl.maximum((length + TILE - 1) // TILE, 1)
    joins = (chunk_first < chunk_end) & (seq_first < chunk_first) & (seq_end <= chunk_end)
    if USE_PDL:  # noqa: SIM102 (known at compile time)
        if joins | (chunk == 0):  # chunk 0 always waits, or this grid could end before the one it depends on
            gdc_wait()
    if joins:
        first_chunk = seq_first // per_chunk
        began_inside = (seq_first > first_chunk * per_chunk).to(tl.int32)  # then the first partial is in slot 1
        channel = tl.arange(0, V_LANES)
        part = tl.arange(0, PARTS)
        highest = LOWEST
        denominator = 0.0
        accumulator = tl.zeros([V_LANES], tl.float32)
        num_parts = chunk - first_chunk + 1
        for start in tl.range(0, num_parts, PARTS):
            index = start + part
            slot = (first_chunk + index) * 2 + tl.where(index == 0, began_inside, 0)
            partial = slot * HEADS + head
            log2_sums = tl.load(
                partials_ptr + PARTIAL_LSE + partial, mask=index < num_parts, other=float("-inf"), cache_modifier=".cg"
            )  # [PARTS]
            results = tl.load(
                partials_ptr + partial[:, None] * V_HEAD_DIM + channel[None, :],
                mask=(index < num_parts)[:, None] & (channel < V_HEAD_DIM)[None, :],
                other=0.0,
                cache_modifier=".cg",
            )  # [PARTS, V_LANES]
            new_highest = tl.maximum(highest, tl.max(log2_sums, 0))
            weights = tl.exp2(log2_sums - new_highest)
            shrink = tl.exp2(highest - new_highest)
            denominator = denominator * shrink + tl.sum(weights, 0)
            accumulator = accumulator * shrink + tl.sum(results * weights[:, None], 0)
            highest = new_highest
        safe = tl.where(denominator > 0, denominator, 1.0)
        offset = seq.to(tl.int64) * out_stride_token + head * OUT_STRIDE_HEAD + channel
        tl.store(out_ptr + offset, (accumulator / safe).to(out_ptr.dtype.element_ty), mask=channel < V_HEAD_DIM)
        if lse_ptr is not None:
            log_sum = tl.where(denominator > 0, (highest + tl.log2(safe)) * LN_2, float("-inf"))
            tl.store(lse_ptr + seq.to(tl.int64) * HEADS + head, log_sum)

"""Paged decode attention: a few query tokens a sequence, all distribution of work found on the device from the lengths.

The units (TILE tokens each) of all sequences of the batch stand in one row, sequence after sequence, and are cut into
NUM_CHUNKS equal chunks, or where whole sequences end if that makes equal ones too. Program (chunk, KV head) of
`decode_kernel` walks its chunk: a sequence that lies wholly inside is written straight to `out`; one that crosses a cut
leaves a partial, at most two a chunk: in slot 2 * chunk for a sequence that holds the chunk's first unit, in slot 2 *
chunk + 1 for one that begins later. `join_kernel` has one program for each (sequence, row), or, where chunks are fewer,
for each (chunk, row): that one joins the sequence that began in an earlier chunk and ends in this one. No atomics
between programs, no counters, nothing to reset: a replayed graph gives the same bits.

With SPLIT > 0 units are SPLIT tokens and each leaves a partial of its own, so that a row's bits depend on its own
length alone. `prepare_kernel` computes once a step what every layer's launch would compute again: where each chunk
begins. A row is a (query token, query head of the group) pair.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .paging import (
    block_of_token,
    count_bad_blocks,
    is_usable,
    largest_id,
    load_block_ids,
    load_tile,
    multiple_of_divisor,
    position_in_block,
)
from .scores import LN_2, LOWEST, biased, load_slopes, scaled, seen_in_tree, tree_positions, with_sink

CHUNK_WORDS: tl.constexpr = tl.constexpr(8)  # of a prepared chunk: units a chunk and so on, as _find_chunk returns them
PARTIAL_TAIL: tl.constexpr = tl.constexpr(4)  # f32 behind a partial's channels: its log2-sum-exp, then room to align


@triton.jit
def _first_unit(length, UNIT: tl.constexpr, SPAN: tl.constexpr):
    """The first unit that the last SPAN tokens of a sequence reach into; 0 without a window."""
    if SPAN > 0:
        return tl.maximum(length - SPAN, 0) // UNIT
    else:
        return length * 0


@triton.jit
def _num_units(length, limit, UNIT: tl.constexpr, SPAN: tl.constexpr):
    """Units of a sequence. An empty one owns one empty unit, so that some program writes its rows; one that says it is
    longer than `limit`, the tokens that a row of the block table holds, owns no more than that."""
    end_unit = (tl.minimum(length, limit) + UNIT - 1) // UNIT
    return tl.maximum(end_unit - _first_unit(length, UNIT, SPAN), 1)


@triton.jit
def _units_of(seq_lens_ptr, seqs, num_seqs, limit, UNIT: tl.constexpr, SPAN: tl.constexpr):
    lengths = tl.load(seq_lens_ptr + seqs, mask=seqs < num_seqs, other=0)
    return tl.where(seqs < num_seqs, _num_units(lengths, limit, UNIT, SPAN), 0)


@triton.jit
def _most_tokens(table_width, BLOCK_SIZE: tl.constexpr):
    return tl.minimum(table_width.to(tl.int64) * BLOCK_SIZE, 2**31 - 1).to(tl.int32)


@triton.jit
def _units_per_chunk(total, longest, num_seqs, NUM_CHUNKS: tl.constexpr):
    """Units of each of NUM_CHUNKS chunks, or of fewer that are up to a thirty-second longer, where all sequences have
    the same number of units and whole ones make such chunks: then nothing is left to join."""
    per_chunk = (total + NUM_CHUNKS - 1) // NUM_CHUNKS
    whole = (num_seqs + NUM_CHUNKS - 1) // NUM_CHUNKS * longest
    is_even = (longest * num_seqs == total) & (whole * 32 <= per_chunk * 33)
    return tl.where(is_even, whole, per_chunk)


@triton.jit
def _share(program, is_idle_last, NUM_CHUNKS: tl.constexpr, LANES: tl.constexpr, STEP: tl.constexpr):
    """Whose share of the work a program takes: its own, or, where the last chunks have none, that of one far from its
    neighbours', so that not the same few SMs are left with nothing to do."""
    if STEP > 1:
        return tl.where(is_idle_last, program * STEP % (NUM_CHUNKS * LANES), program)
    else:
        return program


@triton.jit
def _find_chunk(
    seq_lens_ptr,
    num_seqs,
    limit,
    program,
    NUM_CHUNKS: tl.constexpr,
    LANES: tl.constexpr,  # programs a chunk
    STEP: tl.constexpr,
    UNIT: tl.constexpr,
    SPAN: tl.constexpr,
    SCAN: tl.constexpr,
    ONE_SCAN: tl.constexpr,
):
    """Where a program's chunk begins and ends in the row of units, and the sequence that its first unit belongs to.

    Returns (share, units a chunk, first unit, end unit, sequence, first unit of that sequence); a chunk without work
    has first unit >= end unit. Every program scans all lengths by itself, in pieces of SCAN if they are many.
    """
    lanes = tl.arange(0, SCAN)
    if ONE_SCAN:
        units = _units_of(seq_lens_ptr, lanes, num_seqs, limit, UNIT, SPAN)
        total = tl.sum(units, 0)
        per_chunk = _units_per_chunk(total, tl.max(units, 0), num_seqs, NUM_CHUNKS)
        share = _share(program, total <= per_chunk * (NUM_CHUNKS - 1), NUM_CHUNKS, LANES, STEP)
        first = share // LANES * per_chunk
        before = tl.cumsum(units, 0) <= first
        seq = tl.sum(before.to(tl.int32), 0)
        seq_first = tl.sum(tl.where(before, units, 0), 0)
    else:
        total = 0
        longest = 0
        for start in range(0, num_seqs, SCAN):
            units = _units_of(seq_lens_ptr, start + lanes, num_seqs, limit, UNIT, SPAN)
            total += tl.sum(units, 0)
            longest = tl.maximum(longest, tl.max(units, 0))
        per_chunk = _units_per_chunk(total, longest, num_seqs, NUM_CHUNKS)
        share = _share(program, total <= per_chunk * (NUM_CHUNKS - 1), NUM_CHUNKS, LANES, STEP)
        first = share // LANES * per_chunk
        seq = 0
        seq_first = 0
        scanned = 0
        for start in range(0, num_seqs, SCAN):
            units = _units_of(seq_lens_ptr, start + lanes, num_seqs, limit, UNIT, SPAN)
            before = (scanned + tl.cumsum(units, 0) <= first) & (start + lanes < num_seqs)
            seq += tl.sum(before.to(tl.int32), 0)
            seq_first += tl.sum(tl.where(before, units, 0), 0)
            scanned += tl.sum(units, 0)
    return share, per_chunk, first, tl.minimum(first + per_chunk, total), seq, seq_first


@triton.jit
def _find_sequence(
    seq_lens_ptr,
    seq,
    num_seqs,
    limit,
    NUM_CHUNKS: tl.constexpr,
    UNIT: tl.constexpr,
    SPAN: tl.constexpr,
    SCAN: tl.constexpr,
    ONE_SCAN: tl.constexpr,
):
    """Units a chunk, and units of the sequences before `seq`."""
    lanes = tl.arange(0, SCAN)
    before = 0
    total = 0
    longest = 0
    if ONE_SCAN:
        units = _units_of(seq_lens_ptr, lanes, num_seqs, limit, UNIT, SPAN)
        before = tl.sum(tl.where(lanes < seq, units, 0), 0)
        total = tl.sum(units, 0)
        longest = tl.max(units, 0)
    else:
        for start in range(0, num_seqs, SCAN):
            units = _units_of(seq_lens_ptr, start + lanes, num_seqs, limit, UNIT, SPAN)
            before += tl.sum(tl.where(start + lanes < seq, units, 0), 0)
            total += tl.sum(units, 0)
            longest = tl.maximum(longest, tl.max(units, 0))
    return _units_per_chunk(total, longest, num_seqs, NUM_CHUNKS), before


@triton.jit
def _load_chunk(chunks_ptr, program, NUM_CHUNKS: tl.constexpr, LANES: tl.constexpr, STEP: tl.constexpr):
    """What `prepare_kernel` found for a program's chunk, as `_find_chunk` returns it."""
    share = program
    if STEP > 1:
        last_ptr = chunks_ptr + (NUM_CHUNKS - 1) * CHUNK_WORDS
        share = _share(program, tl.load(last_ptr + 1) >= tl.load(last_ptr + 2), NUM_CHUNKS, LANES, STEP)
    chunk_ptr = chunks_ptr + share // LANES * CHUNK_WORDS
    per_chunk, first = tl.load(chunk_ptr), tl.load(chunk_ptr + 1)
    return share, per_chunk, first, tl.load(chunk_ptr + 2), tl.load(chunk_ptr + 3), tl.load(chunk_ptr + 4)


@triton.jit(
    do_not_specialize=["num_seqs", "table_width", "num_blocks", "table_stride_row"],
    do_not_specialize_on_alignment=["block_table_ptr", "seq_lens_ptr", "query_start_loc_ptr", "table_rows_ptr"],
)
def prepare_kernel(
    block_table_ptr,  # [rows, table_width] int32
    seq_lens_ptr,  # [num_seqs] int32
    query_start_loc_ptr,  # [num_seqs + 1] int32, or None: one query token each
    table_rows_ptr,  # [num_seqs] int32, or None: sequence i has row i
    control_ptr,  # [8] int32, or None: nothing is counted
    chunks_ptr,  # [NUM_CHUNKS, CHUNK_WORDS] int32
    num_seqs: tl.int32,
    table_width: tl.int32,
    num_blocks: tl.int32,
    table_stride_row: tl.int64,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    QUERIES: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    UNIT: tl.constexpr,
    SCAN: tl.constexpr,
    ONE_SCAN: tl.constexpr,
    ENTRIES: tl.constexpr,  # of a table row that are checked at a time
):
    """Programs below NUM_CHUNKS find one chunk each, the others check one sequence's table entries each."""
    SPAN: tl.constexpr = WINDOW + QUERIES - 1 if WINDOW > 0 else 0
    program = tl.program_id(0)
    limit = _most_tokens(table_width, BLOCK_SIZE)
    if program < NUM_CHUNKS:
        _, per_chunk, first, end, seq, seq_first = _find_chunk(
            seq_lens_ptr, num_seqs, limit, program, NUM_CHUNKS, 1, 1, UNIT, SPAN, SCAN, ONE_SCAN
        )
        chunk_ptr = chunks_ptr + program * CHUNK_WORDS
        tl.store(chunk_ptr, per_chunk)
        tl.store(chunk_ptr + 1, first)
        tl.store(chunk_ptr + 2, end)
        tl.store(chunk_ptr + 3, seq)
        tl.store(chunk_ptr + 4, seq_first)
    elif control_ptr is not None:
        bound = tl.load(control_ptr)
        seq = program - NUM_CHUNKS
        length = tl.load(seq_lens_ptr + seq)
        num_queries = 1
        if query_start_loc_ptr is not None:
            num_queries = tl.load(query_start_loc_ptr + seq + 1) - tl.load(query_start_loc_ptr + seq)
        table_row = seq
        if table_rows_ptr is not None:
            table_row = tl.load(table_rows_ptr + seq)
        table_row_ptr = block_table_ptr + table_row.to(tl.int64) * table_stride_row
        first_entry = length * 0
        if WINDOW > 0:
            first_entry = tl.maximum(length - num_queries - WINDOW + 1, 0) // BLOCK_SIZE
        end_entry = (tl.minimum(length, limit) + BLOCK_SIZE - 1) // BLOCK_SIZE
        end_entry = tl.where(num_queries > 0, end_entry, 0)
        for start in range(first_entry, end_entry, ENTRIES):
            entries = start + tl.arange(0, ENTRIES)
            blocks = tl.load(table_row_ptr + entries, mask=entries < end_entry, other=-1)
            if tl.max(blocks, 0) >= bound:
                stop = tl.minimum(start + ENTRIES, end_entry)
                count_bad_blocks(control_ptr, table_row_ptr, table_row, start, stop, bound)


@triton.jit(
    do_not_specialize=[
        "v_offset",
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
def decode_kernel(
    q_ptr,  # [num_tokens, NUM_KV_HEADS * GROUP, HEAD_DIM]
    k_cache_ptr,  # [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM] in the cache's strides
    v_cache_ptr,  # [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, V_HEAD_DIM], v_offset elements on
    block_table_ptr,  # [rows, table_width] int32
    seq_lens_ptr,  # [num_seqs] int32
    query_start_loc_ptr,  # [num_seqs + 1] int32, or None: sequence i has token i
    table_rows_ptr,  # [num_seqs] int32, or None: sequence i has row i
    sinks_ptr,  # [NUM_KV_HEADS * GROUP], or None
    alibi_slopes_ptr,  # [NUM_KV_HEADS * GROUP], or None
    tree_mask_ptr,  # [num_tokens] int64: bit j for the j-th query token; or None
    control_ptr,  # [8] int32, or None: num_blocks is the bound and nothing is counted
    chunks_ptr,  # [NUM_CHUNKS, CHUNK_WORDS] int32 from prepare_kernel, which then counts; or None
    out_ptr,  # [num_tokens, NUM_KV_HEADS * GROUP, V_HEAD_DIM]
    lse_ptr,  # [num_tokens, NUM_KV_HEADS * GROUP] f32, or None
    partials_ptr,  # [slots, NUM_KV_HEADS * GROUP * QUERIES, V_HEAD_DIM + PARTIAL_TAIL] f32
    v_offset: tl.int64,
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
    QUERIES: tl.constexpr,  # query tokens of a sequence, at most; 1 without query_start_loc
    ROWS: tl.constexpr,  # rows a program, padded: a power of two, at least 16
    TILE: tl.constexpr,  # tokens
    K_LANES: tl.constexpr,  # HEAD_DIM padded to a power of two
    V_LANES: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    SPLIT: tl.constexpr,  # tokens a unit, each with a partial of its own; 0: units are tiles
    SCAN: tl.constexpr,
    ONE_SCAN: tl.constexpr,  # num_seqs <= SCAN
    SCALAR_IDS: tl.constexpr,
    STAGES: tl.constexpr,
    STEP: tl.constexpr,  # coprime to the number of programs: spreads those without work over the SMs; or 1
    USE_PDL: tl.constexpr,
):
    HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    ALL_ROWS: tl.constexpr = GROUP * QUERIES
    NUM_PARTS: tl.constexpr = (ALL_ROWS + ROWS - 1) // ROWS  # many rows are shared out to several programs
    LANES: tl.constexpr = NUM_KV_HEADS * NUM_PARTS
    NUM_IDS: tl.constexpr = (TILE + BLOCK_SIZE - 1) // BLOCK_SIZE if SCALAR_IDS else 1
    UNIT: tl.constexpr = SPLIT if SPLIT > 0 else TILE
    SPAN: tl.constexpr = WINDOW + QUERIES - 1 if WINDOW > 0 else 0
    PARTIAL: tl.constexpr = V_HEAD_DIM + PARTIAL_TAIL
    HAS_STARTS: tl.constexpr = query_start_loc_ptr is not None
    COUNTS: tl.constexpr = control_ptr is not None and chunks_ptr is None
    limit = _most_tokens(table_width, BLOCK_SIZE)
    if USE_PDL:
        gdc_wait()  # before the first read: lengths, table and cache may have been written just now
        gdc_launch_dependents()
    if chunks_ptr is not None:
        share, _, chunk_first, chunk_end, seq, seq_first = _load_chunk(
            chunks_ptr, tl.program_id(0), NUM_CHUNKS, LANES, STEP
        )
    else:
        share, _, chunk_first, chunk_end, seq, seq_first = _find_chunk(
            seq_lens_ptr, num_seqs, limit, tl.program_id(0), NUM_CHUNKS, LANES, STEP, UNIT, SPAN, SCAN, ONE_SCAN
        )
    if chunk_first >= chunk_end:
        return
    # Heads are fastest: programs that read the same token rows run at the same time.
    chunk = share // LANES
    kv_head = share % LANES // NUM_PARTS
    part = share % NUM_PARTS
    if control_ptr is not None:
        bound = tl.load(control_ptr)
    else:
        bound = num_blocks

    row = part * ROWS + tl.arange(0, ROWS)
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    in_group = row < ALL_ROWS
    n = tl.arange(0, TILE)
    k_channel = tl.arange(0, K_LANES)
    v_channel = tl.arange(0, V_LANES)
    k_head_ptr = k_cache_ptr + kv_head.to(tl.int64) * K_STRIDE_HEAD
    v_head_ptr = v_cache_ptr + multiple_of_divisor(v_offset + kv_head.to(tl.int64) * V_STRIDE_HEAD, V_DIVISOR)
    if alibi_slopes_ptr is not None:
        slope = load_slopes(alibi_slopes_ptr, head, in_group)

    unit = chunk_first
    while (unit < chunk_end) & (seq < num_seqs):  # lengths may have changed since a plan was prepared
        length = tl.load(seq_lens_ptr + seq)
        seq_units = _num_units(length, limit, UNIT, SPAN)
        first_unit = _first_unit(length, UNIT, SPAN)
        if SPLIT > 0:
            end_unit = unit + 1
        else:
            end_unit = tl.minimum(seq_first + seq_units, chunk_end)
        start = (first_unit + unit - seq_first) * UNIT
        end = tl.minimum((first_unit + end_unit - seq_first) * UNIT, length)
        num_entries = (tl.minimum(length, limit) + BLOCK_SIZE - 1) // BLOCK_SIZE
        table_row = seq
        if table_rows_ptr is not None:
            table_row = tl.load(table_rows_ptr + seq)
        table_row_ptr = block_table_ptr + table_row.to(tl.int64) * table_stride_row
        ids = load_block_ids(table_row_ptr, start, num_entries, BLOCK_SIZE, TILE, SCALAR_IDS)

        query_start = seq
        num_queries = 1
        is_row = in_group
        if HAS_STARTS:
            query_start = tl.load(query_start_loc_ptr + seq)
            num_queries = tl.load(query_start_loc_ptr + seq + 1) - query_start
            is_row = token < tl.minimum(num_queries, QUERIES)
        context = length - num_queries
        query = context + token  # positions
        if tree_mask_ptr is not None:
            words = tl.load(tree_mask_ptr + query_start + token, mask=is_row, other=0)  # [ROWS]
            if WINDOW > 0:
                query = tree_positions(words, context, length)
            words = words.to(tl.int32)  # QUERIES are at most 16
        seq_start = length * 0  # the first key that any query sees
        if WINDOW > 0:
            seq_start = tl.maximum(length - num_queries - WINDOW + 1, 0)
        q_offset = (query_start + token).to(tl.int64) * q_stride_token + head.to(tl.int64) * Q_STRIDE_HEAD
        q_offset = tl.multiple_of(q_offset, Q_DIVISOR)
        q_mask = is_row[:, None] & (k_channel < HEAD_DIM)[None, :]
        q = tl.load(q_ptr + q_offset[:, None] + k_channel[None, :], mask=q_mask, other=0.0)  # [ROWS, K_LANES]
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
            if WINDOW > 0:
                valid = valid & (n >= seq_start - s)
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
            if alibi_slopes_ptr is not None:
                scores = biased(scores, slope, s + n, query)
            seen = valid[None, :]
            if tree_mask_ptr is not None:
                seen = seen & seen_in_tree(words, s + n - context)
            if HAS_STARTS:
                if IS_CAUSAL and tree_mask_ptr is None:
                    seen = seen & (n[None, :] <= (query - s)[:, None])
                if WINDOW > 0:
                    seen = seen & (n[None, :] > (query - WINDOW - s)[:, None])
            scores = tl.where(seen, scores, float("-inf"))
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
        is_whole = seq_units == 1
        if SPLIT == 0:
            is_whole = (seq_first >= chunk_first) & (seq_first + seq_units <= chunk_end)
        out_mask = is_row[:, None] & (v_channel < V_HEAD_DIM)[None, :]
        if is_whole:
            if sinks_ptr is not None:
                highest, shrink, denominator = with_sink(highest, denominator, sinks_ptr, head, in_group)
                accumulator = accumulator * shrink[:, None]
            safe = tl.where(denominator > 0, denominator, 1.0)  # nothing attended: zeros and minus infinity
            result = accumulator / safe[:, None]
            out_row = query_start + token
            out_offset = out_row.to(tl.int64) * out_stride_token + head.to(tl.int64) * OUT_STRIDE_HEAD
            out_offset = tl.multiple_of(out_offset, OUT_DIVISOR)[:, None] + v_channel[None, :]
            tl.store(out_ptr + out_offset, result.to(out_ptr.dtype.element_ty), mask=out_mask)
            if lse_ptr is not None:
                log_sum = tl.where(denominator > 0, (highest + tl.log2(safe)) * LN_2, float("-inf"))
                tl.store(lse_ptr + out_row.to(tl.int64) * HEADS + head, log_sum, mask=is_row)
        else:
            safe = tl.where(denominator > 0, denominator, 1.0)
            result = accumulator / safe[:, None]
            log2_sum = tl.where(denominator > 0, highest + tl.log2(safe), float("-inf"))
            if SPLIT > 0:
                slot = unit.to(tl.int64)
            else:
                slot = (chunk * 2 + (seq_first > chunk_first).to(tl.int32)).to(tl.int64)
            partial_ptr = partials_ptr + (slot * (NUM_KV_HEADS * ALL_ROWS) + kv_head * ALL_ROWS + row) * PARTIAL
            tl.store(partial_ptr[:, None] + v_channel[None, :], result, mask=out_mask)
            tl.store(partial_ptr + V_HEAD_DIM, log2_sum, mask=is_row)

        if COUNTS:  # noqa: SIM102 (known at compile time)
            if (kv_head + part == 0) & (num_queries > 0):  # every head reads the same entries
                if SCALAR_IDS:
                    worst = largest
                else:
                    worst = tl.max(largest, 0)
                if worst >= bound:
                    first_entry = (start + BLOCK_SIZE - 1) // BLOCK_SIZE  # a block that begins in this part is ours
                    if WINDOW > 0:
                        first_entry = tl.where(unit == seq_first, seq_start // BLOCK_SIZE, first_entry)
                        first_entry = tl.maximum(first_entry, seq_start // BLOCK_SIZE)
                    end_entry = tl.minimum((end + BLOCK_SIZE - 1) // BLOCK_SIZE, num_entries)
                    count_bad_blocks(control_ptr, table_row_ptr, table_row, first_entry, end_entry, bound)
        unit = end_unit
        if end_unit == seq_first + seq_units:
            seq_first = end_unit
            seq += 1


@triton.jit(
    do_not_specialize=["num_tokens", "num_seqs", "table_width", "out_stride_token"],
    do_not_specialize_on_alignment=["seq_lens_ptr", "query_start_loc_ptr", "sinks_ptr", "lse_ptr"],
)
def join_kernel(
    seq_lens_ptr,  # [num_seqs] int32
    query_start_loc_ptr,  # [num_seqs + 1] int32, or None: sequence i has token i
    sinks_ptr,  # [HEADS], or None
    chunks_ptr,  # [NUM_CHUNKS, CHUNK_WORDS] int32, or None
    out_ptr,  # [num_tokens, HEADS, V_HEAD_DIM]
    lse_ptr,  # [num_tokens, HEADS] f32, or None
    partials_ptr,  # as decode_kernel left them
    num_tokens: tl.int32,
    num_seqs: tl.int32,
    table_width: tl.int32,
    out_stride_token: tl.int64,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    OUT_STRIDE_HEAD: tl.constexpr,
    OUT_DIVISOR: tl.constexpr,
    WINDOW: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    V_LANES: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    SPLIT: tl.constexpr,
    BY_SEQUENCE: tl.constexpr,  # a program joins a sequence, not what ends in a chunk; always with SPLIT
    SCAN: tl.constexpr,
    ONE_SCAN: tl.constexpr,
    PARTS: tl.constexpr,  # partials read at a time
    CHANNELS: tl.constexpr,  # of V a program; divides V_LANES
    USE_PDL: tl.constexpr,
):
    HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    ALL_ROWS: tl.constexpr = GROUP * QUERIES
    UNIT: tl.constexpr = SPLIT if SPLIT > 0 else TILE
    SPAN: tl.constexpr = WINDOW + QUERIES - 1 if WINDOW > 0 else 0
    PARTIAL: tl.constexpr = V_HEAD_DIM + PARTIAL_TAIL
    PIECES: tl.constexpr = V_LANES // CHANNELS
    place = tl.program_id(0) // (NUM_KV_HEADS * ALL_ROWS * PIECES)  # a sequence, or a chunk
    index = tl.program_id(0) // PIECES % (NUM_KV_HEADS * ALL_ROWS)
    piece = tl.program_id(0) % PIECES
    token = index % ALL_ROWS // GROUP
    head = index // ALL_ROWS * GROUP + index % GROUP
    channel = piece * CHANNELS + tl.arange(0, CHANNELS)
    limit = _most_tokens(table_width, BLOCK_SIZE)
    # Under the decode kernel this runs early: it reads only what that kernel waited for.
    if BY_SEQUENCE:
        seq = place
        per_chunk, seq_first = _find_sequence(
            seq_lens_ptr, seq, num_seqs, limit, NUM_CHUNKS, UNIT, SPAN, SCAN, ONE_SCAN
        )
        num_units = _num_units(tl.load(seq_lens_ptr + seq), limit, UNIT, SPAN)
        if SPLIT == 0:
            first_chunk = seq_first // per_chunk
            num_parts = (seq_first + num_units - 1) // per_chunk - first_chunk + 1
        else:
            num_parts = num_units
        joins = num_parts > 1
    else:
        if chunks_ptr is not None:
            _, per_chunk, chunk_first, chunk_end, seq, seq_first = _load_chunk(chunks_ptr, place, NUM_CHUNKS, 1, 1)
        else:
            _, per_chunk, chunk_first, chunk_end, seq, seq_first = _find_chunk(
                seq_lens_ptr, num_seqs, limit, place, NUM_CHUNKS, 1, 1, UNIT, SPAN, SCAN, ONE_SCAN
            )
        seq = tl.minimum(seq, num_seqs - 1)
        seq_end = seq_first + _num_units(tl.load(seq_lens_ptr + seq), limit, UNIT, SPAN)
        joins = (chunk_first < chunk_end) & (seq_first < chunk_first) & (seq_end <= chunk_end)
        first_chunk = seq_first // tl.maximum(per_chunk, 1)
        num_parts = place - first_chunk + 1
    if SPLIT == 0:
        began_inside = (seq_first > first_chunk * per_chunk).to(tl.int32)  # then the first partial is in slot 1
    query_start = seq
    if query_start_loc_ptr is not None:
        query_start = tl.load(query_start_loc_ptr + seq)
        joins = joins & (token < tl.load(query_start_loc_ptr + seq + 1) - query_start)
        if token == 0:  # padding tokens past the last sequence
            first_padding = tl.load(query_start_loc_ptr + num_seqs) + place
            num_places = tl.num_programs(0) // (NUM_KV_HEADS * ALL_ROWS * PIECES)
            for padding in range(first_padding, num_tokens, num_places):
                padding_row = tl.cast(padding, tl.int64)
                nothing = tl.zeros([CHANNELS], out_ptr.dtype.element_ty)
                offset = padding_row * out_stride_token + head.to(tl.int64) * OUT_STRIDE_HEAD
                tl.store(out_ptr + offset + channel, nothing, mask=channel < V_HEAD_DIM)
                if lse_ptr is not None:
                    tl.store(lse_ptr + padding_row * HEADS + head, float("-inf"))
    if USE_PDL:  # noqa: SIM102 (known at compile time)
        if joins | (place == 0):  # place 0 always waits, or this grid could end before the one it depends on
            gdc_wait()
    if joins:
        part = tl.arange(0, PARTS)
        highest = LOWEST
        denominator = 0.0
        accumulator = tl.zeros([CHANNELS], tl.float32)
        for start in tl.range(0, num_parts, PARTS):
            number = start + part
            if SPLIT > 0:
                slot = seq_first + number
            else:
                slot = (first_chunk + number) * 2 + tl.where(number == 0, began_inside, 0)
            partial_ptr = partials_ptr + (slot.to(tl.int64) * (NUM_KV_HEADS * ALL_ROWS) + index) * PARTIAL
            log2_sums = tl.load(
                partial_ptr + V_HEAD_DIM, mask=number < num_parts, other=float("-inf"), cache_modifier=".cg"
            )  # [PARTS]
            results = tl.load(
                partial_ptr[:, None] + channel[None, :],
                mask=(number < num_parts)[:, None] & (channel < V_HEAD_DIM)[None, :],
                other=0.0,
                cache_modifier=".cg",
            )  # [PARTS, CHANNELS]
            new_highest = tl.maximum(highest, tl.max(log2_sums, 0))
            weights = tl.exp2(log2_sums - new_highest)
            shrink = tl.exp2(highest - new_highest)
            denominator = denominator * shrink + tl.sum(weights, 0)
            accumulator = accumulator * shrink + tl.sum(results * weights[:, None], 0)
            highest = new_highest
        if sinks_ptr is not None:
            highest, shrink, denominator = with_sink(highest, denominator, sinks_ptr, head, True)
            accumulator = accumulator * shrink
        safe = tl.where(denominator > 0, denominator, 1.0)
        out_row = (query_start + token).to(tl.int64)
        offset = tl.multiple_of(out_row * out_stride_token + head.to(tl.int64) * OUT_STRIDE_HEAD, OUT_DIVISOR)
        result = (accumulator / safe).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + offset + channel, result, mask=channel < V_HEAD_DIM)
        if lse_ptr is not None:
            log_sum = tl.where(denominator > 0, (highest + tl.log2(safe)) * LN_2, float("-inf"))
            tl.store(lse_ptr + out_row * HEADS + head, log_sum)

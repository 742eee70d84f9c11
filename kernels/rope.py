"""Norm and rotate a step's queries and keys, and put its keys and values into the pages of a KV cache."""

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=[
        "v_offset",
        "num_tokens",
        "num_blocks",
        "max_position",
        "q_stride_token",
        "q_stride_head",
        "q_out_stride_token",
        "q_out_stride_head",
        "k_stride_token",
        "k_stride_head",
        "v_stride_token",
        "v_stride_head",
        "cos_sin_stride_position",
    ],
    do_not_specialize_on_alignment=["slot_mapping_ptr", "positions_ptr", "control_ptr"],
)
def rope_write_kernel(
    q_ptr,  # [num_tokens, NUM_QUERY_HEADS, HEAD_DIM]
    q_out_ptr,  # [num_tokens, NUM_QUERY_HEADS, HEAD_DIM], may be q itself
    k_ptr,  # [num_tokens, NUM_KV_HEADS, HEAD_DIM]
    v_ptr,  # [num_tokens, NUM_KV_HEADS, V_HEAD_DIM]
    q_norm_ptr,  # [HEAD_DIM], or None: queries are not normed
    k_norm_ptr,  # [HEAD_DIM], or None: keys are not normed
    cos_sin_ptr,  # [max_position, ROTARY_DIM]: ROTARY_DIM / 2 cosines, then as many sines
    positions_ptr,  # [num_tokens] int32 or int64
    slot_mapping_ptr,  # [num_tokens] int32 or int64, negative: K and V are padding
    k_cache_ptr,  # [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM] in the cache's strides
    v_cache_ptr,  # [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, V_HEAD_DIM], v_offset elements on
    control_ptr,  # [8] int32, or None: num_blocks is the bound and nothing is counted
    v_offset: tl.int64,
    num_tokens: tl.int32,
    num_blocks: tl.int32,
    max_position: tl.int32,
    q_stride_token: tl.int64,
    q_stride_head: tl.int64,
    q_out_stride_token: tl.int64,
    q_out_stride_head: tl.int64,
    k_stride_token: tl.int64,
    k_stride_head: tl.int64,
    v_stride_token: tl.int64,
    v_stride_head: tl.int64,
    cos_sin_stride_position: tl.int64,
    eps: tl.float32,
    norm_offset: tl.float32,  # added to the norms' weights
    NUM_QUERY_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    K_CACHE_STRIDE_BLOCK: tl.constexpr,
    K_CACHE_STRIDE_TOKEN: tl.constexpr,
    K_CACHE_STRIDE_HEAD: tl.constexpr,
    V_CACHE_STRIDE_BLOCK: tl.constexpr,
    V_CACHE_STRIDE_TOKEN: tl.constexpr,
    V_CACHE_STRIDE_HEAD: tl.constexpr,
    IS_NEOX: tl.constexpr,  # channel i turns with i + ROTARY_DIM / 2; else 2i with 2i + 1
    IS_IN_PLACE: tl.constexpr,  # q_out is q: channels that do not change are left alone
    VECTOR: tl.constexpr,  # elements: divides head dims, strides and offsets, at most 16 bytes
    COS_VECTOR: tl.constexpr,  # likewise of the cos/sin cache's rows
    HALF_LANES: tl.constexpr,  # powers of two at or above ROTARY_DIM / 2, what is left of HEAD_DIM, and V_HEAD_DIM
    REST_LANES: tl.constexpr,
    V_LANES: tl.constexpr,
    ROWS: tl.constexpr,  # heads of tokens in one program
):
    """The first programs take ROWS rows of K and the same of V each, the others ROWS rows of Q.

    Rows are numbered over (token, head). A row of K or Q is normed over its channels, then rotated, in f32. Tokens
    whose position is outside the cos/sin cache are not written at all. Tokens whose slot is negative are not cached;
    those with a slot at or past the bound, or a slot but no such position, are dropped, counted once and the first one
    recorded in the control block.
    """
    program = tl.program_id(0).to(tl.int64)
    num_kv_programs = (num_tokens.to(tl.int64) * NUM_KV_HEADS + ROWS - 1) // ROWS
    if program >= num_kv_programs:
        token, head = _rows((program - num_kv_programs) * ROWS, NUM_QUERY_HEADS, ROWS)
        valid = token < num_tokens
        position = tl.load(positions_ptr + token, mask=valid, other=-1)  # [ROWS]
        _rotate(
            q_ptr,
            tl.multiple_of(token.to(tl.int64) * q_stride_token + head * q_stride_head, VECTOR),
            valid,
            q_out_ptr,
            tl.multiple_of(token.to(tl.int64) * q_out_stride_token + head * q_out_stride_head, VECTOR),
            valid & (position >= 0) & (position < max_position),
            q_norm_ptr,
            cos_sin_ptr,
            position,
            max_position,
            cos_sin_stride_position,
            eps,
            norm_offset,
            HEAD_DIM,
            ROTARY_DIM,
            IS_NEOX,
            IS_IN_PLACE,
            COS_VECTOR,
            HALF_LANES,
            REST_LANES,
        )
    else:
        bound = num_blocks
        if control_ptr is not None:
            bound = tl.load(control_ptr)
        token, head = _rows(program * ROWS, NUM_KV_HEADS, ROWS)
        valid = token < num_tokens
        slot = tl.load(slot_mapping_ptr + token, mask=valid, other=-1)  # [ROWS]
        position = tl.load(positions_ptr + token, mask=valid, other=-1)
        # V is in flight before K is stored: the store may alias it for all the compiler knows.
        v_lane = tl.arange(0, V_LANES)[None, :]  # [1, V_LANES]
        v_source = tl.multiple_of(token.to(tl.int64) * v_stride_token + head * v_stride_head, VECTOR)
        v = _load(v_ptr + v_source[:, None], v_lane, valid[:, None], V_HEAD_DIM, V_LANES)  # [ROWS, V_LANES]

        block = slot // BLOCK_SIZE
        inside = (slot % BLOCK_SIZE).to(tl.int64)
        is_cached = (slot >= 0) & (block < bound) & (position >= 0) & (position < max_position)
        k_target = block.to(tl.int64) * K_CACHE_STRIDE_BLOCK + inside * K_CACHE_STRIDE_TOKEN
        _rotate(
            k_ptr,
            tl.multiple_of(token.to(tl.int64) * k_stride_token + head * k_stride_head, VECTOR),
            valid,
            k_cache_ptr,
            tl.multiple_of(k_target + head * K_CACHE_STRIDE_HEAD, VECTOR),
            is_cached,
            k_norm_ptr,
            cos_sin_ptr,
            position,
            max_position,
            cos_sin_stride_position,
            eps,
            norm_offset,
            HEAD_DIM,
            ROTARY_DIM,
            IS_NEOX,
            False,
            COS_VECTOR,
            HALF_LANES,
            REST_LANES,
        )
        v_target = block.to(tl.int64) * V_CACHE_STRIDE_BLOCK + inside * V_CACHE_STRIDE_TOKEN
        v_target = tl.multiple_of(v_target + head * V_CACHE_STRIDE_HEAD + v_offset, VECTOR)
        _store(v_cache_ptr + v_target[:, None], v_lane, v, is_cached[:, None], V_HEAD_DIM, V_LANES)

        if control_ptr is not None:
            _count_bad_tokens(
                slot_mapping_ptr,
                positions_ptr,
                control_ptr,
                program * ROWS,
                num_tokens,
                bound,
                max_position,
                BLOCK_SIZE,
                NUM_KV_HEADS,
                ROWS,
            )


@triton.jit
def _rows(first, NUM_HEADS: tl.constexpr, ROWS: tl.constexpr):
    """Token and head (64-bit) of rows [first, + ROWS). Only `first` is divided in 64 bits."""
    first_token = first // NUM_HEADS
    index = (first - first_token * NUM_HEADS).to(tl.int32) + tl.arange(0, ROWS)  # [ROWS]
    return first_token.to(tl.int32) + index // NUM_HEADS, (index % NUM_HEADS).to(tl.int64)


@triton.jit
def _rotate(
    source_ptr,
    source,  # [ROWS]: elements from source_ptr to a row's first channel
    is_read,  # [ROWS]
    target_ptr,
    target,  # [ROWS]
    is_written,  # [ROWS]
    norm_ptr,  # [HEAD_DIM] or None
    cos_sin_ptr,
    position,  # [ROWS]
    max_position,
    cos_sin_stride_position,
    eps,
    norm_offset,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    IS_NEOX: tl.constexpr,
    IS_IN_PLACE: tl.constexpr,
    COS_VECTOR: tl.constexpr,
    HALF_LANES: tl.constexpr,
    REST_LANES: tl.constexpr,
):
    """Rows of HEAD_DIM channels from source to target: normed if there are weights, the first ROTARY_DIM rotated.

    All of a row is loaded before any of it is stored, so target may be source. What divides the offsets is said by the
    caller: on a parameter the compiler forgets it.
    """
    HALF: tl.constexpr = ROTARY_DIM // 2
    REST: tl.constexpr = HEAD_DIM - ROTARY_DIM
    # Channels behind the rotated ones matter where they are normed or have to move.
    HAS_REST: tl.constexpr = REST > 0 and (norm_ptr is not None or not IS_IN_PLACE)
    source_ptr += source[:, None]  # [ROWS, 1]
    target_ptr += target[:, None]
    is_read, is_written = is_read[:, None], is_written[:, None]
    lane = tl.arange(0, HALF_LANES)[None, :]  # [1, HALF_LANES]
    rest_lane = tl.arange(0, REST_LANES)[None, :]
    first, second = _load_pairs(source_ptr, is_read, ROTARY_DIM, IS_NEOX, HALF_LANES)
    if HAS_REST:
        rest = _load(source_ptr + ROTARY_DIM, rest_lane, is_read, REST, REST_LANES).to(tl.float32)  # [ROWS, REST_LANES]

    is_known = ((position >= 0) & (position < max_position))[:, None]
    cos_sin_ptr += tl.multiple_of(position.to(tl.int64) * cos_sin_stride_position, COS_VECTOR)[:, None]
    cos = _load(cos_sin_ptr, lane, is_known, HALF, HALF_LANES).to(tl.float32)
    sin = _load(cos_sin_ptr + HALF, lane, is_known, HALF, HALF_LANES).to(tl.float32)

    if norm_ptr is not None:
        squares = tl.sum(first * first + second * second, axis=1)
        if HAS_REST:
            squares += tl.sum(rest * rest, axis=1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]  # [ROWS, 1]
        # A copy a row, of the cache: one row for all would be laid out otherwise, and the tiles changed to fit it.
        norm_ptr += tl.zeros_like(position)[:, None]
        first_weight, second_weight = _load_pairs(norm_ptr, is_read, ROTARY_DIM, IS_NEOX, HALF_LANES)
        first = first * scale * (first_weight + norm_offset)
        second = second * scale * (second_weight + norm_offset)
        if HAS_REST:
            rest_weight = _load(norm_ptr + ROTARY_DIM, rest_lane, is_read, REST, REST_LANES).to(tl.float32)
            rest = rest * scale * (rest_weight + norm_offset)

    turned_first = first * cos - second * sin
    turned_second = second * cos + first * sin
    if IS_IN_PLACE:
        # Several warps may hold one element of a small tile: none may read it after another has stored it.
        tl.debug_barrier()
    if IS_NEOX:
        _store(target_ptr, lane, turned_first, is_written, HALF, HALF_LANES)
        _store(target_ptr + HALF, lane, turned_second, is_written, HALF, HALF_LANES)
    else:
        pairs = tl.reshape(tl.join(turned_first, turned_second), [first.shape[0], 2 * HALF_LANES])
        pair_lane = tl.arange(0, 2 * HALF_LANES)[None, :]
        _store(target_ptr, pair_lane, pairs, is_written, ROTARY_DIM, 2 * HALF_LANES)
    if HAS_REST:
        _store(target_ptr + ROTARY_DIM, rest_lane, rest, is_written, REST, REST_LANES)


@triton.jit
def _load_pairs(row_ptr, is_read, ROTARY_DIM: tl.constexpr, IS_NEOX: tl.constexpr, HALF_LANES: tl.constexpr):
    """The channels that turn with each other, as two f32 tiles [ROWS, HALF_LANES]."""
    if IS_NEOX:
        HALF: tl.constexpr = ROTARY_DIM // 2
        lane = tl.arange(0, HALF_LANES)[None, :]
        first = _load(row_ptr, lane, is_read, HALF, HALF_LANES)
        second = _load(row_ptr + HALF, lane, is_read, HALF, HALF_LANES)
        return first.to(tl.float32), second.to(tl.float32)
    else:
        pair_lane = tl.arange(0, 2 * HALF_LANES)[None, :]
        pairs = _load(row_ptr, pair_lane, is_read, ROTARY_DIM, 2 * HALF_LANES).to(tl.float32)
        return tl.split(tl.reshape(pairs, [pairs.shape[0], HALF_LANES, 2]))


@triton.jit
def _load(row_ptr, lane, is_read, WIDTH: tl.constexpr, LANES: tl.constexpr):
    """[ROWS, LANES] from rows that start at row_ptr [ROWS, 1], the first WIDTH lanes of them."""
    if WIDTH == LANES:
        return tl.load(row_ptr + lane, mask=is_read, other=0.0)
    else:
        return tl.load(row_ptr + lane, mask=is_read & (lane < WIDTH), other=0.0)


@triton.jit
def _store(row_ptr, lane, values, is_written, WIDTH: tl.constexpr, LANES: tl.constexpr):
    """The first WIDTH of LANES values of each row, rounded to the target's dtype."""
    values = values.to(row_ptr.dtype.element_ty)
    if WIDTH == LANES:
        tl.store(row_ptr + lane, values, mask=is_written)
    else:
        tl.store(row_ptr + lane, values, mask=is_written & (lane < WIDTH))


@triton.jit
def _count_bad_tokens(
    slot_mapping_ptr,
    positions_ptr,
    control_ptr,
    first,
    num_tokens,
    bound,
    max_position,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Count the tokens that have a slot but cannot be cached, among those whose first row this program has."""
    NUM_STARTS: tl.constexpr = triton.next_power_of_2((ROWS + NUM_HEADS - 1) // NUM_HEADS)
    first_token = (first + NUM_HEADS - 1) // NUM_HEADS
    start = tl.arange(0, NUM_STARTS)  # [NUM_STARTS]
    token = first_token.to(tl.int32) + start
    lead = (first_token * NUM_HEADS - first).to(tl.int32)  # rows of a token that began in an earlier program
    starts_here = (token < num_tokens) & (lead + start * NUM_HEADS < ROWS)
    slot = tl.load(slot_mapping_ptr + token, mask=starts_here, other=-1).to(tl.int64)
    position = tl.load(positions_ptr + token, mask=starts_here, other=0).to(tl.int64)
    is_past = slot // BLOCK_SIZE >= bound
    bad = (slot >= 0) & (is_past | (position < 0) | (position >= max_position))
    count = tl.sum(bad.to(tl.int32), axis=0)
    if count > 0:
        tl.atomic_add(control_ptr + 1, count)
        row = tl.min(tl.where(bad, token, num_tokens), axis=0)
        by_slot = tl.sum(((token == row) & is_past).to(tl.int32), axis=0)
        kind = tl.where(by_slot > 0, 2, 5)  # 2: a slot written, 5: a position outside the cos/sin cache
        if tl.atomic_cas(control_ptr + 2, 0, kind) == 0:
            value = tl.sum(tl.where(token == row, tl.where(is_past, slot, position), 0), axis=0)
            tl.store(control_ptr + 3, row)
            value = tl.minimum(tl.maximum(value, -(2**31)), 2**31 - 1)  # the control block is int32
            tl.store(control_ptr + 4, value.to(tl.int32))

"""Scatter new keys and values into the pages of a KV cache."""

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=[
        "v_offset",
        "num_tokens",
        "num_blocks",
        "k_stride_token",
        "k_stride_head",
        "v_stride_token",
        "v_stride_head",
    ],
    do_not_specialize_on_alignment=["slot_mapping_ptr", "control_ptr"],
)
def write_kernel(
    k_ptr,  # [num_tokens, NUM_HEADS, HEAD_DIM]
    v_ptr,  # [num_tokens, NUM_HEADS, V_HEAD_DIM]
    k_cache_ptr,  # [num_blocks, BLOCK_SIZE, NUM_HEADS, HEAD_DIM] in the cache's strides
    v_cache_ptr,  # [num_blocks, BLOCK_SIZE, NUM_HEADS, V_HEAD_DIM], v_offset elements on
    slot_mapping_ptr,  # [num_tokens] int32 or int64, negative: padding
    control_ptr,  # [8] int32, or None: num_blocks is the bound and nothing is counted
    v_offset: tl.int64,
    num_tokens: tl.int32,
    num_blocks: tl.int32,
    k_stride_token: tl.int64,
    k_stride_head: tl.int64,
    v_stride_token: tl.int64,
    v_stride_head: tl.int64,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    K_CACHE_STRIDE_BLOCK: tl.constexpr,
    K_CACHE_STRIDE_TOKEN: tl.constexpr,
    K_CACHE_STRIDE_HEAD: tl.constexpr,
    V_CACHE_STRIDE_BLOCK: tl.constexpr,
    V_CACHE_STRIDE_TOKEN: tl.constexpr,
    V_CACHE_STRIDE_HEAD: tl.constexpr,
    VECTOR: tl.constexpr,  # elements: divides every dim, stride and offset above, at most 16 bytes
    NUM_VECTORS: tl.constexpr,  # vectors a program copies of K, and as many of V
):
    """Program p copies vectors [p * NUM_VECTORS, + NUM_VECTORS) of K and the same range of V.

    Vectors are numbered over (token, head, channel / VECTOR) of the dense shape, so that no lane idles for a head_dim
    that is no power of two, whatever the strides. Tokens whose slot is negative are skipped; slots at or past the bound
    are dropped, counted once and the first one recorded in the control block.
    """
    bound = num_blocks
    if control_ptr is not None:
        bound = tl.load(control_ptr)
    first = tl.program_id(0).to(tl.int64) * NUM_VECTORS

    k_token, k_source, k_inside = _locate(
        first, k_stride_token, k_stride_head, NUM_HEADS, HEAD_DIM, K_CACHE_STRIDE_HEAD, VECTOR, NUM_VECTORS
    )
    v_token, v_source, v_inside = _locate(
        first, v_stride_token, v_stride_head, NUM_HEADS, V_HEAD_DIM, V_CACHE_STRIDE_HEAD, VECTOR, NUM_VECTORS
    )
    k_slot = tl.load(slot_mapping_ptr + k_token, mask=k_token < num_tokens, other=-1)  # [NUM_VECTORS]
    v_slot = tl.load(slot_mapping_ptr + v_token, mask=v_token < num_tokens, other=-1)
    # Both loads are in flight before the first store: the stores may alias them for all the compiler knows.
    lane = tl.arange(0, VECTOR)[None, :]  # [1, VECTOR]
    k = tl.load(k_ptr + k_source[:, None] + lane, mask=(k_token < num_tokens)[:, None], other=0.0)
    v = tl.load(v_ptr + v_source[:, None] + lane, mask=(v_token < num_tokens)[:, None], other=0.0)

    k_block = k_slot // BLOCK_SIZE
    k_target = k_block.to(tl.int64) * K_CACHE_STRIDE_BLOCK + (k_slot % BLOCK_SIZE).to(tl.int64) * K_CACHE_STRIDE_TOKEN
    k_target = tl.multiple_of(k_target + k_inside, VECTOR)
    k_valid = (k_slot >= 0) & (k_block < bound)
    tl.store(k_cache_ptr + k_target[:, None] + lane, k, mask=k_valid[:, None])

    v_block = v_slot // BLOCK_SIZE
    v_target = v_block.to(tl.int64) * V_CACHE_STRIDE_BLOCK + (v_slot % BLOCK_SIZE).to(tl.int64) * V_CACHE_STRIDE_TOKEN
    v_target = tl.multiple_of(v_target + v_inside + v_offset, VECTOR)
    v_valid = (v_slot >= 0) & (v_block < bound)
    tl.store(v_cache_ptr + v_target[:, None] + lane, v, mask=v_valid[:, None])

    if control_ptr is not None:
        _count_bad_slots(
            slot_mapping_ptr,
            control_ptr,
            first,
            num_tokens,
            bound,
            BLOCK_SIZE,
            NUM_HEADS * HEAD_DIM // VECTOR,
            NUM_VECTORS,
        )


@triton.jit
def _locate(
    first,
    stride_token,
    stride_head,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CACHE_STRIDE_HEAD: tl.constexpr,
    VECTOR: tl.constexpr,
    NUM_VECTORS: tl.constexpr,
):
    """For vectors [first, + NUM_VECTORS): the token, the offset in the source, and the offset in the token's page.

    Only `first` is divided in 64 bits, once a program; the vectors' own arithmetic is 32-bit until it meets a stride.
    """
    PER_HEAD: tl.constexpr = HEAD_DIM // VECTOR
    PER_TOKEN: tl.constexpr = NUM_HEADS * PER_HEAD
    first_token = first // PER_TOKEN
    index = (first - first_token * PER_TOKEN).to(tl.int32) + tl.arange(0, NUM_VECTORS)  # [NUM_VECTORS]
    token = first_token.to(tl.int32) + index // PER_TOKEN
    head = (index % PER_TOKEN // PER_HEAD).to(tl.int64)
    channel = index % PER_HEAD * VECTOR
    source = token.to(tl.int64) * stride_token + head * stride_head + channel
    inside = head * CACHE_STRIDE_HEAD + channel
    return token, tl.multiple_of(source, VECTOR), inside


@triton.jit
def _count_bad_slots(
    slot_mapping_ptr,
    control_ptr,
    first,
    num_tokens,
    bound,
    BLOCK_SIZE: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    NUM_VECTORS: tl.constexpr,
):
    """Count the slots at or past the bound among the tokens whose first vector this program copies.

    Few tokens start in a program, so the sum stays inside a warp and costs no barrier.
    """
    NUM_STARTS: tl.constexpr = triton.next_power_of_2((NUM_VECTORS + PER_TOKEN - 1) // PER_TOKEN)
    first_token = (first + PER_TOKEN - 1) // PER_TOKEN
    start = tl.arange(0, NUM_STARTS)  # [NUM_STARTS]
    token = first_token.to(tl.int32) + start
    lead = (first_token * PER_TOKEN - first).to(tl.int32)  # vectors of a token that began in an earlier program
    starts_here = (token < num_tokens) & (lead + start * PER_TOKEN < NUM_VECTORS)
    slot = tl.load(slot_mapping_ptr + token, mask=starts_here, other=-1).to(tl.int64)
    bad = (slot >= 0) & (slot // BLOCK_SIZE >= bound)
    count = tl.sum(bad.to(tl.int32), axis=0)
    if count > 0:
        tl.atomic_add(control_ptr + 1, count)
        if tl.atomic_cas(control_ptr + 2, 0, 2) == 0:  # kind 2: a slot written
            row = tl.min(tl.where(bad, token, num_tokens), axis=0)
            value = tl.sum(tl.where(token == row, slot, 0), axis=0)
            tl.store(control_ptr + 3, row)
            tl.store(control_ptr + 4, tl.minimum(value, 2**31 - 1).to(tl.int32))  # the control block is int32

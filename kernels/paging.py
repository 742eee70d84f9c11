"""From tokens of a sequence to rows of a paged cache: block ids read ahead, checked, and counted when they are bad."""

import triton
import triton.language as tl


@triton.jit
def load_block_ids(
    table_row_ptr, token, num_entries, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, SCALAR: tl.constexpr
):
    """Block ids of tokens [token, + TILE), as a tuple: one scalar a block if SCALAR, else one vector [TILE].

    Entries at or past `num_entries` are not read and come out as -1. SCALAR needs blocks of a power of two and a token
    that is a multiple of TILE. Callers read the ids of the *next* tile and carry them: a load whose address comes from
    another load of the same iteration halves the depth of Triton's pipeline.
    """
    if SCALAR:
        entry = token // BLOCK_SIZE
        ids = (tl.load(table_row_ptr + entry, mask=entry < num_entries, other=-1),)
        for i in tl.static_range(1, (TILE + BLOCK_SIZE - 1) // BLOCK_SIZE):
            ids = ids + (tl.load(table_row_ptr + entry + i, mask=entry + i < num_entries, other=-1),)  # noqa: RUF005
        return ids
    else:
        entries = (token + tl.arange(0, TILE)) // BLOCK_SIZE
        return (tl.load(table_row_ptr + entries, mask=entries < num_entries, other=-1),)


@triton.jit
def block_of_token(n, ids, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, SCALAR: tl.constexpr):
    """The block id of each token n = arange(0, TILE) of the tile that `ids` were read for."""
    if SCALAR:
        block = ids[0] + tl.zeros_like(n)
        for i in tl.static_range(1, (TILE + BLOCK_SIZE - 1) // BLOCK_SIZE):
            block = tl.where(n >= i * BLOCK_SIZE, ids[i], block)
        return block
    else:
        return ids[0]


@triton.jit
def position_in_block(start, n, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, SCALAR: tl.constexpr):
    """Where token start + n stands in its block; the same for every tile if whole blocks fill a tile."""
    if SCALAR:
        if BLOCK_SIZE <= TILE:
            return n % BLOCK_SIZE
        else:
            return start % BLOCK_SIZE + n
    else:
        return (start + n) % BLOCK_SIZE


@triton.jit
def cache_offset(block, position, STRIDE_BLOCK: tl.constexpr, STRIDE_TOKEN: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Elements from a head's first channel in block 0 to channel 0 at (block, position): 64-bit for the block only."""
    if BLOCK_SIZE * STRIDE_TOKEN >= 2**31:  # tokens outside blocks: no page lies in one piece
        inside = position.to(tl.int64) * STRIDE_TOKEN
    else:
        inside = position * STRIDE_TOKEN
    return block.to(tl.int64) * STRIDE_BLOCK + inside


@triton.jit
def multiple_of_divisor(offset, DIVISOR: tl.constexpr):
    """`offset`, a multiple of DIVISOR, so that the compiler knows. It forgets `tl.multiple_of` where it folds the
    operation that was told of, as adding head 0 of one."""
    return offset // DIVISOR * DIVISOR


@triton.jit
def is_usable(block, bound):
    """0 <= block < bound, in one comparison."""
    return block.to(tl.uint32, bitcast=True) < bound.to(tl.uint32, bitcast=True)


@triton.jit
def load_tile(
    k_head_ptr,
    v_head_ptr,
    block,  # [TILE]
    position,  # [TILE]: in the block
    valid,  # [TILE]: the others are zeros, whatever lies there
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    K_STRIDE_BLOCK: tl.constexpr,
    K_STRIDE_TOKEN: tl.constexpr,
    V_STRIDE_BLOCK: tl.constexpr,
    V_STRIDE_TOKEN: tl.constexpr,
    K_LANES: tl.constexpr,
    V_LANES: tl.constexpr,
):
    """Keys [TILE, K_LANES] and values [TILE, V_LANES] of one head."""
    k_channel = tl.arange(0, K_LANES)
    v_channel = tl.arange(0, V_LANES)
    k_offset = cache_offset(block, position, K_STRIDE_BLOCK, K_STRIDE_TOKEN, BLOCK_SIZE)
    v_offset = cache_offset(block, position, V_STRIDE_BLOCK, V_STRIDE_TOKEN, BLOCK_SIZE)
    k_mask = valid[:, None]
    if HEAD_DIM != K_LANES:
        k_mask = k_mask & (k_channel < HEAD_DIM)[None, :]
    v_mask = valid[:, None]
    if V_HEAD_DIM != V_LANES:
        v_mask = v_mask & (v_channel < V_HEAD_DIM)[None, :]
    k = tl.load(k_head_ptr + k_offset[:, None] + k_channel[None, :], mask=k_mask, other=0.0)
    v = tl.load(v_head_ptr + v_offset[:, None] + v_channel[None, :], mask=v_mask, other=0.0)
    return k, v


@triton.jit
def load_box(
    k_desc,  # [num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM], boxes [1, 1, BOX, K_LANES]
    v_desc,  # [num_blocks, NUM_KV_HEADS, BLOCK_SIZE, V_HEAD_DIM], boxes [1, 1, BOX, V_LANES]
    kv_head,
    block,
    position,  # of the box's first token in the block
    usable,
    BOX: tl.constexpr,
    K_LANES: tl.constexpr,
    V_LANES: tl.constexpr,
):
    """Keys and values of tokens of one block, by the copy engine. Zeros, and nothing is read, if it is not usable."""
    # What is described is the reserved range, with the blocks past the watermark: -1 is out of it for certain.
    block = tl.where(usable, block, -1)
    k = k_desc.load([block, kv_head, position, 0]).reshape(BOX, K_LANES)
    v = v_desc.load([block, kv_head, position, 0]).reshape(BOX, V_LANES)
    return k, v


@triton.jit
def largest_id(largest, ids, NUM: tl.constexpr):
    """Running maximum over the ids of all tiles: a scalar, or [TILE] where ids are vectors. Cheap to carry."""
    for i in tl.static_range(NUM):
        largest = tl.maximum(largest, ids[i])
    return largest


@triton.jit
def count_bad_blocks(control_ptr, table_row_ptr, row, first_entry, end_entry, bound):
    """Count the entries of one table row that lie at or past the bound, and record the first if nothing was before.

    The control block: word 1 the number of errors, 2 the first one's kind (1: a block id read by attention), 3 its row
    of the block table, 4 its value.
    """
    for entry in range(first_entry, end_entry):
        block = tl.load(table_row_ptr + entry)
        if block >= bound:
            tl.atomic_add(control_ptr + 1, 1)
            if tl.atomic_cas(control_ptr + 2, 0, 1) == 0:
                tl.store(control_ptr + 3, row.to(tl.int32))
                tl.store(control_ptr + 4, block)

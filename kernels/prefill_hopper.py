"""Paged prefill for Hopper GPUs in Gluon: one persistent program an SM, its warps specialised (see docs/prefill.md).

Two or three consumer warpgroups own 64 rows of a query tile each, a row being a (token, query head of the group) pair;
one warp loads Q and K, another V, both with the copy engine (TMA), a page a message. The work comes from
`prefill_work`.

The order of waits, conversions and stores below is what keeps ptxas from serialising the matrix instructions; the
compile tests count its waits.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .prefill_work import (
    FIRST_TOKEN,
    HEADER_WORDS,
    ITEM_WORDS,
    KEY_TILES,
    KV_HEAD,
    NUM_TOKENS,
    POSITION,
    SEQ,
    SEQ_LEN,
    TABLE_ROW,
)

# Named otherwise before Triton 3.8.
_load_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_store_box = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
_sync_threads = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_HAS_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))

# A score that no key has. A power of two, so that its product with the scale is exact: a row that saw nothing yet gets
# exp2(0), which the next maximum takes back, and never infinity.
HIDDEN = gl.constexpr(-(2.0**99))
LN_2 = gl.constexpr(0.6931471805599453)
NOWHERE = gl.constexpr(-(2**30))  # a row that is below zero whatever head is added
UNIT = gl.constexpr(16)  # rows of V that are cleared at a time
CONSUMER_ROWS = gl.constexpr(64)  # of a wide matrix instruction
CHANNELS = gl.constexpr(64)  # 16-bit channels in the 128 bytes of a swizzled row


@gluon.jit
def _as(buffer, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    if _HAS_REINTERPRET:
        return buffer.reinterpret(dtype, shape, layout)
    else:
        return buffer._reinterpret(dtype, shape, layout)


@gluon.jit
def _instruct(instruction: gl.constexpr):
    """An instruction of PTX that has neither operands in registers nor a result."""
    text: gl.constexpr = instruction + "; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(text, "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _prefetch(ptr):
    """Brings a line into the L1, so that a later load of it need not go to the L2."""
    gl.inline_asm_elementwise(
        "prefetch.global.L1 [$1]; mov.u32 $0, 0;", "=r,l", [ptr.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _wait_turn(which: gl.constexpr):
    """Consumer `which` waits until the one before has issued its matrix instructions (named barriers from 12 on)."""
    if which == 0:
        _instruct("bar.sync 12, 256")
    elif which == 1:
        _instruct("bar.sync 13, 256")
    else:
        _instruct("bar.sync 14, 256")


@gluon.jit
def _give_turn(which: gl.constexpr, CONSUMERS: gl.constexpr):
    """After consumer `which` it is the next one's turn to issue."""
    if (which + 1) % CONSUMERS == 0:
        _instruct("bar.arrive 12, 256")
    elif (which + 1) % CONSUMERS == 1:
        _instruct("bar.arrive 13, 256")
    else:
        _instruct("bar.arrive 14, 256")


@gluon.jit
def _num_turns(num_items):
    """How many of the items this program computes: one of each wave, the order of programs turning back each time."""
    programs = gl.num_programs(0)
    waves = num_items // programs
    place = gl.where(waves % 2 == 0, gl.program_id(0), programs - 1 - gl.program_id(0))
    return waves + gl.where(place < num_items - waves * programs, 1, 0)


@gluon.jit
def _item_of(turn):
    programs = gl.num_programs(0)
    return turn * programs + gl.where(turn % 2 == 0, gl.program_id(0), programs - 1 - gl.program_id(0))


@gluon.jit
def _bound(control_ptr, num_blocks):
    if control_ptr is not None:
        return gl.load(control_ptr)
    else:
        return num_blocks


@gluon.jit
def _table_entries(row_ptr, tile, need, KEYS: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """The ids of the (at most 8) blocks of a tile of keys; -1 for what is not needed, and must not be read."""
    first = tile * KEYS // BLOCK_SIZE
    ids = ()
    for i in gl.static_range((KEYS + BLOCK_SIZE - 1) // BLOCK_SIZE):
        ids = ids + (gl.load(row_ptr + first + i, mask=first + i < need, other=-1),)  # noqa: RUF005
    return ids


@gluon.jit
def _is_usable(block, bound):
    """0 <= block < bound, in one comparison."""
    return block.to(gl.uint32) < bound.to(gl.uint32)


@gluon.jit
def _places(ids, bound, BLOCK_ROWS: gl.constexpr, PAGES: gl.constexpr):
    """Where blocks begin: in rows of the cache, or, with BLOCK_ROWS 0, their ids.

    Below zero where a block is not usable: there the copy engine reads nothing, and fills in zeros.
    """
    places = ()
    for i in gl.static_range(PAGES):
        if BLOCK_ROWS > 0:
            place = gl.where(_is_usable(ids[i], bound), ids[i] * BLOCK_ROWS, NOWHERE)
        else:
            place = gl.where(_is_usable(ids[i], bound), ids[i], -1)
        places = places + (place,)  # noqa: RUF005
    return places


@gluon.jit
def _produce(
    IS_V: gl.constexpr,
    q_desc,
    kv_desc,
    q_buffer,
    kv_buffer,
    q_full,
    q_free,
    kv_full,
    kv_free,
    block_table_ptr,
    control_ptr,
    work_ptr,
    table_width,
    num_blocks,
    table_stride_row,
    GROUP: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_ROWS: gl.constexpr,
    HEAD_ROWS: gl.constexpr,
    HEAD_CHANNELS: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    PACKED: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    Q_BUFFERS: gl.constexpr,
):
    """One warp: Q and K, or V, of every item, as the ring of buffers has room."""
    PARTS: gl.constexpr = (GROUP + PACKED - 1) // PACKED
    PAGES: gl.constexpr = (KEYS + BLOCK_SIZE - 1) // BLOCK_SIZE
    HALVES: gl.constexpr = HEAD_DIM // CHANNELS
    TOKENS: gl.constexpr = CONSUMER_ROWS // PACKED  # a consumer
    BYTES: gl.constexpr = kv_desc.dtype.primitive_bitwidth // 8
    bound = _bound(control_ptr, num_blocks)
    items_ptr = work_ptr + HEADER_WORDS
    turns = _num_turns(gl.load(work_ptr) * PARTS)
    step = 0
    for turn in range(turns):
        item = _item_of(turn)
        item_ptr = items_ptr + item // PARTS * ITEM_WORDS
        _prefetch(items_ptr + _item_of(gl.minimum(turn + 1, turns - 1)) // PARTS * ITEM_WORDS)
        first_token = gl.load(item_ptr + FIRST_TOKEN)
        num_tokens = gl.load(item_ptr + NUM_TOKENS)
        position = gl.load(item_ptr + POSITION)
        length = gl.load(item_ptr + SEQ_LEN)
        table_row = gl.load(item_ptr + TABLE_ROW)
        kv_head = gl.load(item_ptr + KV_HEAD)
        n = gl.load(item_ptr + KEY_TILES)
        end = length
        if IS_CAUSAL:
            end = gl.minimum(position + num_tokens, length)
        need = gl.minimum((end + BLOCK_SIZE - 1) // BLOCK_SIZE, table_width)
        row_ptr = block_table_ptr + table_row.to(gl.int64) * table_stride_row
        # Of the head's first token in a block, past the block's own place.
        head_row = kv_head * HEAD_ROWS
        head_channel = kv_head * HEAD_CHANNELS
        places = _places(_table_entries(row_ptr, n - 1, need, KEYS, BLOCK_SIZE), bound, BLOCK_ROWS, PAGES)
        if not IS_V:
            head = kv_head * GROUP + item % PARTS * PACKED
            for which in gl.static_range(CONSUMERS):
                slot = turn % Q_BUFFERS * CONSUMERS + which
                mbarrier.wait(q_free.index(slot), (turn // Q_BUFFERS & 1) ^ 1)
                mbarrier.expect(q_full.index(slot), CONSUMER_ROWS * HEAD_DIM * BYTES)
                for half in gl.static_range(HALVES):
                    _load_box(
                        q_desc,
                        [first_token + which * TOKENS, head, half * CHANNELS],
                        q_full.index(slot),
                        q_buffer.index(slot * HALVES + half),
                    )
        for i in range(n):
            tile = n - 1 - i
            stage = step % STAGES
            # Read before the wait; made places of behind the messages, which that would hold up.
            next_ids = _table_entries(row_ptr, gl.maximum(tile - 1, 0), need, KEYS, BLOCK_SIZE)
            mbarrier.wait(kv_free.index(stage), (step // STAGES & 1) ^ 1)
            mbarrier.expect(kv_full.index(stage), KEYS * HEAD_DIM * BYTES)
            for page in gl.static_range(PAGES):
                for half in gl.static_range(HALVES):
                    if BLOCK_SIZE > KEYS:
                        token = tile * KEYS % BLOCK_SIZE
                    else:
                        token = 0
                    box = kv_buffer.index((stage * HALVES + half) * PAGES + page)
                    if BLOCK_ROWS > 0:
                        corner = [places[page] + head_row + token, head_channel + half * CHANNELS]
                        _load_box(kv_desc, corner, kv_full.index(stage), box)
                    else:
                        corner = [places[page], token, kv_head, half * CHANNELS]
                        _load_box(kv_desc, corner, kv_full.index(stage), box)
            places = _places(next_ids, bound, BLOCK_ROWS, PAGES)
            step += 1


@gluon.jit
def _hide_unseen(
    scores,  # [CONSUMER_ROWS, KEYS]
    last_key,  # [CONSUMER_ROWS], counted from the tile's first key
    tile,
    suspect,
    block_table_ptr,
    control_ptr,
    table_row_ptr,
    length,
    table_width,
    num_blocks,
    table_stride_row,
    BLOCK_SIZE: gl.constexpr,
    KEYS: gl.constexpr,
    SCORES: gl.constexpr,
):
    key = gl.arange(0, KEYS, gl.SliceLayout(0, SCORES))
    scores = gl.where(key[None, :] <= last_key[:, None], scores, HIDDEN)
    if suspect != 0:
        need = gl.minimum((length + BLOCK_SIZE - 1) // BLOCK_SIZE, table_width)
        row_ptr = block_table_ptr + gl.load(table_row_ptr).to(gl.int64) * table_stride_row
        ids = _table_entries(row_ptr, tile, need, KEYS, BLOCK_SIZE)
        bound = _bound(control_ptr, num_blocks)
        usable = 0  # one bit a block
        for i in gl.static_range((KEYS + BLOCK_SIZE - 1) // BLOCK_SIZE):
            usable |= gl.where(_is_usable(ids[i], bound), 1 << i, 0)
        scores = gl.where((usable >> key // BLOCK_SIZE & 1)[None, :] != 0, scores, HIDDEN)
    return scores


@gluon.jit
def _first_softmax(
    q,
    k_tiles,
    k_full,
    k_free,
    step,
    n,
    last_key,  # [CONSUMER_ROWS]
    suspect,
    block_table_ptr,
    control_ptr,
    table_row_ptr,
    length,
    table_width,
    num_blocks,
    table_stride_row,
    scale_log2,
    BLOCK_SIZE: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    SCORES: gl.constexpr,
):
    """An item's first scores where there is nothing to run beside: the weights, and each row's maximum and sum."""
    stage = step % STAGES
    mbarrier.wait(k_full.index(stage), step // STAGES & 1)
    scores = warpgroup_mma(
        q,
        k_tiles.index(stage).permute((1, 0)),
        gl.zeros([CONSUMER_ROWS, KEYS], gl.float32, SCORES),
        use_acc=False,
        is_async=True,
    )
    scores = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(k_free.index(stage), count=1)
    scores = _hide_unseen(
        scores,
        last_key - (n - 1) * KEYS,
        n - 1,
        suspect,
        block_table_ptr,
        control_ptr,
        table_row_ptr,
        length,
        table_width,
        num_blocks,
        table_stride_row,
        BLOCK_SIZE,
        KEYS,
        SCORES,
    )
    highest = gl.max(scores, 1)
    p = gl.exp2(scores * scale_log2 - (highest * scale_log2)[:, None])
    return p, highest, gl.sum(p, 1)


@gluon.jit
def _clear_tail(v_units, stage, num_valid, HEAD_DIM: gl.constexpr, KEYS: gl.constexpr):
    """Zeros in the rows of a V tile from `num_valid` on: what lies there was never written, and 0 * NaN is NaN.

    Each consumer clears all of it for itself, so that neither waits for the other.
    """
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    UNITS: gl.constexpr = KEYS // UNIT
    first = num_valid // UNIT
    zeros = gl.zeros([UNIT, CHANNELS], v_units.dtype, ROWS)
    is_valid = gl.arange(0, UNIT, gl.SliceLayout(1, ROWS)) < num_valid % UNIT
    for half in gl.static_range(HEAD_DIM // CHANNELS):
        begin = (stage * (HEAD_DIM // CHANNELS) + half) * UNITS
        unit = v_units.index(begin + first)
        unit.store(gl.where(is_valid[:, None], unit.load(ROWS), zeros))
        for u in range(first + 1, UNITS):
            v_units.index(begin + u).store(zeros)
    fence_async_shared()
    _sync_threads()  # here, or the compiler puts one in front of every read of V


@gluon.jit
def _is_row(row, num_tokens, part, GROUP: gl.constexpr, PACKED: gl.constexpr):
    """Whether rows of a tile stand for a token and a query head of the group."""
    return (row // PACKED < num_tokens) & (part * PACKED + row % PACKED < GROUP)


@gluon.jit
def _store_lines(
    out_ptr,
    lines,  # [CONSUMER_ROWS, HEAD_DIM]
    token,
    num_tokens,
    head,
    part,
    out_stride_token,
    OUT_STRIDE_HEAD: gl.constexpr,
    GROUP: gl.constexpr,
    PACKED: gl.constexpr,
):
    LINES: gl.constexpr = lines.type.layout
    row = gl.arange(0, CONSUMER_ROWS, gl.SliceLayout(1, LINES))
    channel = gl.arange(0, lines.type.shape[1], gl.SliceLayout(0, LINES))
    offset = (token + row // PACKED).to(gl.int64) * out_stride_token + (head + row % PACKED) * OUT_STRIDE_HEAD
    mask = _is_row(row, num_tokens, part, GROUP, PACKED)
    gl.store(out_ptr + offset[:, None] + channel[None, :], lines, mask=mask[:, None])


@gluon.jit
def _store_lse(
    lse_ptr,
    lse,  # [CONSUMER_ROWS]
    token,
    num_tokens,
    head,
    part,
    GROUP: gl.constexpr,
    HEADS: gl.constexpr,
    PACKED: gl.constexpr,
):
    row = gl.arange(0, CONSUMER_ROWS, lse.type.layout)
    offset = (token + row // PACKED).to(gl.int64) * HEADS + head + row % PACKED
    gl.store(lse_ptr + offset, lse, mask=_is_row(row, num_tokens, part, GROUP, PACKED))


@gluon.jit
def _consume(
    which: gl.constexpr,
    out_desc,
    out_ptr,
    lse_ptr,
    q_tiles,
    k_tiles,
    v_tiles,
    v_units,
    out_buffer,
    out_tiles,
    q_full,
    q_free,
    k_full,
    k_free,
    v_full,
    v_free,
    block_table_ptr,
    control_ptr,
    work_ptr,
    suspects_ptr,
    table_width,
    num_blocks,
    table_stride_row,
    out_stride_token,
    scale_log2,
    GROUP: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    OUT_STRIDE_HEAD: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    PACKED: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    Q_BUFFERS: gl.constexpr,
):
    """One warpgroup: softmax(Q K) V of its 64 rows of every item, keys from right to left.

    While the tensor cores work on the scores of one tile and the values of the tile before, another consumer has its
    softmax; they take turns to issue. The first scores of an item run beside the last values of the item before.
    """
    PARTS: gl.constexpr = (GROUP + PACKED - 1) // PACKED
    HALVES: gl.constexpr = HEAD_DIM // CHANNELS
    TOKENS: gl.constexpr = CONSUMER_ROWS // PACKED
    HEADS: gl.constexpr = NUM_KV_HEADS * GROUP
    DTYPE: gl.constexpr = k_tiles.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)  # the scores' own registers
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    OUT_ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    # Rows in pieces of 16 bytes, for what the copy engine cannot store.
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])

    items_ptr = work_ptr + HEADER_WORDS
    num_items = gl.load(work_ptr)
    turns = _num_turns(num_items * PARTS)
    row_token = which * TOKENS + gl.arange(0, CONSUMER_ROWS, ROW) // PACKED
    if turns > 0:
        if which == CONSUMERS - 1:
            _give_turn(which, CONSUMERS)
        item = _item_of(0)
        item_ptr = items_ptr + item // PARTS * ITEM_WORDS
        position = gl.load(item_ptr + POSITION)
        length = gl.load(item_ptr + SEQ_LEN)
        n = gl.load(item_ptr + KEY_TILES)
        suspect = gl.load(suspects_ptr + gl.load(item_ptr + SEQ))
        last_key = row_token + position if IS_CAUSAL else row_token * 0 + (length - 1)
        step = 0
        mbarrier.wait(q_full.index(which), 0)
        p, highest, exp_sum = _first_softmax(
            q_tiles.index(which),
            k_tiles,
            k_full,
            k_free,
            step,
            n,
            last_key,
            suspect,
            block_table_ptr,
            control_ptr,
            item_ptr + TABLE_ROW,
            length,
            table_width,
            num_blocks,
            table_stride_row,
            scale_log2,
            BLOCK_SIZE,
            KEYS,
            STAGES,
            SCORES,
        )
        weights = gl.convert_layout(p.to(DTYPE), WEIGHTS)
        mbarrier.wait(k_full.index((step + 1) % STAGES), (step + 1) // STAGES & 1, pred=n > 1)
        for turn in range(turns):
            slot = turn % Q_BUFFERS * CONSUMERS + which
            q = q_tiles.index(slot)
            _prefetch(items_ptr + _item_of(gl.minimum(turn + 1, turns - 1)) // PARTS * ITEM_WORDS)
            # Tiles after the first in which some row must not see some key.
            num_masked = n - 1 if suspect != 0 else 0
            if IS_CAUSAL:
                num_masked = gl.maximum(num_masked, n - 1 - gl.maximum(position + which * TOKENS + 1, 0) // KEYS)
            if n * KEYS > length:
                mbarrier.wait(v_full.index(step % STAGES), step // STAGES & 1)
                _clear_tail(v_units, step % STAGES, length - (n - 1) * KEYS, HEAD_DIM, KEYS)
            acc = gl.zeros([CONSUMER_ROWS, HEAD_DIM], gl.float32, OUT)
            for i in range(n - 1):
                tile = n - 2 - i
                v_stage = step % STAGES
                v_phase = step // STAGES & 1
                step += 1
                stage = step % STAGES
                _wait_turn(which)
                scores = warpgroup_mma(q, k_tiles.index(stage).permute((1, 0)), p, use_acc=False, is_async=True)
                mbarrier.wait(v_full.index(v_stage), v_phase)
                acc = warpgroup_mma(weights, v_tiles.index(v_stage), acc, is_async=True)
                _give_turn(which, CONSUMERS)
                scores = warpgroup_mma_wait(1, deps=(scores,))
                mbarrier.arrive(k_free.index(stage), count=1)
                if i < num_masked:
                    scores = _hide_unseen(
                        scores,
                        last_key - tile * KEYS,
                        tile,
                        suspect,
                        block_table_ptr,
                        control_ptr,
                        item_ptr + TABLE_ROW,
                        length,
                        table_width,
                        num_blocks,
                        table_stride_row,
                        BLOCK_SIZE,
                        KEYS,
                        SCORES,
                    )
                new_highest = gl.maximum(highest, gl.max(scores, 1))
                scaled = new_highest * scale_log2
                p = gl.exp2(scores * scale_log2 - scaled[:, None])
                shrink = gl.exp2(highest * scale_log2 - scaled)
                highest = new_highest
                exp_sum = exp_sum * shrink + gl.sum(p, 1)
                # This loop between the softmax and the wait keeps ptxas from moving the wait up.
                mbarrier.wait(k_full.index((step + 1) % STAGES), (step + 1) // STAGES & 1, pred=tile > 0)
                acc, p, exp_sum, shrink = warpgroup_mma_wait(0, deps=(acc, p, exp_sum, shrink))
                mbarrier.arrive(v_free.index(v_stage), count=1)
                # Only now: the weights before are an operand until the wait.
                weights = gl.convert_layout(p.to(DTYPE), WEIGHTS)
                acc = acc * gl.convert_layout(shrink, OUT_ROW)[:, None]
            if Q_BUFFERS == 2:
                mbarrier.arrive(q_free.index(slot), count=1)

            # The item's last values, beside the first scores and softmax of the next item.
            out_token = gl.load(item_ptr + FIRST_TOKEN) + which * TOKENS
            out_tokens = gl.load(item_ptr + NUM_TOKENS) - which * TOKENS
            out_part = item % PARTS
            out_head = gl.load(item_ptr + KV_HEAD) * GROUP + out_part * PACKED
            seen = highest > HIDDEN  # else the row saw no key
            out_factor = gl.where(seen, 1.0 / exp_sum, 0.0)
            if lse_ptr is not None:
                lse = gl.where(seen, (highest * scale_log2 + gl.log2(exp_sum)) * LN_2, float("-inf"))
                _store_lse(lse_ptr, lse, out_token, out_tokens, out_head, out_part, GROUP, HEADS, PACKED)
            v_stage = step % STAGES
            v_phase = step // STAGES & 1
            step += 1
            if (Q_BUFFERS == 2) & (turn + 1 < turns):
                item = _item_of(turn + 1)
                item_ptr = items_ptr + item // PARTS * ITEM_WORDS
                position = gl.load(item_ptr + POSITION)
                length = gl.load(item_ptr + SEQ_LEN)
                n = gl.load(item_ptr + KEY_TILES)
                suspect = gl.load(suspects_ptr + gl.load(item_ptr + SEQ))
                last_key = row_token + position if IS_CAUSAL else row_token * 0 + (length - 1)
                next_slot = (turn + 1) % Q_BUFFERS * CONSUMERS + which
                stage = step % STAGES
                mbarrier.wait(q_full.index(next_slot), (turn + 1) // Q_BUFFERS & 1)
                mbarrier.wait(k_full.index(stage), step // STAGES & 1)
                _wait_turn(which)
                scores = warpgroup_mma(
                    q_tiles.index(next_slot),
                    k_tiles.index(stage).permute((1, 0)),
                    p,
                    use_acc=False,
                    is_async=True,
                )
                mbarrier.wait(v_full.index(v_stage), v_phase)
                acc = warpgroup_mma(weights, v_tiles.index(v_stage), acc, is_async=True)
                _give_turn(which, CONSUMERS)
                scores = warpgroup_mma_wait(1, deps=(scores,))
                mbarrier.arrive(k_free.index(stage), count=1)
                scores = _hide_unseen(
                    scores,
                    last_key - (n - 1) * KEYS,
                    n - 1,
                    suspect,
                    block_table_ptr,
                    control_ptr,
                    item_ptr + TABLE_ROW,
                    length,
                    table_width,
                    num_blocks,
                    table_stride_row,
                    BLOCK_SIZE,
                    KEYS,
                    SCORES,
                )
                highest = gl.max(scores, 1)
                p = gl.exp2(scores * scale_log2 - (highest * scale_log2)[:, None])
                exp_sum = gl.sum(p, 1)
                mbarrier.wait(k_full.index((step + 1) % STAGES), (step + 1) // STAGES & 1, pred=n > 1)
                acc, p, exp_sum = warpgroup_mma_wait(0, deps=(acc, p, exp_sum))
                mbarrier.arrive(v_free.index(v_stage), count=1)
                weights = gl.convert_layout(p.to(DTYPE), WEIGHTS)
            else:
                mbarrier.wait(v_full.index(v_stage), v_phase)
                acc = warpgroup_mma(weights, v_tiles.index(v_stage), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(v_free.index(v_stage), count=1)

            result = (acc * gl.convert_layout(out_factor, OUT_ROW)[:, None]).to(DTYPE)
            if out_tokens > 0:
                tma.store_wait(0)
                out_tiles.index(which).store(result)
                if (GROUP % PACKED == 0) & (out_tokens >= TOKENS):
                    fence_async_shared()
                    for half in gl.static_range(HALVES):
                        _store_box(
                            out_desc, [out_token, out_head, half * CHANNELS], out_buffer.index(which * HALVES + half)
                        )
                else:
                    _store_lines(
                        out_ptr,
                        out_tiles.index(which).load(LINES),
                        out_token,
                        out_tokens,
                        out_head,
                        out_part,
                        out_stride_token,
                        OUT_STRIDE_HEAD,
                        GROUP,
                        PACKED,
                    )
            if Q_BUFFERS == 1:
                tma.store_wait(0)
                mbarrier.arrive(q_free.index(slot), count=1)
                if turn + 1 < turns:
                    item = _item_of(turn + 1)
                    item_ptr = items_ptr + item // PARTS * ITEM_WORDS
                    position = gl.load(item_ptr + POSITION)
                    length = gl.load(item_ptr + SEQ_LEN)
                    n = gl.load(item_ptr + KEY_TILES)
                    suspect = gl.load(suspects_ptr + gl.load(item_ptr + SEQ))
                    last_key = row_token + position if IS_CAUSAL else row_token * 0 + (length - 1)
                    mbarrier.wait(q_full.index(slot), (turn + 1) & 1)
                    p, highest, exp_sum = _first_softmax(
                        q,
                        k_tiles,
                        k_full,
                        k_free,
                        step,
                        n,
                        last_key,
                        suspect,
                        block_table_ptr,
                        control_ptr,
                        item_ptr + TABLE_ROW,
                        length,
                        table_width,
                        num_blocks,
                        table_stride_row,
                        scale_log2,
                        BLOCK_SIZE,
                        KEYS,
                        STAGES,
                        SCORES,
                    )
                    weights = gl.convert_layout(p.to(DTYPE), WEIGHTS)
                    mbarrier.wait(k_full.index((step + 1) % STAGES), (step + 1) // STAGES & 1, pred=n > 1)
        tma.store_wait(0)
        if which == 0:
            _wait_turn(0)

    # Tokens that see no key, padding among them.
    blind = gl.load(work_ptr + 1) * PARTS
    for item in range(gl.program_id(0), blind, gl.num_programs(0)):
        item_ptr = items_ptr + (num_items + item // PARTS) * ITEM_WORDS
        part = item % PARTS
        token = gl.load(item_ptr + FIRST_TOKEN) + which * TOKENS
        tokens = gl.load(item_ptr + NUM_TOKENS) - which * TOKENS
        head = gl.load(item_ptr + KV_HEAD) * GROUP + part * PACKED
        zeros = gl.zeros([CONSUMER_ROWS, HEAD_DIM], DTYPE, LINES)
        _store_lines(out_ptr, zeros, token, tokens, head, part, out_stride_token, OUT_STRIDE_HEAD, GROUP, PACKED)
        if lse_ptr is not None:
            nothing = gl.full([CONSUMER_ROWS], float("-inf"), gl.float32, ROW)
            _store_lse(lse_ptr, nothing, token, tokens, head, part, GROUP, HEADS, PACKED)


@gluon.jit(
    do_not_specialize=["table_width", "num_blocks", "table_stride_row", "out_stride_token"],
    do_not_specialize_on_alignment=["block_table_ptr", "control_ptr", "lse_ptr", "suspects_ptr"],
)
def hopper_kernel(
    q_desc,  # [num_tokens, NUM_KV_HEADS * GROUP, HEAD_DIM]: boxes [CONSUMER_ROWS / PACKED, PACKED, CHANNELS]
    k_desc,  # rows of the cache: boxes [min(BLOCK_SIZE, KEYS), CHANNELS]; or, with BLOCK_ROWS 0,
    v_desc,  # [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM]: boxes [1, min(BLOCK_SIZE, KEYS), 1, CHANNELS]
    out_desc,  # as q_desc
    out_ptr,  # [num_tokens, NUM_KV_HEADS * GROUP, HEAD_DIM]
    lse_ptr,  # [num_tokens, NUM_KV_HEADS * GROUP] f32, or None
    block_table_ptr,  # [rows, table_width] int32
    control_ptr,  # [8] int32, or None: num_blocks is the bound
    work_ptr,  # int32: the list of `prefill_work`
    suspects_ptr,  # [num_seqs] int32: whether a sequence's block ids need a look
    table_width: gl.int32,
    num_blocks: gl.int32,
    table_stride_row: gl.int64,
    out_stride_token: gl.int64,
    scale_log2,  # softmax scale * log2(e), positive
    GROUP: gl.constexpr,  # query heads a KV head
    NUM_KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_ROWS: gl.constexpr,  # from a block to the next, or 0
    HEAD_ROWS: gl.constexpr,  # from a head to the next, in rows and
    HEAD_CHANNELS: gl.constexpr,  # in channels of a row
    OUT_STRIDE_HEAD: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    PACKED: gl.constexpr,  # query heads in the rows of a tile, a power of two
    KEYS: gl.constexpr,  # keys a tile
    STAGES: gl.constexpr,  # tiles of K, and of V, in the ring
    CONSUMERS: gl.constexpr,  # 2 or 3
    Q_BUFFERS: gl.constexpr,  # items whose queries are there; with 1 their results take the same memory
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    HALVES: gl.constexpr = HEAD_DIM // CHANNELS
    PAGES: gl.constexpr = (KEYS + BLOCK_SIZE - 1) // BLOCK_SIZE
    DTYPE: gl.constexpr = k_desc.dtype
    PLAIN: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    # Rings are allocated in boxes, as the copy engine fills them, and read as whole tiles: a tile's two halves of 64
    # channels lie behind each other, each in rows of 128 swizzled bytes.
    q_buffer = gl.allocate_shared_memory(
        DTYPE, [Q_BUFFERS * CONSUMERS * HALVES, CONSUMER_ROWS // PACKED, PACKED, CHANNELS], q_desc.layout
    )
    if Q_BUFFERS == 2:
        out_buffer = gl.allocate_shared_memory(
            DTYPE, [CONSUMERS * HALVES, CONSUMER_ROWS // PACKED, PACKED, CHANNELS], out_desc.layout
        )
    else:
        out_buffer = q_buffer
    BOX: gl.constexpr = [KEYS // PAGES, CHANNELS] if BLOCK_ROWS > 0 else [1, KEYS // PAGES, 1, CHANNELS]
    k_buffer = gl.allocate_shared_memory(DTYPE, [STAGES * HALVES * PAGES] + BOX, k_desc.layout)  # noqa: RUF005
    v_buffer = gl.allocate_shared_memory(DTYPE, [STAGES * HALVES * PAGES] + BOX, v_desc.layout)  # noqa: RUF005
    q_tiles = _as(q_buffer, DTYPE, [Q_BUFFERS * CONSUMERS, CONSUMER_ROWS, HEAD_DIM], PLAIN)
    out_tiles = _as(out_buffer, DTYPE, [CONSUMERS, CONSUMER_ROWS, HEAD_DIM], PLAIN)
    k_tiles = _as(k_buffer, DTYPE, [STAGES, KEYS, HEAD_DIM], PLAIN)
    v_tiles = _as(v_buffer, DTYPE, [STAGES, KEYS, HEAD_DIM], PLAIN)
    v_units = _as(v_buffer, DTYPE, [STAGES * HALVES * (KEYS // UNIT), UNIT, CHANNELS], PLAIN)
    q_full = gl.allocate_shared_memory(gl.int64, [Q_BUFFERS * CONSUMERS, 1], BARRIER)
    q_free = gl.allocate_shared_memory(gl.int64, [Q_BUFFERS * CONSUMERS, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(Q_BUFFERS * CONSUMERS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_free.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_free.index(i), count=CONSUMERS)
        mbarrier.init(v_free.index(i), count=CONSUMERS)
    fence_async_shared()
    # fmt: off
    if CONSUMERS == 2:
        gl.warp_specialize(  # tuples cannot be added up here
            [
                (_consume, (
                0, out_desc, out_ptr, lse_ptr, q_tiles, k_tiles, v_tiles, v_units, out_buffer, out_tiles, q_full,
                q_free, k_full, k_free, v_full, v_free, block_table_ptr, control_ptr, work_ptr, suspects_ptr,
                table_width, num_blocks, table_stride_row, out_stride_token, scale_log2, GROUP, NUM_KV_HEADS, HEAD_DIM,
                BLOCK_SIZE, OUT_STRIDE_HEAD, IS_CAUSAL, PACKED, KEYS, STAGES, CONSUMERS, Q_BUFFERS,
                )),
                (_consume, (
                1, out_desc, out_ptr, lse_ptr, q_tiles, k_tiles, v_tiles, v_units, out_buffer, out_tiles, q_full,
                q_free, k_full, k_free, v_full, v_free, block_table_ptr, control_ptr, work_ptr, suspects_ptr,
                table_width, num_blocks, table_stride_row, out_stride_token, scale_log2, GROUP, NUM_KV_HEADS, HEAD_DIM,
                BLOCK_SIZE, OUT_STRIDE_HEAD, IS_CAUSAL, PACKED, KEYS, STAGES, CONSUMERS, Q_BUFFERS,
                )),
                (_produce, (
                False, q_desc, k_desc, q_buffer, k_buffer, q_full, q_free, k_full, k_free,
                block_table_ptr, control_ptr, work_ptr, table_width, num_blocks, table_stride_row, GROUP, NUM_KV_HEADS,
                HEAD_DIM, BLOCK_SIZE, BLOCK_ROWS, HEAD_ROWS, HEAD_CHANNELS, IS_CAUSAL, PACKED, KEYS, STAGES, CONSUMERS,
                Q_BUFFERS,
                )),
                (_produce, (
                True, q_desc, v_desc, q_buffer, v_buffer, q_full, q_free, v_full, v_free,
                block_table_ptr, control_ptr, work_ptr, table_width, num_blocks, table_stride_row, GROUP, NUM_KV_HEADS,
                HEAD_DIM, BLOCK_SIZE, BLOCK_ROWS, HEAD_ROWS, HEAD_CHANNELS, IS_CAUSAL, PACKED, KEYS, STAGES, CONSUMERS,
                Q_BUFFERS,
                )),
            ],
            [4, 1, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (
                0, out_desc, out_ptr, lse_ptr, q_tiles, k_tiles, v_tiles, v_units, out_buffer, out_tiles, q_full,
                q_free, k_full, k_free, v_full, v_free, block_table_ptr, control_ptr, work_ptr, suspects_ptr,
                table_width, num_blocks, table_stride_row, out_stride_token, scale_log2, GROUP, NUM_KV_HEADS, HEAD_DIM,
                BLOCK_SIZE, OUT_STRIDE_HEAD, IS_CAUSAL, PACKED, KEYS, STAGES, CONSUMERS, Q_BUFFERS,
                )),
                (_consume, (
                1, out_desc, out_ptr, lse_ptr, q_tiles, k_tiles, v_tiles, v_units, out_buffer, out_tiles, q_full,
                q_free, k_full, k_free, v_full, v_free, block_table_ptr, control_ptr, work_ptr, suspects_ptr,
                table_width, num_blocks, table_stride_row, out_stride_token, scale_log2, GROUP, NUM_KV_HEADS, HEAD_DIM,
                BLOCK_SIZE, OUT_STRIDE_HEAD, IS_CAUSAL, PACKED, KEYS, STAGES, CONSUMERS, Q_BUFFERS,
                )),
                (_consume, (
                2, out_desc, out_ptr, lse_ptr, q_tiles, k_tiles, v_tiles, v_units, out_buffer, out_tiles, q_full,
                q_free, k_full, k_free, v_full, v_free, block_table_ptr, control_ptr, work_ptr, suspects_ptr,
                table_width, num_blocks, table_stride_row, out_stride_token, scale_log2, GROUP, NUM_KV_HEADS, HEAD_DIM,
                BLOCK_SIZE, OUT_STRIDE_HEAD, IS_CAUSAL, PACKED, KEYS, STAGES, CONSUMERS, Q_BUFFERS,
                )),
                (_produce, (
                False, q_desc, k_desc, q_buffer, k_buffer, q_full, q_free, k_full, k_free,
                block_table_ptr, control_ptr, work_ptr, table_width, num_blocks, table_stride_row, GROUP, NUM_KV_HEADS,
                HEAD_DIM, BLOCK_SIZE, BLOCK_ROWS, HEAD_ROWS, HEAD_CHANNELS, IS_CAUSAL, PACKED, KEYS, STAGES, CONSUMERS,
                Q_BUFFERS,
                )),
                (_produce, (
                True, q_desc, v_desc, q_buffer, v_buffer, q_full, q_free, v_full, v_free,
                block_table_ptr, control_ptr, work_ptr, table_width, num_blocks, table_stride_row, GROUP, NUM_KV_HEADS,
                HEAD_DIM, BLOCK_SIZE, BLOCK_ROWS, HEAD_ROWS, HEAD_CHANNELS, IS_CAUSAL, PACKED, KEYS, STAGES, CONSUMERS,
                Q_BUFFERS,
                )),
            ],
            [4, 4, 1, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )
    # fmt: on

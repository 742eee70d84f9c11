"""Copy whole blocks between segments: one launch for every layer and state of a cache."""

import triton
import triton.language as tl


@triton.jit
def copy_words(
    source_address, target_address, num_bytes, chunk, valid, BLOCK_WORDS: tl.constexpr, ALIGNMENT: tl.constexpr
):
    """Copies words [chunk * BLOCK_WORDS, + BLOCK_WORDS) of num_bytes, where `valid`; ALIGNMENT as in the kernels."""
    word = tl.arange(0, BLOCK_WORDS)  # [BLOCK_WORDS]
    if ALIGNMENT == 1:
        left = tl.minimum(num_bytes - chunk * BLOCK_WORDS, BLOCK_WORDS).to(tl.int32)
        first = chunk * BLOCK_WORDS
        source_ptr = (source_address + first).to(tl.pointer_type(tl.int8))
        target_ptr = (target_address + first).to(tl.pointer_type(tl.int8))
    else:
        left = tl.minimum(num_bytes // 4 - chunk * BLOCK_WORDS, BLOCK_WORDS).to(tl.int32)
        first = chunk * (BLOCK_WORDS * 4)
        source_ptr = (source_address + first).to(tl.pointer_type(tl.int32))
        target_ptr = (target_address + first).to(tl.pointer_type(tl.int32))
        if ALIGNMENT == 16:
            left = tl.multiple_of(left, 4)
            source_ptr = tl.multiple_of(source_ptr, 16)
            target_ptr = tl.multiple_of(target_ptr, 16)
    mask = (word < left) & valid
    tl.store(target_ptr + word, tl.load(source_ptr + word, mask=mask, other=0), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["pairs_ptr", "control_ptr"])
def copy_blocks_kernel(
    table_ptr,  # [num_segments, 3] int64: address of source block 0, of target block 0, bytes a block
    pairs_ptr,  # [num_pairs, 2] int32 or int64: source block, target block; negative: padding
    control_ptr,  # [8] int32, or None: ids are not bounded
    BLOCK_WORDS: tl.constexpr,  # words a program copies
    ALIGNMENT: tl.constexpr,  # 16, 4 or 1: bytes that divide every address and block size; words have 4, 4 or 1 byte
    SOURCE_BOUNDED: tl.constexpr,  # source ids lie below the watermark, else they number a staging buffer
    TARGET_BOUNDED: tl.constexpr,
):
    """Program (p, s, c) copies words [c * BLOCK_WORDS, + BLOCK_WORDS) of pair p in segment s.

    Pairs with a negative id are skipped; pairs with an id at or past the watermark are dropped, counted once and the
    first one recorded in the control block. All pairs run at once: no target may be another pair's source or target.
    """
    pair = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(1)
    chunk = tl.program_id(2).to(tl.int64)
    source = tl.load(pairs_ptr + pair * 2).to(tl.int64)
    target = tl.load(pairs_ptr + pair * 2 + 1).to(tl.int64)
    valid = (source >= 0) & (target >= 0)

    if control_ptr is not None:
        bound = tl.load(control_ptr).to(tl.int64)
        highest = source * 0 - 1
        if SOURCE_BOUNDED:
            highest = tl.maximum(highest, source)
        if TARGET_BOUNDED:
            highest = tl.maximum(highest, target)
        bad = valid & (highest >= bound)
        if bad & (segment == 0) & (chunk == 0):
            tl.atomic_add(control_ptr + 1, 1)
            if tl.atomic_cas(control_ptr + 2, 0, 3) == 0:  # kind 3: a block copied
                tl.store(control_ptr + 3, pair.to(tl.int32))
                tl.store(control_ptr + 4, tl.minimum(highest, 2**31 - 1).to(tl.int32))
        valid = valid & (highest < bound)

    num_bytes = tl.load(table_ptr + segment * 3 + 2)
    source_address = tl.load(table_ptr + segment * 3) + source * num_bytes
    target_address = tl.load(table_ptr + segment * 3 + 1) + target * num_bytes
    copy_words(source_address, target_address, num_bytes, chunk, valid, BLOCK_WORDS, ALIGNMENT)

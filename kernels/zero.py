"""Fill equal byte ranges with zero, at the speed of the device's memset."""

import triton
import triton.language as tl


@triton.jit
def _zero_words(middle, middle_end, chunk, BLOCK_WORDS: tl.constexpr):
    """Zero words [chunk * BLOCK_WORDS, + BLOCK_WORDS) of a 16-byte aligned middle."""
    # All counts are multiples of 4, which lets a masked store keep its 16 bytes.
    left = (middle_end - middle) // 4 - chunk * BLOCK_WORDS
    left = tl.multiple_of(tl.minimum(tl.maximum(left, 0), BLOCK_WORDS).to(tl.int32), 4)
    first = (middle + chunk * (BLOCK_WORDS * 4)).to(tl.pointer_type(tl.int32))
    first = tl.multiple_of(first, 16)
    word = tl.arange(0, BLOCK_WORDS)  # [BLOCK_WORDS]
    tl.store(first + word, tl.zeros([BLOCK_WORDS], tl.int32), mask=word < left)


@triton.jit
def _zero_edges(start, middle, middle_end, end):
    """Zero the up to 15 bytes in front of the middle and the up to 15 behind it."""
    byte = tl.arange(0, 16)  # [16]
    zeros = tl.zeros([16], tl.int8)
    head = start + byte
    tl.store(head.to(tl.pointer_type(tl.int8)), zeros, mask=head < tl.minimum(middle, end))
    tail = middle_end + byte
    tl.store(tail.to(tl.pointer_type(tl.int8)), zeros, mask=tail < end)


@triton.jit(do_not_specialize=["address", "num_bytes", "stride"])
def zero_kernel(
    address: tl.int64,  # first byte of range 0; an integer, because the launcher refuses pointers it cannot look up
    num_bytes: tl.int64,  # of every range
    stride: tl.int64,  # bytes from one range's first byte to the next one's
    BLOCK_WORDS: tl.constexpr,  # 4-byte words a program stores
):
    """Program (c, r) stores words [c * BLOCK_WORDS, + BLOCK_WORDS) of the 16-byte aligned middle of range r.

    A range may start and end at any byte: program (0, r) also stores the up to 15 bytes in front of the middle and the
    up to 15 behind it. So one compiled kernel serves every alignment, and the middle is stored 16 bytes at a time.
    """
    chunk = tl.program_id(0).to(tl.int64)
    start = address.to(tl.int64) + tl.program_id(1).to(tl.int64) * stride
    end = start + num_bytes
    middle = (start + 15) // 16 * 16
    middle_end = tl.maximum(end // 16 * 16, middle)
    _zero_words(middle, middle_end, chunk, BLOCK_WORDS)
    if chunk == 0:
        _zero_edges(start, middle, middle_end, end)


@triton.jit
def _zero_range(start, num_bytes, first_chunk, step, BLOCK_WORDS: tl.constexpr):
    """Zero the bytes [start, + num_bytes), chunks of BLOCK_WORDS words first_chunk, first_chunk + step, ...

    Whoever has chunk 0 also stores the up to 15 bytes in front of the 16-byte aligned middle and those behind it.
    """
    end = start + num_bytes
    middle = (start + 15) // 16 * 16
    middle_end = tl.maximum(end // 16 * 16, middle)
    num_words = (middle_end - middle) // 4
    for chunk in range(first_chunk, (num_words + BLOCK_WORDS - 1) // BLOCK_WORDS, step):
        _zero_words(middle, middle_end, chunk, BLOCK_WORDS)
    if first_chunk == 0:
        _zero_edges(start, middle, middle_end, end)


@triton.jit(do_not_specialize=["first_block", "num_blocks", "limit_bytes"])
def zero_table_kernel(
    header_ptr,  # [1] int64: address of the table, read when the kernel runs
    first_block: tl.int64,
    num_blocks: tl.int64,
    limit_bytes: tl.int64,  # rows whose range is as long as this, or longer, are left alone
    BLOCK_WORDS: tl.constexpr,  # 4-byte words a program stores at a time
):
    """Program (c, r) zeroes chunks c, c + programs, ... of blocks [first_block, + num_blocks) of the segment in row r.

    The table: four words of which the first is the number of rows, then rows [segment's address, bytes a block, piece's
    offset in the block, piece's bytes]. A segment's first row has offset 0; where its blocks are cut into several
    pieces the others come behind the first rows of all segments.
    """
    row_ptr = tl.load(header_ptr).to(tl.pointer_type(tl.int64)) + (tl.program_id(1).to(tl.int64) + 1) * 4
    block_bytes = tl.load(row_ptr + 1)
    num_bytes = num_blocks * block_bytes
    if num_bytes < limit_bytes:
        start = tl.load(row_ptr) + first_block * block_bytes
        chunk = tl.program_id(0).to(tl.int64)
        _zero_range(start, num_bytes, chunk, tl.num_programs(0).to(tl.int64), BLOCK_WORDS)


@triton.jit(do_not_specialize_on_alignment=["ids_ptr"])
def zero_blocks_kernel(
    header_ptr,  # [1] int64, as above: so a captured launch sees segments that are added later
    ids_ptr,  # [num_ids] int32 or int64, negative: skipped
    control_ptr,  # [8] int32: word 0 is the bound; ids at or past it are counted
    KIND: tl.constexpr,  # word 2 of the control block for such an id
    BLOCK_WORDS: tl.constexpr,
):
    """Program (i, w) zeroes pieces w, w + programs, ... of block ids[i], over all segments of the table."""
    row = tl.program_id(0)
    block = tl.load(ids_ptr + row).to(tl.int64)
    bound = tl.load(control_ptr)
    if block >= bound:
        if tl.program_id(1) == 0:
            tl.atomic_add(control_ptr + 1, 1)
            if tl.atomic_cas(control_ptr + 2, 0, KIND) == 0:
                tl.store(control_ptr + 3, row)
                tl.store(control_ptr + 4, tl.minimum(block, 2147483647).to(tl.int32))
    elif block >= 0:
        table_ptr = tl.load(header_ptr).to(tl.pointer_type(tl.int64))
        num_rows = tl.load(table_ptr)
        for index in range(tl.program_id(1).to(tl.int64), num_rows, tl.num_programs(1).to(tl.int64)):
            row_ptr = table_ptr + (index + 1) * 4
            start = tl.load(row_ptr) + block * tl.load(row_ptr + 1) + tl.load(row_ptr + 2)
            zero = index * 0
            _zero_range(start, tl.load(row_ptr + 3), zero, zero + 1, BLOCK_WORDS)

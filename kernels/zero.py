"""Fill equal byte ranges with zero, at the speed of the device's memset."""

import triton
import triton.language as tl


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

    # Words of this program. All counts are multiples of 4, which lets a masked store keep its 16 bytes.
    left = (middle_end - middle) // 4 - chunk * BLOCK_WORDS
    left = tl.multiple_of(tl.minimum(tl.maximum(left, 0), BLOCK_WORDS).to(tl.int32), 4)
    first = (middle + chunk * (BLOCK_WORDS * 4)).to(tl.pointer_type(tl.int32))
    first = tl.multiple_of(first, 16)
    word = tl.arange(0, BLOCK_WORDS)  # [BLOCK_WORDS]
    tl.store(first + word, tl.zeros([BLOCK_WORDS], tl.int32), mask=word < left)

    if chunk == 0:
        byte = tl.arange(0, 16)  # [16]
        zeros = tl.zeros([16], tl.int8)
        head = start + byte
        tl.store(head.to(tl.pointer_type(tl.int8)), zeros, mask=head < tl.minimum(middle, end))
        tail = middle_end + byte
        tl.store(tail.to(tl.pointer_type(tl.int8)), zeros, mask=tail < end)

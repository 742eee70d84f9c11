"""Gather scattered blocks into packed memory, or scatter them back: one launch for all segments of a buffer."""

import triton
import triton.language as tl

from .blocks import copy_words


@triton.jit(do_not_specialize=["blocks", "packed", "ids", "num_ids", "segment_stride", "block_bytes"])
def gather_blocks_kernel(
    blocks: tl.int64,  # address of block 0 of segment 0; an integer, because the launcher looks pointers up
    packed: tl.int64,  # address of [num_segments, num_ids, block_bytes], on the device or in pinned host memory
    ids: tl.int64,  # address of [num_ids] int32, on the device or in pinned host memory
    num_ids: tl.int64,
    segment_stride: tl.int64,  # bytes from one segment's block 0 to the next one's
    block_bytes: tl.int64,  # of one block in each segment
    BLOCK_WORDS: tl.constexpr,  # words a program copies
    ALIGNMENT: tl.constexpr,  # 16, 4 or 1: bytes that divide every address and size; words have 4, 4 or 1 byte
    SCATTER: tl.constexpr,  # from packed memory to the blocks
):
    """Program (r, c) copies words [c * BLOCK_WORDS, + BLOCK_WORDS) of packed row r.

    Row r is block ids[r % num_ids] of segment r // num_ids. A program reads one id, so a list in host memory costs
    next to nothing.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1).to(tl.int64)
    segment = row // num_ids
    place = row - segment * num_ids
    block = tl.load((ids + place * 4).to(tl.pointer_type(tl.int32))).to(tl.int64)
    block_address = blocks + segment * segment_stride + block * block_bytes
    row_address = packed + row * block_bytes
    if SCATTER:
        source_address, target_address = row_address, block_address
    else:
        source_address, target_address = block_address, row_address
    copy_words(source_address, target_address, block_bytes, chunk, True, BLOCK_WORDS, ALIGNMENT)

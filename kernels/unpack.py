"""Scatter one packed host copy of a step's metadata into the static tensors that graphs are captured over."""

import triton
import triton.language as tl


@triton.jit
def unpack_kernel(
    packed_ptr,  # int32 [words]: num_tokens, num_seqs, header's rest, slots (2 words each), lengths, query starts, ...
    block_table_ptr,  # int32 [MAX_SEQS, MAX_BLOCKS]
    seq_lens_ptr,  # int32 [MAX_SEQS]
    query_start_loc_ptr,  # int32 [MAX_SEQS + 1]
    slot_mapping_ptr,  # int64 [MAX_TOKENS]
    MAX_TOKENS: tl.constexpr,
    MAX_SEQS: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    HEADER_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,  # elements a program moves at a time
):
    """Programs (c, 0) write slots, lengths and query starts, padding included; programs (c, 1) write table rows.

    ... then each row's first entry and number of entries, then the entries. The counts travel in the header, so that
    no argument changes from step to step and one launch, built once, serves every step.
    """
    num_tokens = tl.load(packed_ptr)
    num_seqs = tl.load(packed_ptr + 1)
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    lane = tl.arange(0, BLOCK)  # [BLOCK]

    lens_ptr = packed_ptr + HEADER_WORDS + 2 * num_tokens
    starts_ptr = lens_ptr + num_seqs
    row_starts_ptr = starts_ptr + num_seqs + 1
    row_counts_ptr = row_starts_ptr + num_seqs
    entries_ptr = row_counts_ptr + num_seqs

    if tl.program_id(1) == 0:
        slots_ptr = (packed_ptr + HEADER_WORDS).to(tl.pointer_type(tl.int64))
        for first in range(program * BLOCK, MAX_TOKENS, num_programs * BLOCK):
            token = first + lane
            slot = tl.load(slots_ptr + token, mask=token < num_tokens, other=-1)
            tl.store(slot_mapping_ptr + token, slot, mask=token < MAX_TOKENS)
        for first in range(program * BLOCK, MAX_SEQS + 1, num_programs * BLOCK):
            seq = first + lane
            length = tl.load(lens_ptr + seq, mask=seq < num_seqs, other=0)
            tl.store(seq_lens_ptr + seq, length, mask=seq < MAX_SEQS)
            start = tl.load(starts_ptr + seq, mask=seq <= num_seqs, other=0)
            start = tl.where(seq <= num_seqs, start, num_tokens)  # the last query start, repeated
            tl.store(query_start_loc_ptr + seq, start, mask=seq < MAX_SEQS + 1)
    else:
        for row in range(program, num_seqs, num_programs):
            row_entries_ptr = entries_ptr + tl.load(row_starts_ptr + row).to(tl.int64)
            num_entries = tl.load(row_counts_ptr + row)
            row_ptr = block_table_ptr + tl.cast(row, tl.int64) * MAX_BLOCKS
            for first in range(0, num_entries, BLOCK):
                entry = first + lane
                block = tl.load(row_entries_ptr + entry, mask=entry < num_entries, other=0)
                tl.store(row_ptr + entry, block, mask=entry < num_entries)

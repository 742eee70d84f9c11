"""Steps of a batch, and what they must leave in the static tensors of AttentionBuffers, on every device."""

import numpy as np
import torch

from triton_kv.metadata import AttentionBuffers

MAX_TOKENS, MAX_SEQS, MAX_BLOCKS, BLOCK_SIZE = 24, 6, 5, 4


def make_buffers(block_size: int | None = None, device: torch.device | str = "cpu") -> AttentionBuffers:
    """Buffers whose static tensors hold rubbish, so that whatever a fill leaves out shows."""
    buffers = AttentionBuffers(MAX_TOKENS, MAX_SEQS, MAX_BLOCKS, device, block_size=block_size)
    poison(buffers)
    return buffers


def poison(buffers: AttentionBuffers) -> None:
    for tensor in static_tensors(buffers):
        tensor.fill_(-777)


def static_tensors(buffers: AttentionBuffers) -> tuple[torch.Tensor, ...]:
    """Block table, lengths, slots and query starts, whole."""
    whole = buffers.view(buffers.max_tokens, buffers.max_seqs, max(buffers.max_tokens, 2))
    assert whole.query_start_loc is not None
    return whole.block_table, whole.seq_lens, whole.slot_mapping, whole.query_start_loc


def check_step(buffers, block_tables, seq_lens, slots, query_lens=None, block_size=None):
    """The static tensors hold this step, and padding in all the rest."""
    table, lens, slot_mapping, query_start_loc = static_tensors(buffers)
    num_seqs, num_tokens = len(seq_lens), len(slots)
    assert slot_mapping.tolist() == [*(int(slot) for slot in slots), *[-1] * (buffers.max_tokens - num_tokens)]
    assert lens.tolist() == [*(int(length) for length in seq_lens), *[0] * (buffers.max_seqs - num_seqs)]
    starts = [0]
    for length in [1] * num_seqs if query_lens is None else query_lens:
        starts.append(starts[-1] + int(length))
    assert query_start_loc.tolist() == starts + [num_tokens] * (buffers.max_seqs - num_seqs)
    for row, entries in enumerate(block_tables):
        used = len(entries) if block_size is None else -(-int(seq_lens[row]) // block_size)
        assert table[row, :used].tolist() == [int(entry) for entry in entries[:used]]


# id, block tables, lengths, slots, query lengths
STEPS = [
    ("decode", [[3, 1], [2, 9, 4], [7]], [8, 9, 1], [7, 16, 28], None),
    ("mixed", [[3, 1], [2, 9, 4], [7]], [8, 9, 4], [7, 36, 37, 38, 28, 29, 30, 31], [1, 3, 4]),
    ("one_sequence_of_all_tokens", [[1, 2, 3, 4, 5]], [20], list(range(4, 24)), [20]),
    ("sequence_without_tokens", [[1], [2], [3]], [4, 4, 4], [5, 6], [1, 0, 1]),
    ("padding_rows_and_slots", [[1], [], [-1]], [3, 0, 0], [6, -1, -1], None),
    ("full", [[i + 1] * 5 for i in range(6)], [20] * 6, list(range(24)), [4] * 6),
    ("empty", [], [], [], None),
    ("slots_past_32_bits", [[2**29], [2**31 - 1]], [4, 4], [2**31 + 3, 2**40], None),
]


def as_rectangle(rows: list[list[int]], width: int = MAX_BLOCKS) -> np.ndarray:
    table = np.full((len(rows), width), -5, dtype=np.int32)
    for row, entries in zip(table, rows, strict=True):
        row[: len(entries)] = entries
    return table


def large_step(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """More tokens, sequences and blocks than a program moves at a time: 1100 sequences, one of them of 2500 blocks."""
    rng = np.random.default_rng(seed)
    query_lens = rng.integers(1, 4, 1100)
    lens = query_lens + rng.integers(0, 8, 1100)
    lens[777] = 10_000
    table = rng.integers(0, 1 << 30, (1100, 2500)).astype(np.int32)
    return table, lens, rng.integers(-1, 1 << 40, query_lens.sum()), query_lens


def make_large_buffers(device: torch.device | str = "cpu") -> AttentionBuffers:
    """Buffers for `large_step`, of sizes that no power of two divides."""
    buffers = AttentionBuffers(3333, 1111, 2500, device, block_size=BLOCK_SIZE)
    poison(buffers)
    return buffers

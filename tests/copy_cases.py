"""The table of block copies that the CPU, interpreter and GPU tests share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from triton_kv.blocks import BlockSpans, copy_block_pairs, copy_table


@dataclass(frozen=True)
class CopyCase:
    """Buffers as (segments, block bytes, bytes between segments beyond the blocks), and pairs of block ids."""

    name: str
    buffers: tuple[tuple[int, int, int], ...]
    pairs: tuple[tuple[int, int], ...]
    watermark: int | None = None  # of 12 blocks; None leaves ids unbounded
    dtype: torch.dtype = torch.int32
    offset: int = 0  # bytes by which the buffers miss an aligned address

    def __str__(self) -> str:
        return self.name


NUM_BLOCKS = 12
CASES = (
    CopyCase("one_segment", ((1, 64, 0),), ((0, 5),)),
    CopyCase("one_byte_blocks", ((1, 1, 0),), ((3, 4), (1, 2))),
    CopyCase("odd_blocks", ((2, 37, 3),), ((0, 11), (7, 2), (9, 1))),
    CopyCase("four_byte_blocks", ((2, 36, 4),), ((0, 11), (7, 2))),
    CopyCase("unlike_buffers", ((3, 4096, 512), (2, 48, 16), (1, 80000, 0)), ((0, 6), (1, 7), (2, 8))),
    CopyCase("one_source_many_targets", ((4, 256, 0),), ((2, 3), (2, 9), (2, 11), (2, 0))),
    CopyCase("padding_pairs", ((2, 512, 0),), ((-1, 3), (4, -1), (-1, -1), (5, 6))),
    CopyCase("int64", ((2, 512, 0),), ((1, 2), (3, 4)), dtype=torch.int64),
    CopyCase("unaligned", ((2, 512, 0),), ((1, 2), (3, 4)), offset=8),
    CopyCase("misaligned", ((2, 512, 0),), ((1, 2), (3, 4)), offset=1),
    CopyCase("below_the_watermark", ((2, 512, 0),), ((1, 2), (7, 4)), watermark=8),
    CopyCase("beyond_the_watermark", ((2, 512, 0), (1, 64, 0)), ((1, 2), (8, 3), (4, 11), (0, 5)), watermark=8),
    CopyCase("no_pair", ((2, 512, 0),), ()),
)


def make(case: CopyCase, device: torch.device) -> BlockSpans:
    """Buffers full of bytes that differ from block to block."""
    generator = torch.Generator().manual_seed(len(case.name))
    buffers = []
    for segments, size, gap in case.buffers:
        num_bytes = segments * (NUM_BLOCKS * size + gap)
        raw = torch.randint(0, 256, (num_bytes + 64,), dtype=torch.uint8, generator=generator).to(device)
        start = -raw.data_ptr() % 16 + case.offset
        buffers.append(raw[start : start + num_bytes])
    return BlockSpans(
        tuple(buffers),
        tuple(segments for segments, _, _ in case.buffers),
        tuple(NUM_BLOCKS * size + gap for _, size, gap in case.buffers),
        tuple(size for _, size, _ in case.buffers),
    )


def check(case: CopyCase, device: torch.device) -> None:
    """Runs the case and compares every byte, also between the segments, and the control block."""
    spans = make(case, device)
    before = [buffer.clone() for buffer in spans.buffers]
    control = None
    if case.watermark is not None:
        control = torch.tensor([case.watermark] + [0] * 7, dtype=torch.int32, device=device)
    pairs = torch.tensor(case.pairs, dtype=case.dtype).reshape(-1, 2).to(device)
    copy_block_pairs(spans, spans, pairs, copy_table(spans, spans), control=control)
    bad = []
    expected = BlockSpans(tuple(before), *spans[1:])
    for index, (source, target) in enumerate(case.pairs):
        if min(source, target) < 0:
            continue
        if case.watermark is not None and max(source, target) >= case.watermark:
            bad.append((index, max(source, target)))
            continue
        for buffer in range(len(before)):
            expected.rows(buffer)[:, target] = spans.rows(buffer)[:, source]
    for now, then in zip(spans.buffers, expected.buffers):
        assert torch.equal(now, then)
    if control is not None:
        watermark, count, kind, row, value, *rest = control.tolist()
        assert (watermark, count, rest) == (case.watermark, len(bad), [0, 0, 0])
        assert (row, value) in bad if bad else kind == 0
        assert kind == (3 if bad else 0)

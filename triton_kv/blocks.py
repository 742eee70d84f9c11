"""Zeroing of byte ranges, and copies of whole blocks over every layer and state at once."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from triton_kv.errors import Unavailable
from triton_kv.kernels.blocks import copy_blocks_kernel
from triton_kv.kernels.zero import zero_kernel
from triton_kv.launch import Launch, eager, interpreted, register

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# 1024 words at 4 warps are faster than cuMemsetD8Async on an H200 (`python -m bench run zero`).
_WORDS_PER_PROGRAM = 1024
# The interpreter takes about a millisecond a program, whatever its size.
_WORDS_PER_INTERPRETED_PROGRAM = 1 << 18
_MAX_GRID_0 = 2**31 - 1
_MAX_GRID_1 = 65535


def zero_ranges(address: int, num_bytes: int, *, stride: int, count: int, device: torch.device) -> None:
    """Set the bytes `[address + i * stride, + num_bytes)` to zero for every `i < count`.

    On a GPU it queues kernels on the current stream of `device` and does not synchronise; on the CPU the bytes are zero
    when it returns. The ranges must be mapped and writable: a byte that is not faults (an illegal access on a GPU,
    SIGSEGV on the CPU). Any alignment, any size; ranges may overlap. Bytes outside the ranges are untouched.

    Raises `ValueError` for a negative address, size, or count, `Unavailable` on a GPU under `TRITON_INTERPRET=1`.
    """
    if address < 0 or num_bytes < 0 or count < 0:
        raise ValueError(f"address, num_bytes and count must not be negative, got {address}, {num_bytes} and {count}")
    if device.type == "cpu" and not interpreted(zero_kernel):
        for i in range(count):
            ctypes.memset(address + i * stride, 0, num_bytes)
        return
    if device.type != "cpu" and interpreted(zero_kernel):
        raise Unavailable(f"TRITON_INTERPRET=1 runs kernels on the CPU and cannot write to {device}: unset it")
    for launch in zero_launches(address, num_bytes, stride=stride, count=count):
        launch.run(device)


def zero_launches(address: int, num_bytes: int, *, stride: int, count: int) -> list[Launch]:
    """The launches of `zero_ranges`: one, unless the ranges outnumber or outgrow what one grid can hold."""
    words = _WORDS_PER_INTERPRETED_PROGRAM if interpreted(zero_kernel) else _WORDS_PER_PROGRAM
    launches = []
    largest = _MAX_GRID_0 * words * 4
    for offset in range(0, num_bytes, largest):
        size = min(num_bytes - offset, largest)
        for first in range(0, count, _MAX_GRID_1):
            launches.append(
                Launch(
                    kernel=zero_kernel,
                    grid=(-(-size // (words * 4)), min(count - first, _MAX_GRID_1)),
                    arguments={
                        "address": address + offset + first * stride,
                        "num_bytes": size,
                        "stride": stride,
                        "BLOCK_WORDS": words,
                    },
                    num_warps=4,
                    num_stages=1,
                )
            )
    return launches


# 8 KiB a program: four 16-byte vectors a thread, so that reads are in flight while the first writes go out.
_COPY_WORDS = 2048
_COPY_INTERPRETED_WORDS = 1 << 15
_BLOCK_COPIED = 3  # the kind of error in the control block
_INT32_MAX = 2**31 - 1


class BlockSpans(NamedTuple):
    """Buffers as spans of equal blocks: what a copy of block ids means in bytes. Lists have an entry a buffer."""

    buffers: tuple[torch.Tensor, ...]  # uint8, each over all segments from its first byte on
    num_segments: tuple[int, ...]
    segment_strides: tuple[int, ...]  # bytes
    block_bytes: tuple[int, ...]  # of one block in each segment

    def rows(self, index: int) -> torch.Tensor:
        """uint8 `[num_segments, num_blocks, block_bytes]` over one buffer."""
        buffer, segments = self.buffers[index], self.num_segments[index]
        stride, size = self.segment_strides[index], self.block_bytes[index]
        num_blocks = (buffer.numel() - (segments - 1) * stride) // size
        return buffer.as_strided((segments, num_blocks, size), (stride, size, 1))

    def bases(self) -> list[tuple[int, int]]:
        """Address of block 0 and bytes a block, of every segment."""
        return [
            (buffer.data_ptr() + segment * stride, size)
            for buffer, segments, stride, size in zip(*self)
            for segment in range(segments)
        ]


class CopyTable(NamedTuple):
    """What the kernel looks up. Addresses never move, so a cache makes it once."""

    addresses: torch.Tensor  # int64 [segments, 3]: of source block 0, of target block 0, bytes a block
    alignment: int  # the largest of 16, 4 and 1 that divides them all


def copy_table(source: BlockSpans, target: BlockSpans) -> CopyTable:
    """The table of a copy between two sets of buffers, on their device. Copies a few numbers there."""
    rows = [(first, second, size) for (first, size), (second, _) in zip(source.bases(), target.bases())]
    common = math.gcd(*(value for row in rows for value in row))
    addresses = torch.tensor(rows, dtype=torch.int64, device=source.buffers[0].device)
    return CopyTable(addresses, 16 if common % 16 == 0 else 4 if common % 4 == 0 else 1)


def copy_block_pairs(
    source: BlockSpans,
    target: BlockSpans,
    pairs: torch.Tensor,
    table: CopyTable,
    *,
    control: torch.Tensor | None = None,
    source_bounded: bool = True,
    target_bounded: bool = True,
) -> None:
    """Copy block `pairs[i, 0]` of `source` to block `pairs[i, 1]` of `target`, in every segment, all at once.

    Args:
        source, target: spans of the same number of segments and block sizes; the same object copies within.
        pairs: int32 or int64 `[n, 2]` on the device. A pair with a negative id is skipped. One with an id at or past
            the watermark is dropped and counted in `control`. No target may be another pair's source or target.
        table: `copy_table(source, target)`.
        control: int32 `[8]`; None leaves ids unbounded.
        source_bounded, target_bounded: whether that side's ids are the cache's.

    One launch on the current stream; does not synchronise and may be captured. Raises `ValueError` or `TypeError` for
    pairs of another shape or dtype.
    """
    if pairs.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"pairs must be int32 or int64, got {pairs.dtype}")
    if pairs.dim() != 2 or pairs.shape[1] != 2 or not pairs.is_contiguous():
        raise ValueError(f"pairs must be contiguous [n, 2], got {tuple(pairs.shape)} with strides {pairs.stride()}")
    if pairs.device != table.addresses.device:
        raise ValueError(f"pairs are on {pairs.device}, but the cache is on {table.addresses.device}")
    within = source is target
    arguments = (
        list(target.buffers),
        None if within else list(source.buffers),
        pairs,
        table.addresses,
        control,
        list(target.num_segments),
        list(target.segment_strides),
        None if within else list(source.segment_strides),
        list(target.block_bytes),
        table.alignment,
        source_bounded,
        target_bounded,
    )
    if eager(pairs):
        _copy_block_pairs(*arguments)
    else:
        _OP(*arguments)


def copy_block_pairs_reference(
    source: BlockSpans,
    target: BlockSpans,
    pairs: torch.Tensor,
    *,
    control: torch.Tensor | None = None,
    source_bounded: bool = True,
    target_bounded: bool = True,
) -> None:
    """`copy_block_pairs` in plain torch."""
    sources, targets = pairs[:, 0].long(), pairs[:, 1].long()
    kept = (sources >= 0) & (targets >= 0)
    if control is not None:
        highest = torch.full_like(sources, -1)
        for ids, bounded in ((sources, source_bounded), (targets, target_bounded)):
            highest = torch.maximum(highest, ids) if bounded else highest
        bad = kept & (highest >= control[0])
        if bool(bad.any()):
            rows = bad.nonzero()[:, 0]
            control[1] += rows.numel()
            if int(control[2]) == 0:
                row = int(rows[0])
                control[2:5] = torch.tensor([_BLOCK_COPIED, row, min(int(highest[row]), _INT32_MAX)])
        kept &= ~bad
    sources, targets = sources[kept], targets[kept]
    for index in range(len(target.buffers)):
        target.rows(index)[:, targets] = source.rows(index)[:, sources]


def copy_launch(
    addresses: torch.Tensor,
    pairs: torch.Tensor,
    control: torch.Tensor | None,
    *,
    alignment: int,
    largest_block_bytes: int,
    source_bounded: bool = True,
    target_bounded: bool = True,
) -> Launch:
    """The launch of `copy_block_pairs`."""
    most = _COPY_INTERPRETED_WORDS if interpreted(copy_blocks_kernel) else _COPY_WORDS
    num_words = largest_block_bytes // (1 if alignment == 1 else 4)
    block_words = min(most, 1 << max(num_words - 1, 0).bit_length())
    return Launch(
        kernel=copy_blocks_kernel,
        grid=(pairs.shape[0], addresses.shape[0], -(-num_words // block_words)),
        arguments={
            "table_ptr": addresses,
            "pairs_ptr": pairs,
            "control_ptr": control,
            "BLOCK_WORDS": block_words,
            "ALIGNMENT": alignment,
            "SOURCE_BOUNDED": source_bounded,
            "TARGET_BOUNDED": target_bounded,
        },
        num_warps=4,
        num_stages=1,
    )


def _copy_block_pairs(
    targets: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor] | None,
    pairs: torch.Tensor,
    table: torch.Tensor,
    control: torch.Tensor | None,
    num_segments: Sequence[int],
    target_strides: Sequence[int],
    source_strides: Sequence[int] | None,
    block_bytes: Sequence[int],
    alignment: int,
    source_bounded: bool,
    target_bounded: bool,
) -> None:
    if pairs.shape[0] == 0:
        return
    bounded = {"source_bounded": source_bounded, "target_bounded": target_bounded}
    if pairs.device.type == "cpu" and not interpreted(copy_blocks_kernel):
        target = BlockSpans(tuple(targets), tuple(num_segments), tuple(target_strides), tuple(block_bytes))
        source = target
        if sources is not None and source_strides is not None:
            source = BlockSpans(tuple(sources), tuple(num_segments), tuple(source_strides), tuple(block_bytes))
        copy_block_pairs_reference(source, target, pairs, control=control, **bounded)
        return
    launch = copy_launch(table, pairs, control, alignment=alignment, largest_block_bytes=max(block_bytes), **bounded)
    launch.run(pairs.device)


_OP = register(
    "copy_blocks",
    "(Tensor(a!)[] targets, Tensor[]? sources, Tensor pairs, Tensor table, Tensor(c!)? control, int[] num_segments, "
    "int[] target_strides, int[]? source_strides, int[] block_bytes, int alignment, bool source_bounded, "
    "bool target_bounded) -> ()",
    _copy_block_pairs,
)


class CopyOrder(NamedTuple):
    """Copies that may overlap, in an order that makes them as if all happened at once."""

    staged: list[tuple[int, int]]  # sources that another copy overwrites, with their targets: by way of a buffer
    direct: list[tuple[int, int]]  # the others


def order_copies(pairs: Iterable[tuple[int, int]]) -> CopyOrder:
    """Which of the copies must go through a staging buffer. Pairs with a negative id and copies onto itself drop out.

    Raises `ValueError` if two copies have one target.
    """
    useful = [(int(a), int(b)) for a, b in pairs]
    useful = [(a, b) for a, b in useful if a >= 0 and b >= 0 and a != b]
    targets = {b for _, b in useful}
    if len(targets) != len(useful):
        twice = next(b for index, (_, b) in enumerate(useful) if any(b == other for _, other in useful[:index]))
        raise ValueError(f"two copies have block {twice} as their target")
    staged = [(a, b) for a, b in useful if a in targets]
    return CopyOrder(staged, [(a, b) for a, b in useful if a not in targets])


__all__ = [
    "BlockSpans",
    "CopyOrder",
    "CopyTable",
    "copy_block_pairs",
    "copy_block_pairs_reference",
    "copy_launch",
    "copy_table",
    "order_copies",
    "zero_launches",
    "zero_ranges",
]

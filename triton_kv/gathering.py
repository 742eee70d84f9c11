"""Scattered blocks of a buffer to packed memory and back in one launch, so that few copies cross the link."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, NamedTuple

from triton_kv.kernels.gather import gather_blocks_kernel
from triton_kv.launch import Launch, interpreted

if TYPE_CHECKING:
    import torch

# 8 KiB a program, as in `blocks.copy_launch`.
_WORDS = 2048
_INTERPRETED_WORDS = 1 << 15


class BlockPlaces(NamedTuple):
    """Where the blocks of a buffer are: block b of segment s at `address + s * segment_stride + b * block_bytes`."""

    address: int
    num_segments: int
    segment_stride: int  # bytes
    block_bytes: int  # of one block in each segment

    def alignment(self, packed: int) -> int:
        """The largest of 16, 4 and 1 bytes that divides every address of a copy to or from `packed`."""
        common = math.gcd(self.address, self.segment_stride, self.block_bytes, packed)
        return 16 if common % 16 == 0 else 4 if common % 4 == 0 else 1


def gather_blocks(
    places: BlockPlaces, ids: int, num_ids: int, packed: int, device: torch.device, *, scatter: bool = False
) -> None:
    """Copy blocks to packed memory `[num_segments, num_ids, block_bytes]`, or with `scatter` from there to the blocks.

    Args:
        places: where the blocks are; every one that is named must be mapped.
        ids: address of int32 `[num_ids]`, block ids each named once. On a GPU it may be pinned host memory, and so may
            packed memory: kernels read and write both over the link.
        packed: address of the packed memory.

    On a GPU one launch on the current stream of `device`, not waited for; on the CPU done when it returns.
    """
    if num_ids == 0:
        return
    if device.type == "cpu" and not interpreted(gather_blocks_kernel):
        gather_blocks_reference(places, ids, num_ids, packed, scatter=scatter)
        return
    gather_launch(places, ids, num_ids, packed, scatter=scatter).run(device)


def gather_blocks_reference(places: BlockPlaces, ids: int, num_ids: int, packed: int, *, scatter: bool = False) -> None:
    """`gather_blocks` over addresses of the host, block by block."""
    blocks = (ctypes.c_int32 * num_ids).from_address(ids)
    size = places.block_bytes
    for segment in range(places.num_segments):
        for place in range(num_ids):
            block = places.address + segment * places.segment_stride + blocks[place] * size
            row = packed + (segment * num_ids + place) * size
            ctypes.memmove(block if scatter else row, row if scatter else block, size)


def gather_launch(places: BlockPlaces, ids: int, num_ids: int, packed: int, *, scatter: bool = False) -> Launch:
    """The launch of `gather_blocks`."""
    alignment = places.alignment(packed)
    num_words = places.block_bytes // (1 if alignment == 1 else 4)
    most = _INTERPRETED_WORDS if interpreted(gather_blocks_kernel) else _WORDS
    block_words = min(most, 1 << max(num_words - 1, 0).bit_length())
    return Launch(
        kernel=gather_blocks_kernel,
        grid=(places.num_segments * num_ids, -(-num_words // block_words)),
        arguments={
            "blocks": places.address,
            "packed": packed,
            "ids": ids,
            "num_ids": num_ids,
            "segment_stride": places.segment_stride,
            "block_bytes": places.block_bytes,
            "BLOCK_WORDS": block_words,
            "ALIGNMENT": alignment,
            "SCATTER": scatter,
        },
        num_warps=4,
        num_stages=1,
    )


__all__ = ["BlockPlaces", "gather_blocks", "gather_blocks_reference", "gather_launch"]

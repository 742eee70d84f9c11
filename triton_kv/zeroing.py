"""Zeroing of blocks over all buffers of a cache in one launch, from a table of segments that lies on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from triton_kv.blocks import zero_launches
from triton_kv.errors import CaptureError
from triton_kv.kernels.zero import zero_blocks_kernel, zero_table_kernel
from triton_kv.launch import Launch
from triton_kv.spec import whole_number

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from triton_kv.memory import VirtualMemory

BLOCK_ZEROED = 4  # the error kind of the control block: an id at or past the watermark in `zero_blocks`
# A segment's new bytes below this are zeroed with all others of their kind in one launch, once everything is mapped;
# longer ranges are zeroed while the next one is mapped, which hides the mapping (`python -m bench run vmm`).
TOGETHER_BELOW_BYTES = 8 << 20
# A block's page is zeroed in pieces of this size, one program each, so that a state of megabytes takes many.
PIECE_BYTES = 64 << 10
_WORDS_PER_PROGRAM = 1024  # as in `blocks.zero_ranges`
_MAX_PROGRAMS = 4096  # of a launch over the table: each has several chunks
_MAX_PIECES_AT_ONCE = 256  # programs a block id
_MAX_GRID_1 = 65535
_MAX_TABLES = 8  # kept for kernels that still read an old one, before the device is waited for


class SegmentTable:
    """Addresses and block sizes of all segments, on the device.

    A launch that was captured reads the table when it is replayed: the header, one word whose address never changes,
    says where it is. `set` makes a new table and leaves the old one to kernels that still run.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self.device = device
        self._stream = stream  # what writes the table, so that no queued work is waited for but the caller's
        self.header = torch.zeros(1, dtype=torch.int64, device=device)  # address of the table
        self.segments: list[tuple[int, int]] = []  # address, bytes a block
        self.num_rows = 0
        self._tables: list[torch.Tensor] = []  # [1 + num_rows, 4] each; all that a running kernel may still read

    def set(self, segments: Sequence[tuple[int, int]]) -> None:
        """Makes these the segments of the table; the host waits until the device sees them."""
        self.segments = list(segments)
        first = [(address, size, 0, min(PIECE_BYTES, size)) for address, size in self.segments]
        others = [
            (address, size, offset, min(PIECE_BYTES, size - offset))
            for address, size in self.segments
            for offset in range(PIECE_BYTES, size, PIECE_BYTES)
        ]
        num_rows = len(first) + len(others)
        words = torch.tensor([(num_rows, 0, 0, 0), *first, *others], dtype=torch.int64)
        # Of the caller's stream, like the header: another stream would take a segment of the allocator for itself.
        table = torch.empty_like(words, device=self.device)
        if len(self._tables) == _MAX_TABLES:
            if self._stream is not None:
                torch.cuda.synchronize(self.device)
            del self._tables[:-1]
        self._tables.append(table)
        if self._stream is not None:
            torch.cuda.current_stream(self.device).synchronize()
        with torch.cuda.stream(self._stream):
            table.copy_(words)
            self.header.fill_(table.data_ptr())
        if self._stream is not None:
            self._stream.synchronize()
        self.num_rows = num_rows

    def range_launch(self, first_block: int, num_blocks: int, *, limit_bytes: int) -> Launch:
        """Zeroes blocks `[first_block, + num_blocks)` of every segment whose range is shorter than `limit_bytes`."""
        sizes = [size * num_blocks for _, size in self.segments if size * num_blocks < limit_bytes]
        chunks = -(-max(sizes, default=1) // (_WORDS_PER_PROGRAM * 4))
        return Launch(
            kernel=zero_table_kernel,
            grid=(max(min(chunks, _MAX_PROGRAMS // max(len(self.segments), 1)), 1), max(len(self.segments), 1)),
            arguments={
                "header_ptr": self.header,
                "first_block": first_block,
                "num_blocks": num_blocks,
                "limit_bytes": limit_bytes,
                "BLOCK_WORDS": _WORDS_PER_PROGRAM,
            },
            num_warps=4,
            num_stages=1,
        )

    def blocks_launch(self, ids: torch.Tensor, control: torch.Tensor) -> Launch:
        """Zeroes the blocks `ids` in every segment; grids do not depend on what was added after a capture."""
        return Launch(
            kernel=zero_blocks_kernel,
            grid=(ids.shape[0], max(min(self.num_rows, _MAX_PIECES_AT_ONCE), 1)),
            arguments={
                "header_ptr": self.header,
                "ids_ptr": ids,
                "control_ptr": control,
                "KIND": BLOCK_ZEROED,
                "BLOCK_WORDS": _WORDS_PER_PROGRAM,
            },
            num_warps=4,
            num_stages=1,
        )


class Zeroing:
    """What zeroes the blocks of one cache: those that `extend` adds, and those that a caller names."""

    def __init__(self, memory: VirtualMemory, stream: torch.cuda.Stream | None = None) -> None:
        self._memory = memory
        self.table = SegmentTable(memory.device, stream)
        # Only a driver with kernels of its own has it; the others fill memory one segment after the other.
        self._enqueue: Callable[[Callable[[], None]], None] | None = getattr(memory, "enqueue", None)

    def takes(self, new_bytes: int) -> bool:
        """Whether so many new bytes of each segment wait for `zero_new`, instead of being filled while others map."""
        return (
            self._enqueue is not None and len(self.table.segments) <= _MAX_GRID_1 and new_bytes < TOGETHER_BELOW_BYTES
        )

    def zero_new(self, first_block: int, num_blocks: int) -> None:
        """Queues the zeroing of new blocks in all segments that `takes` was true for: one launch."""
        sizes = [block_bytes * num_blocks for _, block_bytes in self.table.segments]
        if self._enqueue is not None and any(self.takes(size) for size in sizes):
            launch = self.table.range_launch(first_block, num_blocks, limit_bytes=TOGETHER_BELOW_BYTES)
            self._enqueue(launch.run)

    def launches(self, control: torch.Tensor) -> list[Launch]:
        """One of each kernel that can be reached."""
        blocks = [
            self.table.blocks_launch(torch.empty(1, dtype=dtype, device="meta"), control)
            for dtype in (torch.int32, torch.int64)
        ]
        new = self.table.range_launch(0, 1, limit_bytes=TOGETHER_BELOW_BYTES)
        return [*blocks, new, *zero_launches(0, 1, stride=0, count=1)]

    def zero_blocks(self, ids: torch.Tensor | Sequence[int], control: torch.Tensor) -> None:
        """`KVCache.zero_blocks`."""
        device = self.table.device
        if not isinstance(ids, torch.Tensor):
            if self._memory.is_capturing():
                raise CaptureError("zero_blocks of a list (pass a tensor on the cache's device instead)")
            ids = torch.tensor([whole_number("a block id", each) for each in ids], dtype=torch.int64, device=device)
        if ids.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"block ids must be int32 or int64, got {ids.dtype}")
        if ids.dim() != 1 or (ids.shape[0] > 1 and ids.stride(0) != 1):
            raise ValueError(
                f"block ids must be 1-D and contiguous, got {tuple(ids.shape)} with strides {ids.stride()}"
            )
        if ids.device.type != device.type or (device.type == "cuda" and ids.device != control.device):
            raise ValueError(f"block ids are on {ids.device}, but the cache is on {device}")
        if ids.shape[0] == 0:
            return
        if device.type == "cuda":
            self.table.blocks_launch(ids, control).run(device)
            return
        bound = int(control[0])
        for row, block in enumerate(ids.tolist()):
            if block >= bound:
                control[1] += 1
                if int(control[2]) == 0:
                    control[2:5] = torch.tensor([BLOCK_ZEROED, row, min(block, 2**31 - 1)], dtype=torch.int32)
            elif block >= 0:
                for address, block_bytes in self.table.segments:
                    self._memory.fill(address + block * block_bytes, block_bytes)
        self._memory.wait()


__all__ = ["BLOCK_ZEROED", "SegmentTable", "Zeroing"]

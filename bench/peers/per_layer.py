"""The plain way to grow a cache: a buffer a layer; map a segment, `zero_()` its tensor, next segment.

A baseline for `extend`, written here over the same driver calls. It overlaps mapping with zeroing, because each `zero_`
is asynchronous. One handle a segment and extend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from triton_kv.memory import VirtualMemory


class LayerBuffer:
    """One layer's buffer of equal segments, each with a committed prefix."""

    def __init__(self, memory: VirtualMemory, num_segments: int, segment_bytes: int) -> None:
        self.memory, self.num_segments, self.segment_bytes = memory, num_segments, segment_bytes
        self.num_bytes = num_segments * segment_bytes
        self.address = memory.reserve(self.num_bytes)
        self.committed_bytes = 0  # of each segment
        self.mapped: list[tuple[int, int, int]] = []  # address, bytes, handle
        self.tensor = memory.view(self.address, self.num_bytes, self)

    def grow(self, committed_bytes: int) -> None:
        """Commits every segment's prefix up to `committed_bytes` (whole granules). Only queues the zeroing."""
        size = committed_bytes - self.committed_bytes
        for segment in range(self.num_segments):
            offset = segment * self.segment_bytes + self.committed_bytes
            handle = self.memory.create(size)
            self.memory.map(self.address + offset, size, handle)
            self.memory.set_access(self.address + offset, size)
            self.mapped.append((self.address + offset, size, handle))
            self.tensor[offset : offset + size].view(torch.bfloat16).zero_()
        self.committed_bytes = committed_bytes

    def close(self) -> None:
        """Unmaps and frees everything. The caller has waited for the device."""
        for address, size, handle in self.mapped:
            self.memory.unmap(address, size)
            self.memory.release(handle)
        self.mapped.clear()
        del self.tensor
        self.memory.free(self.address, self.num_bytes)


class PerLayerCache:
    """`num_layers` buffers that grow one after the other."""

    def __init__(self, memory: VirtualMemory, num_layers: int, segments_per_layer: int, segment_bytes: int) -> None:
        self.memory = memory
        self.layers = [LayerBuffer(memory, segments_per_layer, segment_bytes) for _ in range(num_layers)]

    def grow(self, committed_bytes: int) -> None:
        """Commits and zeroes every segment's prefix; waits for the zeroing."""
        with self.memory.activate():
            for layer in self.layers:
                layer.grow(committed_bytes)
            self.memory.synchronize()

    def close(self) -> None:
        """Gives everything back."""
        with self.memory.activate():
            self.memory.synchronize()
            for layer in self.layers:
                layer.close()

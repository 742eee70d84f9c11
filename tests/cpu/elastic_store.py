"""A store of two unlike buffers, and a plain byte model of what its blocks hold."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from triton_kv.extensible import ExtensibleTensor
from triton_kv.memory import (
    AllocatedMemory,
    FakeMemory,
    FaultyMemory,
    HandlePolicy,
    HostMemory,
    PoisonedMemory,
    VirtualMemory,
)
from triton_kv.memory.wrapper import WrappedMemory
from triton_kv.store import BlockStore, StoredBuffer

G = 4096
CAPACITY = 24
PADDED_BLOCK = G // 2 + 512  # bytes a block in each segment of the first buffer
DENSE_BLOCK = G // 3 + 16  # and of the second, whose segments share granules


class Held(NamedTuple):
    """What must be the same after a change that failed."""

    state: str
    num_blocks: int
    watermark: int
    epoch: int
    mapped_bytes: int
    num_handles: int
    live: tuple[int, int, int]  # the driver's own count of reservations, handles and mappings
    free_bytes: int
    pinned_bytes: int
    host_bytes: int


def innermost(memory: VirtualMemory) -> VirtualMemory:
    while isinstance(memory, WrappedMemory):
        memory = memory.memory
    return memory


def make_store(
    memory: VirtualMemory, *, handles: HandlePolicy | None = None, alias: bool = False, checked: bool = False
) -> BlockStore:
    padded_stride = -(-CAPACITY * PADDED_BLOCK // G) * G
    padded = ExtensibleTensor(
        2 * CAPACITY * PADDED_BLOCK, num_segments=2, segment_stride_bytes=padded_stride, memory=memory, handles=handles
    )
    dense = ExtensibleTensor(3 * CAPACITY * DENSE_BLOCK, num_segments=3, memory=memory, handles=handles)
    stored = [StoredBuffer(padded, PADDED_BLOCK), StoredBuffer(dense, DENSE_BLOCK)]
    return BlockStore(memory, stored, CAPACITY, alias=alias, checked=checked)


def held(store: BlockStore) -> Held:
    driver = innermost(store.memory)
    return Held(
        state=store.state,
        num_blocks=store.num_blocks,
        watermark=int(store.control[0]),
        epoch=store.epoch,
        mapped_bytes=store.mapped_bytes,
        num_handles=sum(buffer.num_handles for buffer, _ in store.buffers),
        live=tuple(driver.live),
        free_bytes=driver.memory_info()[0] if store.elastic else 0,  # plain memory's is the machine's
        pinned_bytes=driver.pinned_bytes,
        host_bytes=store.stats().host_bytes,
    )


def has_bytes(store: BlockStore) -> bool:
    return not isinstance(innermost(store.memory), FakeMemory)


def segments(store: BlockStore) -> list[torch.Tensor]:
    """Every segment of every buffer as blocks, uint8 `[num_blocks, block_bytes]`."""
    views = []
    for buffer, block_bytes in store.buffers:
        for segment in range(buffer.num_segments):
            start = segment * buffer.segment_stride_bytes
            flat = buffer.view(start, store.num_blocks * block_bytes)
            views.append(flat.view(store.num_blocks, block_bytes))
    return views


class Model:
    """One byte value for each block and segment; a block is uniform."""

    def __init__(self, store: BlockStore) -> None:
        self.num_segments = sum(buffer.num_segments for buffer, _ in store.buffers)
        self.values = np.zeros((0, self.num_segments), np.uint8)  # [num_blocks, segments]

    def resize(self, num_blocks: int) -> None:
        fresh = np.zeros((max(num_blocks - len(self.values), 0), self.num_segments), np.uint8)
        self.values = np.concatenate((self.values[:num_blocks], fresh))

    def write(self, store: BlockStore, block: int, value: int) -> None:
        row = (value + np.arange(self.num_segments)) % 255 + 1
        self.values[block] = row
        if has_bytes(store):
            for segment, view in enumerate(segments(store)):
                view[block] = int(row[segment])

    def write_all(self, store: BlockStore) -> None:
        for block in range(len(self.values)):
            self.write(store, block, 7 * block)

    def check(self, store: BlockStore) -> None:
        assert store.num_blocks == len(self.values)
        assert int(store.control[0]) == store.num_blocks
        if has_bytes(store):
            for segment, view in enumerate(segments(store)):
                expected = torch.from_numpy(self.values[:, segment].copy())[:, None]
                assert bool((view == expected).all()), f"segment {segment}"


def faulty(name: str, budget_bytes: int | None = 64 << 20) -> FaultyMemory:
    if name == "allocated":
        return FaultyMemory(AllocatedMemory("cpu"))
    inner = FakeMemory(G, budget_bytes) if name == "fake" else PoisonedMemory(HostMemory(G, budget_bytes))
    return FaultyMemory(inner)

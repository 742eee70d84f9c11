"""The table of gathered blocks that the CPU, interpreter and GPU tests share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from triton_kv.gathering import BlockPlaces, gather_blocks

NUM_BLOCKS = 12


@dataclass(frozen=True)
class GatherCase:
    """Segments of blocks, `gap` bytes between them, and which blocks meet; `offset` spoils the alignment."""

    name: str
    num_segments: int
    block_bytes: int
    ids: tuple[int, ...]
    gap: int = 0
    offset: int = 0

    def __str__(self) -> str:
        return self.name


CASES = (
    GatherCase("one_block", 1, 64, (5,)),
    GatherCase("one_byte_blocks", 3, 1, (0, 4, 11)),
    GatherCase("odd_blocks", 2, 37, (1, 2, 9), gap=3),
    GatherCase("four_byte_blocks", 2, 36, (0, 7, 11), gap=4),
    GatherCase("a_page", 4, 4096, (0, 3, 4, 10), gap=512),
    GatherCase("larger_than_a_program", 2, 80016, (1, 11), gap=16),
    GatherCase("unsorted", 2, 512, (9, 0, 4)),
    GatherCase("all", 2, 512, tuple(range(NUM_BLOCKS))),
    GatherCase("unaligned", 2, 512, (1, 3), offset=8),
    GatherCase("misaligned", 2, 512, (1, 3), offset=1),
    GatherCase("none", 2, 512, ()),
)


def check(case: GatherCase, device: torch.device, *, on_host: bool = False) -> None:
    """Gathers and scatters, and compares every byte, also those around. `on_host`: ids and packed memory are pinned."""
    generator = torch.Generator().manual_seed(len(case.name))
    stride = NUM_BLOCKS * case.block_bytes + case.gap
    raw = torch.randint(0, 256, (case.num_segments * stride + 64,), dtype=torch.uint8, generator=generator).to(device)
    start = -raw.data_ptr() % 16 + case.offset
    cache = raw[start : start + case.num_segments * stride]
    rows = cache.view(case.num_segments, stride)[:, : NUM_BLOCKS * case.block_bytes]
    rows = rows.unflatten(1, (NUM_BLOCKS, case.block_bytes))
    num_bytes = case.num_segments * len(case.ids) * case.block_bytes

    def place(values: torch.Tensor) -> torch.Tensor:
        return values.pin_memory() if on_host else values.to(device)

    ids = place(torch.tensor(case.ids, dtype=torch.int32))
    packed = place(torch.full((num_bytes + 32,), 0xFF, dtype=torch.uint8))
    skip = -packed.data_ptr() % 16
    places = BlockPlaces(cache.data_ptr(), case.num_segments, stride, case.block_bytes)
    arguments = (places, ids.data_ptr(), len(case.ids), packed.data_ptr() + skip, device)

    gather_blocks(*arguments)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    expected = rows[:, list(case.ids)].cpu()
    found = packed.cpu()
    assert torch.equal(found[skip : skip + num_bytes].view_as(expected), expected)
    assert bool((found[:skip] == 0xFF).all())
    assert bool((found[skip + num_bytes :] == 0xFF).all())

    before = raw.clone()
    rows[:, list(case.ids)] = 0
    gather_blocks(*arguments, scatter=True)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    assert torch.equal(raw, before)

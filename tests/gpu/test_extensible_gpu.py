"""Extensible buffers on a device, several granules a segment, so that a missed one faults instead of passing."""

from __future__ import annotations

import pytest
import torch

from triton_kv.extensible import ExtensibleTensor
from triton_kv.memory import PoisonedMemory, open_memory
from triton_kv.memory.reservation import reap

G = 2 << 20


@pytest.fixture
def memory() -> PoisonedMemory:
    memory = PoisonedMemory(open_memory("cuda"))
    reap(memory)
    assert memory.granularity == G, "the sizes below are meant for granules of 2 MiB"
    return memory


def _segments(buffer: ExtensibleTensor) -> list[torch.Tensor]:
    view, stride = buffer.full_view(), buffer.segment_stride_bytes
    return [view[i * stride : i * stride + buffer.bytes_per_segment] for i in range(buffer.num_segments)]


def test_grows_in_place_and_keeps_its_bytes(memory: PoisonedMemory) -> None:
    buffer = ExtensibleTensor(64 * G, memory=memory)
    base, view = buffer.base_ptr, buffer.full_view()
    buffer.resize_(3 * G + 5, zero_new=True)
    pattern = (torch.arange(3 * G + 5, device="cuda") % 251).to(torch.uint8)
    view[: 3 * G + 5] = pattern
    for size in (3 * G + 6, 4 * G, 17 * G + 1, 64 * G):
        buffer.resize_(size, zero_new=True)
        assert buffer.base_ptr == base == view.data_ptr() == buffer.tensor.data_ptr()
        assert torch.equal(view[: 3 * G + 5], pattern)
        assert not view[3 * G + 5 : size].any()
    assert buffer.mapped_bytes == 64 * G
    buffer.free()


@pytest.mark.parametrize("stride", [None, 33 * G], ids=["dense", "padded"])
def test_two_segments_in_lockstep(memory: PoisonedMemory, stride: int | None) -> None:
    buffer = ExtensibleTensor(2 * (32 * G), num_segments=2, segment_stride_bytes=stride, memory=memory)
    buffer.resize_per_segment_(5 * G + 7, zero_new=True)
    for value, segment in enumerate(_segments(buffer), 1):
        assert not segment.any()
        segment.fill_(value)
    buffer.resize_per_segment_(30 * G, zero_new=True)
    for value, segment in enumerate(_segments(buffer), 1):
        assert bool((segment[: 5 * G + 7] == value).all())
        assert not segment[5 * G + 7 :].any()
    buffer.free()


def test_straddling_granules_are_mapped_once(memory: PoisonedMemory) -> None:
    capacity = 4 * G + G // 2 + 16
    buffer = ExtensibleTensor(5 * capacity, num_segments=5, memory=memory)
    for size in (G, 3 * G + 1, capacity):
        old = buffer.bytes_per_segment
        buffer.resize_per_segment_(size, zero_new=True)
        assert buffer.mapped_bytes == buffer.mapped_bytes_at(size)
        for value, segment in enumerate(_segments(buffer), 1):
            assert bool((segment[:old] == value).all())
            assert not segment[old:].any()
            segment.fill_(value)
    assert buffer.mapped_bytes == buffer.capacity_bytes == -(-5 * capacity // G) * G
    buffer.free()


@pytest.mark.parametrize(("old", "new"), [(0, 1), (1, 2), (G - 1, G + 1), (777, 7 * G + 3), (G, 8 * G)], ids=str)
def test_exactly_the_new_bytes_are_zeroed(memory: PoisonedMemory, old: int, new: int) -> None:
    buffer = ExtensibleTensor(3 * 9 * G, num_segments=3, memory=memory)
    buffer.resize_per_segment_(old, zero_new=True)
    for segment in _segments(buffer):
        segment.fill_(0xAB)
    buffer.resize_per_segment_(new, zero_new=True)
    for index, segment in enumerate(_segments(buffer)):
        assert bool((segment[:old] == 0xAB).all())
        assert not segment[old:].any()
        start = index * buffer.segment_stride_bytes
        assert bool((buffer.full_view()[start + new : start + -(-new // G) * G] == 0xFF).all())
    buffer.free()


@pytest.mark.alone
def test_shrink_and_regrow(memory: PoisonedMemory) -> None:
    buffer = ExtensibleTensor(2 * 16 * G, num_segments=2, memory=memory)
    buffer.resize_per_segment_(4 * G, zero_new=True)
    buffer.resize_per_segment_(12 * G, zero_new=True)
    for segment in _segments(buffer):
        segment.fill_(0xCD)
    torch.cuda.synchronize()
    free = memory.memory_info()[0]
    assert buffer.shrink_per_segment_(2 * G + 5) == 2 * 9 * G
    assert memory.memory_info()[0] - free == 2 * 9 * G
    buffer.resize_per_segment_(12 * G, zero_new=True)
    for segment in _segments(buffer):
        assert bool((segment[: 2 * G + 5] == 0xCD).all())
        assert not segment[2 * G + 5 :].any()
    buffer.free()


def test_many_segments_of_a_gibibyte_scale(memory: PoisonedMemory) -> None:
    """Several zeroing batches while mapping goes on."""
    buffer = ExtensibleTensor(48 * (256 << 20), num_segments=48, memory=memory)
    buffer.resize_per_segment_(1 << 20, zero_new=True)
    buffer.resize_per_segment_(160 << 20, zero_new=True)
    for segment in _segments(buffer):
        assert not segment.view(torch.int64).any()
    buffer.free()


def test_zeros_are_seen_by_every_stream(memory: PoisonedMemory) -> None:
    buffer = ExtensibleTensor(256 * G, memory=memory)
    streams = [torch.cuda.Stream() for _ in range(4)]
    for size in range(16 * G, 257 * G, 16 * G):
        buffer.resize_(size, zero_new=True)
        found = []
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(buffer.tensor[-16 * G :].any())
        assert not any(bool(each) for each in found)
    torch.cuda.synchronize()
    buffer.free()


def test_a_graph_captured_over_one_granule_reaches_later_ones(memory: PoisonedMemory) -> None:
    buffer = ExtensibleTensor(64 * G, memory=memory).resize_(G, zero_new=True)
    view = buffer.full_view()
    index = torch.zeros(8, dtype=torch.int64, device="cuda")
    out = torch.zeros(8, dtype=torch.uint8, device="cuda")
    torch.index_select(view, 0, index, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.index_select(view, 0, index, out=out)
    for size in (5 * G, 33 * G, 64 * G):
        buffer.resize_(size, zero_new=True)
        positions = [0, G - 1, G, size // 2, size - G, size - 3, size - 2, size - 1]
        for value, position in enumerate(positions):
            view[position] = value
        index.copy_(torch.tensor(positions))
        graph.replay()
        torch.cuda.synchronize()
        assert out.tolist() == view[index].tolist()
        assert out[-1].item() == 7
    buffer.free()


@pytest.mark.parametrize(
    ("use", "match"),
    [
        (lambda b: b.resize_(4 * G), "resize_ needs a buffer of one segment, this one has 2"),
        (lambda b: b.append(G), "append needs a buffer of one segment"),
        (lambda b: b.tensor, "tensor needs a buffer of one segment"),
        (lambda b: b.resize_per_segment_(2 * G), "grow-only"),
        (lambda b: b.resize_per_segment_(8 * G + 1), f"{8 * G + 1} bytes .* capacity of {8 * G} bytes"),
    ],
    ids=["resize_", "append", "tensor", "shrinking resize", "past the capacity"],
)
def test_refusals(memory: PoisonedMemory, use, match: str) -> None:
    buffer = ExtensibleTensor(16 * G, num_segments=2, memory=memory)
    buffer.resize_per_segment_(3 * G, zero_new=True)
    with pytest.raises(ValueError, match=match):
        use(buffer)
    assert (buffer.bytes_per_segment, buffer.mapped_bytes) == (3 * G, 6 * G)
    buffer.free()

"""A buffer that grows without moving: sizes, contents, zeroing, refusals, and a random life against a byte model."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from triton_kv.errors import AddressSpaceExhausted, CaptureError, Closed, DriverError, OutOfMemory, TritonKVError
from triton_kv.extensible import FILL_BYTES, ExtensibleTensor
from triton_kv.memory import FakeMemory, FaultyMemory, HostMemory, PoisonedMemory

G = 4096


def _memory(budget_bytes: int | None = 4096 * G) -> PoisonedMemory:
    return PoisonedMemory(HostMemory(G, budget_bytes))


def _segments(buffer: ExtensibleTensor) -> list[torch.Tensor]:
    """The committed bytes of each segment."""
    view, stride = buffer.full_view(), buffer.segment_stride_bytes
    return [view[i * stride : i * stride + buffer.bytes_per_segment] for i in range(buffer.num_segments)]


def test_grows_in_place_and_keeps_its_bytes() -> None:
    buffer = ExtensibleTensor(64 * G, memory=_memory())
    base, view = buffer.base_ptr, buffer.full_view()
    assert (buffer.num_bytes, buffer.mapped_bytes, buffer.capacity_bytes) == (0, 0, 64 * G)
    buffer.resize_(3 * G, zero_new=True)
    view[: 3 * G] = torch.arange(3 * G) % 251
    assert buffer.resize_(40 * G, zero_new=True) is buffer
    assert buffer.base_ptr == base == view.data_ptr() == buffer.tensor.data_ptr()
    assert torch.equal(view[: 3 * G], (torch.arange(3 * G) % 251).to(torch.uint8))
    assert not view[3 * G : 40 * G].any()
    assert buffer.mapped_bytes == buffer.num_bytes == 40 * G


def test_two_segments_in_lockstep() -> None:
    memory = _memory()
    buffer = ExtensibleTensor(64 * G, num_segments=2, memory=memory)
    assert buffer.segment_capacity_bytes == buffer.segment_stride_bytes == 32 * G
    buffer.resize_per_segment_(5 * G, zero_new=True)
    for value, segment in enumerate(_segments(buffer), 1):
        assert not segment.any()
        segment[:] = value
    buffer.resize_per_segment_(30 * G, zero_new=True)
    for value, segment in enumerate(_segments(buffer), 1):
        assert (segment[: 5 * G] == value).all()
        assert not segment[5 * G :].any()
    assert (buffer.num_bytes, buffer.mapped_bytes) == (60 * G, 60 * G)
    assert memory.live == (1, 4, 4)  # one handle a segment and growth


def test_straddling_granule_is_mapped_once() -> None:
    memory = _memory()
    buffer = ExtensibleTensor(2 * (4 * G + G // 2), num_segments=2, memory=memory)
    assert buffer.capacity_bytes == 9 * G
    buffer.resize_per_segment_(4 * G + G // 2, zero_new=True)
    assert buffer.mapped_bytes == 9 * G == buffer.mapped_bytes_at(4 * G + G // 2)
    first, second = _segments(buffer)
    first[:], second[:] = 1, 2
    assert (first == 1).all()
    # Segment 1 still needs the shared granule after segment 0 shrank out of it: 0, 4 and 5 stay.
    assert buffer.shrink_per_segment_(G) == 6 * G
    assert buffer.mapped_bytes == buffer.mapped_bytes_at(G) == 3 * G
    buffer.resize_per_segment_(4 * G + G // 2, zero_new=True)
    first, second = _segments(buffer)
    assert (first[:G] == 1).all()
    assert (second[:G] == 2).all()
    assert not first[G:].any()
    assert not second[G:].any()


def test_straddling_granule_stays_while_either_segment_needs_it() -> None:
    buffer = ExtensibleTensor(2 * (4 * G + G // 2), num_segments=2, memory=_memory())
    for size in (G, 3 * G, 4 * G + G // 2):
        buffer.resize_per_segment_(size, zero_new=True)
    first, second = _segments(buffer)
    first[:], second[:] = 1, 2
    # Segment 0 gives back granules 1 to 3; 4 holds the start of segment 1.
    assert buffer.shrink_per_segment_(G) == buffer.capacity_bytes - buffer.mapped_bytes == 6 * G
    assert (_segments(buffer)[0] == 1).all()
    assert (_segments(buffer)[1] == 2).all()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param(0, 1, id="one byte"),
        pytest.param(1, 2, id="within a mapped granule"),
        pytest.param(100, G, id="up to a granule"),
        pytest.param(G - 1, G + 1, id="over a border"),
        pytest.param(G, 3 * G, id="whole granules"),
        pytest.param(777, 7 * G + 3, id="odd"),
        pytest.param(0, 8 * G + 1, id="everything"),
    ],
)
@pytest.mark.parametrize("stride", [None, 16 * G], ids=["dense", "padded"])
def test_exactly_the_new_bytes_are_zeroed(old: int, new: int, stride: int | None) -> None:
    buffer = ExtensibleTensor(3 * (8 * G + 1), num_segments=3, segment_stride_bytes=stride, memory=_memory())
    buffer.resize_per_segment_(old, zero_new=True)
    for segment in _segments(buffer):
        segment[:] = 0xAB
    buffer.resize_per_segment_(new, zero_new=True)
    for segment in _segments(buffer):
        assert (segment[:old] == 0xAB).all()
        assert not segment[old:].any()
    # Bytes that are mapped but not committed must not have been zeroed: nobody asked for it.
    last = 2 * buffer.segment_stride_bytes + new
    rest = buffer.full_view()[last : -(-last // G) * G]
    assert (rest == 0xFF).all()


def test_without_zeroing_fresh_bytes_hold_anything() -> None:
    buffer = ExtensibleTensor(4 * G, memory=_memory())
    buffer.resize_(2 * G)
    assert (buffer.tensor == 0xFF).all()  # what the driver left there, here the poison
    buffer.append(G, zero_new=True)
    assert (buffer.tensor[: 2 * G] == 0xFF).all()
    assert not buffer.tensor[2 * G :].any()


def test_shrink_and_regrow_gives_zeros() -> None:
    memory = _memory()
    buffer = ExtensibleTensor(2 * 16 * G, num_segments=2, memory=memory)
    buffer.resize_per_segment_(4 * G, zero_new=True)
    buffer.resize_per_segment_(12 * G, zero_new=True)
    for segment in _segments(buffer):
        segment[:] = 0xCD
    free = memory.memory_info()[0]
    assert buffer.shrink_per_segment_(2 * G + 5) == 2 * 9 * G  # the first handle of each segment was cut
    assert memory.memory_info()[0] - free == 2 * 9 * G
    assert (buffer.bytes_per_segment, buffer.mapped_bytes) == (2 * G + 5, 2 * 3 * G)
    buffer.resize_per_segment_(12 * G, zero_new=True)
    for segment in _segments(buffer):
        assert (segment[: 2 * G + 5] == 0xCD).all()
        assert not segment[2 * G + 5 :].any()


def test_shrink_to_nothing_releases_all() -> None:
    memory = _memory()
    buffer = ExtensibleTensor(6 * G, num_segments=3, memory=memory)
    buffer.resize_per_segment_(G + 1)
    assert buffer.shrink_per_segment_(0) == 6 * G
    assert memory.live == (1, 0, 0)
    assert buffer.tensor.numel() == 0 if buffer.num_segments == 1 else buffer.num_bytes == 0


def test_one_byte_buffer() -> None:
    buffer = ExtensibleTensor(1, memory=_memory())
    assert buffer.capacity_bytes == G
    buffer.append(1, zero_new=True)
    assert (buffer.num_bytes, buffer.mapped_bytes, buffer.tensor.tolist()) == (1, G, [0])
    with pytest.raises(ValueError, match="asked for 2 bytes per segment, beyond the capacity of 1 bytes"):
        buffer.resize_(2)


@pytest.mark.parametrize("num_segments", [1, 2, 7])
@pytest.mark.parametrize("capacity", [1, G - 1, G, G + 1, 3 * G + 100, 10 * G])
@pytest.mark.parametrize("padded", [False, True], ids=["dense", "padded"])
def test_mapped_bytes_are_predicted_exactly(num_segments: int, capacity: int, padded: bool) -> None:
    stride = -(-capacity // G) * G if padded else None
    for size in sorted({0, 1, capacity // 3, capacity // 2, capacity - 1, capacity}):
        memory = FakeMemory(G)
        buffer = ExtensibleTensor(
            num_segments * capacity, num_segments=num_segments, segment_stride_bytes=stride, memory=memory
        )
        predicted = buffer.mapped_bytes_at(size)
        buffer.resize_per_segment_(size)
        assert buffer.mapped_bytes == predicted == memory.memory_info()[1] - memory.memory_info()[0]
        buffer.free()


@pytest.mark.parametrize(
    ("segments", "per_segment", "launches"),
    [
        pytest.param(64, 1 << 30, [1] * 64, id="large segments: one launch each"),
        pytest.param(640, 8 << 20, [64] * 10, id="small ones share"),
        pytest.param(3, 200 << 20, [3], id="the third fills the batch"),
        pytest.param(5, 200 << 20, [3, 2], id="the last flushes"),
        pytest.param(2000, 1024, [2000], id="tiny ones are one launch"),
    ],
)
def test_zeroing_overlaps_mapping_in_few_launches(segments: int, per_segment: int, launches: list[int]) -> None:
    assert FILL_BYTES == 512 << 20
    events: list[tuple[str, int]] = []

    class Recorder(FakeMemory):
        def map(self, address: int, num_bytes: int, handle: int) -> None:
            events.append(("map", 1))
            super().map(address, num_bytes, handle)

        def fill(self, *arguments: Any, count: int = 1, **options: Any) -> None:
            events.append(("fill", count))
            super().fill(*arguments, count=count, **options)

    buffer = ExtensibleTensor(segments * per_segment, num_segments=segments, memory=Recorder(1024))
    buffer.resize_per_segment_(per_segment, zero_new=True)
    assert [count for name, count in events if name == "fill"] == launches
    mapped = zeroed = 0
    for name, count in events:
        mapped, zeroed = (mapped + count, zeroed) if name == "map" else (mapped, zeroed + count)
        assert zeroed <= mapped, "only mapped segments may be zeroed"
        if name == "fill":
            assert zeroed == mapped, "a full batch must not wait for more mapping"


def test_a_huge_growth_takes_one_handle_a_segment() -> None:
    memory = FaultyMemory(FakeMemory())
    ExtensibleTensor(100 << 30, memory=memory).resize_(100 << 30, zero_new=True)
    assert memory.calls["create"] == 1
    ExtensibleTensor(100 << 40, num_segments=64, memory=memory).resize_per_segment_(1 << 40, zero_new=True)
    assert memory.calls["create"] == 65


def test_views_have_their_own_storage() -> None:
    buffer = ExtensibleTensor(8 * G, memory=_memory())
    buffer.resize_(2 * G, zero_new=True)
    view = buffer.view(G, 3 * G)
    assert view.untyped_storage().data_ptr() == buffer.address_of(0, G)
    assert view.untyped_storage().nbytes() == 3 * G
    assert buffer.tensor.untyped_storage().nbytes() == 2 * G  # so that pickling it stays inside
    assert buffer.full_view().shape == (8 * G,)


def test_full_view_ends_with_the_last_segment() -> None:
    buffer = ExtensibleTensor(3 * 100, num_segments=3, segment_stride_bytes=G, memory=_memory())
    assert buffer.full_view().shape == (2 * G + 100,)
    assert buffer.address_of(2, 100) - buffer.base_ptr == 2 * G + 100
    assert buffer.capacity_bytes == 3 * G


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"max_num_bytes": 0}, ValueError, "max_num_bytes must be positive, got 0"),
        ({"max_num_bytes": -1}, ValueError, "max_num_bytes must be positive, got -1"),
        ({"max_num_bytes": 1.5}, TypeError, "max_num_bytes must be an int, got 1.5"),
        ({"max_num_bytes": True}, TypeError, "max_num_bytes must be an int, got True"),
        ({"max_num_bytes": 8, "num_segments": 0}, ValueError, "num_segments must be at least 1, got 0"),
        ({"max_num_bytes": 8, "num_segments": -2}, ValueError, "num_segments must be at least 1, got -2"),
        ({"max_num_bytes": 8, "num_segments": 2.0}, TypeError, "num_segments must be an int"),
        ({"max_num_bytes": 10, "num_segments": 3}, ValueError, "10 is not divisible by 3 segments"),
        (
            {"max_num_bytes": 8, "num_segments": 2, "segment_stride_bytes": 3},
            ValueError,
            "segment_stride_bytes 3 is less than the 4 bytes of a segment",
        ),
        ({"max_num_bytes": 8, "device": "cuda"}, ValueError, "device 'cuda' is not the memory's device 'cpu'"),
    ],
    ids=str,
)
def test_impossible_buffers(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    memory = FakeMemory(G)
    with pytest.raises(error, match=match):
        ExtensibleTensor(**arguments, memory=memory)
    assert memory.live == (0, 0, 0)


REFUSALS: list[tuple[str, Callable[[ExtensibleTensor], object], type[Exception], str]] = [
    ("negative", lambda b: b.resize_per_segment_(-1), ValueError, "must not be negative, got -1"),
    ("float", lambda b: b.resize_per_segment_(2.0), TypeError, "bytes_per_segment must be an int, got 2.0"),  # type: ignore[arg-type]
    (
        "smaller",
        lambda b: b.resize_per_segment_(G - 1),
        ValueError,
        f"grow-only: asked for {G - 1} .* {G} are committed",
    ),
    (
        "too large",
        lambda b: b.resize_per_segment_(4 * G + 1),
        ValueError,
        f"{4 * G + 1} bytes .* capacity of {4 * G} bytes",
    ),
    ("resize_", lambda b: b.resize_(2 * G), ValueError, "resize_ needs a buffer of one segment, this one has 2"),
    ("append", lambda b: b.append(1), ValueError, "append needs a buffer of one segment, this one has 2"),
    ("tensor", lambda b: b.tensor, ValueError, "tensor needs a buffer of one segment, this one has 2"),
    ("shrink up", lambda b: b.shrink_per_segment_(2 * G), ValueError, f"shrink to {2 * G} .* of {G} committed"),
    ("shrink below", lambda b: b.shrink_per_segment_(-1), ValueError, "shrink to -1 bytes"),
    ("predict", lambda b: b.mapped_bytes_at(4 * G + 1), ValueError, f"{4 * G + 1} bytes per segment, of a capacity"),
    ("segment", lambda b: b.address_of(2), ValueError, "segment 2 of a buffer with 2 segments"),
    ("offset", lambda b: b.address_of(1, 4 * G + 1), ValueError, f"offset {4 * G + 1} in a segment of {4 * G} bytes"),
    ("view", lambda b: b.view(0, 8 * G + 1), ValueError, f"of a reservation of {8 * G} bytes"),
]


@pytest.mark.parametrize(("use", "error", "match"), [pytest.param(*rest, id=name) for name, *rest in REFUSALS])
def test_refusals_change_nothing(use: Callable[[ExtensibleTensor], object], error: type[Exception], match: str) -> None:
    memory = _memory()
    buffer = ExtensibleTensor(8 * G, num_segments=2, memory=memory)
    buffer.resize_per_segment_(G)
    live = memory.live
    with pytest.raises(error, match=match):
        use(buffer)
    assert (buffer.bytes_per_segment, memory.live) == (G, live)


def test_append_refuses_a_negative_size() -> None:
    with pytest.raises(ValueError, match="append must not be negative, got -1 bytes"):
        ExtensibleTensor(8, memory=FakeMemory(G)).append(-1)


def test_the_same_size_does_nothing() -> None:
    memory = FaultyMemory(FakeMemory(G))
    buffer = ExtensibleTensor(8 * G, memory=memory).resize_(2 * G)
    before = memory.calls["create"]
    buffer.resize_(2 * G).append(0)
    assert memory.calls["create"] == before


def test_out_of_memory_names_all_numbers_and_changes_nothing() -> None:
    memory = _memory(budget_bytes=10 * G)
    buffer = ExtensibleTensor(2 * 16 * G, num_segments=2, memory=memory)
    buffer.resize_per_segment_(2 * G, zero_new=True)
    for segment in _segments(buffer):
        segment[:] = 4
    live = memory.live
    with pytest.raises(OutOfMemory) as caught:
        buffer.resize_per_segment_(8 * G, zero_new=True)
    error = caught.value
    assert (error.asked_bytes, error.free_bytes, error.would_fit) == (12 * G, 6 * G, 5 * G)
    for part in (
        f"asked for {12 * G} bytes",
        f"{6 * G} bytes free",
        f"{5 * G} bytes per segment would fit",
        "try again",
    ):
        assert part in str(error)
    assert isinstance(error.__cause__, DriverError)
    assert (memory.live, buffer.bytes_per_segment, buffer.mapped_bytes) == (live, 2 * G, 4 * G)
    assert all((segment == 4).all() for segment in _segments(buffer))
    buffer.resize_per_segment_(error.would_fit, zero_new=True)
    assert memory.memory_info()[0] == 0


def test_out_of_memory_that_the_numbers_do_not_explain() -> None:
    memory = FaultyMemory(_memory())
    buffer = ExtensibleTensor(8 * G, memory=memory)
    memory.fail("create", code="ENOMEM")
    with pytest.raises(OutOfMemory) as caught:
        buffer.resize_(G)
    assert caught.value.would_fit is None
    assert "would fit" not in str(caught.value)
    memory.fail("create", code="EIO")
    with pytest.raises(DriverError, match="create failed with EIO"):
        buffer.resize_(G)
    buffer.resize_(G)


def test_asking_for_twice_the_machine() -> None:
    memory = HostMemory()
    total = memory.memory_info()[1]
    buffer = ExtensibleTensor(4 * total, memory=memory)
    with pytest.raises(OutOfMemory):
        buffer.resize_(2 * total)
    buffer.resize_(1, zero_new=True)
    assert buffer.tensor.tolist() == [0]
    buffer.free()


def test_too_much_address_space() -> None:
    memory = HostMemory()
    with pytest.raises(AddressSpaceExhausted, match="address space, not memory"):
        ExtensibleTensor(1 << 60, memory=memory)
    assert memory.live == (0, 0, 0)


def test_a_terabyte_of_address_space_costs_nothing() -> None:
    memory = HostMemory(budget_bytes=1 << 30)
    buffer = ExtensibleTensor(1 << 40, num_segments=64, memory=memory)
    assert buffer.capacity_bytes == 1 << 40
    assert memory.memory_info() == (1 << 30, 1 << 30)
    assert "0 bytes each committed" in repr(buffer)  # and repr touched none of it


@pytest.mark.parametrize("operation", ["resize_per_segment_", "shrink_per_segment_", "free"])
def test_no_change_during_a_capture(operation: str) -> None:
    memory = FakeMemory(G)
    buffer = ExtensibleTensor(8 * G, memory=memory).resize_(2 * G)
    live = memory.live
    memory.is_capturing = lambda: True  # type: ignore[method-assign]
    arguments = {"resize_per_segment_": (3 * G,), "shrink_per_segment_": (G,), "free": ()}[operation]
    with pytest.raises(CaptureError, match="must not change during a capture"):
        getattr(buffer, operation)(*arguments)
    assert (memory.live, buffer.num_bytes, buffer.mapped_bytes) == (live, 2 * G, 2 * G)
    del memory.is_capturing
    getattr(buffer, operation)(*arguments)


def test_free_is_idempotent_and_final() -> None:
    memory = _memory()
    buffer = ExtensibleTensor(8 * G, memory=memory).resize_(2 * G)
    base = buffer.base_ptr
    buffer.free()
    buffer.free()
    assert (buffer.num_bytes, buffer.mapped_bytes, buffer.base_ptr) == (0, 0, base)
    assert memory.live == (0, 0, 0)
    for use in (
        lambda: buffer.resize_(3 * G),
        lambda: buffer.shrink_per_segment_(0),
        lambda: buffer.append(1),
        lambda: buffer.tensor,
        lambda: buffer.full_view(),
    ):
        with pytest.raises(Closed, match="freed"):
            use()
    assert "freed" in repr(buffer)


def test_free_waits_for_the_device() -> None:
    memory = FaultyMemory(FakeMemory(G))
    ExtensibleTensor(8 * G, memory=memory).resize_(2 * G).free()
    assert memory.calls["synchronize"] == 1


def test_many_small_buffers_leave_no_descriptors() -> None:
    memory = HostMemory(G)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(200):
        buffer = ExtensibleTensor(64 * G, num_segments=8, memory=memory)
        buffer.resize_per_segment_(G, zero_new=True)
        buffer.resize_per_segment_(3 * G)
        buffer.free()
    assert len(os.listdir("/proc/self/fd")) == before
    assert memory.live == (0, 0, 0)
    assert memory._file_bytes() == 0


def test_two_threads_want_the_last_granule() -> None:
    memory = HostMemory(G, budget_bytes=5 * G)
    buffers = [ExtensibleTensor(8 * G, memory=memory).resize_(2 * G) for _ in range(2)]
    barrier = threading.Barrier(2)
    outcomes: list[str] = []

    def grow(buffer: ExtensibleTensor) -> None:
        barrier.wait()
        try:
            buffer.append(G)
            outcomes.append("won")
        except OutOfMemory:
            outcomes.append("lost")

    threads = [threading.Thread(target=grow, args=(buffer,)) for buffer in buffers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["lost", "won"]
    assert sum(buffer.mapped_bytes for buffer in buffers) == 5 * G
    assert memory.memory_info()[0] == 0


def test_threads_grow_and_shrink_one_buffer() -> None:
    memory = HostMemory(G)
    buffer = ExtensibleTensor(3 * 64 * G, num_segments=3, memory=memory)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(60):
            size = int(random.integers(0, 64 * G))
            try:
                if random.random() < 0.5:
                    buffer.resize_per_segment_(size, zero_new=True)
                else:
                    buffer.shrink_per_segment_(size)
            except ValueError:  # somebody else grew or shrank past it first
                pass
            except BaseException as failure:
                failures.append(failure)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert buffer.mapped_bytes == memory._books.physical_bytes >= buffer.mapped_bytes_at(buffer.bytes_per_segment)
    buffer.shrink_per_segment_(0)
    assert memory.live == (1, 0, 0)


class BufferLife(RuleBasedStateMachine):
    """Random growth, shrinking, writing and failures, against arrays of bytes."""

    @initialize(
        segments=st.integers(1, 4),
        capacity=st.integers(1, 10 * G),
        padding=st.sampled_from(["dense", "granule", "odd"]),
    )
    def make(self, segments: int, capacity: int, padding: str) -> None:
        stride = {"dense": None, "granule": -(-capacity // G) * G, "odd": capacity + 333}[padding]
        self.inner = PoisonedMemory(HostMemory(G, budget_bytes=30 * G))
        self.memory = FaultyMemory(self.inner)
        self.buffer = ExtensibleTensor(
            segments * capacity, num_segments=segments, segment_stride_bytes=stride, memory=self.memory
        )
        self.model = [np.zeros(0, np.uint8) for _ in range(segments)]
        self.base = self.buffer.base_ptr

    @rule(data=st.data(), call=st.sampled_from(["create", "map", "set_access", "fill", "wait"]), nth=st.integers(1, 9))
    def grow(self, data: st.DataObject, call: str, nth: int) -> None:
        size = data.draw(st.integers(self.buffer.bytes_per_segment, self.buffer.segment_capacity_bytes))
        live = self.inner.live
        if data.draw(st.booleans()):
            self.memory.fail(call, nth)
        try:
            self.buffer.resize_per_segment_(size, zero_new=True)
        except TritonKVError as error:
            assert not error.undo_failures  # noqa: PT017
            assert self.inner.live == live
        else:
            self.model = [np.concatenate((old, np.zeros(size - len(old), np.uint8))) for old in self.model]
        self.memory.heal()

    @rule(data=st.data(), nth=st.integers(1, 6))
    def shrink(self, data: st.DataObject, nth: int) -> None:
        size = data.draw(st.integers(0, self.buffer.bytes_per_segment))
        live, free = self.inner.live, self.inner.memory_info()[0]
        if data.draw(st.booleans()):
            self.memory.fail("unmap", nth)
        try:
            released = self.buffer.shrink_per_segment_(size)
        except TritonKVError:
            assert self.inner.live == live
        else:
            assert self.inner.memory_info()[0] - free == released
            self.model = [old[:size] for old in self.model]
        self.memory.heal()

    @rule(value=st.integers(1, 255), data=st.data())
    @precondition(lambda self: self.buffer.bytes_per_segment)
    def write(self, value: int, data: st.DataObject) -> None:
        segment = data.draw(st.integers(0, len(self.model) - 1))
        start = data.draw(st.integers(0, self.buffer.bytes_per_segment - 1))
        end = data.draw(st.integers(start + 1, self.buffer.bytes_per_segment))
        self.model[segment][start:end] = value
        _segments(self.buffer)[segment][start:end] = value

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert self.buffer.base_ptr == self.base
        assert self.buffer.bytes_per_segment == len(self.model[0])
        for segment, expected in zip(_segments(self.buffer), self.model):
            assert np.array_equal(segment.numpy(), expected)
        total, free = self.inner.memory_info()[1], self.inner.memory_info()[0]
        assert self.buffer.mapped_bytes == total - free
        assert self.buffer.mapped_bytes >= self.buffer.mapped_bytes_at(self.buffer.bytes_per_segment)

    def teardown(self) -> None:
        if hasattr(self, "buffer"):
            self.buffer.free()
            assert self.inner.live == (0, 0, 0)


BufferLife.TestCase.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
TestBufferLife = BufferLife.TestCase

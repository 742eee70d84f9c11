"""One undo stack: order, everything runs, everything is reported; and growth that fails at any driver call."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from memory_drivers import GRANULARITY as G
from memory_drivers import MAKERS, drivers, has_contents

from triton_kv.errors import Broken, DriverError, TritonKVError
from triton_kv.extensible import ExtensibleTensor
from triton_kv.memory import FakeMemory, FaultyMemory, HostMemory, PoisonedMemory, VirtualMemory
from triton_kv.memory.transaction import Transaction


def test_success_undoes_nothing() -> None:
    done: list[int] = []
    with Transaction() as transaction:
        transaction.undo(done.append, 1)
    transaction.rollback()
    assert done == []


def _fail(transaction: Transaction, error: BaseException) -> None:
    with transaction:
        raise error


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_failure_undoes_in_reverse(error: BaseException) -> None:
    done: list[int] = []
    transaction = Transaction()
    for step in range(4):
        transaction.undo(done.append, step)
    with pytest.raises(type(error)) as caught:
        _fail(transaction, error)
    assert caught.value is error
    assert done == [3, 2, 1, 0]
    assert transaction.undo_failures == []


def test_every_undo_runs_and_every_failure_is_reported() -> None:
    done: list[str] = []

    def fail(text: str, kind: type[BaseException]) -> None:
        done.append(text)
        raise kind(text)

    transaction = Transaction()
    transaction.undo(done.append, "first")
    transaction.undo(fail, "second", OSError)
    transaction.undo(fail, "third", KeyboardInterrupt)
    transaction.undo(done.append, "fourth")
    with pytest.raises(DriverError) as caught:
        _fail(transaction, DriverError("map", "EIO"))
    assert done == ["fourth", "third", "second", "first"]
    assert [type(failure) for failure in caught.value.undo_failures] == [KeyboardInterrupt, OSError]
    assert transaction.undo_failures == list(caught.value.undo_failures)
    assert caught.value.__notes__ == ["and then KeyboardInterrupt: third", "and then OSError: second"]


def test_commit_in_the_middle_keeps_what_was_done() -> None:
    done: list[int] = []
    transaction = Transaction()
    transaction.undo(done.append, 1)
    transaction.commit()
    transaction.undo(done.append, 2)
    with pytest.raises(ValueError, match="late"):
        _fail(transaction, ValueError("late"))
    assert done == [2]


# Growth over several segments where the k-th driver call fails, for every k.

SEGMENTS = 3


def _small(memory: VirtualMemory) -> int:
    return memory.granularity + 100  # ends inside a granule


def _large(memory: VirtualMemory) -> int:
    return 4 * memory.granularity - 50


def _buffer(memory: VirtualMemory) -> ExtensibleTensor:
    # A stride that is no whole number of granules, so that granules straddle two segments.
    capacity = 5 * memory.granularity + 512
    return ExtensibleTensor(SEGMENTS * capacity, num_segments=SEGMENTS, memory=memory)


def _write(buffer: ExtensibleTensor, start: int, end: int) -> None:
    if has_contents(buffer.memory.memory):
        for segment in range(SEGMENTS):
            at = segment * buffer.segment_stride_bytes
            buffer.full_view()[at + start : at + end] = segment + 1
    buffer.memory.memory.synchronize()


def _check(buffer: ExtensibleTensor, written: int) -> None:
    """Every segment: its own byte up to `written`, zero up to the end."""
    if not has_contents(buffer.memory.memory):
        return
    for segment in range(SEGMENTS):
        at = segment * buffer.segment_stride_bytes
        contents = buffer.full_view()[at : at + buffer.bytes_per_segment].cpu()
        expected = torch.zeros(buffer.bytes_per_segment, dtype=torch.uint8)
        expected[:written] = segment + 1
        assert torch.equal(contents, expected), f"segment {segment}"


def _life(memory: FaultyMemory, buffers: list[ExtensibleTensor]) -> None:
    """Reserve, grow twice, shrink, grow, close: after any failure the buffer is as it was, and the retry works."""

    def attempt(buffer: ExtensibleTensor, step: Callable[[], object], written: int) -> None:
        before = (buffer.bytes_per_segment, buffer.mapped_bytes)
        try:
            step()
        except TritonKVError as error:
            assert not error.undo_failures  # noqa: PT017
            assert (buffer.bytes_per_segment, buffer.mapped_bytes) == before
            _check(buffer, written)
            step()

    try:
        buffers.append(_buffer(memory))
    except TritonKVError:
        buffers.append(_buffer(memory))
    buffer = buffers[0]
    small, large = _small(memory), _large(memory)
    attempt(buffer, lambda: buffer.resize_per_segment_(small, zero_new=True), 0)
    _check(buffer, 0)
    _write(buffer, 0, small)
    attempt(buffer, lambda: buffer.resize_per_segment_(large, zero_new=True), small)
    _check(buffer, small)
    _write(buffer, 0, large)
    attempt(buffer, lambda: buffer.shrink_per_segment_(small), large)
    _check(buffer, small)
    attempt(buffer, lambda: buffer.resize_per_segment_(large, zero_new=True), small)
    _check(buffer, small)
    try:
        buffer.free()
    except TritonKVError:
        buffer.free()


FAULTY_DRIVERS = drivers("host", "fake", "poisoned", "cuda")


@pytest.mark.parametrize("name", FAULTY_DRIVERS)
def test_any_single_driver_call_may_fail(name: str) -> None:
    healthy = FaultyMemory(MAKERS[name]())
    _life(healthy, [])
    num_calls = healthy.calls.total()
    assert num_calls > 40
    inner = MAKERS[name]()
    free_before = inner.memory_info()[0]
    for nth in range(1, num_calls + 10):
        memory = FaultyMemory(inner)
        memory.fail("any", nth)
        _life(memory, [])
        if name == "cuda":
            assert inner.memory_info()[0] >= free_before - (64 << 20)
        else:
            assert inner.live == (0, 0, 0), f"call {nth}"
            assert inner.memory_info()[0] == free_before
    assert memory.num_planned == 1, "the loop must reach a life that no failure touches"


@pytest.mark.parametrize("call", ["unmap", "release"])
def test_undo_that_fails_breaks_the_buffer_and_close_frees_it(call: str) -> None:
    inner = PoisonedMemory(HostMemory(G))
    memory = FaultyMemory(inner)
    buffer = _buffer(memory)
    buffer.resize_per_segment_(_small(memory))
    memory.fail("set_access", 3)
    memory.fail(call)
    with pytest.raises(DriverError, match="set_access failed with EIO") as caught:
        buffer.resize_per_segment_(_large(memory))
    assert [failure.call for failure in caught.value.undo_failures] == [call]
    assert f"and then DriverError: {call} failed with EIO: injected" in caught.value.__notes__
    assert buffer.broken
    assert buffer.bytes_per_segment == _small(memory)
    for use in (
        lambda: buffer.resize_per_segment_(_large(memory)),
        lambda: buffer.shrink_per_segment_(0),
        lambda: buffer.full_view(),
    ):
        with pytest.raises(Broken, match="only close"):
            use()
    buffer.free()
    assert inner.live == (0, 0, 0)


@pytest.mark.parametrize(
    ("call", "nth", "left"),
    [
        pytest.param("synchronize", 1, (0, 0, 0), id="synchronize"),
        pytest.param("unmap", 1, (1, 1, 1), id="first unmap"),
        pytest.param("unmap", 3, (1, 1, 1), id="last unmap"),
        pytest.param("release", 1, (1, 1, 0), id="first release"),
        pytest.param("release", 3, (1, 1, 0), id="last release"),
        pytest.param("free", 1, (1, 0, 0), id="free"),
    ],
)
def test_close_frees_the_rest_and_reports(call: str, nth: int, left: tuple[int, int, int]) -> None:
    inner = HostMemory(G)
    memory = FaultyMemory(inner)
    buffer = _buffer(memory)
    buffer.resize_per_segment_(_large(memory))
    assert inner.live == (1, 3, 3)
    memory.fail(call, nth)
    with pytest.raises(DriverError, match=f"{call} failed with EIO: injected"):
        buffer.free()
    assert inner.live == left
    assert buffer.num_bytes == 0
    buffer.free()
    assert inner.live == (0, 0, 0)


def test_a_dropped_buffer_whose_close_failed_is_reaped_by_the_next() -> None:
    inner = HostMemory(G)
    memory = FaultyMemory(inner)
    buffer = _buffer(memory)
    buffer.resize_per_segment_(_large(memory))
    memory.fail("unmap")
    memory.fail("release")
    with pytest.raises(DriverError) as caught:
        buffer.free()
    assert [failure.call for failure in (caught.value, *caught.value.undo_failures)] == ["unmap", "release"]
    del buffer, caught
    gc.collect()
    assert inner.live != (0, 0, 0)
    _buffer(memory).free()
    assert inner.live == (0, 0, 0)


def test_an_interrupt_while_growing_is_undone() -> None:
    memory = HostMemory(G)
    buffer = _buffer(memory)
    buffer.resize_per_segment_(_small(memory), zero_new=True)
    live, real = memory.live, memory.set_access
    calls = []

    def interrupted(address: int, num_bytes: int) -> None:
        calls.append(address)
        if len(calls) == 3:
            raise KeyboardInterrupt
        real(address, num_bytes)

    memory.set_access = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        buffer.resize_per_segment_(_large(memory))
    memory.set_access = real  # type: ignore[method-assign]
    assert memory.live == live
    assert buffer.bytes_per_segment == _small(memory)
    buffer.resize_per_segment_(_large(memory))
    buffer.free()
    assert memory.live == (0, 0, 0)


class SlowMemory(FakeMemory):
    """Fills run only when somebody waits, and whoever unmaps under a queued one is caught."""

    def __init__(self) -> None:
        super().__init__(G)
        self.queued: list[range] = []

    def fill(self, address: int, num_bytes: int, value: int = 0, *, stride: int = 0, count: int = 1) -> None:
        super().fill(address, num_bytes, value, stride=stride, count=count)
        self.queued += [range(address + i * stride, address + i * stride + num_bytes) for i in range(count)]

    def wait(self) -> None:
        self.queued.clear()

    def unmap(self, address: int, num_bytes: int) -> None:
        for each in self.queued:
            assert each.stop <= address or address + num_bytes <= each.start, "unmapped under a queued fill"
        super().unmap(address, num_bytes)


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("call", ["create", "map", "set_access", "fill"])
def test_undo_waits_for_queued_zeroing_before_it_unmaps(monkeypatch: pytest.MonkeyPatch, call: str, nth: int) -> None:
    monkeypatch.setattr("triton_kv.extensible.FILL_BYTES", 1)  # a fill for every segment
    inner = SlowMemory()
    memory = FaultyMemory(inner)
    buffer = ExtensibleTensor(3 * 8 * G, num_segments=3, memory=memory)
    buffer.resize_per_segment_(G, zero_new=True)
    live = inner.live
    memory.fail(call, nth, code="EIO")
    with pytest.raises(DriverError, match=f"{call} failed with EIO") as caught:
        buffer.resize_per_segment_(8 * G, zero_new=True)
    assert caught.value.undo_failures == ()
    assert inner.live == live
    buffer.resize_per_segment_(8 * G, zero_new=True)
    assert inner.queued == [], "the host must have waited for the zeroing"


def test_a_failed_wait_is_undone_too() -> None:
    inner = SlowMemory()
    memory = FaultyMemory(inner)
    buffer = ExtensibleTensor(3 * 8 * G, num_segments=3, memory=memory)
    memory.fail("wait")
    with pytest.raises(DriverError, match="wait failed with EIO"):
        buffer.resize_per_segment_(8 * G, zero_new=True)
    assert (inner.live, buffer.num_bytes) == ((1, 0, 0), 0)

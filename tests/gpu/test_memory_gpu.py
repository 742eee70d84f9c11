"""The CUDA driver on a device: addresses, contexts, captures, lifetime (its contract: test_memory_contract)."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch

from triton_kv.errors import CaptureError, DriverError, OutOfMemory
from triton_kv.extensible import ExtensibleTensor
from triton_kv.memory import CudaMemory, PoisonedMemory, open_memory
from triton_kv.memory.reservation import reap

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30
TIB = 1 << 40
SLEEP_CYCLES = 200_000_000  # about 0.1 s on an H200


@pytest.fixture
def memory() -> CudaMemory:
    memory = open_memory("cuda")
    assert isinstance(memory, CudaMemory)
    reap(memory)
    torch.cuda.synchronize()
    return memory


def _context() -> int:
    from cuda.bindings import driver

    code, context = driver.cuCtxGetCurrent()
    assert not code
    return int(context)


@pytest.mark.alone
def test_reserving_16_tib_takes_no_memory(memory: CudaMemory) -> None:
    free = memory.memory_info()[0]
    buffer = ExtensibleTensor(16 * TIB, "cuda", num_segments=64)
    assert buffer.capacity_bytes == 16 * TIB
    assert abs(memory.memory_info()[0] - free) < memory.granularity
    assert buffer.full_view().device == memory.device
    buffer.free()


@pytest.mark.alone
def test_mapped_bytes_are_what_the_device_lost(memory: CudaMemory) -> None:
    buffer = ExtensibleTensor(3 * 64 * memory.granularity + 3, "cuda", num_segments=3)
    buffer.resize_per_segment_(1, zero_new=True)  # the zero kernel is loaded here
    free, mapped = memory.memory_info()[0], buffer.mapped_bytes
    buffer.resize_per_segment_(40 * memory.granularity + 1, zero_new=True)
    assert buffer.mapped_bytes == buffer.mapped_bytes_at(40 * memory.granularity + 1)
    assert free - memory.memory_info()[0] == buffer.mapped_bytes - mapped
    buffer.free()


@pytest.mark.alone
def test_twice_the_device_is_an_error_and_life_goes_on(memory: CudaMemory) -> None:
    total = memory.memory_info()[1] // memory.granularity * memory.granularity
    buffer = ExtensibleTensor(2 * total, "cuda", num_segments=4)
    free = memory.memory_info()[0]
    with pytest.raises(OutOfMemory) as caught:
        buffer.resize_per_segment_(buffer.segment_capacity_bytes, zero_new=True)
    assert caught.value.asked_bytes == buffer.capacity_bytes
    assert caught.value.would_fit
    assert "CUDA_ERROR_OUT_OF_MEMORY" in str(caught.value.__cause__)
    assert (buffer.num_bytes, buffer.mapped_bytes) == (0, 0)
    assert memory.memory_info()[0] >= free - memory.granularity
    buffer.resize_per_segment_(memory.granularity, zero_new=True)
    assert not buffer.full_view()[: memory.granularity].any()
    buffer.free()


def test_fill_beyond_two_gib(memory: CudaMemory) -> None:
    size = 5 * GIB
    buffer = ExtensibleTensor(size, memory=PoisonedMemory(memory))
    buffer.resize_(size)
    view = buffer.full_view()
    memory.fill(buffer.base_ptr + 3, size - 7)
    memory.wait()
    assert view[:3].tolist() == [255] * 3
    assert view[-4:].tolist() == [255] * 4
    assert not view[3 : size - 4].view(-1).any()
    buffer.free()


@pytest.mark.parametrize("with_context", [False, True], ids=["bare thread", "thread with a context"])
def test_threads_keep_their_context(memory: CudaMemory, with_context: bool) -> None:
    seen: list[object] = []

    def grow() -> None:
        try:
            if with_context:
                torch.zeros(1, device="cuda")
            before = _context()
            buffer = ExtensibleTensor(8 * memory.granularity, memory=memory)
            buffer.resize_(5 * memory.granularity, zero_new=True)
            buffer.shrink_per_segment_(memory.granularity)
            buffer.free()
            seen.append(_context() == before)
        except BaseException as failure:
            seen.append(failure)

    thread = threading.Thread(target=grow)
    thread.start()
    thread.join()
    assert seen == [True]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("current", [0, 1])
def test_the_current_device_is_left_alone(current: int) -> None:
    with torch.cuda.device(current):
        stream = torch.cuda.Stream()
        other = 1 - current
        with torch.cuda.stream(stream):
            buffer = ExtensibleTensor(64 << 20, f"cuda:{other}", num_segments=2)
            buffer.resize_per_segment_(20 << 20, zero_new=True)
            assert torch.cuda.current_device() == current
            assert torch.cuda.current_stream() == stream
            assert buffer.full_view().device == torch.device("cuda", other)
            assert not buffer.full_view()[: 20 << 20].any()
            buffer.free()
            assert torch.cuda.current_device() == current


def test_the_current_stream_is_left_alone(memory: CudaMemory) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        buffer = ExtensibleTensor(8 << 20, memory=memory).resize_(8 << 20, zero_new=True)
        assert torch.cuda.current_stream() == stream
        buffer.free()
        assert torch.cuda.current_stream() == stream


@pytest.mark.alone
def test_growth_does_not_wait_for_queued_work(memory: CudaMemory) -> None:
    for is_warm in (False, True):  # the first growth of a process compiles and loads the zero kernel
        buffer = ExtensibleTensor(64 << 20, memory=memory).resize_(2 << 20, zero_new=True)
        torch.cuda._sleep(SLEEP_CYCLES)
        done = torch.cuda.Event()
        done.record()
        buffer.resize_(32 << 20, zero_new=True)
        assert not done.query() or not is_warm, "growing waited for the sleep"
        torch.cuda.synchronize()
        buffer.free()


@pytest.mark.alone
@pytest.mark.parametrize("how", ["free", "shrink"])
def test_unmapping_waits_for_queued_work(memory: CudaMemory, how: str) -> None:
    """Work queued on any stream may still touch the range: without the wait this is an illegal memory access."""
    buffer = ExtensibleTensor(64 << 20, memory=memory).resize_(32 << 20, zero_new=True)
    view = buffer.tensor
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
        view.add_(1)
        total = view.sum()
    if how == "free":
        buffer.free()
    else:
        buffer.shrink_per_segment_(0)
    assert stream.query()
    assert total.item() == 32 << 20
    buffer.free()


def test_changes_during_a_capture_are_refused_and_the_capture_stays_valid(memory: CudaMemory) -> None:
    buffer = ExtensibleTensor(64 << 20, memory=memory).resize_(4 << 20, zero_new=True)
    view = buffer.full_view()[: 4 << 20]
    view.add_(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        view.add_(1)
        for change in (
            lambda: buffer.resize_(8 << 20, zero_new=True),
            lambda: buffer.shrink_per_segment_(0),
            buffer.free,
        ):
            with pytest.raises(CaptureError, match="must not change during a capture"):
                change()
        assert (buffer.num_bytes, buffer.mapped_bytes) == (4 << 20, 4 << 20)
    buffer.resize_(8 << 20, zero_new=True)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert bool((view == 4).all())
    assert not buffer.tensor[4 << 20 :].any()
    buffer.free()


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_another_thread_grows_while_this_one_captures(memory: CudaMemory, mode: str) -> None:
    """It neither breaks the capture nor is recorded: replaying must not zero again."""
    buffer = ExtensibleTensor(64 << 20, memory=memory).resize_(4 << 20, zero_new=True)
    counter = torch.zeros(1024, device="cuda")
    counter.add_(1)
    torch.cuda.synchronize()
    failures: list[BaseException] = []

    def grow() -> None:
        try:
            buffer.resize_(16 << 20, zero_new=True)
        except BaseException as failure:
            failures.append(failure)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        counter.add_(1)
        thread = threading.Thread(target=grow)
        thread.start()
        thread.join()
        counter.add_(1)
    assert not failures
    buffer.tensor.fill_(7)
    graph.replay()
    torch.cuda.synchronize()
    assert bool((counter == 3).all())
    assert bool((buffer.tensor == 7).all())
    buffer.free()


@pytest.mark.alone
def test_a_collection_inside_a_capture_makes_no_call(memory: CudaMemory) -> None:
    gc.collect()  # graphs that earlier tests left in cycles, whose end would end the capture
    buffer = ExtensibleTensor(8 << 20, memory=memory).resize_(8 << 20, zero_new=True)
    counter = torch.zeros(16, device="cuda")
    counter.add_(1)
    torch.cuda.synchronize()
    cycle = [buffer, buffer.full_view()]
    cycle.append(cycle)  # type: ignore[arg-type]
    del buffer
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counter.add_(1)
        del cycle
        gc.collect()
        assert reap(memory) == []  # not now
        counter.add_(1)
    graph.replay()
    torch.cuda.synchronize()
    assert bool((counter == 3).all())
    free = memory.memory_info()[0]
    assert reap(memory) == []
    assert memory.memory_info()[0] == free + (8 << 20)


@pytest.mark.alone
def test_a_hundred_cycles_leak_nothing(memory: CudaMemory) -> None:
    def cycle() -> None:
        buffer = ExtensibleTensor(4 * (16 << 20) + 4, memory=memory, num_segments=4)
        buffer.resize_per_segment_(1, zero_new=True)
        buffer.resize_per_segment_(9 << 20, zero_new=True)
        buffer.shrink_per_segment_(3 << 20)
        buffer.resize_per_segment_(16 << 20)
        buffer.free()

    cycle()
    free = memory.memory_info()[0]
    for _ in range(100):
        cycle()
    assert memory.memory_info()[0] >= free


def test_driver_errors_are_named(memory: CudaMemory) -> None:
    with memory.activate():
        address, handle = memory.reserve(4 << 20), memory.create(4 << 20)
        memory.map(address, 4 << 20, handle)
        with pytest.raises(DriverError, match="cuMemUnmap failed with CUDA_ERROR_INVALID_VALUE"):
            memory.unmap(address, 2 << 20)
        memory.unmap(address, 4 << 20)
        memory.release(handle)
        memory.free(address, 4 << 20)


PRELUDE = """
import gc, os, sys, torch
from triton_kv.errors import *
from triton_kv.extensible import ExtensibleTensor
from triton_kv.memory import CudaMemory, PoisonedMemory, open_memory
M = 1 << 20

def make():
    memory = open_memory("cuda")
    buffer = ExtensibleTensor(2 * 64 * M, num_segments=2, memory=memory)
    buffer.resize_per_segment_(6 * M, zero_new=True)
    return memory, buffer
"""


def _run(code: str) -> subprocess.CompletedProcess[str]:
    program = PRELUDE + textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


QUIET_EXITS = {
    "everything alive": "memory, buffer = make(); view = buffer.full_view()",
    "view outlives the buffer": "memory, buffer = make(); view = buffer.full_view(); del buffer",
    "closed with a view": "memory, buffer = make(); view = buffer.full_view(); buffer.free()",
    "reference cycle": """
        memory, buffer = make()
        cycle = [buffer, buffer.full_view()]
        cycle.append(cycle)
        del memory, buffer, cycle
    """,
    "kept by a module": "torch.kept = make()[1]; torch.view = torch.kept.full_view()",
    "modules torn down first": """
        memory, buffer = make()
        view = buffer.full_view()
        for name in [name for name in sys.modules if name.startswith("triton_kv")]:
            vars(sys.modules[name]).clear()
            del sys.modules[name]
        gc.collect()
        del buffer, view, memory
    """,
    "work still queued": """
        memory, buffer = make()
        view = buffer.full_view()[: 6 * M]
        torch.cuda._sleep(100_000_000)
        view.add_(1)
        del buffer, view
    """,
    "out of memory on the way": """
        memory = open_memory("cuda")
        buffer = ExtensibleTensor(1 << 44, memory=memory)
        try:
            buffer.resize_(1 << 44)
        except OutOfMemory as error:
            kept = error
    """,
    "fork": """
        memory, buffer = make()
        view = buffer.full_view()
        pid = os.fork()
        if pid == 0:
            for use in (
                lambda: buffer.resize_per_segment_(8 * M),
                lambda: buffer.shrink_per_segment_(0),
                buffer.free,
                buffer.full_view,
                memory.memory_info,
                memory.synchronize,
                lambda: memory.create(2 * M),
                lambda: open_memory("cuda"),
            ):
                try:
                    use()
                except Forked as error:
                    assert "in the child" in str(error)
                else:
                    raise AssertionError("not refused")
            memory._driver = None  # any call from here on would raise
            del buffer, memory
            gc.collect()
            sys.exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        buffer.resize_per_segment_(10 * M, zero_new=True)
        assert not view[: 10 * M].any()
        buffer.free()
    """,
}


@pytest.mark.parametrize("code", QUIET_EXITS.values(), ids=QUIET_EXITS.keys())
def test_exit_is_silent(code: str) -> None:
    done = _run(code)
    assert (done.returncode, done.stderr) == (0, "")


FAULTS = {
    "past the commit": "memory, buffer = make(); buffer.full_view()[6 * M].item()",
    "second segment": "memory, buffer = make(); buffer.full_view()[64 * M + 6 * M].item()",
    "stale view after close": "memory, buffer = make(); v = buffer.full_view(); buffer.free(); v[0].item()",
    "stale view, range asked for again": """
        memory, buffer = make()
        view = buffer.full_view()
        buffer.free()
        others = [make()[1] for _ in range(20)]
        view[0].item()
    """,
    "zero kernel past the commit": """
        memory, buffer = make()
        memory.fill(buffer.base_ptr, 8 * M)
        memory.wait()
    """,
}


@pytest.mark.parametrize("code", FAULTS.values(), ids=FAULTS.keys())
def test_touching_what_is_not_committed_is_an_error(code: str) -> None:
    done = _run(code)
    assert done.returncode != 0
    assert "CUDA error" in done.stderr or "CUDA_ERROR_ILLEGAL_ADDRESS" in done.stderr

"""AttentionBuffers on a GPU: one copy and one kernel a step, asynchronous, seen by the graphs captured over them."""

import gc

import numpy as np
import pytest
import torch

from tests.metadata_cases import (
    BLOCK_SIZE,
    MAX_BLOCKS,
    MAX_SEQS,
    MAX_TOKENS,
    STEPS,
    as_rectangle,
    check_step,
    large_step,
    make_buffers,
    make_large_buffers,
    static_tensors,
)
from triton_kv.errors import CaptureError
from triton_kv.launch import count_compilations

CUDA = torch.device("cuda")
IDS = [step[0] for step in STEPS]
# Cycles that keep a stream busy for some 50 ms at 2 GHz, longer than the host needs for everything queued behind it.
LONG = 100_000_000


@pytest.mark.parametrize("step", [step[1:] for step in STEPS], ids=IDS)
@pytest.mark.parametrize("rectangle", [False, True], ids=["rows", "rectangle"])
def test_fill_after_a_full_step(step, rectangle):
    buffers = make_buffers(device=CUDA)
    buffers.fill(*STEPS[IDS.index("full")][1:])
    tables, *rest = step
    tables = as_rectangle(tables) if rectangle else tables
    buffers.fill(tables, *rest)
    check_step(buffers, tables, *rest)


def test_a_large_step():
    buffers, (table, lens, slots, query_lens) = make_large_buffers(CUDA), large_step()
    buffers.fill(table, lens, slots, query_lens)
    check_step(buffers, table, lens, slots, query_lens, BLOCK_SIZE)


def test_replays_see_each_step_at_the_same_addresses():
    """A graph captured over a dummy step copies what it finds; nothing is waited for between the steps."""
    buffers = make_buffers(device=CUDA)
    captured = buffers.view(MAX_TOKENS, MAX_SEQS)
    buffers.dummy(MAX_TOKENS, MAX_SEQS)
    log = [torch.empty_like(tensor) for tensor in static_tensors(buffers)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for to, tensor in zip(log, static_tensors(buffers), strict=True):
            to.copy_(tensor)
    addresses = [tensor.data_ptr() for tensor in static_tensors(buffers)]
    host = make_buffers()
    host.dummy(MAX_TOKENS, MAX_SEQS)
    seen, wanted = [], []
    for _ in range(3):
        for _, *step in STEPS:
            buffers.fill(*step)
            graph.replay()
            seen.append([tensor.clone() for tensor in log])
            host.fill(*step)
            wanted.append([tensor.clone() for tensor in static_tensors(host)])
            assert [tensor.data_ptr() for tensor in static_tensors(buffers)] == addresses
    assert captured.seq_lens.data_ptr() == addresses[1]
    for ours, theirs in zip(seen, wanted, strict=True):
        for ours_one, theirs_one in zip(ours, theirs, strict=True):
            torch.testing.assert_close(ours_one.cpu(), theirs_one, rtol=0, atol=0)


def test_a_fill_never_overwrites_a_copy_in_flight():
    """The stream is held up in front of every copy, so each step is packed while earlier copies have yet to run."""
    buffers = make_buffers(device=CUDA)
    buffers.dummy(MAX_SEQS, MAX_SEQS)
    torch.cuda.synchronize()
    seen = []
    for i in range(9):  # three turns of the uploads
        torch.cuda._sleep(LONG // 10)
        buffers.fill(np.full((MAX_SEQS, MAX_BLOCKS), i, np.int32), [i + 1] * MAX_SEQS, [i * 10] * MAX_SEQS)
        seen.append([tensor.clone() for tensor in static_tensors(buffers)])
    for i, (table, lens, slots, _) in enumerate(seen):
        assert table.eq(i).all(), f"step {i} was overwritten"
        assert lens.eq(i + 1).all()
        assert slots[:MAX_SEQS].eq(i * 10).all()


def test_fill_and_view_do_not_wait():
    buffers = make_buffers(device=CUDA)
    buffers.dummy(MAX_SEQS, MAX_SEQS)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    held = torch.cuda.Event()
    held.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _, *step in STEPS[:3]:  # as many as there are uploads
            buffers.fill(*step)
            buffers.view(7, 3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not held.query(), "fill waited for the stream"
    torch.cuda.synchronize()


def test_one_copy_and_one_kernel():
    buffers = make_buffers(device=CUDA)
    buffers.dummy(MAX_TOKENS, MAX_SEQS)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _, *step in STEPS[:4]:
            buffers.fill(*step)
        torch.cuda.synchronize()
    queued = sorted(event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA)
    if not queued:
        pytest.skip("the profiler sees no device activity here")
    copies = [name for name in queued if "Memcpy" in name]
    kernels = [name for name in queued if "unpack_kernel" in name]
    assert len(copies) == len(kernels) == 4
    assert len(queued) == 8, queued
    assert all("HtoD" in name and "Pinned" in name for name in copies), copies


def test_nothing_is_compiled_after_the_first_fill():
    buffers = make_buffers(device=CUDA)
    buffers.launch.compile()
    with count_compilations() as compiled:
        for _, *step in STEPS:
            buffers.fill(*step)
        buffers.dummy(MAX_TOKENS, MAX_SEQS)
        buffers.dummy(1, 1)
    assert compiled == []


def test_no_device_memory_is_allocated_by_fills():
    buffers, (table, lens, slots, query_lens) = make_large_buffers(CUDA), large_step()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(4):
        buffers.fill(table, lens, slots, query_lens)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_a_fill_inside_a_capture_is_refused_and_the_capture_goes_on():
    buffers = make_buffers(device=CUDA)
    buffers.fill(*STEPS[0][1:])
    x = torch.zeros(4, device=CUDA)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x += 1
        with pytest.raises(CaptureError, match=r"AttentionBuffers\.fill while the current stream captures"):
            buffers.fill(*STEPS[1][1:])
        x += 1
    graph.replay()
    assert x.tolist() == [2.0] * 4
    check_step(buffers, *STEPS[0][1:])


def test_buffers_dropped_under_a_copy_in_flight_keep_what_it_reads():
    for i in range(4):
        buffers = make_buffers(device=CUDA)
        buffers.dummy(MAX_SEQS, MAX_SEQS)
        torch.cuda.synchronize()
        torch.cuda._sleep(LONG // 10)
        kept = buffers.fill(np.full((MAX_SEQS, MAX_BLOCKS), i, np.int32), [i + 1] * MAX_SEQS, [i] * MAX_SEQS)
        num_words = len(buffers._uploads[0].words)
        del buffers
        gc.collect()
        others = [torch.full((num_words,), -5, dtype=torch.int32).pin_memory() for _ in range(6)]
        torch.cuda.synchronize()
        assert kept.block_table.eq(i).all()
        assert kept.seq_lens.eq(i + 1).all()
        del others


def test_buffers_dropped_inside_a_capture_do_not_end_it():
    buffers = make_buffers(device=CUDA)
    buffers.fill(*STEPS[0][1:])
    x = torch.zeros(4, device=CUDA)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x += 1
        del buffers
        gc.collect()
        x += 1
    graph.replay()
    assert x.tolist() == [2.0] * 4


def test_the_current_stream_is_used():
    buffers = make_buffers(device=CUDA)
    buffers.fill(*STEPS[0][1:])
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG)
        buffers.fill(*STEPS[1][1:])
        done = torch.cuda.Event()
        done.record()
    assert not done.query()
    check_step(buffers, *STEPS[0][1:])  # read on the default stream, which does not wait for a side stream
    side.synchronize()
    check_step(buffers, *STEPS[1][1:])


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current_one():
    buffers = make_buffers(device=torch.device("cuda", 1))
    with torch.cuda.device(0):
        buffers.fill(*STEPS[1][1:])
        assert torch.cuda.current_device() == 0
    check_step(buffers, *STEPS[1][1:])


def test_values_on_the_device_are_refused():
    buffers = make_buffers(device=CUDA)
    with pytest.raises(TypeError, match="seq_lens is on cuda:0; pass a host list or array"):
        buffers.fill([[1]], torch.ones(1, dtype=torch.int32, device=CUDA), [0])

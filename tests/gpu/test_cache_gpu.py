"""KVCache on a GPU: lockstep growth, zeroing over poisoned memory, exact accounting, errors that change nothing."""

import subprocess
import sys
import textwrap

import pytest
import torch

import triton_kv as tkv
from triton_kv.memory import CudaMemory

GIB = 1 << 30
SPEC = tkv.AttentionSpec(num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)  # 32 KiB a block and K or V: 64 a granule
LAYOUTS = ["LTBNHD", "LBTNHD", "LBTHND", "TLBNHD", "BLTNHD", "LBNHTD", "LBHNTD", "LHBNTD", "BLNHTD", "BLHNTD", "BHLNTD"]


def reserve(
    layout: str = "LTBNHD", *, capacity: int = 4096, num_layers: int = 3, dense: bool = False, poison: bool = True
):
    memory = CudaMemory(torch.device("cuda", torch.cuda.current_device()))
    return tkv.KVCache.reserve(
        SPEC,
        block_size=16,
        num_layers=num_layers,
        capacity=capacity,
        layout=layout,
        memory=tkv.PoisonedMemory(memory) if poison else memory,
        dense=dense,
    )


@pytest.mark.parametrize("dense", [False, True], ids=["padded", "dense"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_growth_zeroes_new_blocks_and_keeps_old_ones(layout, dense):
    with reserve(layout, dense=dense) as cache:
        addresses = [(layer.k.data_ptr(), layer.v.data_ptr()) for layer in cache]
        written = 0
        for target in (1, 130, 131, 1500):  # in a granule, over its end, one block more, several granules at once
            cache.extend(target)
            for layer in cache:
                assert not layer.k[written:target].any()
                assert not layer.v[written:target].any()
                layer.k[written:target] = layer.index + 1
                layer.v[written:target] = -layer.index - 1
            written = target
            for layer in cache:
                assert bool((layer.k[:target] == layer.index + 1).all())
                assert bool((layer.v[:target] == -layer.index - 1).all())
        assert [(layer.k.data_ptr(), layer.v.data_ptr()) for layer in cache] == addresses
        assert int(cache.control[0]) == 1500


@pytest.mark.alone
@pytest.mark.parametrize("layout", ["LTBNHD", "BLTNHD"])
def test_mapped_bytes_are_what_the_driver_lost(layout):
    torch.cuda.synchronize()
    with reserve(layout, poison=False, num_layers=16) as cache:
        cache.extend(1)  # the zero kernel loads its module here
        torch.cuda.synchronize()
        free_before, mapped_before = torch.cuda.mem_get_info()[0], cache.mapped_bytes
        cache.extend(4000)
        free_after = torch.cuda.mem_get_info()[0]
        assert cache.mapped_bytes == cache.mapped_bytes_at(4000)
        assert free_before - free_after == cache.mapped_bytes - mapped_before
        assert cache.committed_bytes == 4000 * cache.block_bytes
    assert torch.cuda.mem_get_info()[0] >= free_after + cache.mapped_bytes_at(1) * 0 + 3 * GIB


@pytest.mark.alone
def test_reserving_four_times_the_device_takes_no_memory():
    small = torch.zeros(
        8, device="cuda"
    )  # torch's allocator takes 2 MiB for small tensors, the control block among them
    free_before, total = torch.cuda.mem_get_info()
    block_bytes = 16 * 2 * 8 * 128 * 2 * 16
    with reserve(capacity=4 * total // block_bytes, num_layers=16, poison=False) as cache:
        assert cache.reserved_bytes >= 3.99 * total
        # At most what torch's allocator takes where its memory for small tensors is full.
        assert free_before - torch.cuda.mem_get_info()[0] <= tkv.open_memory(cache.device).granularity
        assert (cache.committed_bytes, cache.mapped_bytes) == (0, 0)
    assert not small.any()


def test_commit_all_commits_the_whole_capacity():
    memory = CudaMemory(torch.device("cuda", torch.cuda.current_device()))
    with tkv.KVCache.reserve(SPEC, block_size=16, num_layers=2, capacity=999, memory=memory, commit="all") as cache:
        assert cache.num_blocks == 999
        cache[1].v[998].fill_(1)
        torch.cuda.synchronize()


@pytest.mark.alone
def test_extend_that_does_not_fit_changes_nothing_and_a_smaller_one_works():
    _, total = torch.cuda.mem_get_info()
    with reserve(capacity=2 * total // (16 * 2 * 8 * 128 * 2 * 3), poison=False) as cache:
        cache.extend(10)
        cache[0].k[:10] = 3
        before = (cache.num_blocks, cache.mapped_bytes)
        with pytest.raises(tkv.OutOfMemory, match=r"asked for .* free, \d+ blocks would fit") as caught:
            cache.extend(cache.capacity)
        assert (cache.num_blocks, cache.mapped_bytes) == before
        assert int(cache.control[0]) == 10
        assert bool((cache[0].k[:10] == 3).all())
        assert 10 < caught.value.would_fit < cache.capacity
        cache.extend(2000)
        assert not cache[2].v[10:2000].any()
    torch.cuda.synchronize()


def test_extend_during_capture_raises_and_the_capture_stays_valid():
    with reserve() as cache:
        cache.extend(1)
        x, graph = torch.ones(8, device="cuda"), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x * 2
            with pytest.raises(tkv.CaptureError, match="capture"):
                cache.extend(100)
            with pytest.raises(tkv.CaptureError, match="capture"):
                cache.close()
        x.fill_(21)
        graph.replay()
        torch.cuda.synchronize()
        assert bool((y == 42).all())
        assert cache.num_blocks == 1
        cache.extend(100)
        assert cache.num_blocks == 100


def test_work_queued_on_another_stream_after_extend_sees_zeroed_blocks():
    with reserve(num_layers=8) as cache:
        cache.extend(1)
        side, busy = torch.cuda.Stream(), torch.cuda.Stream()
        with torch.cuda.stream(busy):
            torch.cuda._sleep(200_000_000)  # the caller's own work must not order the zeroing
        cache.extend(3000)
        with torch.cuda.stream(side):
            dirty = [bool(layer.kv[:, :3000].any()) for layer in cache]
        assert not any(dirty)


def run_in_process(code: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=240,
    )


PREAMBLE = """
    import torch, triton_kv as tkv
    spec = tkv.AttentionSpec(num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    cache = tkv.KVCache.reserve(spec, block_size=16, num_layers=2, capacity=4096, device="cuda")
    cache.extend(100)
    view = cache[0].k
"""
LIVES = {
    "live cache at exit": "",
    "closed, view alive": "cache.close()",
    "cache dropped, view alive": "del cache",
    "reference cycle": "cycle = [cache]; cycle.append(cycle); del cache, view, cycle",
    "exception in flight": "raise SystemExit(0)",
    "view reads after the cache was dropped": "del cache; assert not view[:100].any()",
}


@pytest.mark.parametrize("ending", LIVES.values(), ids=LIVES.keys())
def test_interpreter_exit_is_silent(ending):
    done = run_in_process(PREAMBLE + "    " + ending)
    assert (done.returncode, done.stderr) == (0, "")


def test_stale_view_faults_instead_of_reading_other_memory():
    done = run_in_process(
        PREAMBLE
        + """
    cache.close()
    other = tkv.KVCache.reserve(spec, block_size=16, num_layers=2, capacity=4096, device="cuda").extend(4096)
    assert other[0].k.data_ptr() != view.data_ptr()
    try:
        view[:1].sum().item()
    except Exception as error:
        print("faulted:", "illegal memory access" in str(error), flush=True)
        import os
        os._exit(7)
    """
    )
    assert done.returncode == 7, done.stderr
    assert "faulted: True" in done.stdout


def test_forked_child_is_told_and_makes_no_driver_call():
    done = run_in_process(
        PREAMBLE
        + """
    import os
    child = os.fork()
    if child == 0:
        try:
            cache.extend(200)
        except tkv.Forked:
            os._exit(5)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    cache.extend(200)
    assert not cache[1].v[:200].any()
    """
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_any_thread_may_extend_and_the_current_device_stays():
    import threading

    with reserve() as cache:
        cache.extend(1)
        failures: list[BaseException] = []

        def grow():
            try:
                cache.extend(2000)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=grow)
        thread.start()
        thread.join()
        assert not failures
        assert not cache[0].kv[:, :2000].any()
    assert torch.cuda.current_device() == 0

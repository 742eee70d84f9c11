"""The ledger and the plan over a real device: what graphs take, what neighbours take, what is left after extend."""

import gc
import statistics
import time
from datetime import timedelta

import pytest
import torch

import triton_kv as tkv
from bench.session import Session
from bench.suites import sizing
from triton_kv.memory import open_memory

MIB = 1 << 20
GIB = 1 << 30
SPEC = tkv.AttentionSpec(num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
NUM_LAYERS = 8
DEVICE = torch.device("cuda", 0)
# Whatever else lives on the card: a plan for what is free now, not for a fixed share of the whole.
ALL = {"utilization": 1.0, "headroom_bytes": 512 * MIB}


@pytest.fixture
def memory():
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    return open_memory(DEVICE)


def reserve(memory, **options):
    return tkv.KVCache.reserve(SPEC, block_size=16, num_layers=NUM_LAYERS, memory=memory, **options)


def used(memory):
    torch.cuda.synchronize()
    free_bytes, total_bytes = memory.memory_info()
    return total_bytes - free_bytes


def step(x, weights):
    for weight in weights:
        x = torch.nn.functional.silu(x @ weight)
    return x


def capture(weights, batch_sizes):
    """Graphs with outputs that live: each needs memory of its own."""
    graphs = []
    for size in batch_sizes:
        x = torch.randn(size, weights[0].shape[0], device=DEVICE, dtype=torch.bfloat16)
        step(x, weights)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = torch.cat([step(x, weights)] * 8)
        graphs.append((graph, x, y))
    for graph, _, _ in graphs:
        graph.replay()
    torch.cuda.synchronize()
    return graphs


def start_up(memory, batch_sizes=(4096, 2048, 1024)):
    ledger = tkv.MemoryLedger(memory=memory)
    with ledger.stage("weights"):
        weights = [torch.randn(4096, 4096, device=DEVICE, dtype=torch.bfloat16) / 64 for _ in range(4)]
    with ledger.stage("first block"):
        cache = reserve(memory)
        ledger.watch(cache)
        cache.extend(1)
    with ledger.stage("profile run"):
        step(torch.randn(16384, 4096, device=DEVICE, dtype=torch.bfloat16), weights)
    before = used(memory)
    with ledger.stage("capture"):
        graphs = capture(weights, batch_sizes)
    return ledger, cache, graphs, used(memory) - before


@torch.inference_mode()
def test_graphs_are_measured_and_the_plan_keeps_its_word(memory):
    ledger, cache, graphs, drop = start_up(memory)
    try:
        assert ledger.graph_bytes >= max(drop, 100 * MIB)
        plan = tkv.plan_blocks(cache, ledger, **ALL)
        started = used(memory)
        cache.extend(plan)
        tolerance = cache.layout.num_segments * memory.granularity
        assert abs(memory.memory_info()[0] - plan.free_after_bytes) <= tolerance
        assert used(memory) - started == plan.mapped_bytes - plan.share.held_bytes
        assert cache.mapped_bytes_at(plan.num_blocks) <= plan.limit_bytes
        if plan.num_blocks < cache.capacity:
            assert cache.mapped_bytes_at(plan.num_blocks + 1) > plan.limit_bytes
        for graph, _, y in graphs:
            graph.replay()
            assert y.isfinite().all()
        for stage in ledger.stages:
            amounts = stage.torch_bytes, stage.cache_bytes, stage.other_bytes, stage.outside_bytes, stage.free_bytes
            assert min(amounts) >= 0
            assert sum(amounts) == stage.total_bytes
    finally:
        cache.close()


@torch.inference_mode()
def test_what_a_step_needs_again_is_left_free(memory):
    """The profile run's peak, once its memory was given back: exactly a step of that size still runs afterwards."""
    ledger, cache, _, _ = start_up(memory)
    try:
        peak = ledger.find("profile run").peak_beyond_bytes
        assert peak >= 3 * 16384 * 4096 * 2, "input, product and activation of one layer"
        torch.cuda.empty_cache()
        plan = tkv.plan_blocks(cache, ledger, utilization=1.0, headroom_bytes=64 * MIB)
        assert plan.activation_bytes >= peak - 64 * MIB
        cache.extend(plan)
        x = torch.empty(peak // 2, device=DEVICE, dtype=torch.bfloat16)
        assert x.fill_(1.0)[-1] == 1.0
    finally:
        cache.close()


@torch.inference_mode()
def test_memory_that_torch_holds_ready_is_not_asked_for_twice(memory):
    ledger = tkv.MemoryLedger(memory=memory)
    cache = reserve(memory, capacity=100).extend(1)
    try:
        with ledger.stage("profile run"):
            del_me = torch.empty(2 * GIB, device=DEVICE, dtype=torch.uint8)
            del del_me
        peak = ledger.find("profile run").peak_beyond_bytes
        assert peak >= 2 * GIB
        assert ledger.activation_bytes(ledger.read()) == 0
        torch.cuda.empty_cache()
        reading = ledger.read()
        assert reading.reusable_bytes < 32 * MIB, "what other tests' tensors keep of their segments"
        assert ledger.activation_bytes(reading) == peak - reading.reusable_bytes
    finally:
        cache.close()


def test_private_pools_are_not_reusable(memory):
    reader = tkv.MemoryReader(memory)
    x = torch.zeros(64 * MIB, device=DEVICE, dtype=torch.uint8)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        z = y + 1  # its pool keeps what y gives back
        del y
    torch.cuda.empty_cache()
    reading = reader.read()
    assert reading.reserved_bytes >= 3 * 64 * MIB
    assert reading.reusable_bytes < 64 * MIB
    del graph, z


def test_a_neighbour_shrinks_the_plan(memory):
    ledger, cache, _, _ = start_up(memory, batch_sizes=(64,))
    handle = None
    try:
        first = tkv.plan_blocks(cache, ledger, **ALL)
        with memory.activate():
            handle = memory.create(256 * MIB)
        second = tkv.plan_blocks(cache, ledger, **ALL)
        assert first.mapped_bytes - second.mapped_bytes >= 256 * MIB - cache.layout.num_segments * memory.granularity
        assert first.limit_bytes - second.limit_bytes >= 256 * MIB
        assert "others took 256 MiB" in ledger.warnings[-1]
        with memory.activate():
            memory.release(handle)
        handle = None
        assert tkv.plan_blocks(cache, ledger, **ALL).num_blocks >= second.num_blocks
    finally:
        if handle is not None:
            with memory.activate():
                memory.release(handle)
        cache.close()


def test_an_announced_workspace_is_honoured(memory):
    ledger, cache, _, _ = start_up(memory, batch_sizes=(64,))
    try:
        ledger.reserve("workspace", 256 * MIB)
        plan = tkv.plan_blocks(cache, ledger, utilization=1.0, headroom_bytes=64 * MIB)
        cache.extend(plan)
        workspace = torch.empty(256 * MIB, device=DEVICE, dtype=torch.uint8)
        assert workspace.fill_(3)[-1] == 3
    finally:
        cache.close()


def test_an_abandoned_capture_costs_nothing(memory):
    def abandon(ledger):
        x = torch.ones(1024, 1024, device=DEVICE)
        graph = torch.cuda.CUDAGraph()
        with ledger.stage("capture"), torch.cuda.graph(graph):
            torch.cat([x] * 64)
            raise RuntimeError("abandoned")

    before = memory.memory_info()[0]
    ledger = tkv.MemoryLedger(memory=memory)
    cache = reserve(memory).extend(1)
    ledger.watch(cache)
    try:
        with ledger.stage("profile run"):
            torch.ones(1024, 1024, device=DEVICE) @ torch.ones(1024, 1024, device=DEVICE)
        with pytest.raises(RuntimeError, match="abandoned"):
            abandon(ledger)
        gc.collect()
        torch.cuda.empty_cache()
        cache.extend(tkv.plan_blocks(cache, ledger, **ALL))
    finally:
        cache.close()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    assert before - memory.memory_info()[0] <= 64 * MIB


def test_plan_sleep_and_wake_with_too_little_memory(memory):
    """Somebody takes memory while the cache sleeps: a clean error, and it wakes once the memory is back."""
    ledger, cache, _, _ = start_up(memory, batch_sizes=(64,))
    taken = []
    try:
        cache.extend(tkv.plan_blocks(cache, ledger, **ALL))
        blocks = cache.num_blocks
        cache.sleep()
        with memory.activate():
            taken.append(memory.create(GIB))
            with pytest.raises(tkv.OutOfMemory):
                cache.wake()
            assert cache.asleep
            memory.release(taken.pop())
        cache.wake()
        assert cache.num_blocks == blocks
    finally:
        with memory.activate():
            for handle in taken:
                memory.release(handle)
        cache.close()


def test_a_plan_takes_less_than_a_millisecond(memory):
    ledger, cache, _, _ = start_up(memory, batch_sizes=(64,))
    try:
        seconds = []
        for _ in range(30):
            started = time.perf_counter()
            tkv.plan_blocks(cache, ledger, **ALL)
            seconds.append(time.perf_counter() - started)
        assert statistics.median(seconds) < 1e-3, f"{statistics.median(seconds) * 1e3:.2f} ms"
    finally:
        cache.close()


def test_one_rank_over_nccl_agrees_over_gloo(memory, tmp_path):
    dist = torch.distributed
    if not dist.is_nccl_available():
        pytest.skip("torch without NCCL")
    torch.cuda.set_device(DEVICE)
    dist.init_process_group(
        "nccl", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1, timeout=timedelta(seconds=30)
    )
    try:
        from triton_kv.ranks import control_group

        group = dist.group.WORLD
        control = control_group(group)
        assert control is not group
        assert dist.get_backend(control) == "gloo"
        assert control._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=30)
        cache = reserve(memory, capacity=64)
        try:
            plan = tkv.plan_blocks(cache, **ALL).agree(group)
            assert cache.extend(plan, group=group).num_blocks == plan.num_blocks == 64
        finally:
            cache.close()
    finally:
        dist.destroy_process_group()


def test_estimate_then_measure():
    """As far as a guess, no fewer blocks, an exact plan, the same tokens. `bench run sizing` does more of it."""
    case = sizing.SizingCase(
        "sizing/half-b", 8, 2048, 8192, 16, 8, 128, 128256, tied=True, utilizations=(0.995,), guesses=("legacy-1GiB",)
    )
    result = sizing.run(Session(DEVICE), case)
    assert result["ok"], result.get("error")
    (attempt,) = result["ours"]["attempts"]
    assert attempt["ok"]
    assert attempt["graph_bytes"] > 64 * MIB, attempt
    assert attempt["within_budget"]
    assert attempt["lost_bytes"] <= 64 * MIB

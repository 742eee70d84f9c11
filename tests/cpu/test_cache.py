"""KVCache over host and fake memory: growth, zeroing, accounting, views, and what bad input says."""

import gc
import logging
import math
import os
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import triton_kv as tkv

PAGE = 4096
SPEC = tkv.AttentionSpec(num_kv_heads=2, head_dim=16, dtype=torch.float32)  # 2 KiB a block of 16 tokens, K or V
LAYOUTS = ["LTBNHD", "LBTNHD", "LBTHND", "TLBNHD", "BLTNHD", "LBNHTD", "LBHNTD", "LHBNTD", "BLNHTD", "BLHNTD", "BHLNTD"]


def reserve(layout: str = "LTBNHD", memory: tkv.VirtualMemory | None = None, **options) -> tkv.KVCache:
    options = {"block_size": 16, "num_layers": 3, "capacity": 100, **options}
    return tkv.KVCache.reserve(
        SPEC, layout=layout, memory=memory or tkv.PoisonedMemory(tkv.HostMemory(PAGE, budget_bytes=64 << 20)), **options
    )


def brute_force_mapped_bytes(cache: tkv.KVCache, num_blocks: int) -> int:
    layout, granules = cache.layout, set()
    for segment in range(layout.num_segments):
        start = segment * layout.segment_stride_bytes
        stop = start + num_blocks * layout.segment_block_bytes
        if stop > start:
            granules |= set(range(start // PAGE, math.ceil(stop / PAGE)))
    return len(granules) * PAGE


@pytest.mark.parametrize("dense", [False, True], ids=["padded", "dense"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_growth_zeroes_new_blocks_and_keeps_old_ones(layout, dense):
    with reserve(layout, dense=dense) as cache:
        addresses = [(layer.k.data_ptr(), layer.v.data_ptr()) for layer in cache]
        written = 0
        for target in (1, 2, 3, 50, 100):
            assert cache.extend(target) is cache
            assert cache.mapped_bytes == cache.mapped_bytes_at(target) == brute_force_mapped_bytes(cache, target)
            assert cache.committed_bytes == target * cache.block_bytes
            for layer in cache:
                assert not layer.k[written:target].any()
                assert not layer.v[written:target].any()
                layer.k[written:target] = layer.index + 1
                layer.v[written:target] = -layer.index - 1
            written = target
            for layer in cache:
                assert (layer.k[:target] == layer.index + 1).all()
                assert (layer.v[:target] == -layer.index - 1).all()
            assert int(cache.control[0]) == target == cache.num_blocks
        assert [(layer.k.data_ptr(), layer.v.data_ptr()) for layer in cache] == addresses


def test_a_number_at_or_below_the_committed_blocks_changes_nothing():
    with reserve() as cache:
        cache.extend(5)
        for target in (0, 3, 5):
            assert cache.extend(target).num_blocks == 5


def test_capacity_stays_as_asked_and_defaults_to_the_memory():
    with reserve(capacity=7) as cache:
        assert cache.capacity == 7
    with reserve(capacity=None) as cache:
        assert cache.capacity == (64 << 20) // cache.block_bytes


def test_commit_all():
    with reserve(commit="all") as cache:
        assert cache.num_blocks == cache.capacity == 100


def test_reserving_takes_no_memory():
    memory = tkv.FakeMemory(granularity=2 << 20, budget_bytes=0)
    cache = reserve(memory=memory, capacity=1 << 30)
    assert cache.reserved_bytes >= (1 << 30) * cache.block_bytes
    assert (cache.committed_bytes, cache.mapped_bytes) == (0, 0)
    assert memory.live.handles == 0
    cache.close()
    assert memory.live == (0, 0, 0)


def test_extend_that_does_not_fit_changes_nothing():
    memory = tkv.HostMemory(PAGE, budget_bytes=40 * PAGE)
    with reserve(memory=tkv.PoisonedMemory(memory)) as cache:
        cache.extend(4)
        for layer in cache:
            layer.kv[:, :4] = 7
        before = (memory.live, cache.num_blocks, cache.mapped_bytes, cache.committed_bytes, cache.control.tolist())
        with pytest.raises(
            tkv.OutOfMemory,
            match=r"extend\(90\) from 4 blocks \(create: ENOMEM\): .*asked for \d+ bytes.* \d+ bytes.* free, 12 blocks",
        ):
            cache.extend(90)
        assert (
            memory.live,
            cache.num_blocks,
            cache.mapped_bytes,
            cache.committed_bytes,
            cache.control.tolist(),
        ) == before
        assert all((layer.kv[:, :4] == 7).all() for layer in cache)
        cache.extend(12)  # what the error promised
        assert not any(layer.kv[:, 4:12].any() for layer in cache)
        with pytest.raises(tkv.OutOfMemory):
            cache.extend(13)


@pytest.mark.parametrize("call", ["create", "map", "set_access"])
def test_any_failing_call_rolls_back_and_the_next_try_works(call):
    driver = tkv.HostMemory(PAGE)
    faulty = tkv.FaultyMemory(driver)
    cache = reserve(memory=faulty)
    cache.extend(3)
    cache[1].v[:3] = 5
    live = driver.live
    for nth in range(1, cache.layout.num_segments + 1):
        faulty.fail(call, nth=nth)
        with pytest.raises((tkv.DriverError, tkv.OutOfMemory)):
            cache.extend(60)
        assert (driver.live, cache.num_blocks, int(cache.control[0])) == (live, 3, 3)
    cache.extend(60)
    assert (cache[1].v[:3] == 5).all()
    assert not cache[1].v[3:60].any()
    cache.close()
    assert driver.live == (0, 0, 0)


def test_a_cache_whose_undo_failed_says_so_and_still_closes():
    driver = tkv.HostMemory(PAGE)
    faulty = tkv.FaultyMemory(driver)
    cache = reserve(memory=faulty)
    cache.extend(1)
    faulty.fail("set_access", nth=4)
    faulty.fail("unmap", nth=1)
    with pytest.raises(tkv.TritonKVError) as caught:
        cache.extend(50)
    assert caught.value.undo_failures
    with pytest.raises(tkv.Broken, match=r"close\(\)"):
        cache.extend(2)
    cache.close()
    assert driver.live.handles == 0


def test_views_have_a_storage_of_their_own():
    with reserve() as cache:
        for layer in cache:
            assert layer.k.untyped_storage().data_ptr() == layer.k.data_ptr()
            assert layer.k.storage_offset() == 0
        assert cache[1] is cache["layers.1"] is cache[-2]
        assert [layer.name for layer in cache] == ["layers.0", "layers.1", "layers.2"]


def test_kv_is_both_halves_in_one_view():
    with reserve("LBTNHD") as cache:
        cache.extend(4)
        cache[2].k[:4] = 1
        cache[2].v[:4] = 2
        assert cache[2].kv.shape == (2, 100, 16, 2, 16)
        assert (cache[2].kv[0, :4] == 1).all()
        assert (cache[2].kv[1, :4] == 2).all()


def test_k_and_v_dims_that_differ():
    spec = tkv.AttentionSpec(num_kv_heads=2, head_dim=24, v_head_dim=16, dtype=torch.float16)
    with tkv.KVCache.reserve(
        spec, block_size=16, num_layers=2, capacity=50, layout="LBTNHD", memory=tkv.HostMemory(PAGE)
    ) as cache:
        cache.extend(50)
        assert cache[0].k.shape[-1] == 24
        assert cache[0].v.shape[-1] == 16
        with pytest.raises(ValueError, match="K head_dim 24 and V head_dim 16"):
            _ = cache[0].kv


@pytest.mark.parametrize("layout", [x for x in LAYOUTS if x.index("H") > x.index("B")])
def test_committed_views_can_be_printed_and_pickled(layout):
    with reserve(layout) as cache:
        cache.extend(5)
        for layer in cache:
            layer.k[:5] = layer.index
            layer.v[:5] = -1
        for layer in cache:
            k, v = pickle.loads(pickle.dumps(tuple(cache.committed(layer.index))))
            assert (k == layer.index).all()
            assert (v == -1).all()
            assert "tensor" in repr(cache.committed(layer.index).k)


def test_committed_views_where_heads_are_segments():
    with reserve("LHBNTD") as cache, pytest.raises(ValueError, match="several segments"):
        cache.extend(5).committed(0)


def test_repr_touches_no_memory():
    with reserve() as cache:
        assert "LTBNHD" in repr(cache[0])
        assert "0 of 100 blocks" in repr(cache)
    assert repr(cache) == "KVCache(closed)"


def test_extend_says_what_it_did(caplog):
    with caplog.at_level(logging.INFO, logger="triton_kv"), reserve() as cache:
        cache.extend(10)
    assert "from 0 to 10 blocks" in caplog.text
    assert "GiB" in caplog.text
    assert "ms" in caplog.text


def test_check_reports_the_first_error_and_resets():
    with reserve() as cache:
        cache.extend(1)
        assert cache.check().ok
        cache.control[1:5] = torch.tensor([3, 2, 7, 99], dtype=torch.int32)
        assert cache.check(reset=True) == (3, "slot written", 7, 99)
        assert cache.check().ok
        assert int(cache.control[0]) == 1


def test_closing_gives_everything_back():
    memory = tkv.HostMemory(PAGE)
    cache = reserve(memory=memory).extend(20)
    view = cache[0].k
    cache.close()
    cache.close()
    assert (memory.live.handles, memory.live.mappings) == (0, 0)
    assert memory.live.reservations == 1  # the view keeps the addresses
    del view
    reserve(memory=memory).close()
    assert memory.live == (0, 0, 0)


BAD = {
    "unknown letter": (lambda: reserve("LTBNHX"), ValueError, "unknown X"),
    "repeated letter": (lambda: reserve("LTBNHH"), ValueError, "repeated H"),
    "zero layers": (lambda: reserve(num_layers=0), ValueError, "num_layers must be at least 1, got 0"),
    "zero capacity": (lambda: reserve(capacity=0), ValueError, "capacity must be at least 1, got 0"),
    "negative block size": (lambda: reserve(block_size=-16), ValueError, "block_size must be at least 1, got -16"),
    "float block size": (lambda: reserve(block_size=16.0), TypeError, "block_size must be an integer"),
    "commit": (lambda: reserve(commit="some"), ValueError, 'None or "all"'),
    "no spec": (
        lambda: tkv.KVCache.reserve("llama", block_size=16, num_layers=1, device="cpu"),
        TypeError,
        "AttentionSpec, not str",
    ),
    "beyond capacity": (lambda: reserve().extend(101), ValueError, r"extend\(101\).*capacity of 100"),
    "negative extend": (lambda: reserve().extend(-1), ValueError, "not negative, got -1"),
    "float extend": (lambda: reserve().extend(3.0), TypeError, "num_blocks must be an integer, got 3.0; round it"),
    "bool extend": (lambda: reserve().extend(True), TypeError, "num_blocks must be an integer, got True"),
    "layer index": (lambda: reserve()[3], IndexError, "no layer 3: this cache has layers 0 to 2"),
    "layer name": (lambda: reserve()["layers.x"], KeyError, "layers.0 to layers.2"),
    "layer type": (lambda: reserve()[1.0], TypeError, "not by float"),
    "mapped_bytes_at": (lambda: reserve().mapped_bytes_at(101), ValueError, "0..100"),
    "committed without a block": (lambda: reserve().committed(0), tkv.NothingCommitted, r"extend\(1\)"),
    "device and memory": (
        lambda: reserve(memory=tkv.HostMemory(PAGE), device="cuda"),
        ValueError,
        "differ; name one",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()


def closed() -> tkv.KVCache:
    cache = reserve().extend(2)
    cache.close()
    return cache


@pytest.mark.parametrize(
    "use",
    [
        lambda cache: cache.extend(3),
        lambda cache: cache[0],
        lambda cache: cache.committed(0),
        lambda cache: cache.check(),
        lambda cache: cache.memory_info(),
    ],
    ids=["extend", "layer", "committed", "check", "memory_info"],
)
def test_use_after_close(use):
    with pytest.raises(tkv.Closed, match="reserve a new one"):
        use(closed())


def test_ops_on_a_closed_or_empty_cache():
    cache = reserve()
    layer, x = cache[0], torch.zeros(1, 2, 16)
    slots = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(tkv.NothingCommitted, match=r"extend\(1\)"):
        tkv.write_kv(x, x, layer, slots)
    cache.extend(1)
    tkv.write_kv(x, x, layer, slots)
    cache.close()
    with pytest.raises(tkv.Closed):
        tkv.write_kv(x, x, layer, slots)


@pytest.mark.parametrize("layout", ["LTBNDH", "DLTBNH"])
def test_op_on_a_layout_without_contiguous_channels(layout):
    with reserve(layout) as cache:
        cache.extend(1)
        x = torch.zeros(1, 2, 16)
        with pytest.raises(ValueError, match=f"{layout}.*D innermost"):
            tkv.write_kv(x, x, cache[0], torch.zeros(1, dtype=torch.int64))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_no_gpu_where_one_is_asked_for():
    with pytest.raises(tkv.Unavailable, match=r"driver|device"):
        tkv.KVCache.reserve(SPEC, block_size=16, num_layers=1, device="cuda")


def test_a_close_that_failed_is_tried_again():
    driver = tkv.HostMemory(PAGE)
    faulty = tkv.FaultyMemory(driver)
    cache = reserve(memory=faulty).extend(20)
    faulty.fail("unmap", nth=2)
    with pytest.raises(tkv.DriverError, match="unmap"):
        cache.close()
    assert 0 < driver.live.mappings <= 1  # all else was freed
    cache.close()
    assert driver.live == (0, 0, 0)


def test_a_forked_child_is_told():
    cache = reserve().extend(2)
    child = os.fork()
    if child == 0:
        for change in (lambda: cache.extend(3), cache.close):
            try:
                change()
                os._exit(1)
            except tkv.Forked:
                pass
        os._exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    assert cache.extend(3).num_blocks == 3
    cache.close()


def test_numpy_integers_are_integers():
    cache = reserve(capacity=8)
    cache.extend(np.int64(2))
    assert cache.num_blocks == 2
    assert cache[np.int32(1)] is cache[1]
    assert cache.mapped_bytes_at(np.int64(2)) == cache.mapped_bytes
    with pytest.raises(TypeError, match=r"num_blocks must be an integer, got 2\.5"):
        cache.mapped_bytes_at(2.5)


def test_block_ids_are_32_bits():
    with pytest.raises(ValueError, match="block ids are int32: at most 2147483647"):
        reserve(memory=tkv.FakeMemory(PAGE), capacity=2**31)


def test_address_space_that_no_machine_has():
    with pytest.raises(tkv.AddressSpaceExhausted, match="address space, not memory, ran out"):
        tkv.HostMemory(PAGE).reserve(1 << 65)


def test_a_cache_made_in_inference_mode_works_outside():
    with torch.inference_mode():
        cache = reserve(capacity=8)
        cache.extend(1)
        cache[0].k[0] = 3
    cache.extend(2)
    cache[0].k[1] = 4
    assert cache[0].k[:2].sum() == 7 * cache[0].k[0].numel()
    cache.close()


def test_an_out_of_memory_error_says_whether_it_was_undone():
    faulty = tkv.FaultyMemory(tkv.HostMemory(PAGE))
    cache = reserve(memory=faulty, capacity=8)
    faulty.fail("create", nth=2)
    with pytest.raises(tkv.OutOfMemory, match="nothing was changed") as caught:
        cache.extend(4)
    assert caught.value.would_fit is None  # the driver refused what the numbers allow
    faulty.fail("create", nth=2)
    faulty.fail("unmap")
    with pytest.raises(tkv.OutOfMemory, match="undoing it failed too: only close"):
        cache.extend(4)
    cache.close()


def test_threads_get_the_same_views():
    cache = reserve(capacity=8)
    cache.extend(1)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: cache[1], range(64)))
    assert len(set(map(id, found))) == 1


@pytest.mark.parametrize("ask", ["plan", "extend"])
def test_the_memory_of_a_cache_that_died_unclosed_is_free(ask):
    memory = tkv.HostMemory(PAGE, budget_bytes=64 * PAGE)
    first, second = (reserve(memory=memory, capacity=64) for _ in range(2))
    first.extend(8)
    held = memory.memory_info()[0]
    most = tkv.plan_blocks(second, utilization=1.0, headroom_bytes=0).num_blocks
    del first
    gc.collect()
    if ask == "plan":
        assert tkv.plan_blocks(second, utilization=1.0, headroom_bytes=0).num_blocks > most
        assert memory.memory_info()[0] > held
    else:
        second.extend(most + 1)
    second.close()

"""write_kv on a GPU: every layout and source, 64-bit offsets, errors counted, growth without recompilation."""

import pytest
import torch

from tests.write_cases import CASES, assert_written, make_tensors
from triton_kv import AttentionSpec, KVCache, compile_kernels
from triton_kv.launch import count_compilations
from triton_kv.writing import write_kv, write_kv_reference

CUDA = torch.device("cuda")
NAMED = {case.name: case for case in CASES}


def needs_memory(num_bytes: int) -> None:
    free_bytes, _ = torch.cuda.mem_get_info()
    if free_bytes < num_bytes:
        pytest.skip(f"needs {num_bytes >> 30} GiB of free device memory, {free_bytes >> 30} GiB are free")


@pytest.mark.parametrize("write", [write_kv, write_kv_reference], ids=["op", "reference"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_slot_holds_its_token(case, write):
    tensors = make_tensors(case, CUDA)
    expected = tensors.expected()
    write(tensors.k, tensors.v, tensors.layer, tensors.slot_mapping)
    assert_written(case, tensors, expected)


def test_opcheck_and_compile():
    case = NAMED["past_watermark"]
    tensors = make_tensors(case, CUDA)
    expected = tensors.expected()

    @torch.compile(fullgraph=True)
    def step(k, v, slots):
        write_kv(k, v, tensors.layer, slots)
        return k + 1

    step(tensors.k, tensors.v, tensors.slot_mapping)
    assert_written(case, tensors, expected)


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_more_than_2_31_elements(slot_dtype):
    """The last of 2^21 + 64 tokens of 1024 elements, and a slot as far into the cache."""
    num_tokens, heads, dim, block_size = (1 << 21) + 64, 8, 128, 16
    needs_memory(4 * num_tokens * heads * dim * 2 + (2 << 30))
    k = torch.zeros(num_tokens, heads, dim, dtype=torch.bfloat16, device=CUDA)
    v = torch.zeros_like(k)
    k[-64:] = torch.randn(64, heads, dim, device=CUDA)
    v[-64:] = torch.randn(64, heads, dim, device=CUDA)
    layer = tuple(
        torch.zeros(num_tokens // block_size, block_size, heads, dim, dtype=k.dtype, device=CUDA) for _ in "kv"
    )
    slots = torch.full((num_tokens,), -1, dtype=slot_dtype, device=CUDA)
    slots[-64:] = torch.arange(num_tokens - 1, num_tokens - 65, -1, device=CUDA)
    write_kv(k, v, layer, slots)
    for source, cache in zip((k, v), layer):
        assert torch.equal(cache.flatten(0, 1)[-64:], source[-64:].flip(0))
        assert not cache.flatten(0, 1)[:-64].any()


def test_a_full_prefill_batch():
    """Every token of a batch of 65536 lands once, read back by the permutation."""
    num_tokens, heads, dim, block_size = 65536, 8, 128, 16
    k, v = (torch.randn(num_tokens, heads, dim, device=CUDA).bfloat16() for _ in range(2))
    layer = tuple(
        torch.empty(num_tokens // block_size, block_size, heads, dim, dtype=k.dtype, device=CUDA) for _ in "kv"
    )
    slots = torch.randperm(num_tokens, device=CUDA)
    write_kv(k, v, layer, slots)
    for source, cache in zip((k, v), layer):
        assert torch.equal(cache.flatten(0, 1)[slots], source)


def test_concurrent_errors_are_all_counted():
    spec = AttentionSpec(num_kv_heads=2, head_dim=64, dtype=torch.float16)
    with KVCache.reserve(spec, block_size=16, num_layers=1, capacity=1 << 16, device="cuda") as cache:
        cache.extend(4)
        num_tokens = 20_000
        k = torch.ones(num_tokens, 2, 64, dtype=torch.float16, device=CUDA)
        slots = torch.arange(num_tokens, device=CUDA)  # 64 of them are committed
        write_kv(k, k, cache[0], slots)
        report = cache.check(reset=True)
        assert (report.num_errors, report.kind) == (num_tokens - 64, "slot written")
        assert report.row == report.value >= 64
        assert bool((cache[0].k[:4] == 1).all())
        assert cache.check().ok


def test_steps_and_growth_compile_nothing_new():
    spec = AttentionSpec(num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    with KVCache.reserve(spec, block_size=16, num_layers=3, capacity=1 << 14, device="cuda") as cache:
        cache.extend(1)

        def step(num_tokens: int, first_slot: int) -> None:
            k = torch.randn(num_tokens, 8, 128, device=CUDA).bfloat16()
            slots = torch.arange(first_slot, first_slot + num_tokens, device=CUDA)
            for layer in cache:
                write_kv(k, k, layer, slots)
                assert torch.equal(layer.v.flatten(0, 1)[slots[-1]], k[-1])

        step(1, 0)
        compile_kernels(cache, 32, max_seqs=1, max_tokens=16)
        with count_compilations() as compiled:
            for num_blocks in (2, 100, 1 << 14):
                cache.extend(num_blocks)
                step(16, (num_blocks - 1) * 16)
            step(5000, 77)
        assert compiled == []
        assert cache.check().ok


def test_captured_before_growth_writes_after_it():
    """Also under a stream of its own; the bound comes from the watermark when the graph is replayed."""
    spec = AttentionSpec(num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    with KVCache.reserve(spec, block_size=16, num_layers=2, capacity=1 << 12, device="cuda") as cache:
        cache.extend(1)
        k = torch.randn(4, 8, 128, device=CUDA).bfloat16()
        slots = torch.tensor([0, 1, -1, (1 << 16) - 1], device=CUDA)
        write_kv(k, k, cache[0], slots)
        cache.check(reset=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for layer in cache:
                write_kv(k, k, layer, slots)
        graph.replay()
        assert cache.check(reset=True).num_errors == 2  # the last slot, once a layer
        cache.extend(1 << 12)
        graph.replay()
        assert cache.check().ok
        for layer in cache:
            assert torch.equal(layer.k[-1, -1], k[3])
            assert torch.equal(layer.v[-1, -1], k[3])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current_one():
    case = NAMED["kv_in_block"]
    tensors = make_tensors(case, torch.device("cuda", 1))
    expected = tensors.expected()
    write_kv(tensors.k, tensors.v, tensors.layer, tensors.slot_mapping)
    assert_written(case, tensors, expected)
    assert torch.cuda.current_device() == 0

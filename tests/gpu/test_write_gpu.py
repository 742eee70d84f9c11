"""write_kv and rope_and_write_kv on a GPU: every layout and source, 64-bit offsets, errors counted, growth."""

import pytest
import torch

from tests.rope_cases import CASES as ROPE_CASES
from tests.rope_cases import assert_roped, make_rope
from tests.write_cases import CASES, assert_written, make_tensors
from triton_kv import AttentionSpec, KVCache, compile_kernels
from triton_kv.launch import count_compilations
from triton_kv.rope import rope_and_write_kv, rope_and_write_kv_reference
from triton_kv.writing import write_kv, write_kv_reference

CUDA = torch.device("cuda")
NAMED = {case.name: case for case in CASES}
ROPE_NAMED = {str(case): case for case in ROPE_CASES}


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


def cos_sin_table(num_positions: int, rotary_dim: int) -> torch.Tensor:
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, rotary_dim, 2, device=CUDA) / rotary_dim)
    angles = torch.arange(num_positions, device=CUDA)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def qkv_slices(num_tokens: int, query_heads: int, kv_heads: int, dim: int) -> tuple[torch.Tensor, ...]:
    """bf16 slices of one tensor, as a fused projection gives them."""
    qkv = torch.randn(num_tokens, query_heads + 2 * kv_heads, dim, device=CUDA).bfloat16()
    return qkv.split((query_heads, kv_heads, kv_heads), dim=1)


@pytest.mark.parametrize("rope", [rope_and_write_kv, rope_and_write_kv_reference], ids=["op", "reference"])
@pytest.mark.parametrize("case", ROPE_CASES, ids=str)
def test_every_slot_and_query_is_rotated(case, rope):
    tensors = make_rope(case, CUDA)
    expected = tensors.expected()
    positional, named = tensors.arguments()
    assert_roped(tensors, rope(*positional, **named), expected)


@pytest.mark.parametrize("name", ["qwen3", "gpt_j_f16", "far_everything"])
def test_rope_opcheck_and_compile(name):
    tensors = make_rope(ROPE_NAMED[name], CUDA)
    torch.library.opcheck(
        torch.ops.triton_kv.rope_and_write_kv.default, make_rope(ROPE_NAMED[name], CUDA).op_arguments()
    )
    expected = tensors.expected()
    (q, k, v, layer, slots, positions, cos_sin), named = tensors.arguments()

    @torch.compile(fullgraph=True)
    def step(q, k, v, slots, positions, named):
        return rope_and_write_kv(q, k, v, layer, slots, positions, cos_sin, **named) + 0

    assert_roped(tensors, step(q, k, v, slots, positions, named), expected)


@pytest.mark.parametrize("in_place", [True, False], ids=["in_place", "q_out"])
@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "gpt_j"])
@pytest.mark.parametrize("rotary_dim", [128, 64])
def test_rope_of_a_full_prefill_batch(rotary_dim, is_neox, in_place):
    """8192 tokens of 32 and 8 heads, slices of one tensor, twice over: programs of Q and of K in flight together."""
    num_tokens, block_size = 8192, 16
    q, k, v = qkv_slices(num_tokens, 32, 8, 128)
    q_norm, k_norm = (torch.randn(128, device=CUDA).bfloat16() for _ in "qk")
    slots, positions = torch.randperm(num_tokens, device=CUDA), torch.randint(0, 40960, (num_tokens,), device=CUDA)
    caches = [
        tuple(torch.empty(num_tokens // block_size, block_size, 8, 128, dtype=k.dtype, device=CUDA) for _ in "kv")
        for _ in range(2)
    ]
    table = cos_sin_table(40960, rotary_dim)
    choices = {"is_neox": is_neox, "q_norm": q_norm, "k_norm": k_norm}
    wanted = torch.empty_like(q)
    rope_and_write_kv_reference(q, k, v, caches[0], slots, positions, table, q_out=wanted, **choices)
    for _ in range(2):
        source = q.clone()
        out = rope_and_write_kv(
            source, k, v, caches[1], slots, positions, table, q_out=None if in_place else torch.empty_like(q), **choices
        )
        assert in_place == (out is source)
        torch.testing.assert_close(out.float(), wanted.float(), rtol=2**-7, atol=1e-5)
        torch.testing.assert_close(caches[1][0].float(), caches[0][0].float(), rtol=2**-7, atol=1e-5)
        assert torch.equal(caches[1][1], caches[0][1])
        for cache in caches[1]:
            cache.fill_(float("nan"))


def test_rope_of_more_than_2_31_elements():
    """The last of 2^21 + 64 tokens, of 1024 elements of Q each."""
    num_tokens, heads, dim, block_size = (1 << 21) + 64, 8, 128, 16
    needs_memory(2 * num_tokens * (heads + 3) * dim * 2 + (2 << 30))
    q = torch.zeros(num_tokens, heads, dim, dtype=torch.bfloat16, device=CUDA)
    k = torch.zeros(num_tokens, 1, dim, dtype=torch.bfloat16, device=CUDA)
    q[-64:], k[-64:] = torch.randn(64, heads, dim, device=CUDA), torch.randn(64, 1, dim, device=CUDA)
    slots = torch.full((num_tokens,), -1, device=CUDA)
    slots[-64:] = torch.arange(64, device=CUDA)
    positions = torch.arange(num_tokens, device=CUDA)
    positions -= num_tokens - 64  # negative but for the last ones
    layers = [tuple(torch.zeros(4, block_size, 1, dim, dtype=k.dtype, device=CUDA) for _ in "kv") for _ in range(2)]
    table = cos_sin_table(64, dim)
    wanted = rope_and_write_kv_reference(
        q[-64:].clone(), k[-64:], k[-64:], layers[0], slots[-64:], positions[-64:], table
    )
    rope_and_write_kv(q, k, k, layers[1], slots, positions, table)
    torch.testing.assert_close(q[-64:].float(), wanted.float(), rtol=2**-7, atol=1e-5)
    assert not q[:-64].any()
    torch.testing.assert_close(layers[1][0].float(), layers[0][0].float(), rtol=2**-7, atol=1e-5)
    assert torch.equal(layers[1][1], layers[0][1])


def test_rope_concurrent_errors_are_all_counted():
    spec = AttentionSpec(num_kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    with KVCache.reserve(spec, block_size=16, num_layers=1, capacity=1 << 16, device="cuda") as cache:
        cache.extend(4)
        num_tokens = 20_000
        q, k, v = qkv_slices(num_tokens, 4, 2, 64)
        slots, positions = (torch.arange(num_tokens, device=CUDA) for _ in range(2))
        rope_and_write_kv(q, k, v, cache[0], slots, positions, cos_sin_table(32, 64))
        report = cache.check(reset=True)
        assert report.num_errors == num_tokens - 32
        assert (report.kind, report.row) in [
            ("slot written", report.value),
            ("position of a token written", report.value),
        ]
        assert torch.equal(cache[0].v.flatten(0, 1)[:32], v[:32])
        assert not cache[0].v[2:4].any()


def test_rope_captured_before_growth_writes_after_it():
    """Also with new positions in the same tensor, and nothing compiled after `compile_kernels`."""
    spec = AttentionSpec(num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    with KVCache.reserve(spec, block_size=16, num_layers=2, capacity=1 << 12, device="cuda") as cache:
        cache.extend(1)
        table, norm = cos_sin_table(4096, 128), torch.randn(128, device=CUDA).bfloat16()
        compile_kernels(cache, 32, max_seqs=1, max_tokens=16, cos_sin_cache=table, q_norm=norm, k_norm=norm)
        q, k, v = qkv_slices(4, 32, 8, 128)
        q_out = torch.empty(4, 32, 128, dtype=q.dtype, device=CUDA)
        slots = torch.tensor([0, 1, -1, (1 << 16) - 1], device=CUDA)
        positions = torch.tensor([0, 1, 2, 3], dtype=torch.int32, device=CUDA)

        def step() -> None:
            for layer in cache:
                rope_and_write_kv(q, k, v, layer, slots, positions, table, q_norm=norm, k_norm=norm, q_out=q_out)

        with count_compilations() as compiled:
            step()
            rope_and_write_kv(
                q.contiguous(), k, v, cache[0], slots.int(), positions.long(), table, q_norm=norm, k_norm=norm
            )
            cache.check(reset=True)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            graph.replay()
            assert cache.check(reset=True).num_errors == 2  # the last slot, once a layer
            cache.extend(1 << 12)
            positions.copy_(torch.tensor([4095, 17, 0, 2000], device=CUDA))
            graph.replay()
            assert cache.check().ok
        assert compiled == []
        pair = tuple(torch.zeros(1, 16, 8, 128, dtype=q.dtype, device=CUDA) for _ in "kv")
        nearby = torch.tensor([0, 1, 2, 3], device=CUDA)
        wanted = rope_and_write_kv_reference(
            q, k, v, pair, nearby, positions, table, q_norm=norm, k_norm=norm, q_out=torch.empty_like(q_out)
        )
        torch.testing.assert_close(q_out.float(), wanted.float(), rtol=2**-7, atol=1e-5)
        for layer in cache:
            torch.testing.assert_close(layer.k[-1, -1].float(), pair[0][0, 3].float(), rtol=2**-7, atol=1e-5)
            torch.testing.assert_close(layer.k[0, 1].float(), pair[0][0, 1].float(), rtol=2**-7, atol=1e-5)
            assert torch.equal(layer.v[-1, -1], v[3])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_rope_on_another_device_than_the_current_one():
    tensors = make_rope(ROPE_NAMED["qwen3"], torch.device("cuda", 1))
    expected = tensors.expected()
    positional, named = tensors.arguments()
    assert_roped(tensors, rope_and_write_kv(*positional, **named), expected)
    assert torch.cuda.current_device() == 0

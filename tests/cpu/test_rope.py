"""rope_and_write_kv on the CPU: the reference against complex arithmetic, the op, compilation, and bad input."""

from dataclasses import replace

import pytest
import torch

from tests.rope_cases import CASES, MAX_POSITION, assert_roped, make_rope
from triton_kv.cache import KVCache
from triton_kv.choices import Hardware
from triton_kv.compilation import compile_kernels
from triton_kv.errors import BadAccess, Closed, NothingCommitted
from triton_kv.kernels.rope import rope_write_kernel
from triton_kv.launch import interpreted
from triton_kv.layer import operands_of
from triton_kv.memory import HostMemory
from triton_kv.rope import RopeCall, choose_rope, rope_and_write_kv, rope_and_write_kv_reference, rope_launch
from triton_kv.spec import AttentionSpec
from triton_kv.writing import write_kv

NAMED = {str(case): case for case in CASES}
H200 = Hardware(132, 90)


@pytest.mark.parametrize("rope", [rope_and_write_kv, rope_and_write_kv_reference], ids=["op", "reference"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_slot_and_query_is_rotated(case, rope):
    assert not interpreted(rope_write_kernel)
    tensors = make_rope(case)
    expected = tensors.expected()
    positional, named = tensors.arguments()
    queries = rope(*positional, **named)
    assert queries is (tensors.q if case.in_place else tensors.q_out)
    assert_roped(tensors, queries, expected)


@pytest.mark.parametrize("in_place", [True, False])
def test_its_inputs_stay_as_they_are(in_place):
    tensors = make_rope(replace(NAMED["qwen3"], in_place=in_place))
    inputs = (tensors.q, tensors.write.k, tensors.write.v)
    before = [x.clone() for x in inputs]
    positional, named = tensors.arguments()
    rope_and_write_kv(*positional, **named)
    assert torch.equal(tensors.q, before[0]) != in_place
    assert torch.equal(tensors.write.k, before[1])
    assert torch.equal(tensors.write.v, before[2])


@pytest.mark.parametrize("name", ["q", "a view"])
def test_q_as_its_own_output_is_in_place(name):
    tensors = make_rope(NAMED["qwen3"])
    expected = tensors.expected()
    positional, named = tensors.arguments()
    q_out = tensors.q if name == "q" else tensors.q[:]
    assert RopeCall.of(tensors.q, q_out, *[None] * 10).q is None
    queries = rope_and_write_kv(*positional, **{**named, "q_out": q_out})
    assert queries is q_out
    assert_roped(tensors, queries, expected)


def test_position_zero_is_the_plain_write():
    tensors, plain = (make_rope(NAMED["llama"]) for _ in range(2))
    q, cos_sin = tensors.q.clone(), torch.cat((torch.ones(1, 32), torch.zeros(1, 32)), dim=1)
    write = plain.write
    rope_and_write_kv(
        tensors.q,
        write.k,
        write.v,
        tensors.write.layer,
        write.slot_mapping,
        torch.zeros(33, dtype=torch.int32),
        cos_sin,
    )
    write_kv(write.k, write.v, write.layer, write.slot_mapping)
    assert torch.equal(tensors.q, q)
    for rotated, copied in zip(tensors.write.views, write.views):
        assert torch.equal(rotated, copied)


@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "gpt_j_f16", "partial_out", "padding", "far_everything", "pair_far"]
)
def test_opcheck(name):
    torch.library.opcheck(torch.ops.triton_kv.rope_and_write_kv.default, make_rope(NAMED[name]).op_arguments())


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_j_f16", "norm_k_only", "far_everything"])
def test_compiles_into_one_graph(name):
    """Slices of one qkv tensor too, of which the queries change in place."""
    case = NAMED[name]
    tensors = make_rope(case)
    (q, k, v, layer, slots, positions, cos_sin), named = tensors.arguments()
    shapes = [x.shape[1:] for x in (q, k, v)]
    widths = [shape.numel() for shape in shapes]

    @torch.compile(fullgraph=True)
    def step(hidden, slots, positions, named):
        qkv = hidden * 2 / 2
        q, k, v = (x.unflatten(1, shape) for x, shape in zip(qkv.split(widths, dim=1), shapes))
        rotated = rope_and_write_kv(q, k, v, layer, slots, positions, cos_sin, **named)
        return rotated + 0, k + 0

    expected = tensors.expected()
    keys = k.clone()
    queries, keys_after = step(torch.cat([x.flatten(1) for x in (q, k, v)], dim=1), slots, positions, named)
    known = (positions >= 0) & (positions < MAX_POSITION)
    if not case.in_place:  # rows without a position keep what q_out held
        queries = torch.where(known[:, None, None], queries, tensors.q_out)
    assert_roped(tensors, queries, expected)
    torch.testing.assert_close(keys_after, keys, rtol=0, atol=0, equal_nan=True)


def test_bad_positions_and_slots_are_dropped_and_counted():
    spec = AttentionSpec(num_kv_heads=2, head_dim=16, dtype=torch.float32)
    q, k = torch.ones(4, 4, 16), torch.ones(4, 2, 16)
    cos_sin = torch.cat((torch.zeros(8, 8), torch.ones(8, 8)), dim=1)  # a quarter turn: (1, 1) becomes (-1, 1)
    slots = torch.tensor([5, 6, -1, 8])
    with KVCache.reserve(
        spec, block_size=4, num_layers=1, capacity=1 << 20, memory=HostMemory(), checked=True
    ) as cache:
        with pytest.raises(NothingCommitted):
            rope_and_write_kv(q, k, k, cache[0], slots, torch.arange(4), cos_sin)
        cache.extend(2)
        rope_and_write_kv(q, k, k, cache[0], slots, torch.tensor([7, 8, 99, 0]), cos_sin)
        with pytest.raises(BadAccess, match="position of a token written at row 1: 8"):
            rope_and_write_kv(q, k, k, cache[0], slots, torch.tensor([7, 8, 99, 0]), cos_sin)
        report = cache.check(reset=True)
        assert (report.num_errors, report.kind, report.row, report.value) == (2, "position of a token written", 1, 8)
        assert [row[0, 0].item() for row in q] == [-1, 1, 1, -1]
        assert [row[0, 8].item() for row in cache[0].k[1]] == [0, 1, 0, 0]
        assert cache[0].k[:2].sum() == 0
        assert cache[0].v[:2].sum() == 2 * 16
        layer = cache[0]
    with pytest.raises(Closed):
        rope_and_write_kv(q, k, k, layer, slots, torch.arange(4), cos_sin)


class TestChoice:
    @pytest.mark.parametrize(
        ("itemsize_bytes", "head_dim", "v_head_dim", "strides", "vector", "rows"),
        [
            (2, 128, 128, (6144, 128), 8, 16),
            (4, 128, 128, (6144, 128), 4, 8),
            (2, 80, 80, (2400, 80), 8, 16),
            (2, 256, 256, (2048, 256), 8, 8),
            (2, 64, 64, (129, 64), 1, 32),
            (2, 16, 16, (16, 0), 8, 64),
            (4, 2048, 64, (2048, 0), 4, 1),
        ],
        ids=["bf16", "f32", "dim_80", "dim_256", "odd_stride", "dim_16", "dim_2048"],
    )
    def test_vector_divides_everything(self, itemsize_bytes, head_dim, v_head_dim, strides, vector, rows):
        choice = choose_rope(itemsize_bytes, head_dim, v_head_dim, 0, strides, True, H200)
        assert (choice.vector, choice.rows) == (vector, rows)
        assert rows & (rows - 1) == 0  # a tl.arange

    def test_unused_strides_do_not_choose(self):
        tensors = make_rope(NAMED["one_token"])
        q, k = (x.as_strided(x.shape, (1, x.stride(1), 1)) for x in (tensors.q, tensors.write.k))
        launch = rope_launch(tensors.call()._replace(q_out=q, k=k), operands_of(tensors.write.layer), H200)
        assert launch.arguments["VECTOR"] == 8

    def test_grid_covers_queries_and_keys(self):
        tensors = make_rope(NAMED["qwen3"], "meta")  # 20 tokens of 4 and 2 heads, 16 rows a program
        launch = rope_launch(tensors.call(), operands_of(tensors.write.layer), H200)
        assert launch.arguments["ROWS"] == 16
        assert launch.grid == (3 + 5,)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"q": lambda q: q.float()},
            TypeError,
            r"q is torch.float32, but the cache holds torch.float16: cast it first",
        ),
        ({"q": lambda q: q.flatten(1)}, ValueError, r"q must be 3-D .*got \(33, 512\)"),
        ({"q": lambda q: q[..., :32]}, ValueError, r"q has 8 heads of 32 channels, but the cache's head_dim is 64"),
        ({"q": lambda q: q[:9]}, ValueError, r"q and k must agree in the number of tokens, got 9 and 33"),
        ({"q": lambda q: q.repeat(1, 1, 2)[..., ::2]}, ValueError, r"q's channels must be contiguous, got strides"),
        ({"q": lambda q: q.to("meta")}, ValueError, r"q is on meta, but the cache is on cpu"),
        ({"q": lambda q: q.tolist()}, TypeError, r"q must be a tensor, not list"),
        ({"q_out": lambda _: torch.empty(33, 4, 64).half()}, ValueError, r"q_out must have q's shape \(33, 8, 64\)"),
        ({"q_out": lambda _: torch.empty(33, 8, 64)}, TypeError, r"q_out is torch.float32, but the cache holds"),
        ({"k": lambda k: k.float()}, TypeError, r"k is torch.float32, but the cache holds torch.float16"),
        ({"v": lambda v: v[..., :32]}, ValueError, r"v has 2 heads of 32 channels, but the cache holds 2 heads of 64"),
        ({"slot_mapping": lambda s: s[:9]}, ValueError, r"number of tokens, got 33, 33 and 9"),
        ({"positions": lambda p: p.float()}, TypeError, r"positions must be int32 or int64, got torch.float32"),
        ({"positions": lambda p: p[None]}, ValueError, r"positions must be \[num_tokens\] = \(33,\), got \(1, 33\)"),
        ({"positions": lambda p: p.repeat(2)[::2]}, ValueError, r"positions must be contiguous, got stride 2"),
        ({"cos_sin_cache": lambda c: c.double()}, TypeError, r"cos_sin_cache must be float16, .*got torch.float64"),
        ({"cos_sin_cache": lambda c: c[:, None]}, ValueError, r"cos_sin_cache must be 2-D .*got \(100, 1, 64\)"),
        ({"cos_sin_cache": lambda c: c[:, :31]}, ValueError, r"rotary_dim 31, which must be even"),
        ({"cos_sin_cache": lambda c: c.repeat(1, 2)}, ValueError, r"rotary_dim 128, .* at most head_dim 64"),
        ({"cos_sin_cache": lambda c: c[:0]}, ValueError, r"1 to 2\^31 - 1 rows, got 0"),
        ({"cos_sin_cache": lambda c: c.t().contiguous().t()}, ValueError, r"rows must be contiguous, got strides"),
        ({"q_norm": lambda _: torch.ones(32)}, ValueError, r"q_norm must be \[head_dim\] = \(64,\), got \(32,\)"),
        ({"k_norm": lambda _: torch.ones(64).int()}, TypeError, r"k_norm must be float16, .*got torch.int32"),
        ({"k_norm": lambda _: torch.ones(128)[::2]}, ValueError, r"k_norm must be contiguous, got stride 2"),
        ({"eps": lambda _: -1.0}, ValueError, r"eps must be at least 0, got -1.0"),
        ({"layer": lambda layer: layer.k}, TypeError, r"LayerCache or a pair \(k, v\) of tensors, not Tensor"),
        ({"layer": lambda layer: (layer.k.byte(), layer.v.byte())}, TypeError, r"the cache holds torch.uint8: rotate"),
    ],
    ids=[
        "q_dtype",
        "q_rank",
        "q_dim",
        "q_tokens",
        "q_channel_stride",
        "q_device",
        "q_list",
        "q_out_shape",
        "q_out_dtype",
        "k_dtype",
        "v_dim",
        "slot_tokens",
        "position_dtype",
        "position_rank",
        "position_stride",
        "cos_dtype",
        "cos_rank",
        "odd_rotary_dim",
        "wide_rotary_dim",
        "no_position",
        "cos_stride",
        "norm_shape",
        "norm_dtype",
        "norm_stride",
        "eps",
        "one_tensor",
        "cache_dtype",
    ],
)
def test_bad_input(changes, error, message):
    tensors = make_rope(NAMED["llama"])
    names = ("q", "k", "v", "layer", "slot_mapping", "positions", "cos_sin_cache")
    positional, named = tensors.arguments()
    arguments = {**dict(zip(names, positional)), **named}
    for name, change in changes.items():
        arguments[name] = change(arguments[name])
    before = [tensor.clone() for tensor in (tensors.q, *tensors.write.views)]
    with pytest.raises(error, match=message):
        rope_and_write_kv(**arguments)
    for tensor, was in zip((tensors.q, *tensors.write.views), before):
        assert torch.equal(tensor, was)


def test_compiling_ahead_checks_what_the_calls_will_share():
    spec = AttentionSpec(num_kv_heads=2, head_dim=32, dtype=torch.float16)
    cache = KVCache.reserve(spec, num_layers=1, block_size=4, capacity=8, memory=HostMemory()).extend(1)
    good, sizes = torch.zeros(8, 32), {"max_seqs": 1, "max_tokens": 4}
    assert compile_kernels(cache, 4, **sizes, cos_sin_cache=good, q_norm=torch.ones(32)) == 0  # on a CPU
    with pytest.raises(ValueError, match="rotary_dim 34"):
        compile_kernels(cache, 4, **sizes, cos_sin_cache=torch.zeros(8, 34))
    with pytest.raises(ValueError, match=r"k_norm must be \[head_dim\] = \(32,\)"):
        compile_kernels(cache, 4, **sizes, cos_sin_cache=good, k_norm=torch.ones(16))
    with pytest.raises(ValueError, match="pass its cos_sin_cache too"):
        compile_kernels(cache, 4, **sizes, q_norm=torch.ones(32))
    cache.close()

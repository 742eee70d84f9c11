"""write_kv on the CPU: the reference against a loop, the registered op, compilation, and bad input."""

import pytest
import torch

from tests.write_cases import CASES, assert_written, layer_by_hand, make_tensors
from triton_kv.attention import paged_attention, paged_attention_reference
from triton_kv.cache import KVCache
from triton_kv.errors import Closed, NothingCommitted
from triton_kv.kernels.write import write_kernel
from triton_kv.launch import interpreted
from triton_kv.layer import operands_of
from triton_kv.memory import HostMemory
from triton_kv.metadata import AttentionMetadata
from triton_kv.spec import AttentionSpec
from triton_kv.writing import choose_write, write_kv, write_kv_reference, write_launch

NAMED = {case.name: case for case in CASES}


@pytest.mark.parametrize("write", [write_kv, write_kv_reference], ids=["op", "reference"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_slot_holds_its_token(case, write):
    assert not interpreted(write_kernel)
    tensors = make_tensors(case)
    expected = tensors.expected()
    write(tensors.k, tensors.v, tensors.layer, tensors.slot_mapping)
    assert_written(case, tensors, expected)


def test_errors_add_up_and_the_first_one_stays():
    case = NAMED["past_watermark"]
    tensors = make_tensors(case)
    for _ in range(2):
        write_kv(tensors.k, tensors.v, tensors.layer, tensors.slot_mapping)
    wanted = tensors.expected_control(case.num_blocks)
    wanted[1] *= 2
    assert tensors.layer.control.tolist() == wanted


def op_arguments(case):
    tensors = make_tensors(case)
    operands = operands_of(tensors.layer)
    return (tensors.k, tensors.v, tensors.slot_mapping, *operands)


@pytest.mark.parametrize("name", ["two_segments", "v_dim_differs", "head_dim_17", "padding", "past_watermark"])
def test_opcheck(name):
    torch.library.opcheck(torch.ops.triton_kv.write_kv.default, op_arguments(NAMED[name]))


@pytest.mark.parametrize("name", ["two_segments", "block_outermost", "v_dim_differs", "head_major"])
def test_compiles_into_one_graph(name):
    case = NAMED[name]
    tensors = make_tensors(case)

    @torch.compile(fullgraph=True)
    def step(k, v, slots):
        write_kv(k * 2 / 2, v, tensors.layer, slots)
        return k + 1

    expected = tensors.expected()
    step(tensors.k, tensors.v, tensors.slot_mapping)
    assert_written(case, tensors, expected)


@pytest.mark.parametrize("layout", ["LTBNHD", "BLTNHD", "LBHNTD"])
def test_compiles_over_64_gib_of_addresses(layout):
    """A copy of the cache would touch addresses without memory: the process would not survive it."""
    spec = AttentionSpec(num_kv_heads=8, head_dim=128, dtype=torch.float32)
    page_bytes = 16 * spec.token_bytes
    with KVCache.reserve(
        spec, block_size=16, num_layers=2, capacity=(64 << 30) // (2 * page_bytes), layout=layout, memory=HostMemory()
    ) as cache:
        assert cache.reserved_bytes >= 64 << 30
        cache.extend(1)
        layers = [cache[0], cache[1]]

        @torch.compile(fullgraph=True)
        def step(k, v, slots):
            for layer in layers:
                k = k + 1
                write_kv(k, v * 2, layer, slots)
            return paged_attention(k * 1.0, layers[-1], metadata)

        k, v = (torch.randint(-9, 9, (5, 8, 128)).float() for _ in range(2))  # sums are exact in any order
        table, lens = torch.zeros(5, 1, dtype=torch.int32), torch.arange(1, 6, dtype=torch.int32)
        metadata = AttentionMetadata(
            block_table=table, seq_lens=lens, slot_mapping=torch.arange(5), num_tokens=5, num_seqs=5, max_query_len=1
        )
        step(k, v, torch.arange(5))
        cache.extend(300)
        last = torch.arange(299 * 16 + 3, 299 * 16 + 8)
        table.fill_(299)
        lens.copy_(torch.arange(4, 9))
        layers[-1].k[299, :3], layers[-1].v[299, :3] = 1.0, 1.0
        with torch.compiler.set_stance("fail_on_recompile"):
            out = step(k, v, last)
        torch.testing.assert_close(out, paged_attention_reference(k + 2, layers[-1], metadata))
        for layer in layers:
            for block, position in ((0, 0), (299, 3)):
                written = slice(position, position + 5)
                assert torch.equal(layer.k[block, written], k + 1 + layer.index)
                assert torch.equal(layer.v[block, written], v * 2)
        assert cache.check().ok


def test_writes_past_the_watermark_are_dropped_and_counted():
    spec = AttentionSpec(num_kv_heads=2, head_dim=16, dtype=torch.float32)
    k = torch.ones(4, 2, 16)
    with KVCache.reserve(spec, block_size=4, num_layers=1, capacity=1 << 20, memory=HostMemory()) as cache:
        with pytest.raises(NothingCommitted):
            write_kv(k, k, cache[0], torch.arange(4))
        cache.extend(2)
        slots = torch.tensor(
            [7, 8, -1, (1 << 20) * 4 - 1]
        )  # the last two blocks: not committed, so a write would fault
        write_kv(k, k, cache[0], slots)
        report = cache.check()
        assert (report.num_errors, report.kind, report.row, report.value) == (2, "slot written", 1, 8)
        assert cache[0].k[:2].sum() == 2 * 16
        cache.extend(3)
        write_kv(k[:2], k[:2], cache[0], slots[:2])
        assert cache.check().num_errors == 2
        assert cache[0].k[2, 0].sum() == 2 * 16
        layer = cache[0]
    with pytest.raises(Closed):
        write_kv(k, k, layer, slots)


class TestChoice:
    @pytest.mark.parametrize(
        ("itemsize_bytes", "head_dim", "v_head_dim", "v_offset", "strides", "vector", "num_vectors"),
        [
            (2, 128, 128, 1 << 20, (1024, 128), 8, 256),
            (4, 128, 128, 1 << 20, (1024, 128), 4, 256),
            (2, 80, 80, 80, (240, 80), 8, 256),
            (2, 36, 36, 36, (108, 36), 4, 512),
            (2, 64, 48, 64, (112, 64), 8, 256),
            (2, 64, 64, 66, (128, 64), 2, 512),
            (2, 64, 64, 64, (129, 64), 1, 512),
            (2, 17, 17, 17, (17, 0), 1, 512),
        ],
        ids=["bf16", "f32", "dim_80", "dim_36", "v_dim", "odd_v_offset", "odd_stride", "dim_17"],
    )
    def test_vector_divides_everything(
        self, itemsize_bytes, head_dim, v_head_dim, v_offset, strides, vector, num_vectors
    ):
        choice = choose_write(itemsize_bytes, head_dim, v_head_dim, v_offset, strides)
        assert (choice.vector, choice.num_vectors) == (vector, num_vectors)
        assert num_vectors & (num_vectors - 1) == 0  # a tl.arange

    def test_unused_strides_do_not_choose(self):
        # One decode token cut from a larger buffer has any token stride; a narrower vector would be a new compilation.
        layer = layer_by_hand(NAMED["one_token"], "cpu")
        k = torch.empty(1, 8, 128, dtype=torch.bfloat16).as_strided((1, 8, 128), (1, 128, 1))
        launch = write_launch(k, k, operands_of(layer), torch.zeros(1, dtype=torch.int32))
        assert launch.arguments["VECTOR"] == 8

    def test_grid_covers_the_wider_of_k_and_v(self):
        layer = layer_by_hand(NAMED["v_dim_differs"], "meta")
        k = torch.empty(1000, 2, 48, device="meta")
        v = torch.empty(1000, 2, 32, device="meta")
        launch = write_launch(k, v, operands_of(layer), torch.empty(1000, dtype=torch.int64, device="meta"))
        vectors = launch.grid[0] * launch.arguments["NUM_VECTORS"]
        assert 1000 * 2 * 48 // 4 <= vectors < 1000 * 2 * 48 // 4 + launch.arguments["NUM_VECTORS"]


def call(**changes):
    case = NAMED["two_segments"]
    tensors = make_tensors(case)
    arguments = {"k": tensors.k, "v": tensors.v, "layer": tensors.layer, "slot_mapping": tensors.slot_mapping}
    for name, change in changes.items():
        arguments[name] = change(arguments[name])
    before = [view.clone() for view in tensors.views]
    try:
        write_kv(**arguments)
    finally:
        for view, was in zip(tensors.views, before):
            assert torch.equal(view, was)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"k": lambda k: k.float()}, TypeError, r"k is torch.float32, but the cache holds torch.float16"),
        ({"v": lambda v: v.bfloat16()}, TypeError, r"v is torch.bfloat16, but the cache holds torch.float16"),
        ({"k": lambda k: k.flatten(1)}, ValueError, r"k must be 3-D .*got \(33, 128\)"),
        ({"k": lambda k: k[:, :1]}, ValueError, r"k has 1 heads of 64 channels, but the cache holds 2 heads of 64"),
        ({"v": lambda v: v[..., :32]}, ValueError, r"v has 2 heads of 32 channels, but the cache holds 2 heads of 64"),
        ({"v": lambda v: v.repeat(1, 1, 2)[..., ::2]}, ValueError, r"v's channels must be contiguous, got strides"),
        ({"k": lambda k: k.to("meta")}, ValueError, r"k is on meta, but the cache is on cpu"),
        ({"k": lambda k: k[:9]}, ValueError, r"number of tokens, got 9, 33 and 33"),
        ({"slot_mapping": lambda s: s.int().float()}, TypeError, r"int32 or int64, got torch.float32"),
        ({"slot_mapping": lambda s: s.short()}, TypeError, r"int32 or int64, got torch.int16"),
        ({"slot_mapping": lambda s: s[None]}, ValueError, r"slot_mapping must be 1-D .*got \(1, 33\)"),
        ({"slot_mapping": lambda s: s.repeat(2)[::2]}, ValueError, r"slot_mapping must be contiguous, got stride 2"),
        ({"slot_mapping": lambda s: s.to("meta")}, ValueError, r"slot_mapping is on meta, but the cache is on cpu"),
        ({"layer": lambda layer: layer.k}, TypeError, r"LayerCache or a pair \(k, v\) of tensors, not Tensor"),
        ({"layer": lambda layer: (layer.k, layer.v[0])}, ValueError, r"a plain K/V pair must be 4-D"),
    ],
    ids=[
        "k_dtype",
        "v_dtype",
        "k_rank",
        "k_heads",
        "v_dim",
        "v_channel_stride",
        "k_device",
        "tokens",
        "float_slots",
        "short_slots",
        "slot_rank",
        "slot_stride",
        "slot_device",
        "one_tensor",
        "pair_rank",
    ],
)
def test_bad_input(changes, error, message):
    with pytest.raises(error, match=message):
        call(**changes)

"""Attention on a GPU: every case in every dtype, batches of serving size, captured graphs, and repeatable bits."""

from dataclasses import replace

import pytest
import torch

import triton_kv as tkv
from tests.attention_cases import (
    BF16,
    BOX_CASES,
    DECODE_CASES,
    F16,
    F32,
    FORCED_CASES,
    GARBAGE,
    TOLERANCE,
    VARLEN_CASES,
    assert_attention,
    chain_words,
    decode,
    make_tensors,
    tree_words,
    varlen,
)
from triton_kv.attention import paged_attention, paged_attention_reference
from triton_kv.launch import count_compilations
from triton_kv.metadata import AttentionMetadata
from triton_kv.plan import AttentionPlan
from triton_kv.prefill_hopper import use_prefill_kernel

DTYPES = {"f32": F32, "f16": F16, "bf16": BF16}


def in_dtypes(cases, dtypes):
    """Every case in bf16, and in turn one more dtype: what differs is the width of an element."""
    return [
        pytest.param(case, DTYPES[name], id=f"{'decode' if case.queries is None else 'varlen'}-{case}-{name}")
        for number, case in enumerate(cases)
        for turn, name in enumerate(dtypes)
        if name == "bf16" or number % len(dtypes) == turn
    ]


MODEL = {"num_kv_heads": 8, "group": 4, "head_dim": 128, "v_head_dim": 128, "dtype": BF16}
LARGE_CASES = (
    decode("one_8k", 8192, **MODEL),
    decode("one_64k", 65536, **MODEL),
    decode("skew", 30000, *(17 * i for i in range(40)), **MODEL),
    decode("ragged_256", *(16 + 97 * i % 1900 for i in range(256)), **MODEL),
    decode("ragged_256_f16", *(16 + 97 * i % 1900 for i in range(256)), **{**MODEL, "dtype": F16}),
    decode("ragged_1500", *(i % 97 for i in range(1500)), **MODEL),
    decode("block_12", 5000, 12, 100, **MODEL, block_size=12),
    decode("block_1", 3000, 1, 100, **MODEL, block_size=1),
    decode("block_544", 5000, 544, 100, **MODEL, block_size=544),
    decode("kv_interleaved", 5000, 12, 100, **MODEL, layout="LBNHTD"),
    decode("head_segments", 5000, 12, 100, **MODEL, layout="LHBNTD"),
    decode("group_7", 5000, 12, 100, **{**MODEL, "num_kv_heads": 4, "group": 7}),
    decode("group_128", 5000, 12, 100, **{**MODEL, "num_kv_heads": 1, "group": 128}),
    decode("dim_256", 5000, 12, 100, **{**MODEL, "head_dim": 256, "v_head_dim": 256}),
    decode("dim_112_f16", 5000, 12, 100, **{**MODEL, "head_dim": 112, "v_head_dim": 112, "dtype": F16}),
    decode("dim_192_128", 5000, 12, 100, **{**MODEL, "head_dim": 192}, layout="LBTNHD"),
    varlen("one_2k", (2048, 2048), **MODEL),
    varlen("chunk_on_context", (512, 9000), (512, 512), **MODEL),
    varlen("mixed", *((1, 500 + i) for i in range(60)), (300, 1000), (7, 7), **MODEL, padding_tokens=9),
    varlen("speculative", *((4, 100 + 70 * i) for i in range(32)), **MODEL),
    varlen("many", *((i % 5, 5 + i % 89) for i in range(1500)), **MODEL),
    varlen("block_12", (300, 3000), (12, 12), **MODEL, block_size=12),
    varlen("group_7", (300, 3000), (12, 12), **{**MODEL, "num_kv_heads": 4, "group": 7}),
    varlen("group_128", (30, 3000), (12, 12), **{**MODEL, "num_kv_heads": 1, "group": 128}),
    varlen("dim_256", (300, 3000), (12, 12), **{**MODEL, "head_dim": 256, "v_head_dim": 256}),
    varlen("dim_96_f16", (300, 3000), (12, 12), **{**MODEL, "head_dim": 96, "v_head_dim": 96, "dtype": F16}),
    varlen("non_causal", (300, 3000), (12, 12), **MODEL, causal=False),
    varlen("tree_8", *((8, 100 + 70 * i) for i in range(32)), **MODEL, tree="branches"),
    varlen("tree_60", *((60, 100 + 70 * i) for i in range(32)), (1, 3000), **MODEL, tree="branches"),
    varlen("tree_64_window", *((64, 900 + 70 * i) for i in range(8)), **MODEL, tree="bits", window=600, sinks=True),
)


def attend(tensors, function=paged_attention, out=None):
    """(out, lse) of a case."""
    out = tensors.out() if out is None else out
    return function(tensors.q, tensors.layer, tensors.metadata, out=out, return_lse=True, **tensors.arguments)


@pytest.mark.parametrize(("case", "dtype"), in_dtypes(DECODE_CASES + VARLEN_CASES, ("f32", "f16", "bf16")))
def test_kernels_equal_the_naive_loop(case, dtype):
    tensors = make_tensors(replace(case, dtype=dtype), "cuda")
    out, lse = attend(tensors)
    assert_attention(tensors, out, lse)


@pytest.mark.parametrize(("case", "dtype"), in_dtypes(FORCED_CASES, ("f32", "f16", "bf16")))
def test_the_portable_prefill_kernel_takes_few_query_tokens(case, dtype):
    tensors = make_tensors(replace(case, dtype=dtype), "cuda")
    with use_prefill_kernel("portable"):
        out, lse = attend(tensors)
    assert_attention(tensors, out, lse)


@pytest.mark.parametrize(("case", "dtype"), in_dtypes(BOX_CASES, ("f16", "bf16")))
def test_the_copy_engine_brings_tiles_into_the_portable_kernel(case, dtype):
    """On Hopper GPUs, and by pointers elsewhere."""
    tensors = make_tensors(replace(case, dtype=dtype), "cuda")
    with use_prefill_kernel("portable"):
        out, lse = attend(tensors)
    assert_attention(tensors, out, lse)


@pytest.mark.parametrize("case", LARGE_CASES, ids=str)
def test_batches_of_serving_size_equal_the_reference(case):
    tensors = make_tensors(case, "cuda")
    out, lse = attend(tensors)
    expected_out, expected_lse = attend(tensors, paged_attention_reference)
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(out.float(), expected_out.float(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=1e-3)
    # Repeated, and over a cache without poison: the same bits.
    for fill in (None, 0.0):
        if fill is not None:
            tensors.layer.flat.nan_to_num_(fill)
        again, lse_again = attend(tensors)
        assert torch.equal(out, again)
        assert torch.equal(lse, lse_again)


BOXES = {**MODEL, "block_size": 64}
LARGE_BOX_CASES = (
    varlen("one_2k", (2048, 2048), **BOXES),
    varlen("chunk_on_context", (512, 9000), (512, 512), **BOXES),
    varlen("mixed", *((1, 500 + i) for i in range(60)), (300, 1000), (7, 7), **BOXES, padding_tokens=9),
    varlen("block_128", (300, 3000), (12, 12), **{**BOXES, "block_size": 128}),
    varlen("non_causal", (300, 3000), (12, 12), **BOXES, causal=False),
    varlen("window", (300, 3000), (900, 900), **BOXES, window=1000),
    varlen("dim_64", (300, 3000), (12, 12), **{**BOXES, "head_dim": 64, "v_head_dim": 64}),
    varlen("dim_256", (300, 3000), (12, 12), **{**BOXES, "head_dim": 256, "v_head_dim": 256}),
    varlen("dim_256_window", (300, 3000), **{**BOXES, "head_dim": 256, "v_head_dim": 256}, window=1000, softcap=50.0),
    varlen("dim_192_128", (300, 3000), **{**BOXES, "head_dim": 192}, layout="LBTNHD"),
    varlen("everything", (300, 3000), **BOXES, window=1000, softcap=50.0, sinks=True, alibi=True),
)


@pytest.mark.parametrize("case", LARGE_BOX_CASES, ids=str)
def test_large_batches_that_the_copy_engine_brings(case):
    tensors = make_tensors(case, "cuda")
    with use_prefill_kernel("portable"):
        out, lse = attend(tensors)
        again, lse_again = attend(tensors)
    expected_out, expected_lse = attend(tensors, paged_attention_reference)
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(out.float(), expected_out.float(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=1e-3)
    assert torch.equal(out, again)
    assert torch.equal(lse, lse_again)


@pytest.mark.parametrize("num_query_heads", [32, 56, 8], ids=["group_4", "group_7", "group_1"])
def test_one_captured_graph_is_right_for_every_later_batch(num_query_heads):
    """Captured with lengths of 1; then lengths and tables change in place, outputs are poisoned before each replay."""
    torch.manual_seed(0)
    batch, block_size, num_blocks, width = 24, 16, 6000, 4096
    k = torch.randn(num_blocks, block_size, 8, 128, device="cuda", dtype=BF16)
    v = torch.randn_like(k)
    q = torch.randn(batch, num_query_heads, 128, device="cuda", dtype=BF16)
    metadata = AttentionMetadata(
        block_table=torch.full((batch, width), GARBAGE, dtype=torch.int32, device="cuda"),
        seq_lens=torch.ones(batch, dtype=torch.int32, device="cuda"),
        slot_mapping=torch.full((batch,), -1, dtype=torch.int64, device="cuda"),
        num_tokens=batch,
        num_seqs=batch,
        max_query_len=1,
    )
    metadata.block_table[:, 0] = 0
    out = torch.empty_like(q)
    paged_attention(q, (k, v), metadata, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, lse = paged_attention(q, (k, v), metadata, out=out, return_lse=True)
    batches = {
        "empty": [0] * batch,
        "skew": [60000] + [33] * (batch - 1),
        "last": [1] * (batch - 1) + [65536],
        "ragged": [137 * i % 4000 for i in range(batch)],
        "even": [2048] * batch,
        "ones": [1] * batch,
    }
    for name, lengths in batches.items():
        table = torch.full((batch, width), GARBAGE, dtype=torch.int32)
        order = torch.randperm(num_blocks)
        taken = 0
        for row, length in enumerate(lengths):
            need = -(-length // block_size)
            table[row, :need] = order[torch.arange(taken, taken + need) % num_blocks].int()
            taken += need
        metadata.block_table.copy_(table)
        metadata.seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        expected, expected_lse = paged_attention_reference(q, (k, v), metadata, return_lse=True)
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2, msg=lambda text, name=name: f"{name}: {text}")
        torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("kernel", "changes"),
    [
        pytest.param(None, {}, id="chosen"),
        pytest.param("portable", {"block_size": 64}, id="boxes"),
        pytest.param("portable", {"block_size": 128, "head_dim": 256, "v_head_dim": 256}, id="boxes_dim_256"),
    ],
)
def test_a_captured_prefill_is_right_for_other_query_lengths(kernel, changes):
    torch.manual_seed(0)
    case = varlen("captured", *((16, 400),) * 8, **{**MODEL, **changes})
    tensors = make_tensors(case, "cuda")
    tensors.layer.flat.nan_to_num_(0.5)
    q, metadata = tensors.q, replace(tensors.metadata, max_query_len=case.num_tokens)
    out = tensors.out()
    with use_prefill_kernel(kernel):
        paged_attention(q, tensors.layer, metadata, out=out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            paged_attention(q, tensors.layer, metadata, out=out)
    for queries in ([16] * 8, [100, 0, 1, 1, 1, 20, 0, 5], [0] * 8, [128, 0, 0, 0, 0, 0, 0, 0], [1] * 8):
        starts = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        metadata.query_start_loc.copy_(starts)
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        expected = paged_attention_reference(q, tensors.layer, metadata)
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("planned", [False, True], ids=["alone", "plan"])
@pytest.mark.parametrize("num_queries", [8, 40], ids=["decode_kernels", "prefill_kernel"])
def test_a_captured_tree_mask_may_change(num_queries, planned):
    """Words, lengths and query tokens a sequence change in place, outputs are poisoned before each replay."""
    random = torch.Generator().manual_seed(0)
    case = varlen("captured", *((num_queries, 400 + 31 * i) for i in range(12)), **MODEL, tree="branches")
    tensors = make_tensors(case, "cuda")
    tensors.layer.flat.nan_to_num_(0.5)
    q, metadata, words, out = tensors.q, tensors.metadata, tensors.arguments["tree_mask"], tensors.out()
    plan = None
    if planned:
        limits = {"max_seqs": 12, "max_query_len": num_queries, "max_tokens": case.num_tokens}
        plan = AttentionPlan(tensors.layer, case.num_query_heads, **limits)

    def step():
        if plan is not None:
            plan.prepare(metadata)
        paged_attention(q, tensors.layer, metadata, plan=plan, tree_mask=words, out=out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    full = (num_queries,) * 12
    fewer = tuple(i * 7 % (num_queries + 1) for i in range(12))
    for queries, tree in ((full, "branches"), (full, "bits"), (fewer, "branches"), (fewer, "bits"), (full, "branches")):
        changed = replace(case, queries=queries, tree=tree, padding_tokens=case.num_tokens - sum(queries))
        words.copy_(tree_words(changed, random))
        metadata.query_start_loc.copy_(torch.tensor([0, *queries]).cumsum(0))
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        expected = paged_attention_reference(q, tensors.layer, metadata, tree_mask=words)
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("num_queries", [8, 64], ids=["decode_kernels", "prefill_kernel"])
def test_a_chain_is_the_causal_mask(num_queries):
    tensors = make_tensors(varlen("chain", *((num_queries, 100 + 70 * i) for i in range(16)), **MODEL), "cuda")
    expected, expected_lse = attend(tensors)
    tensors.arguments["tree_mask"] = chain_words(tensors.case).cuda()
    out, lse = attend(tensors)
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=1e-3)


def test_known_launches_take_other_words():
    """A call of a known shape goes past the checks and past Triton's preparation: its own words must be read."""
    random = torch.Generator().manual_seed(0)
    for num_queries in (8, 40):
        case = varlen("known", *((num_queries, 100 + 70 * i) for i in range(8)), **MODEL, tree="bits")
        tensors = make_tensors(case, "cuda")
        causal = replace(tensors, arguments={**tensors.arguments, "tree_mask": None})
        expected, _ = attend(causal)
        out, lse = attend(tensors)
        assert_attention(tensors, out, lse)
        odd = torch.empty(case.num_tokens + 1, dtype=torch.int64, device="cuda")[1:]  # aligned to 8 bytes
        tensors.arguments["tree_mask"] = odd.copy_(tree_words(case, random))
        for _ in range(2):
            out, lse = attend(tensors)
            assert_attention(tensors, out, lse)
        assert torch.equal(attend(causal)[0], expected)


def test_two_calls_in_flight_do_not_share_a_workspace():
    """Workspaces come from the caching allocator, which follows streams."""
    cases = [make_tensors(replace(LARGE_CASES[index], name="in flight"), "cuda") for index in (1, 2)]
    expected = [attend(tensors)[0] for tensors in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    for _ in range(10):
        found = []
        for tensors, stream in zip(cases, streams):
            with torch.cuda.stream(stream):
                found.append(attend(tensors)[0])
        torch.cuda.synchronize()
        assert all(torch.equal(left, right) for left, right in zip(found, expected))


def test_offsets_beyond_31_bits():
    """Blocks whose first element lies past 2^31 elements of an interleaved K/V tensor."""
    num_blocks, block_size, heads, dim = 70_000, 16, 8, 128
    both = torch.empty(num_blocks, 2, block_size, heads, dim, device="cuda", dtype=BF16)
    assert both.numel() > 2**31
    torch.manual_seed(0)
    used = list(range(num_blocks - 20, num_blocks))
    both[used] = torch.randn(20, 2, block_size, heads, dim, device="cuda", dtype=BF16)
    small = both[used].clone()
    metadata = AttentionMetadata(
        block_table=torch.tensor([used], dtype=torch.int32, device="cuda"),
        seq_lens=torch.tensor([315], dtype=torch.int32, device="cuda"),
        slot_mapping=torch.full((1,), -1, dtype=torch.int64, device="cuda"),
        num_tokens=1,
        num_seqs=1,
        max_query_len=1,
    )
    moved = replace(metadata, block_table=metadata.block_table - (num_blocks - 20))
    q = torch.randn(1, 32, dim, device="cuda", dtype=BF16)
    assert torch.equal(
        paged_attention(q, (both[:, 0], both[:, 1]), metadata), paged_attention(q, (small[:, 0], small[:, 1]), moved)
    )


def test_what_changes_from_step_to_step_compiles_nothing():
    cases = [
        decode("a", *range(20, 35), **MODEL),
        decode("b", *range(1, 12), **MODEL),
        decode("c", 5000, 1, 9, **MODEL),
    ]
    tensors = [make_tensors(case, "cuda") for case in cases]
    attend(tensors[0])
    with count_compilations() as compiled:
        for other in tensors[1:]:
            attend(other)
    assert compiled == []


@pytest.mark.parametrize(
    ("num_query_heads", "head_dim", "dtype"),
    [
        pytest.param(32, 128, BF16, id="8x4-128-bf16"),
        pytest.param(9, 64, F16, id="3x3-64-f16"),
        pytest.param(14, 80, BF16, id="2x7-80-bf16"),
    ],
)
def test_compile_kernels_leaves_nothing_to_compile(num_query_heads, head_dim, dtype):
    num_kv_heads = {32: 8, 9: 3, 14: 2}[num_query_heads]
    spec = tkv.AttentionSpec(num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)
    with tkv.KVCache.reserve(spec, num_layers=2, block_size=16, capacity=100, device="cuda") as cache:
        cache.extend(1)
        tkv.compile_kernels(cache, num_query_heads, max_seqs=300, max_tokens=700)
        assert cache.check().num_errors == 0
        buffers = tkv.AttentionBuffers(700, 300, 4, "cuda")
        buffers.dummy(1, 1)
        with count_compilations() as compiled:
            for num_tokens, num_seqs in (
                (1, 1),
                (33, 33),
                (50, 50),
                (64, 64),
                (300, 300),
                (700, 3),
                (9, 2),
                (260, 257),
            ):
                metadata = buffers.dummy(num_tokens, num_seqs)
                qkv = torch.randn(num_tokens, num_query_heads + 2 * num_kv_heads, head_dim, device="cuda").to(dtype)
                q, k, v = qkv.split((num_query_heads, num_kv_heads, num_kv_heads), dim=1)
                for layer in cache:
                    tkv.write_kv(k, v, layer, metadata.slot_mapping)
                    tkv.paged_attention(q, layer, metadata)
        assert compiled == []


def test_compile_kernels_leaves_nothing_of_a_cascade_to_compile():
    spec = tkv.AttentionSpec(num_kv_heads=8, head_dim=128, dtype=BF16)
    with tkv.KVCache.reserve(spec, num_layers=1, block_size=16, capacity=100, device="cuda") as cache:
        cache.extend(1)
        tkv.compile_kernels(cache, 32, max_seqs=64, max_tokens=300, return_lse=True, cascade=True)
        buffers = [tkv.AttentionBuffers(300, 64, 4, "cuda") for _ in range(2)]
        for each in buffers:
            each.dummy(1, 1)
        with count_compilations() as compiled:
            for num_seqs in (1, 4, 64):
                prefix = buffers[0].dummy(num_seqs, 1)
                suffix = buffers[1].dummy(num_seqs, num_seqs)
                q = torch.randn(num_seqs, 32, 128, device="cuda").to(BF16)
                over_prefix = paged_attention(q, cache[0], prefix, causal=False, return_lse=True)
                over_suffix = paged_attention(q, cache[0], suffix, return_lse=True)
                tkv.merge_attention(*over_prefix, *over_suffix)
        assert compiled == []


def test_compile_kernels_leaves_nothing_of_a_tree_mask_to_compile():
    spec = tkv.AttentionSpec(num_kv_heads=8, head_dim=64, dtype=BF16)
    with tkv.KVCache.reserve(spec, num_layers=1, block_size=16, capacity=100, device="cuda") as cache:
        cache.extend(1)
        tkv.compile_kernels(cache, 32, max_seqs=70, max_tokens=700, tree_mask=True)
        buffers = tkv.AttentionBuffers(700, 70, 4, "cuda")
        buffers.dummy(1, 1)
        with count_compilations() as compiled:
            for num_tokens, num_seqs, max_query_len in ((1, 1, 1), (70, 70, 1), (64, 16, 4), (9, 1, 9), (700, 70, 64)):
                buffers.dummy(num_tokens, num_seqs)
                metadata = buffers.view(num_tokens, num_seqs, max_query_len)
                q = torch.randn(num_tokens, 32, 64, device="cuda").to(BF16)
                words = torch.ones(num_tokens, dtype=torch.int64, device="cuda")
                tkv.paged_attention(q, cache[0], metadata, tree_mask=words)
        assert compiled == []

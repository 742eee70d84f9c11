"""The Hopper prefill kernel on a Hopper GPU: the shared tables at the head dims it takes, and cases of its own."""

from dataclasses import replace

import pytest
import torch

from tests.attention_cases import (
    BF16,
    F16,
    NEGATIVE,
    OVER,
    TOLERANCE,
    VARLEN_CASES,
    assert_attention,
    make_tensors,
    varlen,
)
from triton_kv.attention import paged_attention, paged_attention_reference
from triton_kv.choices import HOPPER_TRITONS, hardware_of, refuse_hopper
from triton_kv.layer import LayerCache, operands_of
from triton_kv.metadata import AttentionMetadata
from triton_kv.plan import AttentionPlan
from triton_kv.prefill_hopper import TRITON_VERSION, use_prefill_kernel

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available()
    and refuse_hopper(hardware_of(torch.device("cuda")).architecture, TRITON_VERSION, BF16, 128, 128, 16) is not None,
    reason="the Hopper kernel does not run on this GPU, or with this Triton",
)

HEADS = {"num_kv_heads": 2, "group": 4, "head_dim": 128, "v_head_dim": 128, "dtype": BF16}
# Lengths around tiles of 128 keys and of 32 tokens, bad ids in several tiles, and every block size and layout.
OWN_CASES = (
    varlen("tile_edges", (128, 128), (127, 127), (129, 129), (32, 256), (33, 257), (31, 255), **HEADS),
    varlen("tails", *((5, 128 + i) for i in (1, 8, 15, 16, 17, 100, 127, 128)), **HEADS),
    varlen("long_context", (40, 1500), (3, 900), (1, 700), **HEADS),
    varlen("more_queries_than_keys", (200, 100), (50, 1), (140, 139), **HEADS),
    varlen("non_causal_long", (40, 700), (130, 130), (1, 257), **HEADS, causal=False),
    varlen("bad_ids", (40, 700), (130, 300), **HEADS, bad_entries=((0, 3, OVER), (0, 20, NEGATIVE), (1, 9, OVER))),
    varlen("all_ids_bad", (5, 30), (3, 40), **HEADS, bad_entries=((0, 0, NEGATIVE), (0, 1, OVER))),
    varlen("block_32", (40, 700), (3, 33), **HEADS, block_size=32),
    varlen("block_128", (40, 700), (3, 130), **HEADS, block_size=128, bad_entries=((0, 2, OVER),)),
    varlen("block_256", (40, 700), (3, 300), **HEADS, block_size=256, bad_entries=((0, 1, NEGATIVE),)),
    varlen("group_1", (140, 300), (3, 33), **{**HEADS, "group": 1}),
    varlen("group_7_long", (140, 300), (3, 33), **{**HEADS, "group": 7}),
    varlen("group_7_short", (16, 300), (3, 33), **{**HEADS, "group": 7}),
    varlen("group_6", (140, 300), (3, 33), **{**HEADS, "group": 6}),
    varlen("group_16", (20, 300), (3, 33), **{**HEADS, "group": 16}),
    varlen("group_64", (5, 300), (1, 33), **{**HEADS, "num_kv_heads": 1, "group": 64}),
    varlen("group_100", (5, 300), (1, 33), **{**HEADS, "num_kv_heads": 1, "group": 100}),
    *(
        varlen(f"layout_{layout}", (40, 300), (3, 33), **HEADS, layout=layout)
        for layout in (
            "LBTNHD",
            "LBTHND",
            "TLBNHD",
            "BLTNHD",
            "LBNHTD",
            "LHBNTD",
            "BHLNTD",
            "pair",
            "pair_interleaved",
            "pair_head_major",
            "pair_padded",
        )
    ),
)


def taken(cases):
    """The cases whose scores and block size the kernel takes: all of head_dim 128 in bf16, others of 64 or 256 too."""
    plain = [case for case in cases if not (case.window or case.softcap or case.sinks or case.alibi or case.tree)]
    for number, case in enumerate(plain):
        for head_dim, dtype in ((128, BF16), (64, F16) if number % 4 == 1 else (256, BF16))[: 1 + number % 2]:
            changed = replace(case, head_dim=head_dim, v_head_dim=head_dim, dtype=dtype)
            if refuse_hopper(90, HOPPER_TRITONS[0], dtype, head_dim, head_dim, case.block_size) is None:
                yield pytest.param(changed, id=f"{case}-{head_dim}")


@pytest.mark.parametrize("case", taken(VARLEN_CASES + OWN_CASES))
def test_equals_the_naive_loop(case):
    tensors = make_tensors(case, "cuda")
    out = tensors.out()
    with use_prefill_kernel("hopper"):
        _, lse = paged_attention(
            tensors.q, tensors.layer, tensors.metadata, out=out, return_lse=True, **tensors.arguments
        )
    assert_attention(tensors, out, lse)


MODEL = {"num_kv_heads": 8, "group": 4, "head_dim": 128, "v_head_dim": 128, "dtype": BF16}
LARGE_CASES = (
    varlen("one_2k", (2048, 2048), **MODEL),
    varlen("one_2k_dim_64", (2048, 2048), **{**MODEL, "head_dim": 64, "v_head_dim": 64}),
    varlen("third_consumer", (4099, 5003), (3, 33), (130, 130), **{**MODEL, "head_dim": 64, "v_head_dim": 64}),
    varlen("dim_256", (600, 3001), (3, 33), (130, 130), **{**MODEL, "head_dim": 256, "v_head_dim": 256}),
    varlen("chunk_on_context", (512, 9000), (512, 512), **MODEL),
    varlen("mixed", *((1, 500 + i) for i in range(60)), (300, 1000), (7, 7), **MODEL, padding_tokens=9),
    varlen("many", *((i % 5, 5 + i % 89) for i in range(1500)), **MODEL),
    varlen("non_causal", (300, 3000), (12, 12), **MODEL, causal=False),
)


@pytest.mark.parametrize("case", LARGE_CASES, ids=str)
def test_batches_of_serving_size_equal_the_reference(case):
    tensors = make_tensors(case, "cuda")

    def attend(function):
        return function(
            tensors.q, tensors.layer, tensors.metadata, out=tensors.out(), causal=case.causal, return_lse=True
        )

    with use_prefill_kernel("hopper"):
        out, lse = attend(paged_attention)
        again = attend(paged_attention)
    expected_out, expected_lse = attend(paged_attention_reference)
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(out.float(), expected_out.float(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=1e-3)
    assert torch.equal(out, again[0])
    assert torch.equal(lse, again[1])


PLANNED_CASES = (
    *LARGE_CASES,
    varlen("bad_ids", (40, 700), (130, 300), **MODEL, bad_entries=((0, 3, OVER), (0, 20, NEGATIVE), (1, 9, OVER))),
    varlen("table_rows", (40, 700), (0, 9), (130, 300), **MODEL, table_rows=True),
    varlen("group_7", (140, 300), (3, 33), **{**MODEL, "group": 7}),
    varlen(
        "bad_ids_third_consumer",
        (4100, 4100),
        (300, 600),
        **{**MODEL, "head_dim": 64, "v_head_dim": 64},
        bad_entries=((0, 3, OVER), (0, 200, NEGATIVE), (1, 20, OVER)),
    ),
    varlen("pair", (140, 300), (3, 33), **MODEL, layout="pair"),
)


@pytest.mark.parametrize("case", PLANNED_CASES, ids=str)
def test_a_plans_list_gives_the_same_bits(case):
    tensors = make_tensors(case, "cuda")
    metadata = tensors.metadata
    plan = AttentionPlan(
        tensors.layer, case.num_query_heads, max_seqs=metadata.num_seqs + 9, max_tokens=metadata.num_tokens + 100
    )

    def attend(**arguments):
        return paged_attention(
            tensors.q, tensors.layer, metadata, out=tensors.out(), causal=case.causal, return_lse=True, **arguments
        )

    with use_prefill_kernel("hopper"):
        out, lse = attend()
        if isinstance(tensors.layer, LayerCache):
            tensors.layer.control[1:].zero_()
        plan.prepare(metadata)
        used = plan.workspace_for(tensors.q, operands_of(tensors.layer), metadata, 0, case.causal, False)
        assert (used is not None) == case.causal
        for _ in range(3):  # layers
            planned_out, planned_lse = attend(plan=plan)
            assert torch.equal(planned_out, out)
            assert torch.equal(planned_lse, lse)
    # Bad ids are counted once a step, not once a layer.
    if isinstance(tensors.layer, LayerCache) and case.causal:
        assert int(tensors.layer.control[1]) == len(tensors.bad)


def test_a_plan_lists_work_in_a_captured_graph():
    """Captured over one prompt, with prepare in front of two layers; then lengths and starts change in place."""
    torch.manual_seed(0)
    batch, num_tokens, num_blocks, width = 6, 400, 600, 64
    layers = [torch.randn(2, num_blocks, 16, 8, 128, device="cuda", dtype=BF16) for _ in range(2)]
    q = torch.randn(num_tokens, 32, 128, device="cuda", dtype=BF16)
    int32 = {"dtype": torch.int32, "device": "cuda"}
    metadata = AttentionMetadata(
        block_table=torch.randint(0, num_blocks, (batch, width), **int32),
        seq_lens=torch.full((batch,), 400, **int32),
        slot_mapping=torch.full((num_tokens,), -1, dtype=torch.int64, device="cuda"),
        num_tokens=num_tokens,
        num_seqs=batch,
        max_query_len=num_tokens,
        query_start_loc=torch.tensor([0] + [400] * batch, **int32),
    )
    plan = AttentionPlan((layers[0][0], layers[0][1]), 32, max_seqs=8, max_tokens=512)
    outs = [torch.empty_like(q) for _ in layers]

    def step():
        plan.prepare(metadata)
        for layer, out in zip(layers, outs):
            paged_attention(q, (layer[0], layer[1]), metadata, plan=plan, out=out)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for queries, lengths in (
        ([400, 0, 0, 0, 0, 0], [400, 0, 0, 0, 0, 0]),
        ([1, 100, 7, 33, 200, 1], [1000, 100, 700, 33, 1000, 1]),
        ([66, 66, 67, 67, 67, 67], [66, 166, 367, 567, 767, 967]),
        ([3, 0, 0, 0, 0, 90], [1024, 0, 0, 0, 0, 91]),
    ):
        metadata.seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        metadata.query_start_loc.copy_(torch.tensor([0, *queries], dtype=torch.int32).cumsum(0))
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        for layer, out in zip(layers, outs):
            own = paged_attention(q, (layer[0], layer[1]), metadata)
            assert torch.equal(out, own)
            expected = paged_attention_reference(q, (layer[0], layer[1]), metadata)
            torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


def test_one_captured_graph_is_right_for_every_later_batch():
    """Captured over 12 sequences of one token; then lengths, query starts and tables change in place."""
    torch.manual_seed(0)
    batch, num_tokens, block_size, num_blocks, width = 12, 600, 16, 4000, 512
    k = torch.randn(num_blocks, block_size, 8, 128, device="cuda", dtype=BF16)
    v = torch.randn_like(k)
    q = torch.randn(num_tokens, 32, 128, device="cuda", dtype=BF16)
    int32 = {"dtype": torch.int32, "device": "cuda"}
    metadata = AttentionMetadata(
        block_table=torch.zeros(batch, width, **int32),
        seq_lens=torch.ones(batch, **int32),
        slot_mapping=torch.full((num_tokens,), -1, dtype=torch.int64, device="cuda"),
        num_tokens=num_tokens,
        num_seqs=batch,
        max_query_len=num_tokens,
        query_start_loc=torch.arange(batch + 1, **int32),
    )
    out = torch.empty_like(q)
    with use_prefill_kernel("hopper"):
        paged_attention(q, (k, v), metadata, out=out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            _, lse = paged_attention(q, (k, v), metadata, out=out, return_lse=True)
    batches = {
        "nothing": ([0] * batch, [0] * batch),
        "one_prompt": ([600] + [0] * 11, [600] + [0] * 11),
        "mixed": ([300, 1, 1, 1, 1, 1, 0, 40, 4, 4, 4, 7], [5000, 1, 17, 800, 129, 128, 900, 40, 3000, 4, 77, 7]),
        "decodes": ([1] * batch, [137 * i % 4000 + 1 for i in range(batch)]),
        "full": ([50] * batch, [50 + 300 * i for i in range(batch)]),
    }
    for name, (queries, lengths) in batches.items():
        order = torch.randperm(num_blocks)
        table = order[torch.arange(batch * width) % num_blocks].view(batch, width)
        metadata.block_table.copy_(table)
        metadata.seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        metadata.query_start_loc.copy_(torch.tensor([0, *queries], dtype=torch.int32).cumsum(0))
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        expected, expected_lse = paged_attention_reference(q, (k, v), metadata, return_lse=True)
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2, msg=lambda text, name=name: f"{name}: {text}")
        torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=1e-3)


def test_a_forced_kernel_says_why_it_cannot_run():
    tensors = make_tensors(varlen("odd", (9, 70), **HEADS, block_size=12), "cuda")
    with use_prefill_kernel("hopper"), pytest.raises(ValueError, match="block sizes 16, 32, 64, 128 and 256, not 12"):
        paged_attention(tensors.q, tensors.layer, tensors.metadata)

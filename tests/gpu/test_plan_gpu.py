"""Plans, batch invariance and merging on a GPU: the same bits as without, in graphs, on several streams."""

from dataclasses import replace

import pytest
import torch

from tests.attention_cases import BF16, DECODE_CASES, VARLEN_CASES, assert_attention, decode, make_tensors, varlen
from tests.merge_cases import SHAPES, assert_merged, make
from triton_kv.attention import paged_attention, paged_attention_reference
from triton_kv.batch import Batch
from triton_kv.layer import LayerCache
from triton_kv.merging import merge_attention
from triton_kv.plan import AttentionPlan
from triton_kv.prefill_hopper import goes_to_decode, use_prefill_kernel

MODEL = {"num_kv_heads": 8, "group": 4, "head_dim": 128, "v_head_dim": 128, "dtype": BF16}
NAMES = ("skew", "empty_rows", "over_watermark", "table_rows_bad", "window_over_watermark", "everything", "invariant")
NAMES += ("speculative", "tree_few", "tree_few_window", "tree_few_invariant")
CASES = [
    *(replace(case, dtype=BF16) for case in (*DECODE_CASES, *VARLEN_CASES) if case.name in NAMES),
    decode("skewed", 30000, *(17 * i for i in range(70)), **MODEL),
    varlen("four_tokens", (4, 20000), *((4, 100 + 70 * i) for i in range(20)), **MODEL),
]


def plan_for(tensors) -> AttentionPlan:
    case, metadata = tensors.case, tensors.metadata
    return AttentionPlan(
        tensors.layer,
        case.num_query_heads,
        max_seqs=metadata.num_seqs + 3,
        max_query_len=16,
        max_blocks_per_seq=metadata.block_table.shape[1],
        window=case.window,
        batch_invariant=case.batch_invariant,
    )


def attend(tensors, **more):
    return paged_attention(
        tensors.q, tensors.layer, tensors.metadata, out=tensors.out(), return_lse=True, **tensors.arguments, **more
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{'decode' if case.queries is None else 'varlen'}-{case}")
def test_a_plan_changes_no_bit_and_counts_once(case):
    tensors = make_tensors(case, "cuda")
    plan = plan_for(tensors)
    own = attend(tensors)
    if isinstance(tensors.layer, LayerCache):
        tensors.layer.control[1:].zero_()
    plan.prepare(tensors.metadata)
    decodes = goes_to_decode(Batch.of(tensors.metadata), case.group)
    for _ in range(2 if decodes else 1):  # two layers of one step; prefill without a list counts in each
        out, lse = attend(tensors, plan=plan)
        assert torch.equal(out, own[0])
        assert torch.equal(lse, own[1])
    assert_attention(tensors, out, lse)


def test_a_graph_with_its_plan_serves_later_lengths():
    case = decode("captured", *(3000 + 100 * i for i in range(12)), **MODEL)
    tensors = make_tensors(case, "cuda")
    tensors.layer.flat.nan_to_num_(0.25)
    lens = tensors.metadata.seq_lens
    full = lens.clone()
    plan, out = plan_for(tensors), tensors.out()

    def step():
        plan.prepare(tensors.metadata)
        paged_attention(tensors.q, tensors.layer, tensors.metadata, plan=plan, out=out)

    lens.fill_(1)
    step()
    torch.cuda.synchronize()
    first = torch.cuda.CUDAGraph()  # torch keeps a generator's state from the first capture on
    with torch.cuda.graph(first):
        lens.add_(0)
    before = torch.cuda.memory_allocated()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    assert torch.cuda.memory_allocated() == before  # the plan owns all of it
    for lengths in (full, full // 7, torch.zeros_like(full), full.flip(0) // 2):
        lens.copy_(lengths)
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        expected = paged_attention_reference(tensors.q, tensors.layer, tensors.metadata)
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


def test_two_plans_on_two_streams():
    cases = [decode("a", 20000, 5, **MODEL), decode("b", 7, 30000, **MODEL)]
    tensors = [make_tensors(case, "cuda") for case in cases]
    plans, expected = [plan_for(each) for each in tensors], [attend(each)[0] for each in tensors]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    for _ in range(20):
        found = []
        for each, plan, stream in zip(tensors, plans, streams):
            with torch.cuda.stream(stream):
                plan.prepare(each.metadata)
                found.append(attend(each, plan=plan)[0])
        torch.cuda.synchronize()
        assert all(torch.equal(left, right) for left, right in zip(found, expected))


def test_batch_invariant_bits_depend_on_the_row_alone():
    """The first sequence alone, and among 1, 63, 64 and 200 others, with other blocks and padding rows."""
    first = (5000,)
    alone = make_tensors(decode("alone", *first, **MODEL), "cuda")
    expected = paged_attention(alone.q, alone.layer, alone.metadata, batch_invariant=True, return_lse=True)
    for others in ((1,), (50,) * 63, tuple(i % 90 for i in range(64)), (0,) * 200):
        batch = make_tensors(decode("batch", *first, *others, **MODEL), "cuda", seed=len(others))
        table, k, v = batch.metadata.block_table, batch.layer.k, batch.layer.v
        entries = slice(-(-first[0] // 16))
        ours, theirs = table[0, entries].long(), alone.metadata.block_table[0, entries].long()
        k[ours], v[ours] = alone.layer.k[theirs], alone.layer.v[theirs]
        batch.q[0] = alone.q[0]
        out, lse = paged_attention(batch.q, batch.layer, batch.metadata, batch_invariant=True, return_lse=True)
        assert torch.equal(out[0], expected[0][0])
        assert torch.equal(lse[0], expected[1][0])


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(("num_queries", "kernel"), [(4, None), (200, "hopper"), (200, "portable")])
def test_batch_invariant_bits_of_several_query_tokens(num_queries, kernel, block_size):
    """The first sequence alone, and in front of and among others, all under one max_query_len."""
    fields = {**MODEL, "block_size": block_size}
    first = (num_queries, 1000)
    expected = None
    for others in ((), ((num_queries, 300),), *[((1, 70), (3, 9), (0, 0), (num_queries - 1, 2000))] * 2):
        batch = make_tensors(varlen("batch", first, *others, **fields), "cuda", seed=len(others))
        metadata = replace(batch.metadata, max_query_len=num_queries)
        entries = metadata.block_table[0, : -(-first[1] // block_size)].long()
        generator = torch.Generator("cuda").manual_seed(7)
        for view in (batch.layer.k, batch.layer.v):
            view[entries] = torch.randn(view[entries].shape, generator=generator, device="cuda").to(BF16)
        batch.q[:num_queries] = torch.randn(batch.q[:num_queries].shape, generator=generator, device="cuda").to(BF16)
        with use_prefill_kernel(kernel):
            out, lse = paged_attention(batch.q, batch.layer, metadata, batch_invariant=True, return_lse=True)
        found = out[:num_queries], lse[:num_queries]
        expected = found if expected is None else expected
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16], ids=["f32", "f16", "bf16"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_merge(shape, dtype):
    tensors = make(shape, dtype, "cuda")
    assert_merged(tensors, merge_attention(*tensors))


def test_known_launches_take_other_tensors():
    """The second call of a shape goes past Triton's preparation: other tensors, alignments and layers must be seen."""
    case = decode("known", *(100 + 37 * i for i in range(20)), **MODEL)
    for seed in range(3):
        tensors = make_tensors(case, "cuda", seed=seed)
        wide = torch.empty(2, 20, 33, 128, device="cuda", dtype=BF16)
        for q in (tensors.q.contiguous(), wide[0, :, :32].copy_(tensors.q), wide[1, :, 1:].copy_(tensors.q)):
            out, lse = paged_attention(q, tensors.layer, tensors.metadata, return_lse=True)
            assert_attention(tensors, out, lse)
    odd = torch.empty(20 * 32 * 128 + 1, device="cuda", dtype=BF16)[1:].view(20, 32, 128).copy_(tensors.q)
    out, lse = paged_attention(odd, tensors.layer, tensors.metadata, return_lse=True)
    assert_attention(tensors, out, lse)

"""The package's reason: graphs captured with one block, replayed over blocks that did not exist then."""

import pytest
import torch

import triton_kv as tkv
from triton_kv.launch import count_compilations

NUM_LAYERS, NUM_KV_HEADS, NUM_QUERY_HEADS, HEAD_DIM, BLOCK_SIZE = 4, 4, 16, 128, 16
SPEC = tkv.AttentionSpec(num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, dtype=torch.bfloat16)
LAYOUTS = ["LTBNHD", "LBTNHD", "LBTHND", "TLBNHD", "BLTNHD", "LBHNTD", "LHBNTD", "BHLNTD"]
CONTEXTS = [1, 100, 2000, 333, 16, 17, 1234, 801]


def reserve(layout: str = "LTBNHD", capacity: int = 3000) -> tkv.KVCache:
    return tkv.KVCache.reserve(
        SPEC, block_size=BLOCK_SIZE, num_layers=NUM_LAYERS, capacity=capacity, layout=layout, device="cuda"
    )


def blocks_from_the_end(num_blocks: int, contexts: list[int]) -> list[list[int]]:
    """Distinct blocks for every sequence, the last block first, so that the last granule of every segment is read."""
    ids = iter(range(num_blocks - 1, 0, -1))
    return [[next(ids) for _ in range(-(-length // BLOCK_SIZE))] for length in contexts]


def slots(tables: list[list[int]], contexts: list[int]) -> list[int]:
    """The slot of each sequence's last token."""
    return [row[(n - 1) // BLOCK_SIZE] * BLOCK_SIZE + (n - 1) % BLOCK_SIZE for row, n in zip(tables, contexts)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_captured_at_one_block_and_replayed_after_three_extends(layout):
    with reserve(layout) as cache:
        cache.extend(1)
        batch = len(CONTEXTS)
        buffers = tkv.AttentionBuffers(batch, batch, 256, "cuda")
        metadata = buffers.view(batch, batch)
        q = torch.randn(NUM_LAYERS, batch, NUM_QUERY_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        k = torch.randn(NUM_LAYERS, batch, NUM_KV_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        v = torch.randn_like(k)
        out = torch.empty_like(q)

        def step() -> None:
            for index, layer in enumerate(cache):
                tkv.write_kv(k[index], v[index], layer, metadata.slot_mapping)
                tkv.paged_attention(q[index], layer, metadata, out=out[index])

        buffers.dummy(batch, batch)
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for target in (700, 1800, cache.capacity):
            cache.extend(target)
            contexts = [min(length, (target - batch) * BLOCK_SIZE // batch) for length in CONTEXTS]
            tables = blocks_from_the_end(target, contexts)
            for layer in cache:  # what earlier steps of these sequences would have written
                layer.k[1:target].normal_()
                layer.v[1:target].normal_()
            ordinary = [(layer.k[:target].clone(), layer.v[:target].clone()) for layer in cache]
            buffers.fill(tables, contexts, slots(tables, contexts))
            q.normal_(), k.normal_(), v.normal_()
            out.fill_(float("nan"))
            graph.replay()
            for index, (pair, layer) in enumerate(zip(ordinary, cache)):
                tkv.write_kv(k[index], v[index], pair, metadata.slot_mapping)
                expected = tkv.paged_attention_reference(q[index].float(), (pair[0].float(), pair[1].float()), metadata)
                torch.testing.assert_close(out[index].float(), expected, atol=2e-2, rtol=2e-2)
                assert torch.equal(layer.k[1:target], pair[0][1:])
                assert torch.equal(layer.v[1:target], pair[1][1:])
            assert cache.check().ok


def test_write_captured_at_one_block_reaches_the_last_block():
    with reserve() as cache:
        cache.extend(1)
        k = torch.randn(3, NUM_KV_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        v = torch.randn_like(k)
        slot_mapping = torch.tensor([-1, 0, 5], device="cuda", dtype=torch.int64)
        tkv.write_kv(k, v, cache[3], slot_mapping)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tkv.write_kv(k, v, cache[3], slot_mapping)
        cache.extend(cache.capacity)
        last = cache.capacity * BLOCK_SIZE - 1
        slot_mapping.copy_(torch.tensor([last, -1, last - BLOCK_SIZE]))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(cache[3].k[-1, -1], k[0])
        assert torch.equal(cache[3].v[-1, -1], v[0])
        assert torch.equal(cache[3].v[-2, -1], v[2])
        slot_mapping.copy_(torch.tensor([last + 1, -5, 1]))
        graph.replay()
        report = cache.check(reset=True)
        assert (report.num_errors, report.kind, report.row, report.value) == (1, "slot written", 0, last + 1)


def test_nothing_compiles_after_the_plan():
    with reserve() as cache:
        cache.extend(1)
        tkv.compile_kernels(cache, NUM_QUERY_HEADS, max_seqs=128, max_tokens=512)
        buffers = tkv.AttentionBuffers(512, 128, 256, "cuda")
        buffers.dummy(1, 1)
        cache.extend(2000)
        with count_compilations() as compiled:
            for batch, context in ((1, 16), (3, 1000), (64, 333), (128, 250), (17, 1)):
                contexts = [context] * batch
                tables = [[(7 * i + j) % 1999 + 1 for j in range(-(-context // BLOCK_SIZE))] for i in range(batch)]
                buffers.fill(tables, contexts, slots(tables, contexts))
                metadata = buffers.view(batch, batch)
                q = torch.randn(batch, NUM_QUERY_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
                k = torch.randn(batch, NUM_KV_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
                tkv.write_kv(k, k, cache[0], metadata.slot_mapping)
                tkv.paged_attention(q, cache[0], metadata)
            for num_seqs, query in ((1, 511), (5, 77), (2, 128), (9, 3)):
                tables = [[(7 * i + j) % 1999 + 1 for j in range(64)] for i in range(num_seqs)]
                buffers.fill(tables, [1000] * num_seqs, [-1] * (num_seqs * query), [query] * num_seqs)
                metadata = buffers.view(num_seqs * query, num_seqs, max_query_len=query)
                q = torch.randn(num_seqs * query, NUM_QUERY_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
                tkv.paged_attention(q, cache[0], metadata)
            torch.cuda.synchronize()
        assert compiled == []

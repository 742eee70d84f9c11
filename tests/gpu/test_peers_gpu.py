"""FlashAttention-3 and FlashInfer over our views, unmodified, in a graph captured at one block and replayed later."""

import pytest
import torch

import triton_kv as tkv

pytestmark = pytest.mark.peers
NUM_KV_HEADS, NUM_QUERY_HEADS, HEAD_DIM = 4, 16, 128
SPEC = tkv.AttentionSpec(num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, dtype=torch.bfloat16)
CONTEXTS = [1, 2000, 333, 129]


def prepare(layout: str, block_size: int) -> tuple[tkv.KVCache, tkv.AttentionBuffers]:
    cache = tkv.KVCache.reserve(
        SPEC, block_size=block_size, num_layers=2, capacity=49152 // block_size, layout=layout, device="cuda"
    )
    cache.extend(1)
    buffers = tkv.AttentionBuffers(len(CONTEXTS), len(CONTEXTS), 2048 // block_size, "cuda")
    buffers.dummy(len(CONTEXTS), len(CONTEXTS))
    return cache, buffers


def grow(cache: tkv.KVCache, buffers: tkv.AttentionBuffers) -> list[list[int]]:
    """Commits everything, fills it with noise, and points the sequences at the last blocks."""
    cache.extend(cache.capacity)
    for layer in cache:
        layer.k.normal_()
        layer.v.normal_()
    ids = iter(range(cache.capacity - 1, 0, -1))
    tables = [[next(ids) for _ in range(-(-length // cache.block_size))] for length in CONTEXTS]
    buffers.fill(tables, CONTEXTS, [-1] * len(CONTEXTS))
    return tables


def check(out: torch.Tensor, q: torch.Tensor, layer: tkv.LayerCache, metadata: tkv.AttentionMetadata) -> None:
    expected = tkv.paged_attention_reference(q.float(), (layer.k.float(), layer.v.float()), metadata)
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("block_size", [16, 128])
def test_flash_attention_3(block_size):
    interface = pytest.importorskip("vllm.vllm_flash_attn", reason="FlashAttention-3 is not installed")
    cache, buffers = prepare("LTBNHD", block_size)
    with cache:
        metadata, layer = buffers.view(len(CONTEXTS), len(CONTEXTS)), cache[1]
        q = torch.randn(len(CONTEXTS), NUM_QUERY_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        starts = torch.arange(len(CONTEXTS) + 1, device="cuda", dtype=torch.int32)
        out = torch.empty_like(q)

        def attend() -> None:
            interface.flash_attn_varlen_func(
                q, layer.k, layer.v, max_seqlen_q=1, cu_seqlens_q=starts, max_seqlen_k=2048,
                seqused_k=metadata.seq_lens, block_table=metadata.block_table, causal=True, fa_version=3, out=out,
            )  # fmt: skip

        attend()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            attend()
        grow(cache, buffers)
        out.fill_(float("nan"))
        graph.replay()
        check(out, q, layer, metadata)


@pytest.mark.parametrize("layout", ["LBTNHD", "LTBNHD"])
def test_flashinfer(layout):
    flashinfer = pytest.importorskip("flashinfer", reason="FlashInfer is not installed")
    block_size = 16
    cache, buffers = prepare(layout, block_size)
    with cache:
        metadata, layer = buffers.view(len(CONTEXTS), len(CONTEXTS)), cache[1]
        batch, most = len(CONTEXTS), len(CONTEXTS) * 2048 // block_size
        q = torch.randn(batch, NUM_QUERY_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        out = torch.empty_like(q)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            torch.empty(128 << 20, dtype=torch.uint8, device="cuda"),
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=torch.empty(batch + 1, dtype=torch.int32, device="cuda"),
            paged_kv_indices_buffer=torch.empty(most, dtype=torch.int32, device="cuda"),
            paged_kv_last_page_len_buffer=torch.empty(batch, dtype=torch.int32, device="cuda"),
        )

        def plan(tables: list[list[int]], contexts: list[int]) -> None:
            counts = torch.tensor([0] + [len(row) for row in tables], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            ids = torch.tensor([block for row in tables for block in row], dtype=torch.int32, device="cuda")
            last = torch.tensor([(length - 1) % block_size + 1 for length in contexts], dtype=torch.int32)
            wrapper.plan(counts, ids, last, NUM_QUERY_HEADS, NUM_KV_HEADS, HEAD_DIM, block_size,
                         q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)  # fmt: skip

        def attend() -> None:
            wrapper.run(q, (layer.k, layer.v), out=out)

        plan([[0]] * batch, [1] * batch)
        attend()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            attend()
        plan(grow(cache, buffers), CONTEXTS)
        out.fill_(float("nan"))
        graph.replay()
        check(out, q, layer, metadata)

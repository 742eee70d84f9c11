"""Every kind of state on a GPU: growth, zeroing, captured graphs, and kernels that are not ours over the views.

Buffers have several granules a segment, so that a block which a commit missed faults.
"""

import pytest
import torch

import triton_kv as tkv
from tests import zero_blocks_cases as cases
from triton_kv.launch import Launch

DEVICE = "cuda"
BLOCK_SIZE = 16
CAPACITY = 1600
ATTENTION = tkv.AttentionSpec(num_kv_heads=4, head_dim=128, dtype=torch.bfloat16)  # 32 KiB a block: K and V
WINDOW = tkv.AttentionSpec(num_kv_heads=4, head_dim=128, dtype=torch.bfloat16, window=256)
SMALL = tkv.AttentionSpec(num_kv_heads=2, head_dim=64, dtype=torch.float16)
UNEQUAL = tkv.AttentionSpec(num_kv_heads=2, head_dim=192, v_head_dim=128, dtype=torch.bfloat16)
MLA = tkv.MLASpec(kv_lora_rank=512, qk_rope_head_dim=64, dtype=torch.bfloat16)  # 18 KiB
# conv 3 x 1024 bf16 = 6 KiB, and a state of 8 x 16 x 16 f32 = 8 KiB
MAMBA = tkv.MambaSpec([("conv", (3, 1024), torch.bfloat16), ("ssm", (8, 16, 16), torch.float32)])
ODD = tkv.MambaSpec([("scale", (7,), torch.float64), ("codes", (13, 211), torch.uint8), ("flag", (1,), torch.bool)])

HYBRID = {f"layers.{index}": ATTENTION if index % 4 == 3 else MAMBA for index in range(8)}
TWO_GROUPS = [
    tkv.LayerGroup("full", {"full.0": ATTENTION, "full.1": ATTENTION}),
    tkv.LayerGroup("window", {"window.0": WINDOW, "window.1": WINDOW, "window.2": WINDOW}),
]
CACHES = {
    "hybrid": (HYBRID, {}),
    "hybrid_dense": (HYBRID, {"dense": True}),
    "hybrid_packed": (HYBRID, {"packed": True}),
    "mla": ({f"layers.{index}": MLA for index in range(4)}, {}),
    "mla_packed": ([tkv.LayerGroup("mla", {f"layers.{index}": MLA for index in range(4)}, "BL")], {}),
    "padded": (
        [
            tkv.LayerGroup("attention", {"a.0": ATTENTION, "a.1": ATTENTION}, page_bytes=40 << 10),
            tkv.LayerGroup("mamba", {"m.0": MAMBA, "m.1": MAMBA}, page_bytes=20_000),
        ],
        {},
    ),
    "shared": (TWO_GROUPS, {"shared_by": "groups", "layout": "LBTNHD"}),
    "shared_two_segments": (TWO_GROUPS, {"shared_by": "groups", "layout": "LTBNHD"}),
    "shared_and_packed": (
        [tkv.LayerGroup("attention", {"a": ATTENTION}), tkv.LayerGroup("mamba", {"m.0": MAMBA, "m.1": MAMBA})],
        {"shared_by": "groups", "packed": True},
    ),
    "separate": ([tkv.LayerGroup("attention", {f"a.{index}": SMALL for index in range(4)}, separate=True)], {}),
    "draft": (
        [
            tkv.LayerGroup("target", {f"t.{index}": ATTENTION for index in range(3)}, "LTBNHD"),
            tkv.LayerGroup("draft", {"d.0": SMALL, "d.1": SMALL}, "BLTNHD"),
        ],
        {},
    ),
    "everything": (
        {"a": ATTENTION, "w": WINDOW, "u": UNEQUAL, "s": SMALL, "l": MLA, "m": MAMBA, "o": ODD},
        {"packed": True},
    ),
}


def reserve(layers, *, poison: bool = True, capacity: int = CAPACITY, **options) -> tkv.KVCache:
    memory = tkv.open_memory(DEVICE)
    if poison:
        memory = tkv.PoisonedMemory(memory)
    return tkv.KVCache.reserve(layers, block_size=BLOCK_SIZE, capacity=capacity, memory=memory, **options)


def views_of(layer) -> list[torch.Tensor]:
    return [layer.k, layer.v] if isinstance(layer, tkv.LayerCache) else list(layer.states)


def all_views(cache: tkv.KVCache) -> list[torch.Tensor]:
    return [view for layer in cache for view in views_of(layer)]


def is_zero(view: torch.Tensor) -> bool:
    """By bytes: a negative zero or a denormal would pass as a value."""
    return not view.contiguous().view(torch.uint8).any()


def tag(view: torch.Tensor, blocks: slice, number: int) -> None:
    """Values that tell blocks and views apart, exact in every dtype here."""
    ids = torch.arange(blocks.start, blocks.stop, device=view.device) * 7 + number
    view[blocks] = (ids % 100 + 1).to(view.dtype).view(-1, *[1] * (view.dim() - 1))


def has_tag(view: torch.Tensor, blocks: slice, number: int) -> bool:
    ids = torch.arange(blocks.start, blocks.stop, device=view.device) * 7 + number
    return bool((view[blocks] == (ids % 100 + 1).to(view.dtype).view(-1, *[1] * (view.dim() - 1))).all())


def owned_views(cache: tkv.KVCache, shared: bool, owner: int) -> list[tuple[int, torch.Tensor]]:
    """Views of the layers that one group has; all of them where groups share nothing."""
    names = cache.geometry.groups[owner].names
    return [
        (number, view)
        for number, (layer, view) in enumerate((layer, view) for layer in cache for view in views_of(layer))
        if not shared or layer.name in names
    ]


@pytest.mark.parametrize(("layers", "options"), CACHES.values(), ids=CACHES.keys())
def test_growth(layers, options):
    """New blocks are zero over poisoned memory, old ones keep their bytes, and the driver's count is ours."""
    shared = "shared_by" in options
    with reserve(layers, **options) as cache:
        addresses = [view.data_ptr() for view in all_views(cache)]
        done = 0
        for step, target in enumerate((1, 2, 700, CAPACITY)):
            cache.extend(target)
            assert cache.mapped_bytes == cache.mapped_bytes_at(target) == cache.geometry.mapped_bytes_at(target)
            assert all(is_zero(view[done:target]) for view in all_views(cache))
            # Each step's blocks belong to one group where they are shared.
            owner = step % len(cache.geometry.groups) if shared else 0
            for number, view in owned_views(cache, shared, owner):
                tag(view, slice(done, target), number)
            for number, view in owned_views(cache, shared, owner):
                assert has_tag(view, slice(done, target), number)
            if not shared:
                assert all(has_tag(view, slice(0, target), number) for number, view in owned_views(cache, False, 0))
            done = target
        assert [view.data_ptr() for view in all_views(cache)] == addresses
        assert int(cache.control[0]) == CAPACITY


@pytest.mark.alone
@pytest.mark.parametrize("name", ["hybrid", "everything"])
def test_the_driver_maps_what_was_said(name):
    layers, options = CACHES[name]
    torch.cuda.synchronize()
    with reserve(layers, poison=False, **options) as cache:
        cache.extend(1)  # compiles and loads the zeroing
        free = torch.cuda.mem_get_info()[0]
        before = cache.mapped_bytes
        cache.extend(CAPACITY)
        taken = free - torch.cuda.mem_get_info()[0]
        assert abs(taken - (cache.mapped_bytes_at(CAPACITY) - before)) <= 4 << 20


def metadata_of(contexts: list[int], num_blocks: int) -> tuple[tkv.AttentionBuffers, list[list[int]], list[int]]:
    """Blocks from the end of the cache for every sequence, and each one's last slot."""
    ids = iter(range(num_blocks - 1, 0, -1))
    tables = [[next(ids) for _ in range(-(-length // BLOCK_SIZE))] for length in contexts]
    slots = [row[(n - 1) // BLOCK_SIZE] * BLOCK_SIZE + (n - 1) % BLOCK_SIZE for row, n in zip(tables, contexts)]
    return tkv.AttentionBuffers(len(contexts), len(contexts), 256, DEVICE), tables, slots


@pytest.mark.parametrize("name", ["hybrid", "hybrid_packed", "padded", "shared", "shared_two_segments"])
def test_our_attention_in_a_graph_captured_at_one_block(name):
    layers, options = CACHES[name]
    contexts = [1, 100, 2000, 333, 16, 1234]
    batch = len(contexts)
    with reserve(layers, **options) as cache:
        cache.extend(1)
        mine = [layer for layer in cache if isinstance(layer, tkv.LayerCache)]
        if "shared_by" in options:  # the blocks of this test are the last group's
            mine = [layer for layer in mine if layer.name in cache.geometry.groups[-1].names]
        buffers, tables, slots = metadata_of(contexts, CAPACITY)
        metadata = buffers.view(batch, batch)
        shape = (len(mine), batch)
        q = torch.randn(*shape, 16, 128, device=DEVICE, dtype=torch.bfloat16)
        k, v = (torch.randn(*shape, 4, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
        out = torch.empty_like(q)

        def step() -> None:
            for index, layer in enumerate(mine):
                tkv.write_kv(k[index], v[index], layer, metadata.slot_mapping)
                tkv.paged_attention(q[index], layer, metadata, out=out[index])

        buffers.dummy(batch, batch)
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        cache.extend(CAPACITY)
        for layer in mine:
            layer.k[1:].normal_()
            layer.v[1:].normal_()
        ordinary = [(layer.k.clone(), layer.v.clone()) for layer in mine]
        buffers.fill(tables, contexts, slots)
        out.fill_(float("nan"))
        graph.replay()
        for index, (pair, layer) in enumerate(zip(ordinary, mine)):
            tkv.write_kv(k[index], v[index], pair, metadata.slot_mapping)
            expected = tkv.paged_attention_reference(q[index].float(), (pair[0].float(), pair[1].float()), metadata)
            torch.testing.assert_close(out[index].float(), expected, atol=2e-2, rtol=2e-2)
            assert torch.equal(layer.k[1:], pair[0][1:])
            assert torch.equal(layer.v[1:], pair[1][1:])


@pytest.mark.parametrize("name", ["hybrid", "hybrid_packed", "everything"])
def test_a_state_update_by_torch_in_a_graph_captured_at_one_block(name):
    """Gather by slot index, change, scatter: what eager Mamba code does with a state pool."""
    layers, options = CACHES[name]
    with reserve(layers, **options) as cache:
        cache.extend(1)
        pools = [view for layer in cache if isinstance(layer, tkv.StateCache) for view in layer.states]
        pools = [pool for pool in pools if pool.dtype.is_floating_point]
        index = torch.zeros(5, dtype=torch.int64, device=DEVICE)

        def step() -> None:
            for pool in pools:
                pool.index_copy_(0, index, pool.index_select(0, index) * 0.5 + 1)

        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            step()
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        cache.extend(CAPACITY)
        assert all(is_zero(pool[1:]) for pool in pools)
        for pool in pools:
            pool[1:].normal_()
        index.copy_(torch.tensor([CAPACITY - 1, 3, 900, CAPACITY - 2, 1]))
        expected = [pool.clone() for pool in pools]
        for pool in expected:
            pool.index_copy_(0, index, pool.index_select(0, index) * 0.5 + 1)
        graph.replay()
        assert all(torch.equal(pool, wanted) for pool, wanted in zip(pools, expected))


# Zeroing.


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("ids", cases.IDS, ids=str)
@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_blocks_of_every_segment(case, ids, dtype):
    cases.check_blocks(case, ids, dtype, torch.device("cuda", torch.cuda.current_device()))


@pytest.mark.parametrize("first_and_count", [(0, 1), (2, 3), (0, 6)], ids=str)
@pytest.mark.parametrize("limit", [8 << 20, 8192], ids=["all", "short_ones"])
@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_new_blocks_of_short_ranges(case, first_and_count, limit):
    cases.check_range(case, *first_and_count, limit, torch.device("cuda", torch.cuda.current_device()))


def test_a_small_extend_zeroes_all_segments_in_one_launch(monkeypatch):
    launched = []
    run = Launch.run

    def counted(self, device=None):
        launched.append(self.kernel.__name__)
        run(self, device)

    with reserve(HYBRID) as cache:
        monkeypatch.setattr(Launch, "run", counted)
        cache.extend(1)
        assert launched == ["zero_table_kernel"]
        cache.extend(5)
        assert launched == ["zero_table_kernel"] * 2
        assert all(is_zero(view[:5]) for view in all_views(cache))


def test_zero_blocks_in_a_graph_skips_negative_ids_and_sees_later_segments():
    with reserve(HYBRID) as cache:
        cache.extend(1)
        ids = torch.full((6,), -1, dtype=torch.int32, device=DEVICE)
        cache.zero_blocks(ids)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            cache.zero_blocks(ids)
        with pytest.raises(tkv.CaptureError), torch.cuda.graph(torch.cuda.CUDAGraph()):
            cache.zero_blocks([0])
        cache.extend(CAPACITY)
        cache.add_group(tkv.LayerGroup("late", {"late.0": MLA, "late.1": ODD}))
        for number, view in enumerate(all_views(cache)):
            tag(view, slice(0, CAPACITY), number)
        graph.replay()  # nothing but negative ids
        assert all(has_tag(view, slice(0, CAPACITY), number) for number, view in enumerate(all_views(cache)))
        ids.copy_(torch.tensor([CAPACITY - 1, -5, 3, 3, CAPACITY, 700], dtype=torch.int32))
        graph.replay()
        for number, view in enumerate(all_views(cache)):
            assert all(is_zero(view[block]) for block in (3, 700, CAPACITY - 1))
            for blocks in (slice(0, 3), slice(4, 700), slice(701, CAPACITY - 1)):
                assert has_tag(view, blocks, number)
        assert cache.check() == (1, "block zeroed", 4, CAPACITY)


def test_a_captured_zeroing_leaves_out_groups_that_sleep():
    groups = [tkv.LayerGroup("attention", {"a": ATTENTION}), tkv.LayerGroup("mamba", {"m": MAMBA})]
    with reserve(groups) as cache:
        cache.extend(CAPACITY)
        ids = torch.tensor([5, CAPACITY - 1], dtype=torch.int32, device=DEVICE)
        cache.zero_blocks(ids)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            cache.zero_blocks(ids)
        cache.sleep(groups=["attention"])
        for number, view in enumerate(cache["m"].states):
            tag(view, slice(0, CAPACITY), number)
        graph.replay()
        torch.cuda.synchronize()  # an access to what sleeps would have faulted
        assert all(is_zero(view[5]) and is_zero(view[-1]) for view in cache["m"].states)
        assert all(has_tag(view, slice(6, CAPACITY - 1), number) for number, view in enumerate(cache["m"].states))
        cache.wake()
        cache["a"].kv.fill_(1)
        graph.replay()
        assert is_zero(cache["a"].k[5])
        assert is_zero(cache["a"].v[CAPACITY - 1])
        assert bool((cache["a"].kv[:, 6 : CAPACITY - 1] == 1).all())


def test_zero_blocks_reaches_beyond_4_gib():
    """Block offsets of 64 bits: a state of 4 MiB a block."""
    spec = tkv.MambaSpec([("state", (1 << 20,), torch.float32)])
    with reserve({"m": spec}, capacity=1200) as cache:
        cache.extend(1200)
        pool = cache["m"].states[0]
        pool.fill_(1)
        cache.zero_blocks([1199, 0, 1100])
        assert not pool[[0, 1100, 1199]].any()
        assert (pool[[1, 600, 1099, 1101, 1198]] == 1).all()


def test_a_group_added_after_capture():
    with reserve({"a": ATTENTION}) as cache:
        cache.extend(700)
        cache["a"].kv[:, :700] = 1
        cache.add_group(tkv.LayerGroup("late", {"m": MAMBA, "b": WINDOW}))
        assert all(is_zero(view[:700]) for name in ("m", "b") for view in views_of(cache[name]))
        assert (cache["a"].kv[:, :700] == 1).all()
        assert cache.mapped_bytes == cache.geometry.mapped_bytes_at(700)
        cache.extend(CAPACITY)
        assert all(is_zero(view[700:]) for view in all_views(cache))


# Code that is not ours.


@pytest.mark.peers
@pytest.mark.parametrize("packed", [False, True], ids=["apart", "packed"])
def test_kimi_delta_attention_of_fla_over_states(packed):
    """A decode step that reads and writes a state pool through slot indices, bit for bit as over ordinary memory."""
    fused_recurrent = pytest.importorskip("fla.ops.kda.fused_recurrent", reason="fla-core is not installed")
    batch, heads, dim, num_blocks = 6, 8, 128, 300
    spec = tkv.MambaSpec(
        [("conv", (3, 3 * heads * dim), torch.bfloat16), ("delta", (heads, dim, dim), torch.float32)]
    )  # 530 KiB a block
    layers = {"kda.0": spec, "attention": ATTENTION, "kda.1": spec}
    with reserve(layers, capacity=num_blocks, packed=packed, layout="LBTNHD") as cache:
        cache.extend(1)
        pools = [cache[name].state("delta") for name in ("kda.0", "kda.1")]
        q, k, v = (torch.randn(1, batch, heads, dim, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
        gate = -torch.rand(1, batch, heads, dim, device=DEVICE)
        beta = torch.rand(1, batch, heads, device=DEVICE)
        starts = torch.arange(batch + 1, device=DEVICE)
        slots = torch.zeros(batch, dtype=torch.int32, device=DEVICE)
        outs = [torch.zeros_like(v) for _ in pools]

        def step(states: list[torch.Tensor], results: list[torch.Tensor]) -> None:
            for state, out in zip(states, results):
                fused_recurrent.fused_recurrent_kda_fwd(
                    q,
                    k,
                    v,
                    gate,
                    beta,
                    initial_state=state,
                    inplace_final_state=True,
                    cu_seqlens=starts,
                    ssm_state_indices=slots,
                    use_qk_l2norm_in_kernel=True,
                    out=out,
                )

        step(pools, outs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step(pools, outs)
        cache.extend(num_blocks)
        for pool in pools:
            pool[1:].normal_()
        slots.copy_(torch.tensor([num_blocks - 1, 1, 150, 77, num_blocks - 2, 42], dtype=torch.int32))
        ordinary = [torch.empty_strided(pool.shape, pool.stride(), device=DEVICE).copy_(pool) for pool in pools]
        expected = [torch.zeros_like(v) for _ in pools]
        step(ordinary, expected)
        graph.replay()
        for pool, out, state, wanted in zip(pools, outs, ordinary, expected):
            assert torch.isfinite(out).all()
            assert out.any()
            assert torch.equal(out, wanted)
            assert torch.equal(pool[1:], state[1:])


@pytest.mark.peers
@pytest.mark.parametrize("layout", ["LB", "BL"])
def test_flash_mla_over_latents(layout):
    """Dense decode with blocks of 64 tokens, bit for bit as over ordinary memory."""
    flash_mla = pytest.importorskip("flash_mla", reason="flash_mla is not installed")
    if not flash_mla.has_legacy():
        pytest.skip("this flash_mla has no dense decode (its legacy kernels)")
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("flash_mla's dense decode is for compute capability 9.0")
    block_size, num_blocks, heads = 64, 400, 128
    contexts = [1, 2000, 333, 129, 64, 65]
    batch = len(contexts)
    group = tkv.LayerGroup("mla", {"layers.0": MLA, "layers.1": MLA}, layout)
    memory = tkv.PoisonedMemory(tkv.open_memory(DEVICE))
    with tkv.KVCache.reserve(group, block_size=block_size, capacity=num_blocks, memory=memory) as cache:
        cache.extend(1)
        latents = [layer.latent for layer in cache]
        q = torch.randn(batch, 1, heads, MLA.dim, device=DEVICE, dtype=torch.bfloat16)
        table = torch.zeros(batch, 32, dtype=torch.int32, device=DEVICE)
        lengths = torch.ones(batch, dtype=torch.int32, device=DEVICE)
        outs = [torch.empty(batch, 1, heads, 512, device=DEVICE, dtype=torch.bfloat16) for _ in latents]

        def step(caches: list[torch.Tensor], results: list[torch.Tensor]) -> None:
            for latent, out in zip(caches, results):
                schedule, _ = flash_mla.get_mla_metadata()  # made by the first call, so inside the graph
                found, _ = flash_mla.flash_mla_with_kvcache(
                    q,
                    latent[:, :, None, :],
                    table,
                    lengths,
                    512,
                    schedule,
                    softmax_scale=MLA.dim**-0.5,
                    causal=True,
                    use_legacy=True,
                )
                out.copy_(found)

        step(latents, outs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step(latents, outs)
        cache.extend(num_blocks)
        for latent in latents:
            latent[1:].normal_()
        ids = iter(range(num_blocks - 1, 0, -1))
        rows = [[next(ids) for _ in range(-(-length // block_size))] for length in contexts]
        for row, entries in enumerate(rows):
            table[row, : len(entries)] = torch.tensor(entries, dtype=torch.int32)
        lengths.copy_(torch.tensor(contexts, dtype=torch.int32))
        ordinary = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=DEVICE).copy_(x) for x in latents]
        expected = [torch.empty_like(out) for out in outs]
        step(ordinary, expected)
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        for out, wanted, latent in zip(outs, expected, ordinary):
            assert torch.equal(out, wanted)
            # and right: attention over the latents themselves, in f32
            keys = torch.cat([latent[block] for block in rows[1]])[: contexts[1]].float()
            weights = torch.softmax(q[1, 0].float() @ keys.T * MLA.dim**-0.5, -1)
            torch.testing.assert_close(out[1, 0].float(), weights @ keys[:, :512], atol=2e-2, rtol=2e-2)

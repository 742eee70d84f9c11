"""Layers of many kinds in one cache: specs, views, groups, shared and packed buffers, late groups, bad input."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import triton_kv as tkv
from triton_kv.description import block_takers, tokens_of_one_sequence
from triton_kv.groups import block_major, groups_of

PAGE = 4096
ATTENTION = tkv.AttentionSpec(num_kv_heads=2, head_dim=16, dtype=torch.float32)  # 4 KiB a block of 16 tokens
WINDOW = tkv.AttentionSpec(num_kv_heads=2, head_dim=16, dtype=torch.float32, window=128)
WIDE = tkv.AttentionSpec(num_kv_heads=4, head_dim=16, dtype=torch.float32)  # 8 KiB
MLA = tkv.MLASpec(kv_lora_rank=512, qk_rope_head_dim=64, dtype=torch.bfloat16)  # 18 KiB
MAMBA = tkv.MambaSpec([("conv", (3, 65), torch.bfloat16), ("ssm", (4, 8, 16), torch.float32)])
GROUPS = [
    tkv.LayerGroup("full", {"full.0": ATTENTION, "full.1": ATTENTION}),
    tkv.LayerGroup("window", {"window.0": WINDOW, "window.1": WINDOW, "window.2": WINDOW}),
]


def reserve(layers, memory: tkv.VirtualMemory | None = None, **options) -> tkv.KVCache:
    options = {"block_size": 16, "capacity": 60, **options}
    return tkv.KVCache.reserve(layers, memory=memory or tkv.PoisonedMemory(tkv.HostMemory(PAGE, 64 << 20)), **options)


@dataclass(frozen=True)
class Codebook:
    """A kind of state that the package does not know: codes of 5 bytes a token, and one scale a block."""

    width: int
    alignment_bytes: int = 8

    def page_bytes(self, block_size: int) -> int:
        return 16 + block_size * self.width

    def block_tensors(self, block_size: int) -> tuple[tkv.BlockTensor, ...]:
        return (
            tkv.BlockTensor("scale", (2,), torch.float64, 0),
            tkv.BlockTensor("codes", (block_size, self.width), torch.uint8, 16),
        )


class TokenCodes(Codebook):
    """The same, but what is kept is each token's."""

    per_token = True


@pytest.mark.parametrize(
    ("spec", "page_bytes", "tensors"),
    [
        # 16 tokens of (512 + 64) bf16
        (MLA, 16 * 576 * 2, [("latent", (16, 576), 0)]),
        # conv: 3 * 65 * 2 = 390 bytes, so the f32 state starts at 392; 4 * 8 * 16 * 4 = 2048 bytes
        (MAMBA, 392 + 2048, [("conv", (3, 65), 0), ("ssm", (4, 8, 16), 392)]),
        (
            tkv.MambaSpec([("a", (1,), torch.uint8), ("b", (3,), torch.float64)], alignment_bytes=64),
            64 + 24,
            [("a", (1,), 0), ("b", (3,), 64)],
        ),
        (Codebook(5), 16 + 80, [("scale", (2,), 0), ("codes", (16, 5), 16)]),
    ],
    ids=["mla", "mamba", "aligned", "codebook"],
)
def test_pages_of_states(spec, page_bytes, tensors):
    assert isinstance(spec, tkv.StateSpec)
    assert spec.page_bytes(16) == page_bytes
    assert [(t.name, t.shape, t.offset_bytes) for t in spec.block_tensors(16)] == tensors


def test_one_cache_of_every_kind():
    layers = {"attn": ATTENTION, "mamba": MAMBA, "latent": MLA, "own": Codebook(5)}
    with reserve(layers) as cache:
        cache.extend(9)
        assert [layer.name for layer in cache] == list(layers)
        conv, ssm = cache["mamba"].states
        assert (conv.shape, conv.dtype) == ((60, 3, 65), torch.bfloat16)
        assert (ssm.shape, ssm.dtype) == ((60, 4, 8, 16), torch.float32)
        assert conv.stride() == (2440 // 2, 65, 1)  # 392 + 2048, a multiple of 4
        assert ssm.data_ptr() % 4 == 0
        assert cache["latent"].latent.shape == (60, 16, 576)
        assert cache["latent"].states[0] is cache["latent"].latent
        assert cache["own"].state("codes").shape == (60, 16, 5)
        for layer in cache:
            for view in (layer.k, layer.v) if layer.name == "attn" else layer.states:
                assert not view[:9].any()
                view[:9] = layer.index + 1
        for layer in cache:
            for view in (layer.k, layer.v) if layer.name == "attn" else layer.states:
                assert (view[:9] == layer.index + 1).all()
        assert cache.block_bytes == 4096 + 2440 + 18432 + 96
        assert [view.shape[0] for view in cache.committed("mamba")] == [9, 9]
        assert (cache.committed("mamba")[1] == 2).all()
        assert "ssm: [60, 4, 8, 16] torch.float32" in repr(cache["mamba"])
        # Layers that share no buffer keep their own pages: nothing is wasted.
        assert cache.padding_bytes == {"attention": 0, "mamba": 0, "mla": 0, "codebook": 0}


def test_attention_of_a_hybrid_model_is_block_major():
    hidden = 16 * 2 * 16
    with reserve({"a.0": ATTENTION, "m": MAMBA, "a.1": ATTENTION}) as cache:
        assert cache["a.1"].layout == "LBTNHD"
        assert cache["a.1"].kv.stride()[:2] == (hidden, 2 * hidden)
        assert all(layer.num_segments == 1 for layer in cache.geometry.layers)
    padded = [
        tkv.LayerGroup("attention", {"a": ATTENTION}, page_bytes=4096 + 512),
        tkv.LayerGroup("mamba", {"m": MAMBA}, page_bytes=3000),
    ]
    with reserve(padded) as cache:
        cache.extend(60)
        assert cache["a"].kv.stride()[:2] == (hidden, 2 * hidden + 128)
        assert cache["m"].states[1].stride(0) == 3000 // 4
        cache["a"].kv[:] = torch.arange(120.0).view(2, 60, 1, 1, 1)
        cache["m"].states[0][:] = 7
        assert (cache["a"].k[:, 0, 0, 0] == torch.arange(60.0)).all()
        assert (cache["a"].v[:, -1, -1, -1] == torch.arange(60.0, 120.0)).all()
        assert cache.padding_bytes == {"attention": 512, "mamba": 3000 - 2440}


@pytest.mark.parametrize(
    ("other", "order", "tokens"),
    # 10 blocks of 16 tokens for both groups: 5 each, or one for a state and 9 for the tokens
    [(MLA, "LTBNHD", 80), (TokenCodes(5), "LTBNHD", 80), (Codebook(5), "LBTNHD", 144), (MAMBA, "LBTNHD", 144)],
    ids=["mla", "tokens_of_your_own", "state_of_your_own", "mamba"],
)
def test_what_keeps_tokens_is_no_state(other, order, tokens):
    with reserve({"a": ATTENTION, "x": other}) as cache:
        assert cache["a"].layout == order
    groups = {"one": {"a": ATTENTION}, "two": {"x": other}}
    with reserve(groups, shared_by="groups", layout="LBTNHD") as cache:
        assert tokens_of_one_sequence(block_takers(cache.geometry), 10) == tokens


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("LTBNHD", "LBTNHD"),
        ("TLBNHD", "LBTNHD"),
        ("LBNHTD", "LBNHTD"),
        ("LHBNTD", "LBHNTD"),
        ("BLTNHD", "BLTNHD"),
        ("TBLNHD", "BTLNHD"),
    ],
)
def test_block_major(order, expected):
    assert block_major(order) == expected


def test_layers_of_a_mapping_keep_their_order_and_equal_ones_are_a_group():
    groups, names = groups_of({"0": WINDOW, "1": ATTENTION, "2": WINDOW, "3": MLA, "4": WIDE})
    assert [(group.name, group.names) for group in groups] == [
        ("window128", ("0", "2")),
        ("attention.0", ("1",)),
        ("mla", ("3",)),
        ("attention.1", ("4",)),
    ]
    assert names == ("0", "1", "2", "3", "4")


def test_groups_share_buffers_and_a_block_belongs_to_one_of_them():
    with reserve(GROUPS, shared_by="groups", layout="LTBNHD") as cache:
        assert [buffer.layers for buffer in cache.geometry.buffers] == [
            ("full.0", "window.0"),
            ("full.1", "window.1"),
            ("window.2",),
        ]
        assert [buffer.num_segments for buffer in cache.geometry.buffers] == [2, 2, 2]
        cache.extend(8)
        assert cache.block_bytes == 3 * 4096
        assert cache["full.1"].k.data_ptr() == cache["window.1"].k.data_ptr()
        for block in range(8):
            for name in GROUPS[block % 2].names:
                cache[name].kv[:, block] = 10 * block + int(name[-1])
        for block in range(8):
            for name in GROUPS[block % 2].names:
                assert (cache[name].kv[:, block] == 10 * block + int(name[-1])).all()


def test_a_window_group_holds_its_last_blocks_only():
    """Groups that share buffers have tables of their own: the window's lost blocks serve the full group meanwhile."""
    tokens, window, scale = 150, 20, 0.25
    torch.manual_seed(0)
    k, v = (torch.randn(2, tokens, 2, 16) for _ in range(2))  # of the full layer, and of the window's
    q = torch.randn(1, 4, 16)
    lengths = torch.tensor([tokens], dtype=torch.int32)
    layers = {"full": {"f": ATTENTION}, "window": {"w": WINDOW}}
    with reserve(layers, shared_by="groups", layout="LBTNHD", capacity=12) as cache:
        cache.extend(12)
        full, last = list(range(10)), [-1] * 8 + [10, 11]  # 10 blocks of 16 tokens, of which a window of 20 meets two
        outs = []
        for index, (name, table, back) in enumerate([("f", full, None), ("w", last, window)]):
            slots = torch.tensor([table[t // 16] * 16 + t % 16 if table[t // 16] >= 0 else -1 for t in range(tokens)])
            tkv.write_kv(k[index], v[index], cache[name], slots)
            metadata = tkv.AttentionMetadata(
                block_table=torch.tensor([table], dtype=torch.int32),
                seq_lens=lengths,
                query_start_loc=None,
                slot_mapping=slots[-1:],
                num_tokens=1,
                num_seqs=1,
                max_query_len=1,
            )
            outs.append((cache[name], metadata, back))
        for index, (layer, metadata, back) in enumerate(outs):
            found = tkv.paged_attention(q, layer, metadata, scale=scale, window=back)
            first = 0 if back is None else tokens - back
            keys, values = (x[index, first:].repeat_interleave(2, 1).double() for x in (k, v))
            weights = torch.softmax(torch.einsum("hd,thd->ht", q[0].double(), keys) * scale, -1)
            expected = torch.einsum("ht,thd->hd", weights, values)
            torch.testing.assert_close(found[0].double(), expected, atol=1e-5, rtol=1e-5)


def test_a_shared_buffer_has_the_least_page_that_fits_and_says_what_it_wastes():
    groups = [
        tkv.LayerGroup("attention", {"a.0": WIDE, "a.1": WIDE}),
        tkv.LayerGroup("mamba", {"m.0": MAMBA, "m.1": MAMBA}),
    ]
    with reserve(groups, shared_by="groups") as cache:
        assert [buffer.block_bytes for buffer in cache.geometry.buffers] == [8192, 8192]
        assert cache.padding_bytes == {"attention": 0, "mamba": 2 * (8192 - 2440)}
        assert cache["m.0"].states[1].stride(0) == 8192 // 4
    # A page of 16 * 8192 + 16384 bytes would fit both only as a common multiple; the least that holds both does.
    assert cache.geometry.block_bytes == 2 * 8192


def test_groups_that_share_may_count_blocks_of_their_own():
    """Half the heads, twice the tokens: pages of one size, and nothing wasted."""
    narrow = tkv.AttentionSpec(num_kv_heads=1, head_dim=16, dtype=torch.float32)
    groups = [
        tkv.LayerGroup("x", {"a": ATTENTION}),
        tkv.LayerGroup("y", {"b": narrow}, block_size=32),
    ]
    torch.manual_seed(0)
    with reserve(groups, shared_by="groups", layout="LBTNHD") as cache:
        cache.extend(10)
        assert (cache["a"].k.shape, cache["b"].k.shape) == ((60, 16, 2, 16), (60, 32, 1, 16))
        assert cache.padding_bytes == {"x": 0, "y": 0}
        # 40 tokens are 3 blocks of 16 and 2 of 32
        assert [taker.blocks_for(40) for taker in block_takers(cache.geometry)] == [3, 2]
        tables = {"a": [0, 6, 9], "b": [3, 5]}
        filled = {}
        for name, table in tables.items():
            layer = cache[name]
            size, heads = layer.k.shape[1:3]
            slots = torch.tensor([table[token // size] * size + token % size for token in range(40)])
            k, v = torch.randn(2, 40, heads, 16)
            tkv.write_kv(k, v, layer, slots)
            filled[name] = (k, v, slots)
        for name, (k, v, slots) in filled.items():
            metadata = tkv.AttentionMetadata(
                block_table=torch.tensor([tables[name]], dtype=torch.int32),
                seq_lens=torch.tensor([40], dtype=torch.int32),
                query_start_loc=None,
                slot_mapping=slots[-1:],
                num_tokens=1,
                num_seqs=1,
                max_query_len=1,
            )
            q = torch.randn(1, 2, 16)
            keys, values = (x.expand(40, 2, 16) for x in (k, v))
            weights = torch.softmax(torch.einsum("hd,thd->ht", q[0], keys) / 4, -1)
            found = tkv.paged_attention(q, cache[name], metadata)
            torch.testing.assert_close(found[0], torch.einsum("ht,thd->hd", weights, values), atol=1e-5, rtol=1e-5)


def test_a_64_kib_page_beside_an_8_kib_page():
    attention = tkv.AttentionSpec(num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)  # 16 x 8 x 256 x 2 = 64 KiB
    state = tkv.MambaSpec([("ssm", (2048,), torch.float32)])
    groups = {"attention": {"a": attention}, "mamba": {"m": state}}
    with reserve(groups) as cache:
        assert cache.block_bytes == (64 << 10) + (8 << 10)
        assert cache.padding_bytes == {"attention": 0, "mamba": 0}
        assert cache.mapped_bytes_at(60) == 60 * (72 << 10)
    with reserve(groups, shared_by="groups") as cache:
        assert cache.block_bytes == 64 << 10
        assert cache.padding_bytes == {"attention": 0, "mamba": 56 << 10}
        assert cache.mapped_bytes_at(60) == 60 * (64 << 10)


def test_layers_of_one_group_that_share_a_buffer_are_one():
    """Models whose later layers read an earlier layer's K and V."""
    with reserve({"a": ATTENTION, "b": ATTENTION, "c": ATTENTION}, shared_by=[["a", "c"]]) as cache:
        cache.extend(3)
        cache["a"].k[2] = 5
        assert (cache["c"].k[2] == 5).all()
        assert not cache["b"].k[2].any()
        assert cache.block_bytes == 2 * 4096


@pytest.mark.parametrize(
    "options",
    [{}, {"packed": True}, {"shared_by": "groups"}, {"shared_by": "groups", "packed": True}, {"dense": True}],
    ids=["apart", "packed", "shared", "shared_and_packed", "dense"],
)
def test_committed_views_are_the_layers_own(options):
    """Storages that end with the committed bytes: they can be cloned whole, also at the very end of what is mapped."""
    groups = {"attention": {"a": ATTENTION, "b": WIDE}, "state": {"m": MAMBA, "own": Codebook(5)}}
    with reserve(groups, **options) as cache:
        cache.extend(7)
        owner = "state" if "shared_by" in options else None
        for place in cache.geometry.layers:
            layer = cache[place.name]
            views = [layer.k, layer.v] if isinstance(layer, tkv.LayerCache) else list(layer.states)
            if owner in (None, place.group):
                for number, view in enumerate(views):
                    view[:7] = torch.arange(7).to(view.dtype).view(-1, *[1] * (view.dim() - 1)) + number
            for view, committed in zip(views, cache.committed(place.name)):
                assert torch.equal(view[:7].contiguous().view(torch.uint8), committed.contiguous().view(torch.uint8))
                storage = committed.untyped_storage()
                torch.tensor([], dtype=torch.uint8).set_(storage).clone()
                assert committed.data_ptr() == view.data_ptr()


def test_packed_blocks_hold_all_pages_side_by_side():
    layers = {"a": ATTENTION, "m.0": MAMBA, "m.1": MAMBA, "l": MLA}
    with reserve(layers, packed=True) as cache:
        (buffer,) = cache.geometry.buffers
        places = {layer.name: layer for layer in cache.geometry.layers}
        # 4096, then 2440 twice, then the latent on its border of 16 bytes: 8976; 8976 + 18432 = 27408
        assert {name: place.offset_bytes for name, place in places.items()} == {
            "a": 0,
            "m.0": 4096,
            "m.1": 6536,
            "l": 8976,
        }
        assert buffer.block_bytes == 27408
        assert all(place.block_stride_bytes > place.page_bytes for place in places.values())
        cache.extend(60)
        assert cache.mapped_bytes == -(-60 * 27408 // PAGE) * PAGE
        for layer in cache:
            for view in (layer.k, layer.v) if layer.name == "a" else layer.states:
                assert not view.any()
                view[:] = layer.index + 1
        for layer in cache:
            for view in (layer.k, layer.v) if layer.name == "a" else layer.states:
                assert (view == layer.index + 1).all()


def test_one_reservation_a_layer():
    memory = tkv.HostMemory(PAGE)
    group = tkv.LayerGroup("all", {"a": ATTENTION, "b": ATTENTION, "c": ATTENTION}, separate=True)
    with reserve(group, memory) as cache:
        assert memory.live.reservations == 3
        assert [buffer.num_segments for buffer in cache.geometry.buffers] == [2, 2, 2]
        cache.extend(60)
    with reserve({"a": ATTENTION, "b": ATTENTION, "c": WIDE}, memory):
        assert memory.live.reservations == 2


def test_a_draft_model_beside_its_target():
    groups = [
        tkv.LayerGroup("target", {f"target.{i}": WIDE for i in range(3)}, layout="LTBNHD"),
        tkv.LayerGroup("draft", {"draft.0": ATTENTION}, layout="BLTNHD"),
    ]
    with reserve(groups) as cache:
        cache.extend(5)
        assert (cache["target.2"].layout, cache["draft.0"].layout) == ("LTBNHD", "BLTNHD")
        assert cache.block_bytes == 3 * 8192 + 4096


def test_a_group_added_later_has_the_same_prefix():
    memory = tkv.HostMemory(PAGE, 64 << 20)
    with reserve({"a": ATTENTION}, tkv.PoisonedMemory(memory)) as cache:
        cache.extend(11)
        cache["a"].kv[:, :11] = 3
        before = cache.mapped_bytes
        assert cache.add_group(tkv.LayerGroup("late", {"m": MAMBA, "b": WIDE})) is cache
        assert (cache.num_blocks, len(cache)) == (11, 3)
        assert cache["b"].layout == "LBTNHD"  # beside states
        assert not any(view[:11].any() for view in (*cache["m"].states, cache["b"].k, cache["b"].v))
        assert (cache["a"].kv[:, :11] == 3).all()
        assert cache.mapped_bytes == cache.mapped_bytes_at(11) == cache.geometry.mapped_bytes_at(11) > before
        cache.extend(30)
        assert not cache["m"].states[0][:30].any()
        assert cache.mapped_bytes == (64 << 20) - memory.memory_info()[0]
    assert (memory.live.handles, memory.live.mappings) == (0, 0)


@pytest.mark.parametrize("packed", [False, True], ids=["apart", "packed"])
def test_blocks_that_come_back_are_zero_in_every_state(packed):
    layers = {"a": ATTENTION, "m": MAMBA, "l": MLA, "own": Codebook(5)}
    with reserve(layers, packed=packed, layout="LBTNHD") as cache:
        cache.extend(9)
        views = [view for layer in cache for view in ((layer.k, layer.v) if layer.name == "a" else layer.states)]
        for view in views:
            view[:9].view(torch.uint8).fill_(0xFF)
        cache.shrink(2)
        assert cache.mapped_bytes >= cache.mapped_bytes_at(2)
        cache.extend(12)
        for view in views:
            assert not view[2:12].contiguous().view(torch.uint8).any()
            assert (view[:2].contiguous().view(torch.uint8) == 0xFF).all()


def test_the_table_of_segments_leaves_out_groups_that_sleep():
    """A captured `zero_blocks` may be replayed while a group sleeps: it must not touch what is not mapped."""
    driver = tkv.HostMemory(PAGE)
    faulty = tkv.FaultyMemory(driver)
    with reserve({"a": ATTENTION, "m": MAMBA, "l": MLA}, faulty) as cache:
        cache.extend(9)
        table = cache._store.zeroing.table
        everything = list(table.segments)
        attention = everything[:1]
        cache.sleep(groups=["attention"])
        assert table.segments == everything[1:]
        faulty.fail("create")
        with pytest.raises(tkv.TritonKVError):
            cache.wake()
        assert table.segments == everything[1:]
        cache.sleep(groups=["mamba"])
        assert len(table.segments) == len(everything) - 2
        cache.wake(groups=["attention"])
        assert table.segments[:1] == attention
        cache.wake()
        assert table.segments == everything
        cache.zero_blocks([8])
        for _ in range(20):  # old tables are dropped, the newest is what the header names
            cache.sleep()
            assert table.segments == []
            cache.wake()
        assert len(table._tables) <= 8
        assert int(table.header[0]) == table._tables[-1].data_ptr()


@pytest.mark.parametrize("packed", [False, True], ids=["apart", "packed"])
def test_zero_blocks_covers_every_state_and_nothing_else(packed):
    with reserve({"a": ATTENTION, "m": MAMBA, "l": MLA, "own": Codebook(5)}, packed=packed, layout="LBTNHD") as cache:
        cache.extend(9)
        cache.add_group(tkv.LayerGroup("late", {"b": WIDE}))

        def views() -> list[torch.Tensor]:
            return [
                view
                for layer in cache
                for view in ((layer.k, layer.v) if isinstance(layer, tkv.LayerCache) else layer.states)
            ]

        for view in views():
            view[:9] = 1
        cache.zero_blocks(torch.tensor([8, -1, 3, -5, 3], dtype=torch.int32))
        for view in views():
            assert not view[[3, 8]].any()
            assert (view[[0, 1, 2, 4, 5, 6, 7]] == 1).all()
        cache.zero_blocks([0])
        cache.zero_blocks([])
        assert not any(view[0].any() for view in views())
        assert cache.check().ok
        cache.zero_blocks([1, 9, 70])
        assert cache.check() == (2, "block zeroed", 1, 9)


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        (torch.zeros(1), TypeError, "must be int32 or int64, got torch.float32"),
        (torch.zeros(2, 2, dtype=torch.int32), ValueError, r"must be 1-D and contiguous, got \(2, 2\)"),
        (torch.zeros(8, dtype=torch.int32)[::2], ValueError, "1-D and contiguous"),
        (torch.zeros(1, dtype=torch.int32, device="meta"), ValueError, "ids are on meta, but the cache is on cpu"),
    ],
    ids=["float", "2d", "strided", "device"],
)
def test_ids_that_are_none(ids, error, message):
    with reserve({"a": ATTENTION}) as cache:
        with pytest.raises(tkv.NothingCommitted):
            cache.zero_blocks([0])
        cache.extend(2)
        with pytest.raises(error, match=message):
            cache.zero_blocks(ids)


@pytest.mark.parametrize("call", ["reserve", "create", "map", "set_access"])
def test_a_group_that_cannot_be_added_leaves_the_cache_as_it_was(call):
    driver = tkv.HostMemory(PAGE, 64 << 20)
    faulty = tkv.FaultyMemory(driver)
    with reserve({"a": ATTENTION}, faulty) as cache:
        cache.extend(11)
        before = (driver.live, cache.mapped_bytes, cache.signature(), cache.block_bytes)
        for nth in (1, 2):
            faulty.fail(call, nth=nth)
            with pytest.raises(tkv.TritonKVError):
                cache.add_group(tkv.LayerGroup("late", {"m": MAMBA, "b": WIDE}))
            assert (driver.live, cache.mapped_bytes, cache.signature(), cache.block_bytes) == before
            assert len(cache) == 1
        cache.add_group(tkv.LayerGroup("late", {"m": MAMBA, "b": WIDE}))
        cache.extend(30)
        assert not cache["m"].states[1][:30].any()


def test_a_group_that_does_not_fit_says_so():
    with reserve({"a": ATTENTION}, tkv.HostMemory(PAGE, 64 * PAGE)) as cache:
        cache.extend(60)
        with pytest.raises(tkv.OutOfMemory, match=r"adding a group at 60 blocks: .*asked for \d+ bytes"):
            cache.add_group(tkv.LayerGroup("late", {"b": WIDE}))
        assert cache.mapped_bytes == 60 * PAGE


def test_signature_is_what_ranks_must_agree_on():
    def signature(layers=None, **options) -> str:
        with reserve(layers or {"a": ATTENTION, "m": MAMBA}, **options) as cache:
            return cache.signature()

    first = signature()
    assert first == signature(capacity=7) == signature(memory=tkv.HostMemory(2 * PAGE), dense=True)
    assert json.loads(first)["block_size"] == 16
    others = [
        signature(block_size=32),
        signature({"a": ATTENTION, "x": MAMBA}),
        signature({"m": MAMBA, "a": ATTENTION}),
        signature({"a": WIDE, "m": MAMBA}),
        signature({"a": WINDOW, "m": MAMBA}),
        signature(packed=True),
        signature(layout="LBTHND"),
    ]
    assert len({first, *others}) == 1 + len(others)


def test_attention_reads_and_writes_hybrid_padded_and_packed_layers():
    """The ops take every layout's strides: equal to a cache of attention alone, bit for bit."""
    groups = [
        tkv.LayerGroup("mamba", {"m": MAMBA}),
        tkv.LayerGroup("attention", {"a": ATTENTION, "b": ATTENTION}, page_bytes=4096 + 64),
    ]
    k, v, q = (torch.randn(37, heads, 16) for heads in (2, 2, 4))
    blocks = [5, 2, 8]
    slots = torch.tensor([blocks[token // 16] * 16 + token % 16 for token in range(37)])
    metadata = tkv.AttentionMetadata(
        block_table=torch.tensor([blocks], dtype=torch.int32),
        seq_lens=torch.tensor([37], dtype=torch.int32),
        query_start_loc=torch.tensor([0, 37], dtype=torch.int32),
        slot_mapping=slots,
        num_tokens=37,
        num_seqs=1,
        max_query_len=37,
    )
    results = []
    for layers, options in (
        ({"m": ATTENTION, "b": ATTENTION}, {}),
        (groups, {}),
        (groups, {"packed": True}),
        (groups, {"shared_by": "groups"}),
    ):
        with reserve(layers, **options) as cache:
            cache.extend(9)
            tkv.write_kv(k, v, cache["b"], slots)
            results.append(tkv.paged_attention(q, cache["b"], metadata))
    assert all(torch.equal(results[0], result) for result in results[1:])


def test_kernels_are_compiled_for_the_first_layer_with_k_and_v():
    with reserve({"m": MAMBA, "a": ATTENTION, "w": WIDE}) as cache:
        cache.extend(1)
        assert tkv.compile_kernels(cache, 8, max_seqs=2, max_tokens=8) == 0  # on a CPU
        with pytest.raises(ValueError, match="num_query_heads 6 must be a multiple of the cache's 4 KV heads"):
            tkv.compile_kernels(cache, 6, max_seqs=2, max_tokens=8, layer="w")
    with reserve({"m": MAMBA}) as cache, pytest.raises(ValueError, match="no layer of this cache keeps K and V"):
        tkv.compile_kernels(cache.extend(1), 8, max_seqs=2, max_tokens=8)


def test_ops_refuse_states():
    with reserve({"m": MAMBA}) as cache:
        cache.extend(1)
        x = torch.zeros(1, 2, 16)
        with pytest.raises(TypeError, match="'m' keeps conv, ssm, no K and V"):
            tkv.write_kv(x, x, cache["m"], torch.zeros(1, dtype=torch.int64))
        with pytest.raises(ValueError, match="no latent vector"):
            _ = cache["m"].latent
        with pytest.raises(KeyError, match="no state 'kv', only conv, ssm"):
            cache["m"].state("kv")


def test_spec_and_layout_of_a_cache_with_several():
    with reserve({"a": ATTENTION, "m": MAMBA}) as cache:
        with pytest.raises(ValueError, match="no spec in common"):
            _ = cache.spec
        with pytest.raises(ValueError, match="no layout in common"):
            _ = cache.layout
    with reserve(ATTENTION, num_layers=2) as cache:
        assert (cache.spec, cache.layout.order) == (ATTENTION, "LTBNHD")


class Overlapping(Codebook):
    def block_tensors(self, block_size: int) -> tuple[tkv.BlockTensor, ...]:
        return (tkv.BlockTensor("x", (2,), torch.float64, 0), tkv.BlockTensor("y", (4,), torch.uint8, 15))


class Unaligned(Codebook):
    def block_tensors(self, block_size: int) -> tuple[tkv.BlockTensor, ...]:
        return (tkv.BlockTensor("x", (2,), torch.float32, 6),)


class Twice(Codebook):
    def block_tensors(self, block_size: int) -> tuple[tkv.BlockTensor, ...]:
        return (tkv.BlockTensor("x", (1,), torch.float64, 0), tkv.BlockTensor("x", (1,), torch.float64, 8))


class Plain(Codebook):
    def block_tensors(self, block_size: int) -> tuple[tuple, ...]:
        return (("x", (1,), torch.float64, 0),)


class NoHash(Codebook):
    __hash__ = None


def two(first, second, **options):
    return lambda: reserve([tkv.LayerGroup("one", first), tkv.LayerGroup("two", second)], **options)


BAD = {
    "state of zero": (
        lambda: tkv.MambaSpec([("ssm", (4, 0), torch.float32)]),
        ValueError,
        r"state 'ssm': every extent of \(4, 0\) must be at least 1, got 0",
    ),
    "no states": (lambda: tkv.MambaSpec([]), ValueError, "at least one state"),
    "state names": (
        lambda: tkv.MambaSpec([("a", (1,), torch.uint8), ("a", (1,), torch.uint8)]),
        ValueError,
        "states are named twice",
    ),
    "state dtype": (lambda: tkv.MambaSpec([("a", (1,), "float")]), TypeError, "state 'a': dtype must be a torch.dtype"),
    "alignment no power": (
        lambda: tkv.MambaSpec([("a", (1,), torch.float32)], alignment_bytes=12),
        ValueError,
        "alignment_bytes 12 cannot be met",
    ),
    "alignment below dtype": (
        lambda: tkv.MambaSpec([("a", (1,), torch.float32)], alignment_bytes=2),
        ValueError,
        "alignment_bytes 2 cannot be met.*4 bytes of the largest dtype",
    ),
    "alignment beyond a granule": (
        lambda: reserve({"m": tkv.MambaSpec([("a", (1,), torch.uint8)], alignment_bytes=8192)}),
        ValueError,
        "layer 'm': an alignment of 8192 bytes cannot be met.*4096 bytes of a granule",
    ),
    "alignment and page_bytes": (
        lambda: reserve(tkv.LayerGroup("g", {"m": MAMBA}, page_bytes=2442)),
        ValueError,
        "group 'g': the alignment of 4 bytes of layer 'm' cannot be met with pages of 2442",
    ),
    "layers twice": (two({"a": ATTENTION}, {"a": MAMBA}), ValueError, "layers named twice: a"),
    "layers twice in a group": (
        lambda: tkv.LayerGroup("g", [("a", ATTENTION), ("b", WIDE), ("a", MAMBA)]),
        ValueError,
        "layers named twice: a",
    ),
    "groups twice": (
        lambda: reserve([tkv.LayerGroup("g", {"a": ATTENTION}), tkv.LayerGroup("g", {"b": ATTENTION})]),
        ValueError,
        "groups named twice",
    ),
    "no layers": (lambda: reserve({}), ValueError, "has no layers"),
    "no spec": (lambda: reserve({"a": 3}), TypeError, "layer 'a' needs a spec"),
    "num_layers and a mapping": (lambda: reserve({"a": ATTENTION}, num_layers=1), ValueError, "one spec only"),
    "a spec and no number": (lambda: reserve(ATTENTION), ValueError, "num_layers="),
    "mixed block numbering": (
        lambda: reserve([tkv.LayerGroup("a", {"a": ATTENTION}), tkv.LayerGroup("b", {"b": ATTENTION}, block_size=32)]),
        ValueError,
        "mixed block numbering.*'a': 16, 'b': 32",
    ),
    "mixed block numbering of cache and group": (
        lambda: reserve(tkv.LayerGroup("x", {"a": ATTENTION}, block_size=32)),
        ValueError,
        "mixed block numbering: group 'x' counts blocks of 32 tokens .* the cache of 16; .* with block_size=32",
    ),
    "mixed block numbering of a slot alone": (
        lambda: reserve(tkv.LayerGroup("x", {"a": ATTENTION}, block_size=32), shared_by="groups"),
        ValueError,
        "mixed block numbering: group 'x' counts blocks of 32 tokens",
    ),
    "mixed block numbering beside sharers": (
        lambda: reserve(
            [
                *(tkv.LayerGroup(name, {name: WINDOW}, block_size=32) for name in "xy"),
                tkv.LayerGroup("z", {"z": MLA}, block_size=64),
            ],
            shared_by=[["x", "y"]],
        ),
        ValueError,
        "mixed block numbering: group 'z' counts blocks of 64 tokens",
    ),
    "mixed block numbering later": (
        lambda: reserve({"a": ATTENTION}).add_group(tkv.LayerGroup("b", {"b": ATTENTION}, block_size=32)),
        ValueError,
        "mixed block numbering: group 'b' counts blocks of 32 tokens .* the cache of 16",
    ),
    "added twice": (
        lambda: reserve({"a": ATTENTION}).add_group(tkv.LayerGroup("b", {"a": ATTENTION})),
        ValueError,
        "layers named twice: a",
    ),
    "window on MLA": (
        lambda: tkv.MLASpec(512, 64, torch.bfloat16, window=1024),
        ValueError,
        "a window of 1024 on MLA is not possible",
    ),
    "latent of zero": (lambda: tkv.MLASpec(0, 64, torch.bfloat16), ValueError, "kv_lora_rank must be at least 1"),
    "window of zero": (
        lambda: tkv.AttentionSpec(1, 8, torch.float32, window=0),
        ValueError,
        "window must be at least 1, got 0",
    ),
    "sharers disagree": (
        lambda: reserve(
            [tkv.LayerGroup("a", {"a": ATTENTION}, "LTBNHD"), tkv.LayerGroup("b", {"b": WINDOW}, "LBTNHD")],
            shared_by=[["a", "b"]],
        ),
        ValueError,
        "layers 'a' and 'b' share a buffer but disagree: layout 'LTBNHD' cuts it into 2 segments, 'LBTNHD' into 1",
    ),
    "sharers of one group differ": (
        lambda: reserve(tkv.LayerGroup("g", {"a": ATTENTION, "b": WIDE}), shared_by=[["a", "b"]]),
        ValueError,
        "'a' and 'b' of group 'g' share a buffer.*overwrite each other",
    ),
    "unknown sharer": (lambda: reserve({"a": ATTENTION}, shared_by=[["a", "x"]]), ValueError, "no group has: x"),
    "shared twice": (
        lambda: reserve({"a": ATTENTION, "b": WINDOW}, shared_by=[["a", "b"], ["a"]]),
        ValueError,
        "shared_by names layers twice: a",
    ),
    "shared_by word": (lambda: reserve({"a": ATTENTION}, shared_by="layers"), ValueError, 'sets of layer names or "g'),
    "packed with two segments": (
        lambda: reserve({"a": ATTENTION, "b": WIDE}, packed=True),
        ValueError,
        "layer 'a' has 2 segments in layout 'LTBNHD', and a packed block is one piece",
    ),
    "half of a slot packed": (
        lambda: reserve({"a": ATTENTION, "b": WINDOW}, layout="LBTNHD", shared_by=[["a", "b"]], packed=[["a"]]),
        ValueError,
        "layers b share a slot with packed layers",
    ),
    "page too small": (
        lambda: reserve(tkv.LayerGroup("g", {"a": ATTENTION}, page_bytes=4095)),
        ValueError,
        "page_bytes 4095 must hold the 4096 bytes of layer 'a' and divide into its 2 segments",
    ),
    "interleaved and unequal": (
        lambda: reserve(tkv.LayerGroup("g", {"a": ATTENTION, "b": WIDE}, "TLBNHD")),
        ValueError,
        "layout 'TLBNHD' interleaves equal layers",
    ),
    "interleaved and separate": (
        lambda: reserve(tkv.LayerGroup("g", {"a": ATTENTION, "b": ATTENTION}, "BLTNHD", separate=True)),
        ValueError,
        "a reservation each; use a layout that starts with L",
    ),
    "short layout for K and V": (
        lambda: reserve(tkv.LayerGroup("g", {"a": ATTENTION}, "LB")),
        ValueError,
        "K and V need all six letters",
    ),
    "tensors overlap": (lambda: reserve({"x": Overlapping(5)}), ValueError, "tensor 'y', bytes 15 to 19, overlaps"),
    "tensor names": (
        lambda: reserve({"x": Twice(5)}),
        ValueError,
        r"layer 'x': tensors are named twice in \['x', 'x'\]",
    ),
    "no tensors but tuples": (lambda: reserve({"x": Plain(5)}), TypeError, "layer 'x': block_tensors must give BlockT"),
    "alignment of zero": (
        lambda: reserve({"x": Codebook(5, 0)}),
        ValueError,
        "layer 'x': alignment_bytes must be at least 1, got 0",
    ),
    "alignment no integer": (
        lambda: reserve({"x": Codebook(5, 8.0)}),
        TypeError,
        "layer 'x': alignment_bytes must be an integer, got 8.0",
    ),
    "no hash": (lambda: reserve({"x": NoHash(5)}), TypeError, "layer 'x': a spec must be hashable.*frozen dataclass"),
    "negative rope part": (
        lambda: tkv.MLASpec(512, -1, torch.bfloat16),
        ValueError,
        "^qk_rope_head_dim must not be negative, got -1",
    ),
    "rope part no integer": (
        lambda: tkv.MLASpec(512, 64.0, torch.bfloat16),
        TypeError,
        "^qk_rope_head_dim must be an integer, got 64.0",
    ),
    "state without a shape": (
        lambda: tkv.MambaSpec([("s", torch.float32)]),
        TypeError,
        r"a state is \(name, shape, dtype\), .* got \('s', torch.float32\)",
    ),
    "state shape no sequence": (
        lambda: tkv.MambaSpec([("s", 5, torch.float32)]),
        TypeError,
        r"a state is \(name, shape, dtype\), .* got \('s', 5, torch.float32\)",
    ),
    "state no tuple": (lambda: tkv.MambaSpec([5]), TypeError, r"a state is \(name, shape, dtype\), .* got 5"),
    "group name": (lambda: tkv.LayerGroup(None, {"a": ATTENTION}), TypeError, "a group's name is a string, got None"),
    "group name of a mapping": (lambda: reserve({0: {"a": ATTENTION}}), TypeError, "a group's name is a string, got 0"),
    "added no group": (
        lambda: reserve({"a": ATTENTION}).add_group({"b": ATTENTION}),
        TypeError,
        "add_group takes a LayerGroup, such as .*, got {'b': ",
    ),
    "no groups to cut": (lambda: tkv.equal_groups([]), ValueError, "equal_groups needs at least one group"),
    "tensor not aligned": (lambda: reserve({"x": Unaligned(5)}), ValueError, "tensor 'x' of torch.float32 at byte 6"),
}


@pytest.mark.parametrize("call", ["describe", "layout_picture", "mapped_bytes_at"])
def test_a_number_of_blocks_is_whole(call):
    with reserve({"a": ATTENTION}, capacity=4) as cache:
        for asked in (cache, cache.geometry):
            for number in (2.5, 2.0, "2", True):
                with pytest.raises(TypeError, match="num_blocks must be an integer, got"):
                    getattr(asked, call)(number)


@pytest.mark.parametrize(("call", "error", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_the_page_about_states_runs(capsys):
    text = (Path(__file__).parents[2] / "docs" / "states.md").read_text()
    names: dict[str, object] = {"__name__": "states"}
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(block, names)
    assert "LBTNHD" in capsys.readouterr().out

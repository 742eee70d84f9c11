"""Random mixtures of specs, layouts, sizes and growth steps: what a cache promises must hold for all of them."""

import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import triton_kv as tkv

EXAMPLES = int(os.environ.get("TRITON_KV_EXAMPLES", "60"))
HOST_GRANULE, DEVICE_GRANULE = 4 << 10, 2 << 20
MANY = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])

# Layouts with one segment a layer, and those with several; all keep D innermost, so that bytes can be looked at.
ONE_SEGMENT = ["LBTNHD", "LBTHND", "LBNHTD", "LBHNTD", "BLTNHD", "BLNHTD", "BLHNTD"]
INTERLEAVED = ["BHLNTD"]  # one segment, for equal layers in a reservation of their own
SEVERAL = ["LTBNHD", "TLBNHD", "LHBNTD"]


def odd_sizes(granule: int) -> list[int]:
    return [1, 4 << 10, 96 << 10, granule - 1, granule, granule + 1, 3 * granule]


@st.composite
def attention_specs(draw, equal_dims: bool) -> tkv.AttentionSpec:
    head_dim = draw(st.sampled_from([1, 3, 8, 16]))
    return tkv.AttentionSpec(
        num_kv_heads=draw(st.integers(1, 3)),
        head_dim=head_dim,
        v_head_dim=head_dim if equal_dims else draw(st.sampled_from([head_dim, 5])),
        dtype=draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16])),
        window=draw(st.sampled_from([None, 32])),
    )


@st.composite
def state_specs(draw, granule: int) -> tkv.StateSpec:
    kind = draw(st.sampled_from(["mla", "mamba", "odd"]))
    if kind == "mla":
        return tkv.MLASpec(draw(st.sampled_from([3, 32])), draw(st.sampled_from([0, 8])), torch.bfloat16)
    if kind == "odd":
        return tkv.MambaSpec([("bytes", (draw(st.sampled_from(odd_sizes(granule))),), torch.uint8)])
    dtypes = st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float64])
    shapes = st.lists(st.integers(1, 7), min_size=1, max_size=3)
    states = draw(st.lists(st.tuples(shapes, dtypes), min_size=1, max_size=3))
    alignment = draw(st.sampled_from([None, 64]))
    return tkv.MambaSpec([(f"s{i}", shape, dtype) for i, (shape, dtype) in enumerate(states)], alignment)


@st.composite
def mixtures(draw, granule: int) -> dict:
    """Arguments of `reserve`: groups, and how they lie."""
    how = draw(st.sampled_from(["apart", "apart", "shared", "packed", "shared and packed", "sets"]))
    groups = []
    for number in range(draw(st.integers(1, 3))):
        count = draw(st.integers(1, 3))
        block_major = how != "apart" or draw(st.booleans())
        kind = draw(st.sampled_from(["attention", "states", "both"]))
        if kind == "attention":
            layout = draw(st.sampled_from((ONE_SEGMENT + INTERLEAVED * (how != "sets")) if block_major else SEVERAL))
            specs = [draw(attention_specs(equal_dims=not block_major or "L" not in layout[:1]))] * count
        elif kind == "states":
            layout = draw(st.sampled_from([None, "LB", "BL"]))
            specs = [draw(state_specs(granule)) for _ in range(count)]
        else:
            layout = draw(st.sampled_from([None, *ONE_SEGMENT] if block_major else [None, "LTBNHD", "LHBNTD"]))
            attention = attention_specs(equal_dims=not block_major or layout is None or "L" not in layout[:1])
            specs = [draw(attention), draw(state_specs(granule)), draw(attention)][:count]
        page = None
        if draw(st.booleans()) and layout not in ("TLBNHD", *INTERLEAVED):
            # It must divide into 1, 2 or 3 segments, each aligned to 64 bytes.
            page = -(-max(spec.page_bytes(4) for spec in specs) // 384) * 384 + 384
        groups.append(
            tkv.LayerGroup(
                f"g{number}",
                {f"g{number}.{index}": spec for index, spec in enumerate(specs)},
                layout,
                page_bytes=page,
                separate=(layout is None or layout.startswith("L")) and draw(st.booleans()),
            )
        )
    seconds = [f"{group.name}.1" for group in groups if len(group.names) > 1]
    return {
        "layers": groups,
        "block_size": 4,
        "capacity": draw(st.integers(1, 12)),
        "dense": draw(st.booleans()),
        "layout": "LBTNHD" if how != "apart" else "LTBNHD",
        # The first layers of all groups in one slot, and the second ones of all that have some side by side.
        "shared_by": [[f"{group.name}.0" for group in groups]]
        if how == "sets"
        else "groups"
        if "shared" in how
        else (),
        "packed": [seconds] if how == "sets" and seconds else "packed" in how,
    }


def expected_mapped_bytes(geometry: tkv.CacheGeometry, num_blocks: int) -> int:
    """By counting granules one by one."""
    total, granule = 0, geometry.granularity
    for buffer in geometry.buffers:
        granules = set()
        for segment in range(buffer.num_segments):
            start = segment * buffer.segment_stride_bytes
            stop = start + num_blocks * buffer.block_bytes
            granules |= set(range(start // granule, -(-stop // granule))) if stop > start else set()
        total += len(granules) * granule
    return total


def views_of(layer) -> list[torch.Tensor]:
    return [layer.k, layer.v] if isinstance(layer, tkv.LayerCache) else list(layer.states)


def owned(cache: tkv.KVCache, block: int, shared: bool) -> list[int]:
    """Layers that may hold something in a block: those of one group where groups overlay each other."""
    groups = cache.geometry.groups
    owner = groups[block % len(groups)].name
    return [layer.index for layer in cache.geometry.layers if not shared or layer.group == owner]


def pattern(layer: int, view: int, block: int, like: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * layer + 100 * view + block)
    size = like.contiguous().view(torch.uint8).shape
    return torch.randint(1, 256, size, generator=generator, dtype=torch.uint8)


@MANY
@given(mixture=mixtures(HOST_GRANULE), steps=st.lists(st.integers(0, 12), max_size=4))
def test_every_committed_byte_is_zero_then_the_layers_own(mixture, steps):
    driver = tkv.HostMemory(HOST_GRANULE, budget_bytes=64 << 20)
    shared = bool(mixture["shared_by"])
    with tkv.KVCache.reserve(**mixture, memory=tkv.PoisonedMemory(driver)) as cache:
        assert cache.reserved_bytes == cache.geometry.reserved_bytes
        done = 0
        for target in [*sorted(min(step, cache.capacity) for step in steps), cache.capacity]:
            cache.extend(target)
            used = (64 << 20) - driver.memory_info()[0]
            # What must be mapped is mapped, or the writes below fault; and this many granules are all there are.
            assert used == cache.mapped_bytes == cache.mapped_bytes_at(target)
            assert used == cache.geometry.mapped_bytes_at(target) == expected_mapped_bytes(cache.geometry, target)
            for layer in cache:
                assert not any(view[done:target].contiguous().view(torch.uint8).any() for view in views_of(layer))
            for block in range(done, target):
                for index in owned(cache, block, shared):
                    for number, view in enumerate(views_of(cache[index])):
                        # torch refuses to see a tensor whose channels are not innermost as bytes; a copy's bytes do.
                        view[block] = pattern(index, number, block, view[block]).view(view.dtype)
            done = max(done, target)
            for block in range(done):
                for index in owned(cache, block, shared):
                    for number, view in enumerate(views_of(cache[index])):
                        found = view[block].contiguous().view(torch.uint8)
                        assert torch.equal(found, pattern(index, number, block, view[block]))
    assert (driver.live.handles, driver.live.mappings) == (0, 0)


@MANY
@given(mixture=mixtures(DEVICE_GRANULE), blocks=st.integers(1, 1 << 20), steps=st.lists(st.integers(0, 40), max_size=5))
def test_a_device_counts_the_same_bytes(mixture, blocks, steps):
    mixture |= {"capacity": max(blocks, 40)}
    driver = tkv.FakeMemory(DEVICE_GRANULE)
    free = driver.memory_info()[0]
    with tkv.KVCache.reserve(**mixture, memory=driver) as cache:
        assert cache.mapped_bytes_at(cache.capacity) >= cache.capacity * sum(
            max(layer.page_bytes for layer in cache.geometry.layers if layer.buffer == index)
            for index in range(len(cache.geometry.buffers))
        )
        for target in sorted(steps):
            cache.extend(target)
            assert free - driver.memory_info()[0] == cache.mapped_bytes_at(target)
            assert cache.mapped_bytes_at(target) == expected_mapped_bytes(cache.geometry, target)
    assert driver.live == (0, 0, 0)


@MANY
@given(mixture=mixtures(DEVICE_GRANULE))
def test_no_two_pages_overlap_unless_they_share_a_slot(mixture):
    geometry = tkv.arrange(mixture.pop("layers"), granularity=DEVICE_GRANULE, **mixture)
    shared = bool(mixture["shared_by"])
    taken: dict[int, list[tuple[int, int, str, int]]] = {}
    for layer in geometry.layers:
        segments = layer.num_segments if layer.order[0] == "L" else 1
        for segment in range(segments):
            for block in (0, geometry.capacity - 1):
                start = layer.base_bytes + segment * layer.segment_stride_bytes + block * layer.block_stride_bytes
                page = layer.page_bytes // layer.num_segments
                if layer.order in INTERLEAVED:  # the first head's part of it
                    page //= layer.spec.num_kv_heads
                taken.setdefault(layer.buffer, []).append((start, start + page, layer.group, block))
    for index, spans in taken.items():
        buffer = geometry.buffers[index]
        for start, end, group, block in spans:
            assert 0 <= start < end <= buffer.reserved_bytes
            for other_start, other_end, other_group, other_block in spans:
                if (start, end, group, block) == (other_start, other_end, other_group, other_block):
                    continue
                overlay = shared and group != other_group and block == other_block
                assert overlay or end <= other_start or other_end <= start


@pytest.mark.parametrize("block_bytes", odd_sizes(HOST_GRANULE))
def test_a_block_of_an_odd_size(block_bytes):
    """Several granules a segment: a block that the commit missed would fault or count a granule less."""
    spec = tkv.MambaSpec([("bytes", (block_bytes,), torch.uint8)])
    capacity = max(5 * HOST_GRANULE // block_bytes, 7)
    memory = tkv.PoisonedMemory(tkv.HostMemory(HOST_GRANULE))
    with tkv.KVCache.reserve(spec, num_layers=3, block_size=1, capacity=capacity, memory=memory) as cache:
        for target in (1, capacity // 2, capacity):
            cache.extend(target)
            assert cache.mapped_bytes == 3 * -(-target * block_bytes // HOST_GRANULE) * HOST_GRANULE
            for layer in cache:
                assert not layer.states[0][:target].any()

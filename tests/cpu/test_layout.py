"""CacheLayout: where every byte lies, for every order of the six dimensions."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from triton_kv.layout import LETTERS, CacheLayout, Extent
from triton_kv.spec import AttentionSpec

MIB = 1 << 20
SPEC = AttentionSpec(num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
ORDERS = ["".join(letters) for letters in itertools.permutations(LETTERS)]


def expected_offsets(layout: CacheLayout) -> np.ndarray:
    """Offset in elements of every logical element `[L, T, B, N, H, D]`, by counting in physical order; -1: none.

    D has the larger of the two dims; where K and V differ the shorter one leaves a tail of -1.
    """
    spec = layout.spec
    dims = (spec.head_dim, spec.value_dim)
    extents = dict(
        zip(
            LETTERS,
            (layout.num_layers, 2, layout.capacity, layout.block_size, spec.num_kv_heads, max(dims)),
            strict=True,
        )
    )
    outer = layout.order.split("B")[0]
    offsets = np.full([extents[letter] for letter in LETTERS], -1, dtype=np.int64)
    position, segment_start, current_segment = 0, 0, None
    for physical in itertools.product(*(range(extents[letter]) for letter in layout.order)):
        index = dict(zip(layout.order, physical, strict=True))
        if index["D"] >= dims[index["T"]]:
            continue
        segment = tuple(index[letter] for letter in outer)
        if segment != current_segment:
            if current_segment is not None:
                segment_start += layout.segment_stride_bytes // spec.itemsize_bytes
            position, current_segment = segment_start, segment
        offsets[tuple(index[letter] for letter in LETTERS)] = position
        position += 1
    return offsets


def layer_flat(layout: CacheLayout, reservation: torch.Tensor, layer: int) -> torch.Tensor:
    """What the cache hands to `views`: the layer's span of a reservation of elements."""
    start = layout.layer_base_bytes(layer) // layout.spec.itemsize_bytes
    return reservation[start : start + layout.layer_span_bytes // layout.spec.itemsize_bytes]


def check_layout(layout: CacheLayout) -> None:
    """Every property of a layout, by comparison with a count in physical order."""
    spec, itemsize = layout.spec, layout.spec.itemsize_bytes
    expected = expected_offsets(layout)
    assert layout.total_bytes == layout.num_segments * layout.segment_stride_bytes
    assert layout.segment_stride_bytes >= layout.segment_capacity_bytes
    assert layout.segment_stride_bytes % (layout.granularity or 1) == 0
    assert layout.block_bytes == layout.num_layers * layout.block_size * spec.token_bytes

    reservation = torch.zeros(layout.total_bytes // itemsize, dtype=spec.dtype)
    # 16-bit elements cannot hold their offsets: the views' own strides are read over this twin, whose elements can.
    offsets = torch.arange(layout.total_bytes // itemsize)
    seen = np.full_like(expected, -1)
    for layer in range(layout.num_layers):
        flat = layer_flat(layout, reservation, layer)
        k, v = (offsets.as_strided(x.shape, x.stride(), x.storage_offset()) for x in layout.views(flat))
        assert k.shape == (layout.capacity, layout.block_size, spec.num_kv_heads, spec.head_dim)
        assert v.shape == (layout.capacity, layout.block_size, spec.num_kv_heads, spec.value_dim)
        seen[layer, 0, ..., : spec.head_dim] = k.numpy()
        seen[layer, 1, ..., : spec.value_dim] = v.numpy()
        span = flat.storage_offset() + flat.numel()
        assert span == max(int(k.max()), int(v.max())) + 1, "the span ends with the layer's last element"
    np.testing.assert_array_equal(seen, expected)

    elements = seen[seen >= 0]
    assert len(np.unique(elements)) == layout.block_bytes * layout.capacity // itemsize, "two elements share a byte"

    for num_blocks in range(1, layout.capacity + 1):
        prefix = np.concatenate(
            [
                np.arange(num_blocks * layout.segment_block_bytes // itemsize)
                + segment * layout.segment_stride_bytes // itemsize
                for segment in range(layout.num_segments)
            ]
        )
        of_blocks = seen[:, :, :num_blocks]
        np.testing.assert_array_equal(np.sort(of_blocks[of_blocks >= 0]), prefix)

    for block in range(layout.capacity):
        assert layout.extents(block) == tuple(
            Extent(segment, block * layout.segment_block_bytes, layout.segment_block_bytes)
            for segment in range(layout.num_segments)
        )
    for layer, kv, block, token, head in itertools.product(*(range(extent) for extent in expected.shape[:5])):
        segment, offset = layout.locate(layer, kv, block, head, token)
        assert 0 <= offset < layout.segment_capacity_bytes
        address = segment * layout.segment_stride_bytes + offset
        assert address == expected[layer, kv, block, token, head, 0] * itemsize


@pytest.mark.parametrize("granularity", [None, 64], ids=["dense", "padded"])
def test_every_order_places_every_element_once(granularity):
    spec = AttentionSpec(num_kv_heads=3, head_dim=2, dtype=torch.float16)
    for order in ORDERS:
        check_layout(CacheLayout(order, spec, num_layers=2, block_size=2, capacity=3, granularity=granularity))


@settings(max_examples=150, deadline=None)
@given(
    order=st.sampled_from(ORDERS),
    num_layers=st.integers(1, 3),
    block_size=st.integers(1, 3),
    capacity=st.integers(1, 4),
    num_kv_heads=st.integers(1, 3),
    head_dim=st.integers(1, 4),
    v_head_dim=st.none() | st.integers(1, 4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    granularity=st.none() | st.sampled_from([4, 64, 100, 4096]),
)
def test_random_sizes(order, num_layers, block_size, capacity, num_kv_heads, head_dim, v_head_dim, dtype, granularity):
    if v_head_dim not in (None, head_dim):
        position = order.index
        assume(position("T") > position("B") and position("T") > position("L") and position("D") > position("T"))
    spec = AttentionSpec(num_kv_heads, head_dim, dtype, v_head_dim)
    check_layout(
        CacheLayout(
            order, spec, num_layers=num_layers, block_size=block_size, capacity=capacity, granularity=granularity
        )
    )


UNEQUAL = [
    order
    for order in ORDERS
    if order.index("T") > order.index("B")
    and order.index("T") > order.index("L")
    and order.index("D") > order.index("T")
]


@pytest.mark.parametrize("granularity", [None, 64], ids=["dense", "padded"])
@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(3, 2), (1, 4)], ids=["long_keys", "long_values"])
def test_every_order_that_admits_different_dims(head_dim, v_head_dim, granularity):
    spec = AttentionSpec(2, head_dim, torch.float16, v_head_dim)
    assert len(UNEQUAL) == 60
    for order in UNEQUAL:
        check_layout(CacheLayout(order, spec, num_layers=2, block_size=2, capacity=3, granularity=granularity))


@pytest.mark.parametrize("order", ["LTBNHD", "BLTNHD", "LHBNTD", "DTHNLB", "BHLNTD"])
def test_views_share_the_storage_they_are_given(order):
    spec = AttentionSpec(2, 4, torch.float32)
    layout = CacheLayout(order, spec, num_layers=2, block_size=2, capacity=3, granularity=256)
    reservation = torch.arange(layout.total_bytes // 4, dtype=torch.float32)
    expected = expected_offsets(layout)
    for layer in range(2):
        flat = layer_flat(layout, reservation, layer)
        k, v = layout.views(flat)
        np.testing.assert_array_equal(k.numpy(), expected[layer, 0])
        np.testing.assert_array_equal(v.numpy(), expected[layer, 1])
        np.testing.assert_array_equal(layout.kv_view(flat).numpy(), expected[layer])
        assert k.untyped_storage().data_ptr() == reservation.untyped_storage().data_ptr()


# Segments of 3 layers and 8 heads; a block's bytes in one segment, in keys of a token (8 x 128 x 2 = 2048 bytes).
NAMED = [
    ("LTBNHD", "LTBNHD", 6, 16),
    ("LBTNHD", "LBTNHD", 3, 32),
    ("LBTHND", "LBTHND", 3, 32),
    ("TLBNHD", "TLBNHD", 6, 16),
    ("BLTNHD", "BLTNHD", 1, 96),
    ("LBNHC", "LBNHTD", 3, 32),
    ("LBHNC", "LBHNTD", 3, 32),
    ("LHBNC", "LHBNTD", 24, 4),
    ("BLNHC", "BLNHTD", 1, 96),
    ("BLHNC", "BLHNTD", 1, 96),
    ("BHLNC", "BHLNTD", 1, 96),
]


@pytest.mark.parametrize(("name", "order", "segments", "block_keys"), NAMED, ids=[row[0] for row in NAMED])
def test_named_layouts(name, order, segments, block_keys):
    layout = CacheLayout(name, SPEC, num_layers=3, block_size=16, capacity=100, granularity=2 * MIB)
    assert layout.order == order
    assert layout == CacheLayout(order, SPEC, num_layers=3, block_size=16, capacity=100, granularity=2 * MIB)
    assert layout.num_segments == segments
    assert layout.segment_block_bytes == block_keys * 2048
    assert layout.segment_capacity_bytes == 100 * block_keys * 2048
    assert layout.segment_stride_bytes % (2 * MIB) == 0
    assert layout.segment_stride_bytes - layout.segment_capacity_bytes < 2 * MIB
    assert layout.d_innermost


@pytest.mark.parametrize(
    ("order", "k_strides", "v_offset"),
    [
        # [blocks, 16, 8, 128] each, K and V 100 blocks apart
        ("LTBNHD", (16384, 1024, 128, 1), 100 * 16384),
        ("LBTNHD", (32768, 1024, 128, 1), 16384),
        ("LBTHND", (32768, 128, 2048, 1), 16384),
        ("LBNHTD", (32768, 2048, 256, 1), 128),
        ("BLTNHD", (3 * 32768, 1024, 128, 1), 16384),
        ("LBTNDH", (32768, 1024, 1, 8), 16384),
    ],
)
def test_strides_by_hand(order, k_strides, v_offset):
    layout = CacheLayout(order, SPEC, num_layers=3, block_size=16, capacity=100)
    assert layout.k_strides == layout.v_strides == k_strides
    assert layout.v_offset == layout.kv_stride == v_offset
    assert layout.d_innermost == (k_strides[3] == 1)


def test_different_dims_have_strides_of_their_own():
    layout = CacheLayout("LBTNHD", AttentionSpec(2, 192, torch.bfloat16, 128), num_layers=3, block_size=16, capacity=5)
    page = 16 * 2 * (192 + 128)
    assert layout.k_strides == (page, 2 * 192, 192, 1)
    assert layout.v_strides == (page, 2 * 128, 128, 1)
    assert layout.v_offset == 16 * 2 * 192
    assert layout.kv_stride is None
    flat = torch.zeros(layout.layer_span_bytes // 2, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"head_dim 192 and v_head_dim 128 differ.*views\(\)"):
        layout.kv_view(flat)


def test_derived_values_survive_64_bits():
    layout = CacheLayout("LTBNHD", SPEC, num_layers=80, block_size=16, capacity=1 << 24, granularity=2 * MIB)
    assert layout.total_bytes == 160 * (1 << 24) * 32768
    assert layout.locate(79, 1, (1 << 24) - 1, 7, 15) == (159, (1 << 24) * 32768 - 256)


SIZES = {"num_layers": 2, "block_size": 4, "capacity": 3}
BAD_ORDERS = [
    ("LTBNHX", "unknown X; missing D"),
    ("ltbnhd", "unknown b, d, h, l, n, t"),
    ("LTBNHH", "repeated H; missing D"),
    ("LTBNH", "missing D"),
    ("LTBNHDD", "repeated D"),
    ("LTBNHC", "repeated T"),
    ("", "missing B, D, H, L, N, T"),
]


@pytest.mark.parametrize(("order", "message"), BAD_ORDERS, ids=[row[0] or "empty" for row in BAD_ORDERS])
def test_bad_orders(order, message):
    with pytest.raises(ValueError, match=f"layout '{order}': letters {message}.*each of the six letters LTBNHD once"):
        CacheLayout(order, SPEC, **SIZES)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_layers": 0}, ValueError, "num_layers must be at least 1, got 0"),
        ({"capacity": 0}, ValueError, "capacity must be at least 1, got 0"),
        ({"capacity": -7}, ValueError, "capacity must be at least 1, got -7"),
        ({"block_size": 0}, ValueError, "block_size must be at least 1, got 0"),
        ({"granularity": 0}, ValueError, "granularity must be at least 1, got 0"),
        ({"granularity": 3}, ValueError, "granularity must be a multiple of the 2 bytes of one element, got 3"),
        ({"capacity": 3.0}, TypeError, "capacity must be an integer, got 3.0"),
        ({"capacity": True}, TypeError, "capacity must be an integer, got True"),
        ({"order": 7}, TypeError, "a layout is a string such as 'LTBNHD', got 7"),
        ({"spec": "bf16"}, TypeError, "spec must be an AttentionSpec, got 'bf16'"),
    ],
    ids=lambda value: "-".join(f"{k}_{v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_bad_sizes(change, error, message):
    arguments = {"order": "LTBNHD", "spec": SPEC, **SIZES, **change}
    with pytest.raises(error, match=message):
        CacheLayout(arguments.pop("order"), arguments.pop("spec"), **arguments)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("LTBNHD", "T after B.*does not divide into equal segments.*'LBTNHD'"),
        ("TLBNHD", "T after B"),
        ("LBNHDT", "D after T.*cannot alternate"),
        ("LDBTNH", "D after T"),
        ("BTLNHD", "L before T.*differs by layer.*'BLTNHD'"),
    ],
)
def test_different_dims_where_they_cannot_be(order, message):
    spec = AttentionSpec(2, 192, torch.bfloat16, 128)
    with pytest.raises(ValueError, match=f"'{order}': head_dim 192 and v_head_dim 128 differ, which needs {message}"):
        CacheLayout(order, spec, **SIZES)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ((2, 0, 0, 0, 0), r"layer 2 is outside of 0\.\.1"),
        ((0, 2, 0, 0, 0), r"kv 2 is outside of 0\.\.1"),
        ((0, 0, 3, 0, 0), r"block 3 is outside of 0\.\.2"),
        ((0, 0, -1, 0, 0), r"block -1 is outside of 0\.\.2"),
        ((0, 0, 0, 8, 0), r"head 8 is outside of 0\.\.7"),
        ((0, 0, 0, 0, 4), r"token 4 is outside of 0\.\.3"),
    ],
)
def test_locate_outside(index, message):
    with pytest.raises(ValueError, match=message):
        CacheLayout("LTBNHD", SPEC, **SIZES).locate(*index)


@pytest.mark.parametrize(
    "flat",
    [
        torch.zeros(7, dtype=torch.bfloat16),
        torch.zeros(24576, dtype=torch.float16),
        torch.zeros(1, 24576, dtype=torch.bfloat16),
        torch.zeros(49152, dtype=torch.bfloat16)[::2],
    ],
    ids=["short", "dtype", "rank", "strided"],
)
def test_views_of_a_wrong_flat(flat):
    layout = CacheLayout("LBTNHD", SPEC, **SIZES)
    assert layout.layer_span_bytes == 2 * 24576
    with pytest.raises(ValueError, match=r"contiguous 1-D tensor of 24576 elements of torch\.bfloat16, got shape"):
        layout.views(flat)

"""CacheLayout.from_backend: what attention backends state about their caches, and what follows for segments."""

import pytest
import torch

from triton_kv.layout import CacheLayout


def stated(shape, block_dim, stride_order=None, **changes):
    arguments = {"dtype": torch.bfloat16, "num_layers": 3, "capacity": 10, **changes}
    return CacheLayout.from_backend(shape, block_dim, stride_order, **arguments)


BACKENDS = [
    # id, shape for one block, block dimension, stride order, names, order, segments of one layer, segments
    ("flash_attention", (2, 1, 16, 8, 128), 1, None, None, "LTBNHD", 2, 6),
    ("flash_attention_identity", (2, 1, 16, 8, 128), 1, (0, 1, 2, 3, 4), None, "LTBNHD", 2, 6),
    ("flash_attention_hnd", (2, 1, 16, 8, 128), 1, (0, 1, 3, 2, 4), None, "LTBHND", 2, 6),
    ("kv_first_shape_block_first_strides", (2, 1, 16, 8, 128), 1, (1, 0, 2, 3, 4), None, "LBTNHD", 1, 3),
    ("flashinfer", (1, 2, 16, 8, 128), 0, None, None, "LBTNHD", 1, 3),
    ("flashinfer_hnd", (1, 2, 16, 8, 128), 0, (0, 1, 3, 2, 4), None, "LBTHND", 1, 3),
    ("block_last_counts_from_the_end", (2, 16, 8, 1, 128), -2, None, None, "LTNHBD", 256, 768),
    ("flashinfer_hnd_shape", (1, 2, 8, 16, 128), 0, None, "BTHND", "LBTHND", 1, 3),
    ("block_first_shape_kv_first_strides", (1, 2, 16, 8, 128), 0, (1, 0, 2, 3, 4), None, "LTBNHD", 2, 6),
    ("key_then_value_of_a_head", (1, 16, 8, 256), 0, None, "BNHC", "LBNHTD", 1, 3),
    ("one_buffer_a_head", (1, 16, 8, 256), 0, (2, 0, 1, 3), "BNHC", "LHBNTD", 8, 24),
    ("cross_layer", (1, 2, 16, 8, 128), 0, (1, 0, 2, 3, 4, 5), None, "BLTNHD", 1, 1),
    ("layers_inside_kv", (2, 1, 16, 8, 128), 1, (1, 0, 2, 3, 4, 5), None, "TLBNHD", 2, 6),
]


@pytest.mark.parametrize(
    ("shape", "block_dim", "stride_order", "names", "order", "segments_per_layer", "segments"),
    [row[1:] for row in BACKENDS],
    ids=[row[0] for row in BACKENDS],
)
def test_stated_layouts(shape, block_dim, stride_order, names, order, segments_per_layer, segments):
    layout = stated(shape, block_dim, stride_order, names=names, page_bytes=2 * 16 * 8 * 128 * 2)
    assert layout.order == order
    assert layout.segments_per_layer == segments_per_layer
    assert layout.num_segments == segments
    assert (layout.block_size, layout.spec.num_kv_heads, layout.spec.head_dim) == (16, 8, 128)


@pytest.mark.parametrize("stride_order", [None, (0, 1, 2, 3, 4), (1, 0, 2, 3, 4), (1, 3, 0, 2, 4), (0, 1, 3, 2, 4)])
def test_strides_are_those_of_the_permuted_tensor(stride_order):
    """A backend allocates the physical shape and permutes it back; our views must have the strides of that tensor."""
    layout = stated((2, 1, 4, 3, 8), 1, stride_order)
    permutation = stride_order or (0, 1, 2, 3, 4)
    shape = (2, 10, 4, 3, 8)
    physical = torch.empty([shape[dim] for dim in permutation], device="meta")
    logical = physical.permute([permutation.index(dim) for dim in range(5)])
    assert logical.shape == shape
    assert (layout.kv_stride, *layout.k_strides) == logical.stride()


@pytest.mark.parametrize(
    ("arguments", "changes", "message"),
    [
        (((2, 4, 16, 8, 128), 1), {}, r"extent 1 in dimension 1, got 4 in .*capacity="),
        (((2, 1, 16, 8, 128), 5), {}, "block_dim 5 is outside of a shape with 5 dimensions"),
        (((1, 16, 8, 128), 0), {}, r"shape of 4 dimensions, .* needs names="),
        (((3, 1, 16, 8, 128), 1), {}, "dimension 0 of .* must have extent 2, got 3"),
        (((2, 0, 16, 8, 128), 1), {}, "every extent of shape_for_one_block must be at least 1, got 0"),
        (((2, 1, 16, 8, 128), 1, (0, 1, 2, 3)), {}, r"stride_order \(0, 1, 2, 3\) must name each of the 5 dimensions"),
        (((2, 1, 16, 8, 128), 1, (0, 1, 1, 3, 4)), {}, "must name each of the 5 dimensions once"),
        (((1, 16, 8, 255), 0), {"names": "BNHC"}, "K then V of one head, so 255 must be even"),
        (((1, 16, 8, 256), 0), {"names": "NBHC"}, "put B at block_dim 0"),
        (((1, 16, 8, 256), 0), {"names": "LBNHC"}, r"one letter to each dimension of .* \(no L\)"),
        (((1, 16, 8, 256), 0), {"names": "BNHX"}, "unknown X"),
        (((2, 1, 16, 8, 128), 1), {"page_bytes": 65537}, "65537 bytes does not divide into the 2 segments"),
        (((2, 1, 16, 8, 128), 1), {"page_bytes": 65538}, "page of 65538 bytes contradicts .* holds 65536 bytes"),
        (((2, 1, 16, 8, 128), 1), {"num_layers": 0}, "num_layers must be at least 1, got 0"),
    ],
    ids=[
        *("many_blocks", "block_dim", "rank", "no_pair", "zero", "order_short", "order_repeats", "odd_pair"),
        *("names_block", "names_layer", "names_unknown", "page_indivisible", "page_size", "no_layers"),
    ],
)
def test_contradictions(arguments, changes, message):
    with pytest.raises(ValueError, match=message):
        stated(*arguments, **changes)

"""Groups from what attention backends state: segments of each case, hybrids, and layers that disagree."""

import pytest
import torch

import triton_kv as tkv

BF16 = torch.bfloat16
MAMBA = tkv.MambaSpec([("conv", (3, 64), BF16), ("ssm", (4, 8, 16), torch.float32)])
MLA = tkv.MLASpec(512, 64, BF16)
FLASH_ATTENTION = tkv.BackendStatement((2, 1, 16, 8, 128), 1, BF16)
FLASHINFER = tkv.BackendStatement((1, 2, 16, 8, 128), 0, BF16)
BLOCKS_FIRST = tkv.BackendStatement((2, 1, 16, 8, 128), 1, BF16, stride_order=(1, 0, 2, 3, 4))
HEADS_FIRST = tkv.BackendStatement((1, 16, 8, 256), 0, BF16, stride_order=(2, 0, 1, 3), names="BNHC")
CROSS_LAYER = tkv.BackendStatement((1, 2, 16, 8, 128), 0, BF16, stride_order=(1, 0, 2, 3, 4, 5))


def geometry(statements, **options) -> tkv.CacheGeometry:
    groups = tkv.groups_from_backends(statements)
    return tkv.arrange(groups, block_size=16, capacity=10, granularity=2 << 20, **options)


@pytest.mark.parametrize(
    ("statements", "segments", "orders"),
    [
        ({"a": FLASH_ATTENTION}, {"a": 2}, ["LTBNHD"]),
        ({"a": FLASHINFER}, {"a": 1}, ["LBTNHD"]),
        ({"a": BLOCKS_FIRST}, {"a": 1}, ["LBTNHD"]),
        ({"a": HEADS_FIRST}, {"a": 8}, ["LHBNTD"]),
        ({"a": CROSS_LAYER, "b": CROSS_LAYER}, {"a": 1, "b": 1}, ["BLTNHD", "BLTNHD"]),
        ({"m": MAMBA}, {"m": 1}, ["LB"]),
        ({"l": MLA}, {"l": 1}, ["LB"]),
        # a hybrid model: all have one segment, K and V of a block side by side
        ({"a": FLASH_ATTENTION, "m": MAMBA}, {"a": 1, "m": 1}, ["LBTNHD", "LB"]),
        ({"a": HEADS_FIRST, "m": MAMBA}, {"a": 1, "m": 1}, ["LBHNTD", "LB"]),
        # no hybrid: a latent is a token's, as K and V are
        ({"a": FLASH_ATTENTION, "l": MLA}, {"a": 2, "l": 1}, ["LTBNHD", "LB"]),
        ({"a": FLASH_ATTENTION, "b": FLASHINFER}, {"a": 2, "b": 1}, ["LTBNHD", "LBTNHD"]),
    ],
    ids=[
        *("flash_attention", "flashinfer", "blocks_first", "heads_first", "cross_layer", "mamba", "mla"),
        *("hybrid", "hybrid_heads_first", "attention_and_mla", "two_backends"),
    ],
)
def test_segments(statements, segments, orders):
    layers = geometry(statements).layers
    assert {layer.name: layer.num_segments for layer in layers} == segments
    assert [layer.order for layer in layers] == orders


def test_layers_that_share_a_buffer():
    window = tkv.BackendStatement((2, 1, 16, 8, 128), 1, BF16, window=1024)
    shared = geometry({"full": FLASH_ATTENTION, "window": window}, shared_by=[["full", "window"]])
    assert [buffer.layers for buffer in shared.buffers] == [("full", "window")]
    with pytest.raises(ValueError, match=r"layers 'fa' and 'fi' share a buffer but disagree: .* 2 segments, .* into 1"):
        geometry({"fa": FLASH_ATTENTION, "fi": FLASHINFER}, shared_by=[["fa", "fi"]])


def test_a_page_that_is_larger_than_its_shape_is_padded():
    stated = tkv.BackendStatement((1, 2, 16, 8, 128), 0, BF16, page_bytes=70000)
    (layer,) = geometry({"a": stated}).layers
    assert (layer.page_bytes, layer.padding_bytes, layer.block_stride_bytes) == (65536, 70000 - 65536, 70000)


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        (tkv.BackendStatement((2, 4, 16, 8, 128), 1, BF16), "layer 'x': the shape for one block must have extent 1"),
        (
            tkv.BackendStatement((1, 2, 16, 8, 128), 0, BF16, page_bytes=4096),
            "layer 'x': a page of 4096 bytes",
        ),
        (tkv.BackendStatement((2, 1, 16, 8, 128), 1, BF16, stride_order=(0, 1)), "layer 'x': stride_order"),
    ],
    ids=["shape", "page", "stride_order"],
)
def test_contradictions(statement, message):
    with pytest.raises(ValueError, match=message):
        geometry({"x": statement})

"""The table of `write_kv` cases that the CPU, interpreter, compile and GPU tests share, and the tensors of one case."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from triton_kv.layer import LayerCache, LayerOperands
from triton_kv.layout import CacheLayout
from triton_kv.spec import AttentionSpec

POISON = -512.0  # exact in every dtype
PAD, OVER, PAST_CAPACITY = "pad", "over", "past"


@dataclass(frozen=True)
class WriteCase:
    """One shape of the op: `tokens` are written into `num_blocks` committed blocks of `capacity` reserved ones."""

    name: str
    layout: str  # or "pair": two plain tensors
    num_tokens: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    block_size: int
    dtype: torch.dtype = torch.float32
    slot_dtype: torch.dtype = torch.int64
    source: str = "dense"  # or "fused" (slices of one qkv tensor), "head_major" ([heads, tokens, dim] transposed)
    num_blocks: int = 9
    capacity: int = 11
    special: tuple[str, ...] = ()  # PAD, OVER (past the watermark) or PAST_CAPACITY, put over tokens 1, 4, 7, ...

    def __str__(self) -> str:
        return self.name


F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16

CASES = (
    WriteCase("one_token", "LTBNHD", 1, 8, 128, 128, 16, BF16),
    WriteCase("two_segments", "LTBNHD", 33, 2, 64, 64, 16, F16),
    WriteCase("kv_in_block", "LBTNHD", 33, 2, 64, 64, 16, F32, torch.int32),
    WriteCase("head_before_token", "LBTHND", 20, 3, 32, 32, 4, F32),
    WriteCase("kv_outermost", "TLBNHD", 20, 3, 32, 32, 4, F16),
    WriteCase("block_outermost", "BLTNHD", 20, 3, 32, 32, 4, BF16),
    WriteCase("kv_interleaved", "LBNHTD", 20, 3, 32, 32, 4, F32, torch.int32),
    WriteCase("head_segments", "LHBNTD", 20, 3, 32, 32, 4, F32),
    WriteCase("head_before_layer", "BHLNTD", 20, 3, 32, 32, 4, F16),
    WriteCase("v_dim_differs", "LBTNHD", 20, 2, 48, 32, 16, F32, source="fused"),
    WriteCase("head_dim_80", "LTBNHD", 20, 3, 80, 80, 16, BF16, torch.int32, special=(OVER, PAD)),
    WriteCase("head_dim_36", "LTBNHD", 20, 5, 36, 36, 16, F16),
    WriteCase("head_dim_17", "pair", 20, 1, 17, 17, 16, F32),
    WriteCase("many_channels", "pair", 5, 16, 256, 256, 16, F32),
    WriteCase("block_1", "LTBNHD", 8, 2, 16, 16, 1, F32),
    WriteCase("block_12", "LBHNTD", 30, 2, 16, 16, 12, F32),
    WriteCase("block_544", "LTBNHD", 30, 1, 16, 16, 544, F16),
    WriteCase("fused_qkv", "LTBNHD", 33, 2, 64, 64, 16, F16, source="fused"),
    WriteCase("head_major", "pair", 33, 2, 64, 64, 16, F32, source="head_major"),
    WriteCase("padding", "LTBNHD", 33, 2, 64, 64, 16, F16, special=(PAD,)),
    WriteCase("padding_only", "LBTNHD", 3, 2, 64, 64, 16, F32, torch.int32, special=(PAD, PAD)),
    WriteCase("past_watermark", "LTBNHD", 33, 2, 64, 64, 16, F32, special=(OVER,)),
    WriteCase("past_capacity", "LBTNHD", 33, 2, 64, 64, 16, F16, torch.int32, special=(PAD, PAST_CAPACITY, OVER)),
    WriteCase("past_int32", "LTBNHD", 9, 2, 64, 64, 16, F32, special=(PAST_CAPACITY, OVER)),
    WriteCase("pair_past_end", "pair", 33, 2, 64, 64, 16, F32, special=(OVER, PAD)),
)


@dataclass(frozen=True, eq=False)
class WriteTensors:
    """A case's tensors. Padding tokens carry NaN, the cache a finite poison, so that no NaN can hide in it."""

    k: torch.Tensor
    v: torch.Tensor
    slot_mapping: torch.Tensor
    layer: LayerCache | tuple[torch.Tensor, torch.Tensor]
    kept: list[tuple[int, int, int]]  # token, block, position
    bad: list[tuple[int, int]]  # token, slot

    @property
    def views(self) -> tuple[torch.Tensor, torch.Tensor]:
        return (self.layer.k, self.layer.v) if isinstance(self.layer, LayerCache) else self.layer

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as they must look afterwards, token by token; call it before the op runs."""
        k_view, v_view = (view.clone() for view in self.views)
        for token, block, position in self.kept:
            k_view[block, position] = self.k[token]
            v_view[block, position] = self.v[token]
        return k_view, v_view

    def expected_control(self, num_blocks: int) -> list[int]:
        if not self.bad:
            return [num_blocks, 0, 0, 0, 0, 0, 0, 0]
        token, slot = self.bad[0]
        return [num_blocks, len(self.bad), 2, token, min(slot, 2**31 - 1), 0, 0, 0]


def layer_by_hand(case: WriteCase, device: torch.device | str, num_layers: int = 2) -> LayerCache:
    """The last layer of a cache in ordinary memory: what `KVCache` makes, without a driver."""
    spec = AttentionSpec(case.num_kv_heads, case.head_dim, case.dtype, case.v_head_dim)
    layout = CacheLayout(
        case.layout, spec, num_layers=num_layers, block_size=case.block_size, capacity=case.capacity, granularity=4096
    )
    everything = torch.full((layout.total_bytes // spec.itemsize_bytes,), POISON, dtype=case.dtype, device=device)
    base = layout.layer_base_bytes(num_layers - 1) // spec.itemsize_bytes
    flat = everything[base : base + layout.layer_span_bytes // spec.itemsize_bytes]
    k, v = layout.views(flat)
    control = torch.tensor([case.num_blocks] + [0] * 7, dtype=torch.int32, device=device)
    operands = LayerOperands(
        k_cache=flat,
        v_cache=None,
        v_offset=layout.v_offset,
        control=control,
        num_blocks=case.capacity,
        block_size=case.block_size,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        v_head_dim=case.v_head_dim,
        k_strides=layout.k_strides[:3],
        v_strides=layout.v_strides[:3],
    )
    return LayerCache(
        name="layers.1",
        index=1,
        k=k,
        v=v,
        pair=None,
        flat=flat,
        control=control,
        operands=operands,
        layout=layout.order,
        check_usable=lambda: None,
    )


def make_tensors(case: WriteCase, device: torch.device | str = "cpu", seed: int = 0) -> WriteTensors:
    """Random keys and values, distinct random slots, and the case's special slots among them."""
    random = torch.Generator().manual_seed(seed)
    tokens, heads, dim, v_dim = case.num_tokens, case.num_kv_heads, case.head_dim, case.v_head_dim

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(case.dtype).to(device)

    if case.source == "fused":  # three query heads in front
        qkv = values(tokens, 3 * dim + heads * (dim + v_dim))
        k = qkv[:, 3 * dim : 3 * dim + heads * dim].unflatten(1, (heads, dim))
        v = qkv[:, 3 * dim + heads * dim :].unflatten(1, (heads, v_dim))
    elif case.source == "head_major":
        k, v = values(heads, tokens, dim).transpose(0, 1), values(heads, tokens, v_dim).transpose(0, 1)
    else:
        k, v = values(tokens, heads, dim), values(tokens, heads, v_dim)

    bound = case.capacity if case.layout == "pair" else case.num_blocks
    slots = torch.randperm(bound * case.block_size, generator=random)[:tokens].tolist()
    past = 2**40 if case.slot_dtype == torch.int64 else 2**31 - 1
    for i, token in enumerate(range(1, tokens, 3)):
        if case.special:
            slot = {PAD: -1 - i, OVER: bound * case.block_size + i, PAST_CAPACITY: past}[
                case.special[i % len(case.special)]
            ]
            slots[token] = slot
    kept = [
        (token, *divmod(slot, case.block_size))
        for token, slot in enumerate(slots)
        if 0 <= slot < bound * case.block_size
    ]
    bad = [(token, slot) for token, slot in enumerate(slots) if slot >= bound * case.block_size]
    for token, slot in enumerate(slots):
        if slot < 0:
            k[token], v[token] = float("nan"), float("nan")
    if case.layout == "pair":
        shape = (case.capacity, case.block_size, heads)
        layer = tuple(torch.full((*shape, d), POISON, dtype=case.dtype, device=device) for d in (dim, v_dim))
    else:
        layer = layer_by_hand(case, device)
    return WriteTensors(k, v, torch.tensor(slots, dtype=case.slot_dtype, device=device), layer, kept, bad)


def assert_written(case: WriteCase, tensors: WriteTensors, expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Every slot holds what was expected, bit for bit, and the control block counted what was dropped."""
    for view, wanted in zip(tensors.views, expected):
        torch.testing.assert_close(view, wanted, rtol=0, atol=0)
    if isinstance(tensors.layer, LayerCache):
        counted = tensors.layer.control.tolist()
        wanted_control = tensors.expected_control(case.num_blocks)
        if len(tensors.bad) > 1:  # programs run in any order, so any bad token may be the first
            assert (counted[3], counted[4]) in [(token, min(slot, 2**31 - 1)) for token, slot in tensors.bad]
            counted[3:5] = wanted_control[3:5]
        assert counted == wanted_control

"""The table of `rope_and_write_kv` cases that the CPU, interpreter, compile and GPU tests share, and their tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tests.write_cases import BF16, F16, F32, OVER, PAD, PAST_CAPACITY, POISON, WriteCase, WriteTensors, make_tensors
from triton_kv.layer import LayerCache, operands_of
from triton_kv.rope import RopeCall

MAX_POSITION = 100
EPS = 1e-5
FAR = "far"  # a position outside the cos/sin cache


@dataclass(frozen=True)
class RopeCase:
    """A write, and how its queries and keys are normed and rotated."""

    write: WriteCase
    num_query_heads: int
    rotary_dim: int
    is_neox: bool = True
    norms: str = ""  # of "q", "k"
    norm_dtype: torch.dtype | None = None  # None: the cache's
    norm_offset: float = 0.0
    cos_dtype: torch.dtype = F32
    position_dtype: torch.dtype = torch.int64
    in_place: bool = True
    special: tuple[str, ...] = ()  # FAR, or PAD (negative), put over the positions of tokens 0, 2, 4, ...

    def __str__(self) -> str:
        return self.write.name


def case(name, layout, tokens, query_heads, kv_heads, dim, rotary_dim, *, block_size=16, v_dim=None, **choices):
    write_choices = {key: choices.pop(key) for key in ("dtype", "slot_dtype", "source", "slots") if key in choices}
    write_choices["special"] = write_choices.pop("slots", ())
    write = WriteCase(name, layout, tokens, kv_heads, dim, v_dim or dim, block_size, **write_choices)
    return RopeCase(write, query_heads, rotary_dim, **choices)


CASES = (
    case("llama", "LTBNHD", 33, 8, 2, 64, 64, dtype=F16, source="fused"),
    case("llama_bf16", "LTBNHD", 3, 32, 8, 128, 128, dtype=BF16, source="fused", slot_dtype=torch.int32),
    case("one_token", "LTBNHD", 1, 4, 1, 64, 64, dtype=F16, position_dtype=torch.int32, cos_dtype=F16),
    case("qwen3", "LBTNHD", 20, 4, 2, 128, 128, dtype=BF16, norms="qk", source="fused", cos_dtype=BF16),
    case("gemma3", "LBNHTD", 20, 2, 1, 256, 256, dtype=BF16, norms="qk", norm_offset=1.0, source="fused"),
    case("norm_f32_weights", "LBTHND", 20, 3, 3, 32, 32, dtype=F16, norms="qk", norm_dtype=F32, block_size=4),
    case("norm_q_only", "TLBNHD", 20, 4, 2, 32, 32, norms="q", block_size=4),
    case("norm_k_only", "BLTNHD", 20, 4, 2, 32, 32, norms="k", block_size=4, in_place=False),
    case("gpt_j", "LTBNHD", 20, 4, 2, 64, 64, is_neox=False, source="fused"),
    case("gpt_j_f16", "LTBNHD", 20, 4, 2, 64, 64, dtype=F16, is_neox=False, in_place=False),
    case("partial", "LTBNHD", 20, 4, 2, 80, 32, dtype=F16, source="fused"),
    case("partial_out", "LTBNHD", 20, 4, 2, 64, 16, in_place=False, source="fused"),
    case("partial_norm", "LBTNHD", 20, 4, 2, 128, 96, dtype=F16, norms="qk", source="fused"),
    case("glm", "LTBNHD", 20, 4, 2, 128, 64, dtype=BF16, is_neox=False, source="fused"),
    case("gpt_j_partial_norm", "LTBNHD", 20, 4, 2, 48, 24, is_neox=False, norms="qk", norm_offset=1.0),
    case("v_dim_differs", "LBTNHD", 20, 4, 2, 48, 48, v_dim=32, source="fused", norms="qk"),
    case("head_dim_18", "pair", 20, 2, 1, 18, 18, norms="qk"),
    case("rotary_dim_2", "pair", 20, 2, 1, 17, 2, in_place=False),
    case("head_dim_512", "pair", 5, 2, 1, 512, 512, norms="qk"),
    case("head_major", "pair", 20, 4, 2, 64, 64, source="head_major", in_place=False),
    case("padding", "LTBNHD", 33, 4, 2, 64, 64, dtype=F16, slots=(PAD,), special=(PAD,)),
    case("past_watermark", "LTBNHD", 33, 4, 2, 64, 64, slots=(OVER,), slot_dtype=torch.int32),
    case("past_int32", "LTBNHD", 9, 2, 2, 64, 64, slots=(PAST_CAPACITY, OVER, PAD), position_dtype=torch.int32),
    case("far_position", "LTBNHD", 20, 4, 2, 64, 64, special=(FAR,), in_place=False),
    case("far_everything", "LBTNHD", 20, 4, 3, 64, 64, slots=(PAD, OVER), special=(PAD, FAR), norms="qk"),
    case("pair_far", "pair", 20, 4, 2, 64, 64, slots=(OVER,), special=(FAR,), position_dtype=torch.int32),
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class RopeTensors:
    """A case's tensors. Padding tokens carry NaN; q_out, where there is one, and the cache carry a finite poison."""

    case: RopeCase
    q: torch.Tensor
    q_out: torch.Tensor | None
    write: WriteTensors
    positions: torch.Tensor
    cos_sin_cache: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None

    def arguments(self) -> tuple[tuple, dict]:
        """What `rope_and_write_kv` takes."""
        write = self.write
        positional = (self.q, write.k, write.v, write.layer, write.slot_mapping, self.positions, self.cos_sin_cache)
        named = {"is_neox": self.case.is_neox, "q_norm": self.q_norm, "k_norm": self.k_norm, "eps": EPS}
        return positional, {**named, "norm_offset": self.case.norm_offset, "q_out": self.q_out}

    def call(self) -> RopeCall:
        """What the op and the launch take, beside the layer."""
        write = self.write
        return RopeCall(
            q_out=self.q if self.q_out is None else self.q_out,
            q=None if self.q_out is None else self.q,
            k=write.k,
            v=write.v,
            slot_mapping=write.slot_mapping,
            positions=self.positions,
            cos_sin_cache=self.cos_sin_cache,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            eps=EPS,
            norm_offset=self.case.norm_offset,
            is_neox=self.case.is_neox,
        )

    def op_arguments(self) -> tuple:
        return (*self.call(), *operands_of(self.write.layer))

    @property
    def bad(self) -> dict[int, tuple[int, int]]:
        """Tokens that have a slot but are dropped: kind and value as the control block says them."""
        write = self.write
        bound = self.case.write.capacity if self.case.write.layout == "pair" else self.case.write.num_blocks
        bad = {}
        for token, (slot, position) in enumerate(zip(write.slot_mapping.tolist(), self.positions.tolist())):
            if slot >= bound * self.case.write.block_size:
                bad[token] = (2, min(slot, 2**31 - 1))
            elif slot >= 0 and not 0 <= position < MAX_POSITION:
                bad[token] = (5, min(position, 2**31 - 1))
        return bad

    def expected(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, K and V as they must look afterwards, before the one rounding; call it before the op runs.

        In float64 on the CPU, in float32 on a GPU; pairs of channels are complex numbers that are multiplied.
        """
        write = self.write
        queries = (self.q if self.q_out is None else self.q_out).to(wide(self.q))
        k_view, v_view = (view.to(wide(view)) for view in write.views)
        rotated_q, rotated_k = self._rotated(self.q, self.q_norm), self._rotated(write.k, self.k_norm)
        for token, position in enumerate(self.positions.tolist()):
            if 0 <= position < MAX_POSITION:
                queries[token] = rotated_q[token]
        for token, block, place in write.kept:
            if 0 <= self.positions[token] < MAX_POSITION:
                k_view[block, place] = rotated_k[token]
                v_view[block, place] = write.v[token].to(v_view.dtype)
        return queries, k_view, v_view

    def _rotated(self, x: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        case, rows = self.case, x.to(wide(x))
        if norm is not None:
            mean = rows.pow(2).sum(-1, keepdim=True) / rows.shape[-1]
            rows = rows / (mean + EPS).sqrt() * (norm.to(rows.dtype) + case.norm_offset)
        half = case.rotary_dim // 2
        table = self.cos_sin_cache.to(rows.dtype)[self.positions.long().clamp(0, MAX_POSITION - 1)]
        turn = torch.complex(table[:, :half], table[:, half:])[:, None]  # [tokens, 1, half]
        if case.is_neox:
            first, second = slice(0, half), slice(half, 2 * half)
        else:
            first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        turned = torch.complex(rows[..., first].contiguous(), rows[..., second].contiguous()) * turn
        rows = rows.clone()
        rows[..., first], rows[..., second] = turned.real, turned.imag
        return rows


def wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.device.type == "cpu" else torch.float32


def make_rope(case: RopeCase, device: torch.device | str = "cpu", seed: int = 0) -> RopeTensors:
    """Random queries, keys, values, weights and positions; a fused case's are slices of one qkv tensor."""
    write = make_tensors(case.write, device, seed)
    random = torch.Generator().manual_seed(seed + 1)
    tokens, heads, dim, dtype = case.write.num_tokens, case.num_query_heads, case.write.head_dim, case.write.dtype

    def values(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(dtype).to(device)

    if case.write.source == "fused":
        k, v = write.k, write.v
        qkv = torch.cat((values(tokens, heads * dim), k.flatten(1), v.flatten(1)), dim=1)
        q, k, v = qkv.split((heads * dim, k[0].numel(), v[0].numel()), dim=1)
        q, k = (x.unflatten(1, (-1, dim)) for x in (q, k))
        write = replace(write, k=k, v=v.unflatten(1, (-1, case.write.v_head_dim)))
    else:
        q = values(tokens, heads, dim)
    positions = torch.randint(0, MAX_POSITION, (tokens,), generator=random)
    for i, token in enumerate(range(0, tokens, 2)):
        if case.special:
            far = 2**40 + i if case.position_dtype == torch.int64 and i % 4 == 3 else MAX_POSITION + i
            positions[token] = {PAD: -1 - i, FAR: far}[case.special[i % len(case.special)]]
    angles = torch.rand(MAX_POSITION, case.rotary_dim // 2, generator=random) * 6.3
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).to(case.cos_dtype).to(device)
    norm_dtype = case.norm_dtype or dtype
    return RopeTensors(
        case,
        q,
        None if case.in_place else torch.full_like(q, POISON),
        write,
        positions.to(case.position_dtype).to(device),
        cos_sin,
        values(dim, dtype=norm_dtype) if "q" in case.norms else None,
        values(dim, dtype=norm_dtype) if "k" in case.norms else None,
    )


def assert_roped(
    tensors: RopeTensors, queries: torch.Tensor, expected: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> None:
    """Queries and keys to one rounding, values bit for bit, the rest untouched, and the control block's count."""
    write = tensors.write
    # Half a unit in the last place, which a value beside the middle may round the other way; f32 sums and products.
    rtol = {F32: 4e-6, F16: 2**-10, BF16: 2**-7}[queries.dtype]
    for got, wanted in zip((queries, write.views[0]), expected[:2]):
        assert not (got.isnan() & ~wanted.isnan()).any()
        torch.testing.assert_close(got.to(wanted.dtype), wanted, rtol=rtol, atol=4e-6, equal_nan=True)
    torch.testing.assert_close(write.views[1].to(expected[2].dtype), expected[2], rtol=0, atol=0)
    if isinstance(write.layer, LayerCache):
        num_blocks, count, kind, row, value, *rest = write.layer.control.tolist()
        assert (num_blocks, rest) == (tensors.case.write.num_blocks, [0, 0, 0])
        assert count == len(tensors.bad)
        # Programs run in any order, so any bad token may be the first.
        assert (kind, value) == tensors.bad[row] if count else (kind, row, value) == (0, 0, 0)

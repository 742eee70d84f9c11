"""The tensors of a fused case: a write's, and positions, cosines and sines, weights and rotated queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

import triton_kv as tkv
from bench.attention_case import AttentionCase
from bench.candidate import WrongResultError
from bench.write_inputs import OLD_K, OLD_V, WriteInputs

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.session import Session

EPS = 1e-6


@dataclass(frozen=True)
class RopeCase(AttentionCase):
    """A batch whose queries and keys are rotated, over all of head_dim, before the write."""

    is_normed: bool = False  # an RMS norm of each head in front

    def parameters(self) -> dict[str, object]:
        return {**super().parameters(), "is_normed": self.is_normed}


class RopeInputs(WriteInputs):
    """A write's inputs; the queries are the first slice of the same qkv tensors."""

    def __init__(self, session: Session, case: RopeCase) -> None:
        super().__init__(session, case)
        dim = case.head_dim
        generator = torch.Generator(device=self.device).manual_seed(3)
        frequencies = 1.0 / 10000.0 ** (torch.arange(0, dim, 2, device=self.device) / dim)
        angles = torch.arange(max(case.seq_lens), device=self.device)[:, None] * frequencies
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)  # f32
        self.positions = torch.cat(
            [torch.arange(n - new, n, device=self.device) for new, n in zip(case.query_lens, case.seq_lens)]
        )
        weights = 1 + 0.1 * torch.randn(2, dim, device=self.device, generator=generator)
        self.norms = tuple(weights.to(self.dtype)) if case.is_normed else (None, None)
        self.q_out = torch.empty(case.num_tokens, case.num_query_heads, dim, dtype=self.dtype, device=self.device)

    @property
    def bytes_moved(self) -> int:
        """Bytes read and written by one call, cosines and sines aside."""
        case = self.case
        heads = case.num_query_heads + 2 * case.num_kv_heads
        return 2 * case.num_tokens * heads * case.head_dim * self.dtype.itemsize

    def ours(self, index: int) -> torch.Tensor:
        """One launch."""
        q_norm, k_norm = self.norms
        return tkv.rope_and_write_kv(
            self.q[index],
            self.k[index],
            self.v[index],
            self.layers[index],
            self.slot_mapping,
            self.positions,
            self.cos_sin,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=EPS,
            q_out=self.q_out,
        )

    def unfused(self, index: int, rotate: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Rotated by `rotate` and written by `write_kv`."""
        q_norm, k_norm = self.norms
        k = rotate(self.k[index], self.positions, self.cos_sin, k_norm)
        tkv.write_kv(k, self.v[index], self.layers[index], self.slot_mapping)
        return rotate(self.q[index], self.positions, self.cos_sin, q_norm)

    def poison(self, index: int) -> None:
        super().poison(index)
        self.q_out.fill_(float("nan"))

    def verify(self, output: Any, index: int) -> float:
        """Values bit by bit, queries and keys within one rounding of float32, other slots untouched."""
        layer = self.layers[index]
        self.require_rows("K", layer.k, None, OLD_K)
        self.require_rows("V", layer.v, self.v[index], OLD_V)
        worst = 0.0
        for name, got, x, norm in (
            ("Q", output, self.q[index], self.norms[0]),
            ("K", self.written(layer.k), self.k[index], self.norms[1]),
        ):
            wanted = rotated(x.float(), self.positions, self.cos_sin, norm)
            if not torch.allclose(got.float(), wanted, rtol=torch.finfo(self.dtype).eps, atol=1e-5):
                raise WrongResultError(f"{name}: a row is not the rotated one")
            worst = max(worst, float((got.float() - wanted).norm() / wanted.norm()))
        return worst


def rotated(
    x: torch.Tensor,  # [num_tokens, heads, head_dim]
    positions: torch.Tensor,  # [num_tokens]
    cos_sin: torch.Tensor,  # f32 [max_position, head_dim]
    norm: torch.Tensor | None,  # [head_dim]
) -> torch.Tensor:
    """The norm and the NeoX rotation in plain torch, in float32 with one rounding."""
    rows = x.float()
    if norm is not None:
        rows = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + EPS) * norm.float()
    cos, sin = cos_sin[positions][:, None].chunk(2, dim=-1)
    first, second = rows.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

"""Weights of a model that nobody trained, for the example engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from examples.engine.model import LlamaConfig, LlamaWeights


def random_weights(config: LlamaConfig, dtype: torch.dtype, device: torch.device, *, tied: bool = True) -> LlamaWeights:
    """Made on the device itself: eight billion numbers would take the host a minute."""
    from examples.engine.model import LayerWeights, LlamaWeights

    generator = torch.Generator(device).manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator, device=device, dtype=dtype).mul_(columns**-0.5)

    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.num_query_heads * config.head_dim
    norm = torch.ones(hidden, device=device, dtype=dtype)
    layers = tuple(
        LayerWeights(
            attention_norm=norm,
            qkv=matrix(sum(config.qkv_sizes), hidden),
            attention_out=matrix(hidden, heads),
            mlp_norm=norm,
            gate_up=matrix(2 * inner, hidden),
            down=matrix(hidden, inner),
        )
        for _ in range(config.num_layers)
    )
    embedding = matrix(config.vocab_size, hidden)
    return LlamaWeights(embedding, layers, norm, embedding if tied else matrix(config.vocab_size, hidden))

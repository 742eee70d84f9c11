"""A Llama-architecture decoder whose attention reads and writes a triton_kv cache."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

import triton_kv as tkv


@dataclass(frozen=True)
class LlamaConfig:
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_tokens: int  # the longest sequence
    rope_base: float = 10000.0
    norm_eps: float = 1e-5

    @property
    def qkv_sizes(self) -> tuple[int, int]:
        """Rows of the fused projection: those that rotate (queries, then keys), and values."""
        return (self.num_query_heads + self.num_kv_heads) * self.head_dim, self.num_kv_heads * self.head_dim

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize

    def split(self, num_ranks: int) -> LlamaConfig:
        """One rank's share of the heads and of the MLP."""
        sizes = self.num_query_heads, self.num_kv_heads, self.intermediate_size
        if any(size % num_ranks for size in sizes):
            raise ValueError(f"{sizes} query heads, KV heads and MLP columns do not split over {num_ranks} ranks")
        queries, keys, inner = (size // num_ranks for size in sizes)
        return replace(self, num_query_heads=queries, num_kv_heads=keys, intermediate_size=inner)


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer; matrices are [out, in], as `F.linear` takes them."""

    attention_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [(query + 2 * KV heads) * head_dim, hidden]: Q, K, V rows
    attention_out: torch.Tensor  # [hidden, query heads * head_dim]
    mlp_norm: torch.Tensor  # [hidden]
    gate_up: torch.Tensor  # [2 * intermediate, hidden]: gate rows, then up rows
    down: torch.Tensor  # [hidden, intermediate]

    def shard(self, config: LlamaConfig, rank: int, num_ranks: int) -> LayerWeights:
        """One rank's heads and MLP columns: the first matrix of each pair is cut by rows, the second by columns."""
        if num_ranks == 1:
            return self
        keys = config.num_kv_heads * config.head_dim

        def part(matrix: torch.Tensor, dim: int = 0) -> torch.Tensor:
            return matrix.chunk(num_ranks, dim)[rank].contiguous()

        q_k_v = self.qkv.split((len(self.qkv) - 2 * keys, keys, keys))
        qkv, gate_up = (torch.cat([part(rows) for rows in fused]) for fused in (q_k_v, self.gate_up.chunk(2)))
        return replace(
            self, qkv=qkv, attention_out=part(self.attention_out, 1), gate_up=gate_up, down=part(self.down, 1)
        )


@dataclass(frozen=True)
class LlamaWeights:
    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor  # [hidden]
    lm_head: torch.Tensor  # [vocab, hidden]; the embedding itself where the two are tied

    @property
    def num_bytes(self) -> int:
        tensors = {self.embedding, self.final_norm, self.lm_head}.union(*(vars(x).values() for x in self.layers))
        return sum(tensor.nbytes for tensor in tensors)

    def shard(self, config: LlamaConfig, rank: int, num_ranks: int) -> LlamaWeights:
        return replace(self, layers=tuple(layer.shard(config, rank, num_ranks) for layer in self.layers))

    @classmethod
    def random(cls, config: LlamaConfig, seed: int, dtype: torch.dtype, device: str) -> LlamaWeights:
        """A model that nobody trained, the same for one seed on every device: tests without a download."""
        generator = torch.Generator().manual_seed(seed)

        def matrix(rows: int, columns: int) -> torch.Tensor:
            return (torch.randn(rows, columns, generator=generator) * columns**-0.5).to(device, dtype)

        def layer() -> LayerWeights:
            qkv, out = matrix(sum(config.qkv_sizes), hidden), matrix(hidden, config.num_query_heads * config.head_dim)
            gate_up, down = matrix(2 * config.intermediate_size, hidden), matrix(hidden, config.intermediate_size)
            return LayerWeights(norm, qkv, out, norm, gate_up, down)

        hidden = config.hidden_size
        norm = torch.ones(hidden, device=device, dtype=dtype)
        layers = tuple(layer() for _ in range(config.num_layers))
        embedding = matrix(config.vocab_size, hidden)
        return cls(embedding, layers, norm, embedding)


class Llama:
    """The forward pass of one step over a ragged batch: every sequence's new tokens, one after the other.

    With `group` this is one rank of several (tensor parallelism): `config` and `weights` are its share, and the ranks
    add up what their heads and MLP columns give, twice a layer.
    """

    def __init__(self, config: LlamaConfig, weights: LlamaWeights, group: dist.ProcessGroup | None = None) -> None:
        self.config, self.weights, self.group = config, weights, group
        self.device, self.dtype = weights.embedding.device, weights.embedding.dtype
        frequencies = 1.0 / config.rope_base ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim)
        angles = torch.outer(torch.arange(config.context_tokens).float(), frequencies)
        self._cos = torch.cat((angles.cos(), angles.cos()), dim=-1).to(self.device)  # f32 [context, head_dim]
        self._sin = torch.cat((-angles.sin(), angles.sin()), dim=-1).to(self.device)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, cache: tkv.KVCache, metadata: tkv.AttentionMetadata
    ) -> torch.Tensor:
        """Hidden states `[tokens, hidden]` of this step's tokens; writes their K and V into the cache.

        `token_ids` and `positions` are int64 `[tokens]` on the model's device. Only launches, for a graph to capture.
        """
        config, shape, eps = self.config, (self.config.hidden_size,), self.config.norm_eps
        cos, sin = self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)  # [tokens, 1, head_dim]
        hidden = F.embedding(token_ids, self.weights.embedding)
        for index, layer in enumerate(self.weights.layers):
            normed = F.rms_norm(hidden, shape, layer.attention_norm, eps)
            rotating, v = F.linear(normed, layer.qkv).split(config.qkv_sizes, dim=-1)
            rotated = _rotate(rotating.unflatten(-1, (-1, config.head_dim)), cos, sin)
            q, k = rotated.split((config.num_query_heads, config.num_kv_heads), dim=1)
            # k and v are slices of wider rows: the op takes their strides, nothing is copied.
            tkv.write_kv(k, v.unflatten(-1, (-1, config.head_dim)), cache[index], metadata.slot_mapping)
            attended = q.new_empty(q.shape)
            tkv.paged_attention(q, cache[index], metadata, out=attended)
            hidden = hidden + self._summed(F.linear(attended.flatten(1), layer.attention_out))
            normed = F.rms_norm(hidden, shape, layer.mlp_norm, eps)
            gate, up = F.linear(normed, layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + self._summed(F.linear(F.silu(gate) * up, layer.down))
        return hidden

    def _summed(self, partial: torch.Tensor) -> torch.Tensor:
        if self.group is not None:
            dist.all_reduce(partial, group=self.group)
        return partial

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Next-token logits `[rows, vocab]` of hidden states `[rows, hidden]`."""
        normed = F.rms_norm(hidden, (self.config.hidden_size,), self.weights.final_norm, self.config.norm_eps)
        return F.linear(normed, self.weights.lm_head)


def _rotate(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions over the halves of each head, in f32: x `[tokens, heads, head_dim]`."""
    return (x * cos + x.roll(x.shape[-1] // 2, dims=-1) * signed_sin).to(x.dtype)

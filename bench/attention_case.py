"""A batch that attention is measured on: lengths, heads and where the cache keeps them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from bench.goals import Goals

LAYOUTS = {"nhd": "LTBNHD", "hnd": "LTBHND", "interleaved": "LBNHTD"}  # K and V apart twice; K beside V in each row


@dataclass(frozen=True)
class AttentionCase:
    """One batch: `query_lens[i]` new tokens of sequence i at the end of `seq_lens[i]` tokens in the cache."""

    id: str
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_query_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    layout: str = "nhd"
    dtype: str = "bfloat16"
    warm: bool = False  # one input set, so that what fits stays in the L2
    quick: bool = False
    extra_peers: tuple[str, ...] = ()  # slow to set up, so only where named: "sdpa", "flex"
    ways: tuple[str, ...] = ()  # other ways to call ours, which stand aside: "planned", "portable", "apart", "apart"
    window: int | None = None  # a query sees so many keys at most
    shared_tokens: int = 0  # the first ones of all sequences, in the same blocks
    goals: Goals = field(default_factory=dict, hash=False)  # what it should reach

    def __post_init__(self) -> None:
        if len(self.query_lens) != len(self.seq_lens):
            raise ValueError(f"{self.id}: {len(self.query_lens)} query lengths, {len(self.seq_lens)} lengths")
        if any(query > length for query, length in zip(self.query_lens, self.seq_lens)):
            raise ValueError(f"{self.id}: a sequence has more queries than tokens")
        if self.shared_tokens % self.block_size or self.shared_tokens > min(self.seq_lens):
            raise ValueError(f"{self.id}: {self.shared_tokens} shared tokens are no whole blocks of every sequence")
        if self.num_query_heads % self.num_kv_heads:
            raise ValueError(f"{self.id}: {self.num_query_heads} query heads over {self.num_kv_heads} KV heads")

    @property
    def num_seqs(self) -> int:
        return len(self.seq_lens)

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def is_decode(self) -> bool:
        return max(self.query_lens) == 1

    @cached_property
    def blocks_per_seq(self) -> tuple[int, ...]:
        return tuple(-(-length // self.block_size) for length in self.seq_lens)

    @property
    def num_blocks(self) -> int:
        """Blocks of the batch, and block 0, which no sequence has."""
        return sum(self.blocks_per_seq) - (self.num_seqs - 1) * self.shared_blocks + 1

    @property
    def shared_blocks(self) -> int:
        return self.shared_tokens // self.block_size

    @property
    def keys_read(self) -> tuple[int, ...]:
        """Keys of each sequence that some query sees."""
        reach = self.window or max(self.seq_lens)
        return tuple(min(n, reach + q - 1) for q, n in zip(self.query_lens, self.seq_lens))

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values that one call has to read."""
        keys = sum(self.keys_read) - (self.num_seqs - 1) * self.shared_tokens
        return 2 * keys * self.num_kv_heads * self.head_dim * self.torch_dtype.itemsize

    @property
    def query_bytes(self) -> int:
        return self.num_tokens * self.num_query_heads * self.head_dim * self.torch_dtype.itemsize

    @property
    def bytes_moved(self) -> int:
        """The fewest bytes that a call can move: K, V and q read once, the output written once."""
        return self.kv_bytes + 2 * self.query_bytes

    @property
    def flops(self) -> int:
        """Multiplications and additions of QK and PV for the keys that each query sees under the causal mask."""
        pairs = sum(q * n - q * (q - 1) // 2 for q, n in zip(self.query_lens, self.seq_lens))
        if self.window is not None:
            seen = zip(self.query_lens, self.seq_lens)
            pairs = sum(min(n - row, self.window) for q, n in seen for row in range(q))
        return 4 * pairs * self.num_query_heads * self.head_dim

    def parameters(self) -> dict[str, object]:
        """What the record says about the case."""
        return {
            "num_seqs": self.num_seqs,
            "num_tokens": self.num_tokens,
            "max_query_len": max(self.query_lens),
            "max_seq_len": max(self.seq_lens),
            "context": sum(self.seq_lens),
            "num_query_heads": self.num_query_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "block_size": self.block_size,
            "layout": LAYOUTS[self.layout],
            "dtype": self.dtype,
            "warm": self.warm,
            "window": self.window,
            "shared_tokens": self.shared_tokens,
            "kv_bytes": self.kv_bytes,
        }

"""The tensors of a cache-write case: keys and values as slices of a fused qkv, a cache, shuffled slots."""

from __future__ import annotations

import random
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import torch

import triton_kv as tkv
from bench.attention_case import LAYOUTS
from bench.candidate import WrongResultError

if TYPE_CHECKING:
    from bench.attention_case import AttentionCase
    from bench.session import Session

ROTATED_BYTES = 256 << 20
MAX_SETS = 32
OLD_K, OLD_V = 7.0, 9.0  # what the cache holds before a write


class WriteInputs:
    """The last `query_lens[i]` tokens of each sequence go into the cache, one layer an input set.

    A context manager: leaving it closes the cache.
    """

    def __init__(self, session: Session, case: AttentionCase) -> None:
        self.case, self.device, self.dtype = case, session.device, case.torch_dtype
        self.sets = 2 if session.smoke else max(1, min(-(-ROTATED_BYTES // self.bytes_moved), MAX_SETS))
        spec = tkv.AttentionSpec(num_kv_heads=case.num_kv_heads, head_dim=case.head_dim, dtype=self.dtype)
        self.cache = tkv.KVCache.reserve(
            spec,
            num_layers=self.sets,
            block_size=case.block_size,
            capacity=case.num_blocks,
            layout=LAYOUTS[case.layout],
            memory=tkv.HostMemory() if session.smoke else None,
            device=None if session.smoke else self.device,
            commit="all",
        )
        try:
            self.layers = [self.cache[index] for index in range(self.sets)]
            generator = torch.Generator(device=self.device).manual_seed(1)
            heads = case.num_query_heads + 2 * case.num_kv_heads
            shape = (case.num_tokens, heads, case.head_dim)
            fused = [
                torch.randn(shape, dtype=self.dtype, device=self.device, generator=generator) for _ in range(self.sets)
            ]
            first_v = case.num_query_heads + case.num_kv_heads
            self.q = [qkv[:, : case.num_query_heads] for qkv in fused]
            self.k = [qkv[:, case.num_query_heads : first_v] for qkv in fused]
            self.v = [qkv[:, first_v:] for qkv in fused]
            self._fill_slots(random.Random(2))
        except BaseException:
            self.cache.close()
            raise

    @property
    def bytes_moved(self) -> int:
        """Bytes read and written by one call."""
        case = self.case
        return 4 * case.num_tokens * case.num_kv_heads * case.head_dim * self.dtype.itemsize

    def _fill_slots(self, chooser: random.Random) -> None:
        case = self.case
        blocks = list(range(1, case.num_blocks))
        chooser.shuffle(blocks)
        self.block_rows: list[list[int]] = []
        slots: list[int] = []
        for count, query_len, length in zip(case.blocks_per_seq, case.query_lens, case.seq_lens):
            row, blocks = blocks[:count], blocks[count:]
            self.block_rows.append(row)
            for position in range(length - query_len, length):
                slots.append(row[position // case.block_size] * case.block_size + position % case.block_size)
        self.slots = torch.tensor(slots, dtype=torch.int64)
        self.slot_mapping = self.slots.to(self.device)

    @cached_property
    def paged_indices(self) -> dict[str, torch.Tensor]:
        """The same places as FlashInfer takes them, all on the device."""
        case = self.case
        indptr = [0]
        for count in case.blocks_per_seq:
            indptr.append(indptr[-1] + count)
        sequences = [i for i, query_len in enumerate(case.query_lens) for _ in range(query_len)]
        positions = [
            position
            for query_len, length in zip(case.query_lens, case.seq_lens)
            for position in range(length - query_len, length)
        ]
        lists = {
            "indptr": indptr,
            "indices": [block for row in self.block_rows for block in row],
            "last_page_len": [(length - 1) % case.block_size + 1 for length in case.seq_lens],
            "batch_indices": sequences,
            "positions": positions,
        }
        return {name: torch.tensor(ids, dtype=torch.int32, device=self.device) for name, ids in lists.items()}

    @cached_property
    def copied(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """As many bytes as one call moves, in one piece each: where a copy reads and where it writes."""
        shape = (2, self.case.num_tokens, self.case.num_kv_heads, self.case.head_dim)
        return [
            (torch.stack((k, v)), torch.empty(shape, dtype=self.dtype, device=self.device))
            for k, v in zip(self.k, self.v)
        ]

    def poison(self, index: int) -> None:
        """Gives the layer its old content."""
        self.layers[index].k.fill_(OLD_K)
        self.layers[index].v.fill_(OLD_V)
        if "copied" in vars(self):
            self.copied[index][1].fill_(OLD_K)

    def verify(self, output: Any, index: int) -> float:
        """Written slots hold the new rows bit by bit, all others the old content. Raises `WrongResultError`.

        An output is that of a copy.
        """
        if output is not None:
            if not torch.equal(output, self.copied[index][0]):
                raise WrongResultError("the copy differs from its source")
            return 0.0
        self.require_rows("K", self.layers[index].k, self.k[index], OLD_K)
        self.require_rows("V", self.layers[index].v, self.v[index], OLD_V)
        return 0.0

    def written(self, cache: torch.Tensor) -> torch.Tensor:
        """What the cache holds in this step's slots, in the tokens' order."""
        block = torch.div(self.slot_mapping, self.case.block_size, rounding_mode="floor")
        return cache[block, self.slot_mapping % self.case.block_size]

    def require_rows(self, name: str, cache: torch.Tensor, new: torch.Tensor | None, old: float) -> None:
        """Raises `WrongResultError` unless this step's slots hold `new` (None: anything), and all others `old`."""
        case = self.case
        if new is not None and not torch.equal(self.written(cache), new):
            raise WrongResultError(f"{name}: a written slot does not hold its row")
        untouched = torch.ones(case.num_blocks * case.block_size, dtype=torch.bool, device=self.device)
        untouched[self.slot_mapping] = False
        if bool((cache[untouched.view(case.num_blocks, case.block_size)] != old).any()):
            raise WrongResultError(f"{name}: a slot that was not named has changed")

    def close(self) -> None:
        self.cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

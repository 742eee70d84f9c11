"""Which live blocks move into which holes, so that the rest of a cache can be given back."""

from __future__ import annotations

from typing import NamedTuple

import torch


class CompactionPlan(NamedTuple):
    """Moves that put the live blocks in front, and what `shrink(num_blocks)` frees once they are done.

    Run it with `cache.copy_blocks(plan.moves)`, translate the block tables with `remap`, then `cache.shrink`.
    """

    num_blocks: int  # live blocks: what the cache needs to hold afterwards
    moves: torch.Tensor  # int32 [n, 2] on the device: source block, target block; sources and targets never overlap
    remapping: torch.Tensor  # int32 [blocks before] on the device: the new id of each block, -1 of those not live
    freed_bytes: int  # that shrink(num_blocks) gives back (or keeps in the pool, where the cache has one)

    def remap(self, block_table: torch.Tensor) -> torch.Tensor:
        """A block table with the new ids, same shape and dtype. Does not synchronise.

        Entries of blocks that are not live become -1, as do negative ones and those at or past the blocks that the
        cache had: rows are often longer than their sequences, with anything behind the end.
        """
        num_blocks = self.remapping.numel()
        known = self.remapping[block_table.clamp(0, num_blocks - 1).long()].to(block_table.dtype)
        return torch.where((block_table >= 0) & (block_table < num_blocks), known, -1)


def compact(live: list[int], num_blocks: int) -> tuple[list[tuple[int, int]], list[int]]:
    """The fewest moves of ascending `live` blocks into the ids below their number, and the new id of every block.

    Only blocks at or past `len(live)` move, into ids that are not live: no source is a target.
    """
    count = len(live)
    alive = set(live)
    holes = (block for block in range(count) if block not in alive)
    moves = list(zip((block for block in live if block >= count), holes))
    new = [block if block in alive and block < count else -1 for block in range(num_blocks)]
    for source, target in moves:
        new[source] = target
    return moves, new


__all__ = ["CompactionPlan", "compact"]

"""Which blocks of the cache are free."""

import random
from collections import deque
from collections.abc import Iterable


class BlockAllocator:
    """Hands out blocks 1 .. num_blocks - 1; block 0 is left to warm-up, graph capture and padding.

    Freed blocks go to the back of the queue. A seed shuffles it, so that few sequences already use the whole cache.
    """

    def __init__(self, num_blocks: int, shuffle_seed: int | None = None) -> None:
        if num_blocks < 2:
            raise ValueError(f"a cache of {num_blocks} block(s) has none to hand out: block 0 is left alone")
        blocks = list(range(1, num_blocks))
        if shuffle_seed is not None:
            random.Random(shuffle_seed).shuffle(blocks)
        self._free = deque(blocks)
        self.num_usable = len(blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, num_blocks: int) -> list[int] | None:
        """That many block ids, or None (and nothing taken) where fewer are free."""
        return [self._free.popleft() for _ in range(num_blocks)] if num_blocks <= len(self._free) else None

    def free(self, blocks: Iterable[int]) -> None:
        self._free.extend(blocks)

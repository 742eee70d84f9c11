"""Continuous batching: which tokens of which requests the next step computes."""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from .block_allocator import BlockAllocator


@dataclass(eq=False)
class Request:
    """One sequence on its way. `tokens` is the prompt and what came after; the first `num_cached` lie in `blocks`."""

    id: int
    prompt_ids: list[int]
    max_new_tokens: int
    temperature: float = 0.0  # 0: greedy
    stop_ids: frozenset[int] = frozenset()
    generator: torch.Generator | None = None  # its own: samples do not depend on who else is in the batch
    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    num_cached: int = 0
    num_preemptions: int = 0
    finish_reason: str | None = None  # "stop" (a stop token, not part of the output) or "length"

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt_ids)

    @property
    def num_pending(self) -> int:
        """Tokens whose K and V are not in the cache yet: the whole prompt at first, 1 while decoding."""
        return len(self.tokens) - self.num_cached

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[len(self.prompt_ids) :]

    def append(self, token: int) -> None:
        """Takes a sampled token; a stop token, or the last one allowed, finishes the request."""
        if token in self.stop_ids:
            self.finish_reason = "stop"
            return
        self.tokens.append(token)
        if len(self.output_ids) >= self.max_new_tokens:
            self.finish_reason = "length"


class Chunk(NamedTuple):
    """The next `num_tokens` pending tokens of one request, computed in one step."""

    request: Request
    num_tokens: int

    @property
    def end(self) -> int:
        """How many tokens of the request are cached after the chunk."""
        return self.request.num_cached + self.num_tokens

    @property
    def is_last(self) -> bool:
        """Nothing is pending after it, so its last logits give a new token."""
        return self.num_tokens == self.request.num_pending


class Scheduler:
    """Fills each step with at most `max_tokens` tokens of at most `max_seqs` requests.

    Decodes come first, so a long prompt delays nobody; what is left of the budget goes to prompts, cut into chunks. A
    request joins when blocks for all its present tokens are free. A decode that finds no block preempts the request
    that joined last, which gives up its blocks and computes its tokens again later (as in vLLM).
    """

    def __init__(
        self, allocator: BlockAllocator, *, block_size: int, max_seqs: int, max_tokens: int, context_tokens: int
    ) -> None:
        if max_tokens < max_seqs:
            raise ValueError(f"{max_seqs} sequences that decode do not fit into {max_tokens} tokens a step")
        self._allocator, self._block_size = allocator, block_size
        self._max_seqs, self._max_tokens, self._context_tokens = max_seqs, max_tokens, context_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in the order in which they joined

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queues a request. `ValueError` for one that could not finish even with the whole cache to itself."""
        prompt, new = len(request.prompt_ids), request.max_new_tokens
        if prompt < 1 or new < 1:
            raise ValueError(f"a request needs a prompt and a token to generate, got {prompt} and {new} tokens")
        if request.temperature < 0:
            raise ValueError(f"the temperature must not be negative, got {request.temperature}")
        asked = f"a prompt of {prompt} tokens and {new} new ones make {prompt + new}"
        cache_tokens = self._allocator.num_usable * self._block_size
        if prompt + new > cache_tokens:
            raise ValueError(f"{asked}, the cache holds {cache_tokens}: shorten the prompt or give it more memory")
        if prompt + new > self._context_tokens:
            raise ValueError(f"{asked}, the limit is {self._context_tokens}: shorten the prompt or ask for less")
        self.waiting.append(request)

    def schedule(self) -> list[Chunk]:
        """The next step's chunks, all with blocks. Empty only if there is no work."""
        budget, chunks = self._max_tokens, []
        for request in [request for request in self.running if request.num_pending == 1]:
            # A victim joined later than the request it makes room for, so it has no chunk in this step yet.
            if request in self.running and self._make_room(request):
                chunks.append(Chunk(request, 1))
                budget -= 1
        for request in self.running:
            if request.num_pending > 1 and budget:
                chunks.append(Chunk(request, min(request.num_pending, budget)))
                budget -= chunks[-1].num_tokens
        while self.waiting and budget and len(self.running) < self._max_seqs and self._take_blocks(self.waiting[0]):
            request = self.waiting.popleft()
            self.running.append(request)
            chunks.append(Chunk(request, min(request.num_pending, budget)))
            budget -= chunks[-1].num_tokens
        return chunks

    def leave(self, request: Request) -> None:
        """A finished request leaves the batch; its blocks are free for others."""
        self.running.remove(request)
        self._release(request)

    def _make_room(self, request: Request) -> bool:
        """Blocks for all tokens of a running request, at the cost of later ones; False if it had to go itself."""
        while not self._take_blocks(request):
            victim = self.running.pop()
            self._release(victim)
            victim.num_preemptions += 1
            self.waiting.appendleft(victim)
            if victim is request:
                return False
        return True

    def _take_blocks(self, request: Request) -> bool:
        blocks = self._allocator.allocate(-(-len(request.tokens) // self._block_size) - len(request.blocks))
        request.blocks += blocks or []
        return blocks is not None

    def _release(self, request: Request) -> None:
        self._allocator.free(request.blocks)
        request.blocks, request.num_cached = [], 0

"""The engine: start-up in stages around a reserved cache, then one step after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch

import triton_kv as tkv

from .block_allocator import BlockAllocator
from .model import Llama
from .runner import ModelRunner, sample
from .scheduler import Request, Scheduler


@dataclass(frozen=True)
class EngineOptions:
    layout: str = "LTBNHD"
    block_size: int = 16  # tokens
    max_seqs: int = 16  # in one step
    max_tokens: int = 2048  # in one step; longer prompts are cut into chunks
    graph_sizes: tuple[int, ...] = (1, 2, 4, 8, 16)  # decode batch sizes captured on a GPU
    legacy: bool = False  # commit everything before capture, as an engine without reserved addresses must
    num_blocks: int | None = None  # instead of the plan's
    capacity: int | None = None  # blocks to reserve; None: what the device's total memory could hold
    utilization: float = 0.92  # of the device's memory, everybody's use counted
    headroom_bytes: int = 150 << 20  # left free on top of that
    shuffle_seed: int | None = None  # hand out blocks in random order
    sample_seed: int = 0


class Stage(NamedTuple):
    """A finished start-up stage, as measured at its end."""

    name: str
    note: str
    seconds: float
    free_bytes: int  # of the device, or of the budget where one was given
    num_blocks: int  # committed in the cache
    mapped_bytes: int  # physical memory of the cache


class Engine:
    """Serves requests from a cache that is reserved first, captured into graphs, and sized from what is really left.

    `start` brings it up, `add` queues a request at any time, each `step` computes the next tokens of all that run.
    """

    cache: tkv.KVCache
    runner: ModelRunner
    scheduler: Scheduler

    def __init__(
        self, memory: tkv.VirtualMemory, options: EngineOptions, on_stage: Callable[[Stage], None] = lambda stage: None
    ) -> None:
        self.memory, self.options, self._on_stage = memory, options, on_stage
        self.stages: list[Stage] = []
        self._num_requests = 0

    @contextmanager
    def stage(self, name: str) -> Iterator[list[str]]:
        """Times the body and reads memory after it; what the body appends to the list yielded is the stage's note."""
        notes: list[str] = []
        started = time.perf_counter()
        yield notes
        with self.memory.activate():
            self.memory.synchronize()
            free_bytes, _ = self.memory.memory_info()
        cache, seconds = getattr(self, "cache", None), time.perf_counter() - started
        held = (cache.num_blocks, cache.mapped_bytes) if cache else (0, 0)
        self.stages.append(Stage(name, "; ".join(notes), seconds, free_bytes, *held))
        self._on_stage(self.stages[-1])

    def start(self, model: Llama) -> None:
        """From weights in memory to an engine that serves; the order is the point of the whole package."""
        options, config, max_seqs, max_tokens = (
            self.options,
            model.config,
            self.options.max_seqs,
            self.options.max_tokens,
        )
        sizes = {"block_size": options.block_size, "context_tokens": config.context_tokens}
        self.runner = ModelRunner(model, max_seqs=max_seqs, max_tokens=max_tokens, **sizes)
        with self.stage("reserve") as notes:
            self.cache = self._reserve(model, options.capacity)
            notes.append(f"{self.cache.capacity} blocks, {self.cache.reserved_bytes / 2**30:.2f} GiB of addresses")
        with self.stage("first block"):
            self.cache.extend(1)
        with self.stage("profile run") as notes:
            self.runner.profile(self.cache)
            notes.append(f"{max_tokens} tokens, {max_seqs} sequences")
        if options.legacy:
            with self.stage("guess, commit all") as notes:
                guess = options.num_blocks or self._plan().num_blocks
                self.cache.close()
                self.cache = self._reserve(model, guess, commit="all")
                notes.append(f"{guess} blocks before capture")
        with self.stage("compile kernels"):
            tkv.compile_kernels(self.cache, config.num_query_heads, max_seqs=max_seqs, max_tokens=max_tokens)
        with self.stage("capture graphs") as notes:
            graph_sizes = [size for size in options.graph_sizes if size <= max_seqs and model.device.type == "cuda"]
            self.runner.capture(self.cache, graph_sizes)
            notes.append(f"batch sizes {graph_sizes}" if graph_sizes else "none on a CPU")
        with self.stage("replay graphs"):
            self.runner.replay_all()
        if not options.legacy:
            with self.stage("plan") as notes:
                plan = self._plan()
                notes.append(f"{plan.num_blocks} blocks, bound by {plan.bound_by}")
            with self.stage("extend") as notes:
                before = self.cache.num_blocks
                self.cache.extend(options.num_blocks or plan)
                notes.append(f"from {before} to {self.cache.num_blocks} blocks")
        allocator = BlockAllocator(self.cache.num_blocks, options.shuffle_seed)
        self.scheduler = Scheduler(allocator, max_seqs=max_seqs, max_tokens=max_tokens, **sizes)

    def _reserve(self, model: Llama, capacity: int | None, commit: str | None = None) -> tkv.KVCache:
        return tkv.KVCache.reserve(
            tkv.AttentionSpec(model.config.num_kv_heads, model.config.head_dim, model.dtype),
            num_layers=model.config.num_layers,
            block_size=self.options.block_size,
            layout=self.options.layout,
            capacity=capacity,
            memory=self.memory,
            commit=commit,
        )

    def _plan(self) -> tkv.Plan:
        options = self.options
        return tkv.plan_blocks(self.cache, utilization=options.utilization, headroom_bytes=options.headroom_bytes)

    def add(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        temperature: float = 0.0,
        stop_ids: frozenset = frozenset(),
    ) -> Request:
        """Queues a request; it joins the batch when there is room. `ValueError` if it never could."""
        generator = torch.Generator().manual_seed(self.options.sample_seed + self._num_requests)
        request = Request(self._num_requests, list(prompt_ids), max_new_tokens, temperature, stop_ids, generator)
        self.scheduler.add(request)
        self._num_requests += 1
        return request

    def step(self) -> list[Request]:
        """Computes one batch; returns the requests that got a token or stopped. Synchronises once, for the tokens."""
        chunks = self.scheduler.schedule()
        if not chunks:
            return []
        logits = self.runner.run(chunks, self.cache)
        rows = [row for row, chunk in enumerate(chunks) if chunk.is_last]
        for request, num_tokens in chunks:
            request.num_cached += num_tokens
        requests = [chunks[row].request for row in rows]
        for request, token in zip(requests, sample(logits[rows], requests) if rows else ()):
            request.append(token)
            if request.finish_reason:
                self.scheduler.leave(request)
        return requests

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """Greedy continuations of all prompts at once."""
        requests = [self.add(prompt, max_new_tokens) for prompt in prompts]
        while self.scheduler.has_work:
            self.step()
        return [request.output_ids for request in requests]

    def close(self) -> None:
        if hasattr(self, "cache"):
            self.cache.close()

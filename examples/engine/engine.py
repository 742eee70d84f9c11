"""The engine: start-up in stages around a reserved cache, then one step after the other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

import triton_kv as tkv

from .block_allocator import BlockAllocator
from .model import Llama
from .runner import ModelRunner, sample
from .scheduler import Request, Scheduler

logger = logging.getLogger(__name__)
OnStage = Callable[[tkv.StageRecord], None]


@dataclass(frozen=True)
class EngineOptions:
    layout: str = "LTBNHD"
    block_size: int = 16  # tokens
    max_seqs: int = 16  # in one step
    max_tokens: int = 2048  # in one step; longer prompts are cut into chunks
    max_seq_tokens: int | None = None  # demanded of the cache; None: the model's context, or what fits
    graph_sizes: tuple[int, ...] = (1, 2, 4, 8, 16)  # decode batch sizes captured on a GPU
    legacy: bool = False  # commit everything before capture, as an engine without reserved addresses must
    num_blocks: int | None = None  # instead of the plan's
    capacity: int | None = None  # blocks to reserve; None: what the device's total memory could hold
    utilization: float = 0.92  # of the device's memory, everybody's use counted
    headroom_bytes: int = 150 << 20  # left free on top of that
    shuffle_seed: int | None = None  # hand out blocks in random order
    sample_seed: int = 0


class Engine:
    """Serves requests from a cache that is reserved first, captured into graphs, and sized from what is really left.

    `start` brings it up, `add` queues a request at any time, each `step` computes the next tokens of all that run. With
    a model that is one rank of several, every rank runs an engine and makes the same calls with the same requests.
    """

    cache: tkv.KVCache
    plan: tkv.Plan
    runner: ModelRunner
    scheduler: Scheduler

    def __init__(self, memory: tkv.VirtualMemory, options: EngineOptions, on_stage: OnStage | None = None) -> None:
        self.memory, self.options = memory, options
        self.ledger = tkv.MemoryLedger(memory=memory, on_stage=on_stage)
        self._num_requests = 0

    def start(self, model: Llama) -> None:
        """From weights in memory to an engine that serves; the order is the point of the whole package."""
        options, config, ledger = self.options, model.config, self.ledger
        sizes = {"block_size": options.block_size, "max_seqs": options.max_seqs, "max_tokens": options.max_tokens}
        self._group = model.group
        self.runner = ModelRunner(model, context_tokens=config.context_tokens, **sizes)
        with ledger.stage("first block") as notes:
            self.cache = self._reserve(model, options.capacity)
            self.cache.extend(1, group=self._group)
            notes.append(f"{self.cache.capacity} blocks, {self.cache.reserved_bytes / 2**30:.2f} GiB of addresses")
        with ledger.stage("profile run") as notes:
            self.runner.profile(self.cache)
            notes.append(f"{options.max_tokens} tokens, {options.max_seqs} sequences")
        if options.legacy:
            self.plan = self._make_plan()
            with ledger.stage("guess, commit all") as notes:
                self.cache.close()
                self.cache = self._reserve(model, self.plan.num_blocks, commit="all")
                notes.append(f"{self.plan.num_blocks} blocks before capture")
        with ledger.stage("compile kernels"):
            heads = config.num_query_heads
            tkv.compile_kernels(self.cache, heads, max_seqs=options.max_seqs, max_tokens=options.max_tokens)
        with ledger.stage("capture") as notes:
            batches = [size for size in options.graph_sizes if size <= options.max_seqs and model.device.type == "cuda"]
            self.runner.capture(self.cache, batches)
            self.runner.replay_all()  # the driver allocates some of a graph's memory only now
            notes.append(f"batch sizes {batches}" if batches else "no graphs on a CPU")
        if not options.legacy:
            self.plan = self._make_plan()
            with ledger.stage("extend") as notes:
                before = self.cache.num_blocks
                self.cache.extend(self.plan, group=self._group)
                notes.append(f"from {before} to {self.cache.num_blocks} blocks")
        self.plan = replace(self.plan, stages=tuple(ledger.stages))
        allocator = BlockAllocator(self.cache.num_blocks, options.shuffle_seed)
        self.scheduler = Scheduler(allocator, context_tokens=self._longest(config.context_tokens), **sizes)

    def _reserve(self, model: Llama, capacity: int | None, commit: str | None = None) -> tkv.KVCache:
        cache = tkv.KVCache.reserve(
            tkv.AttentionSpec(model.config.num_kv_heads, model.config.head_dim, model.dtype),
            num_layers=model.config.num_layers,
            block_size=self.options.block_size,
            layout=self.options.layout,
            capacity=capacity,
            memory=self.memory,
            commit=commit,
        )
        self.ledger.watch(cache)
        return cache

    def _make_plan(self) -> tkv.Plan:
        options = self.options
        return tkv.plan_blocks(
            self.cache,
            self.ledger,
            utilization=options.utilization,
            headroom_bytes=options.headroom_bytes,
            num_blocks=options.num_blocks,
            spare_blocks=1,  # block 0
            group=self._group,
        )

    def _longest(self, context_tokens: int) -> int:
        """The longest sequence to accept, read from the plan: what it says fits only now."""
        asked, fits = self.options.max_seq_tokens or context_tokens, self.plan.longest_sequence_tokens
        if fits is None or asked <= fits:
            return min(asked, context_tokens)
        text = f"sequences of {asked} tokens do not fit a cache of {self.plan.num_blocks} blocks ({fits} tokens)"
        if self.options.max_seq_tokens:
            raise ValueError(f"{text}: ask for shorter ones or give the cache more memory")
        logger.warning("%s: the limit is lowered to that", text)
        return fits

    def add(
        self, prompt_ids: Sequence[int], max_new_tokens: int, temperature: float = 0.0, stop_ids: Collection[int] = ()
    ) -> Request:
        """Queues a request; it joins the batch when there is room. `ValueError` if it never could."""
        generator = torch.Generator().manual_seed(self.options.sample_seed + self._num_requests)
        stops = frozenset(stop_ids)
        request = Request(self._num_requests, list(prompt_ids), max_new_tokens, temperature, stops, generator)
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
        for request, token in zip(requests, self._sample(logits[rows], requests) if rows else ()):
            request.append(token)
            if request.finish_reason:
                self.scheduler.leave(request)
        return requests

    def _sample(self, logits: torch.Tensor, requests: list[Request]) -> list[int]:
        tokens = sample(logits, requests)
        if self._group is None:
            return tokens
        shared = torch.tensor(tokens, device=logits.device)  # the ranks' logits may differ in the last bit
        dist.broadcast(shared, dist.get_global_rank(self._group, 0), group=self._group)
        return shared.tolist()

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """Greedy continuations of all prompts at once."""
        requests = [self.add(prompt, max_new_tokens) for prompt in prompts]
        while self.scheduler.has_work:
            self.step()
        return [request.output_ids for request in requests]

    def close(self) -> None:
        if hasattr(self, "cache"):
            self.cache.close()

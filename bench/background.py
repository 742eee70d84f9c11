"""Decode replays while a cache is extended in the background: how much longer the slowest of them take."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

import triton_kv as tkv
from bench.candidate import OURS
from bench.timing import Samples

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.session import Session
    from triton_kv.memory import VirtualMemory

GIB = 1 << 30
SPEC = tkv.AttentionSpec(num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
NUM_LAYERS, BLOCK_SIZE = 8, 16
LEAST_OVERLAPPING = 20  # replays; extensions are repeated until there are so many
MOST_EXTENSIONS = 8
SCRUB_S_PER_GIB = 0.02  # the driver scrubs released memory in the background


def decode_beside_extension(
    session: Session, memory: VirtualMemory, extra_bytes: int, *, batch: int = 64, context: int = 8192
) -> dict[str, dict[str, Any]]:
    """Times of a captured decode step of 8 layers: "ours" while `extend_async` adds `extra_bytes`, "alone" before.

    Each result has its `p99_us` over all replays. Raises `AssertionError` if the step's output changes meanwhile or a
    new block is not zero, and if fewer than 20 replays overlap on a GPU.
    """
    width = -(-context // BLOCK_SIZE)
    one = tkv.CacheLayout("LTBNHD", SPEC, num_layers=NUM_LAYERS, block_size=BLOCK_SIZE, capacity=1)
    needed, extra = batch * width + 1, extra_bytes // one.block_bytes
    with tkv.KVCache.reserve(
        SPEC, num_layers=NUM_LAYERS, block_size=BLOCK_SIZE, capacity=needed + extra, memory=memory
    ) as cache:
        cache.extend(needed)
        step, out = _step(session, cache, batch, context, width)
        timed = _timer(session, step)
        for _ in range(20):
            timed()
        alone = [timed() for _ in range(100)]
        right = out.clone()
        beside: list[float] = []
        extensions, seconds = 0, 0.0
        while len(beside) < LEAST_OVERLAPPING and extensions < MOST_EXTENSIONS:
            if extensions:
                cache.shrink(needed)
                time.sleep(SCRUB_S_PER_GIB * extra_bytes / GIB)
            started = time.perf_counter()
            future = cache.extend_async(needed + extra)
            while not future.done():
                beside.append(timed())
            future.result()
            seconds += time.perf_counter() - started
            extensions += 1
        if not torch.equal(out, right):
            raise AssertionError("a replay beside the extension gave another output")
        _require_zero(cache, needed)
    if len(beside) < LEAST_OVERLAPPING and session.on_gpu:
        raise AssertionError(f"{len(beside)} replays overlap {extensions} extensions, not {LEAST_OVERLAPPING}")
    shared = {"ok": True, "batch": batch, "context": context, "num_layers": NUM_LAYERS}
    beside = beside or alone[-1:]  # a host driver may be done at once
    return {
        OURS: {
            **shared,
            "settings": "a captured decode step while extend_async runs; p99_us over all overlapping replays",
            **_summary(beside),
            "extensions": extensions,
            "extend_s": round(seconds / extensions, 4),
        },
        "alone": {**shared, "settings": "the same replays with nothing beside them", **_summary(alone)},
    }


def _step(
    session: Session, cache: tkv.KVCache, batch: int, context: int, width: int
) -> tuple[Callable[[], object], torch.Tensor]:
    """One decode step over all layers, captured where there are graphs, and its output."""
    generator = torch.Generator(session.device).manual_seed(6)
    committed = cache.num_blocks
    for layer in cache:
        for view in (layer.k, layer.v):
            view[:committed].normal_(generator=generator)
    buffers = tkv.AttentionBuffers(batch, batch, width, session.device)
    tables = [list(range(1 + row * width, 1 + (row + 1) * width)) for row in range(batch)]
    buffers.fill(tables, [context] * batch, [-1] * batch)
    metadata = buffers.view(batch, batch)
    q = torch.randn(batch, 32, SPEC.head_dim, device=session.device, dtype=SPEC.dtype, generator=generator)
    out = torch.empty_like(q)

    def step() -> None:
        for layer in cache:
            tkv.paged_attention(q, layer, metadata, out=out)

    step()
    if not session.on_gpu:
        return step, out
    session.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay, out


def _timer(session: Session, step: Callable[[], object]) -> Callable[[], float]:
    """One replay's time in microseconds, by events on a GPU."""

    def by_host() -> float:
        started = time.perf_counter()
        step()
        return (time.perf_counter() - started) * 1e6

    def by_events() -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        step()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3

    return by_events if session.on_gpu else by_host


def _summary(times_us: list[float]) -> dict[str, Any]:
    ordered = sorted(times_us)
    p99 = ordered[min(int(0.99 * len(ordered)), len(ordered) - 1)]
    return {**Samples(ordered).summary(), "p99_us": round(p99, 3)}


def _require_zero(cache: tkv.KVCache, first_new: int) -> None:
    for layer in cache:
        for view in (layer.k, layer.v):
            if bool(view[first_new : first_new + 64].any()) or bool(view[-64:].any()):
                raise AssertionError(f"layer {layer.name} has new blocks that are not zero")

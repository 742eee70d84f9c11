"""Giving memory back and moving blocks: shrinking by handle policy, coalescing, compaction, block copies."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

import triton_kv as tkv
from bench.candidate import OURS
from bench.case_result import case_result
from bench.floor import floor_us
from bench.suite import Suite
from bench.timing import Samples

if TYPE_CHECKING:
    from bench.session import Session
    from triton_kv.memory import VirtualMemory

MIB, GIB = 1 << 20, 1 << 30
SCRUB_S_PER_GIB = 0.02  # the driver scrubs released memory in the background, and creating right after is slow
SPEC = tkv.AttentionSpec(num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)


@dataclass(frozen=True)
class ShrinkCase:
    """A cache of so many bytes, and what is done to it: "shrink", "coalesce", "compact" or "copy"."""

    id: str
    what: str
    total_bytes: int
    num_layers: int = 32
    kept: float = 0.5  # shrink: share of the blocks; compact and copy: share of live blocks, of blocks copied
    chunk_bytes: int | None = None
    pool_bytes: int = 0
    samples: int = 3
    quick: bool = False


def run(session: Session, case: ShrinkCase) -> dict[str, Any]:
    """Measures one case. Times are the host's, with the device waited for."""
    memory: VirtualMemory = tkv.HostMemory(budget_bytes=GIB) if session.smoke else tkv.open_memory(session.device)
    session.enter(case.id, OURS)
    samples = 2 if session.smoke or session.quick else case.samples
    measured = {"shrink": _shrink, "coalesce": _coalesce, "compact": _move, "copy": _move}
    results, bytes_copied, settings = measured[case.what](session, memory, case, samples)
    floor = floor_us(session.rooflines, bytes_read=bytes_copied, bytes_written=bytes_copied, kind="copy")
    ours = {"ok": True, "settings": settings, **results}
    parameters = {
        "total_bytes": case.total_bytes,
        "num_layers": case.num_layers,
        "kept": case.kept,
        "chunk_bytes": case.chunk_bytes,
        "pool_bytes": case.pool_bytes,
    }
    return case_result(
        case.id,
        {OURS: ours},
        required=(),
        bytes_moved=2 * bytes_copied,  # read and written, as the copy roofline counts
        flops=0,
        floor=floor if bytes_copied else None,
        parameters=parameters,
    )


Measured = tuple[dict[str, Any], int, str]


def reserve(memory: VirtualMemory, case: ShrinkCase) -> tkv.KVCache:
    one = tkv.CacheLayout("LTBNHD", SPEC, num_layers=case.num_layers, block_size=16, capacity=1)
    return tkv.KVCache.reserve(
        SPEC,
        num_layers=case.num_layers,
        block_size=16,
        capacity=case.total_bytes // one.block_bytes,
        memory=memory,
        handles=tkv.HandlePolicy(case.chunk_bytes, case.pool_bytes),
    )


def _shrink(session: Session, memory: VirtualMemory, case: ShrinkCase, samples: int) -> Measured:
    shrinking, growing = Samples(skip=1), Samples(skip=1)
    copied = freed = 0
    with reserve(memory, case) as cache:
        target = int(cache.capacity * case.kept)
        for _ in range(samples + 1):
            with growing.lap():
                cache.extend(cache.capacity)
            jobs = [job for buffer, size in cache._store.buffers for job in _cut(buffer, target * size)]
            copied = sum(end - start for _, spans in jobs for start, end in spans)
            before = memory.memory_info()[0]
            with shrinking.lap():
                freed = int(cache.shrink(target))
            _scrub(session, case.total_bytes)
            if freed != memory.memory_info()[0] - before:
                raise AssertionError(f"{freed} bytes promised, the driver gained {memory.memory_info()[0] - before}")
    extras = {"freed_bytes": freed, "copied_bytes": copied, "extend_again_us": round(growing.median_us, 1)}
    settings = "KVCache.shrink of a cache committed at once (one extend); extend_again_us zeroes too"
    return {**shrinking.summary(), **extras}, copied, settings


def _cut(buffer: tkv.ExtensibleTensor, bytes_per_segment: int) -> list[Any]:
    return buffer._reservation.cut(buffer._ranges(0, bytes_per_segment))


def _coalesce(session: Session, memory: VirtualMemory, case: ShrinkCase, samples: int) -> Measured:
    lap = Samples(skip=1)
    copied = 0
    extra = 0
    for _ in range(samples + 1):
        with reserve(memory, case) as cache:
            for step in range(1, 5):
                cache.extend(cache.capacity * step // 4)
            copied = cache.mapped_bytes
            with lap.lap():
                extra = cache.coalesce().extra_bytes
        _scrub(session, case.total_bytes)
    return {**lap.summary(), "extra_bytes": extra}, copied, "KVCache.coalesce after four extends"


def _move(session: Session, memory: VirtualMemory, case: ShrinkCase, samples: int) -> Measured:
    lap = Samples(skip=2)
    with reserve(memory, case) as cache:
        cache.extend(cache.capacity)
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(cache.capacity, generator=generator)
        count = int(cache.capacity * case.kept)
        if case.what == "compact":
            pairs = cache.compaction_plan(sorted(order[:count].tolist())).moves
        else:
            pairs = torch.stack((order[:count], order[count : 2 * count]), dim=1).to(torch.int32).to(cache.device)
        copied = pairs.shape[0] * cache.block_bytes
        for _ in range(4 * samples + 2):
            session.synchronize()
            with lap.lap():
                cache.copy_blocks(pairs)
                session.synchronize()
        settings = "KVCache.copy_blocks, one launch for all layers, host waits"
        return {**lap.summary(), "blocks": int(pairs.shape[0])}, copied, settings


def _scrub(session: Session, num_bytes: int) -> None:
    if session.on_gpu:
        time.sleep(SCRUB_S_PER_GIB * num_bytes / GIB)


SUITE = Suite(
    name="shrink",
    about="giving memory back, coalescing handles, moving blocks",
    cases=(
        ShrinkCase("shrink/16GiB-half", "shrink", 16 * GIB, quick=True),
        ShrinkCase("shrink/16GiB-all-but-one-block", "shrink", 16 * GIB, kept=0.99999),
        ShrinkCase("shrink/16GiB-to-nothing", "shrink", 16 * GIB, kept=0.0),
        ShrinkCase("shrink/16GiB-half-32MiB-chunks", "shrink", 16 * GIB, chunk_bytes=32 * MIB, quick=True),
        ShrinkCase("shrink/4GiB-half-2MiB-chunks", "shrink", 4 * GIB, chunk_bytes=2 * MIB),
        ShrinkCase("shrink/16GiB-half-32MiB-pooled", "shrink", 16 * GIB, chunk_bytes=32 * MIB, pool_bytes=32 * GIB),
        ShrinkCase("shrink/coalesce-8GiB", "coalesce", 8 * GIB, quick=True),
        ShrinkCase("shrink/compact-8GiB-half-live", "compact", 8 * GIB, quick=True),
        ShrinkCase("shrink/copy-64-blocks", "copy", 4 * GIB, kept=64 / 2048),
        ShrinkCase("shrink/copy-1-block", "copy", 4 * GIB, kept=1.1 / 2048),
    ),
    smoke_cases=(
        ShrinkCase("shrink/32MiB-half", "shrink", 32 * MIB, num_layers=2),
        ShrinkCase("shrink/32MiB-half-pooled", "shrink", 32 * MIB, 2, 0.5, 2 * MIB, 64 * MIB),
        ShrinkCase("shrink/coalesce-32MiB", "coalesce", 32 * MIB, num_layers=2),
        ShrinkCase("shrink/compact-16MiB", "compact", 16 * MIB, num_layers=2),
        ShrinkCase("shrink/copy-16MiB", "copy", 16 * MIB, num_layers=2, kept=0.25),
    ),
    run=run,
    case_s=4.5,
    quick_case_s=2.2,
    setup_s=1.0,
)

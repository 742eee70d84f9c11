"""Virtual memory: reserving, committing by handle size, and extending a cache, zeroing included."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

import triton_kv as tkv
from bench.background import decode_beside_extension
from bench.candidate import OURS
from bench.case_result import case_result, put_ratio
from bench.floor import floor_us
from bench.peers.memset import memset
from bench.peers.per_layer import PerLayerCache
from bench.suite import Suite
from bench.timing import Samples

if TYPE_CHECKING:
    from bench.goals import Goals
    from bench.session import Session
    from triton_kv.memory import VirtualMemory

MIB, GIB, TIB = 1 << 20, 1 << 30, 1 << 40
# The driver scrubs released memory in the background, and creating right after is slow for that long.
SCRUB_S_PER_GIB = 0.02
MOST_OVER_MEMSET = 1.15  # times the fill of the same ranges, already mapped
MOST_BESIDE = 1.3  # p99 of decode replays that overlap an extension, over that of replays alone


@dataclass(frozen=True)
class VmmCase:
    """One operation: "reserve", "handles", "extend", "cache" or "beside" (decode while a cache is extended)."""

    id: str
    what: str
    total_bytes: int
    handle_bytes: int = 0  # handles
    num_segments: int = 1  # extend and cache: cache has half as many layers
    first_only: bool = False  # cache: the first block of every segment, not the rest
    samples: int = 5
    quick: bool = False
    goals: Goals = field(default_factory=dict, hash=False)  # what it should reach


def run(session: Session, case: VmmCase) -> dict[str, Any]:
    """Measures one case; times are the host's, with the device waited for where zeroing belongs to the work."""
    memory: VirtualMemory = tkv.HostMemory() if session.smoke else tkv.open_memory(session.device)
    session.enter(case.id, OURS)
    samples = 2 if session.smoke or session.quick else case.samples
    measured = {"reserve": _reserve, "handles": _handles, "extend": _extend, "cache": _cache, "beside": _beside}
    results, bytes_written, required = measured[case.what](session, memory, case, samples)
    if bytes_written:
        floor = floor_us(session.rooflines, bytes_written=bytes_written, kind="write")
    else:
        floor = results[OURS].get("driver_us")
    parameters = {
        "total_bytes": case.total_bytes,
        "handle_bytes": case.handle_bytes,
        "num_segments": case.num_segments,
        "granularity": memory.granularity,
    }
    result = case_result(
        case.id,
        results,
        required=required,
        bytes_moved=bytes_written,
        flops=0,
        floor=floor,
        parameters=parameters,
    )
    if case.what == "beside":
        put_ratio(result, "alone", MOST_BESIDE, "p99_us")
    return result


Measured = tuple[dict[str, dict[str, Any]], int, tuple[str, ...]]


def _reserve(session: Session, memory: VirtualMemory, case: VmmCase, samples: int) -> Measured:
    reserving, raw, freeing = (Samples(skip=1) for _ in range(3))
    for _ in range(4 * samples + 1):
        with reserving.lap():
            buffer = tkv.ExtensibleTensor(case.total_bytes, memory=memory)
        with freeing.lap():
            buffer.free()
        with memory.activate():
            with raw.lap():
                address = memory.reserve(case.total_bytes)
            memory.free(address, case.total_bytes)
    settings = "ExtensibleTensor; free_us is its free(), driver_us the driver's reserve call alone"
    result = {"ok": True, "settings": settings, **reserving.summary(), "free_us": round(freeing.median_us, 2)}
    return {OURS: {**result, "driver_us": round(raw.median_us, 2)}}, 0, ()


def _handles(session: Session, memory: VirtualMemory, case: VmmCase, samples: int) -> Measured:
    steps = {name: Samples(skip=1) for name in ("create", "map", "set_access", "unmap", "release")}
    commit = Samples(skip=1)
    size, count = case.handle_bytes, case.total_bytes // case.handle_bytes
    for _ in range(samples + 1):
        with memory.activate():
            address = memory.reserve(case.total_bytes)
            places = [address + index * size for index in range(count)]
            with commit.lap():
                with steps["create"].lap():
                    handles = [memory.create(size) for _ in places]
                with steps["map"].lap():
                    for place, handle in zip(places, handles):
                        memory.map(place, size, handle)
                with steps["set_access"].lap():
                    for place in places:
                        memory.set_access(place, size)
            with steps["unmap"].lap():
                for place in places:
                    memory.unmap(place, size)
            with steps["release"].lap():
                for handle in handles:
                    memory.release(handle)
            memory.free(address, case.total_bytes)
        _scrub(session, case.total_bytes)
    ours = {"ok": True, "settings": "create + map + set_access, one call a handle", **commit.summary()}
    ours |= {f"{name}_us": round(step.median_us, 1) for name, step in steps.items()}
    return {OURS: ours}, 0, ()


def _extend(session: Session, memory: VirtualMemory, case: VmmCase, samples: int) -> Measured:
    segments, per_segment = case.num_segments, case.total_bytes // case.num_segments
    first = memory.granularity
    ours, filled, plain = Samples(skip=1), Samples(skip=2), Samples(skip=1)
    for _ in range(samples + 1):
        buffer = tkv.ExtensibleTensor(case.total_bytes, num_segments=segments, memory=memory)
        buffer.resize_per_segment_(first, zero_new=True)
        memory.synchronize()
        with ours.lap():
            buffer.resize_per_segment_(per_segment, zero_new=True)
        _require_zero(buffer)
        if session.peer_available("memset"):
            session.synchronize()
            for _ in range(2):
                with filled.lap():
                    for segment in range(segments):
                        memset(buffer.address_of(segment, first), per_segment - first)
                    session.synchronize()
        buffer.free()
        _scrub(session, case.total_bytes)
        layers = PerLayerCache(memory, max(segments // 2, 1), min(segments, 2), per_segment)
        try:
            layers.grow(first)
            with plain.lap():
                layers.grow(per_segment)
        finally:
            layers.close()
        _scrub(session, case.total_bytes)
    results = {
        OURS: {"ok": True, "settings": "resize_per_segment_(zero_new=True), host waits", **ours.summary()},
        "perlayer": {
            "ok": True,
            "settings": "a buffer a layer, two segments each: map a segment, bfloat16 zero_(), next; then wait",
            **plain.summary(),
        },
    }
    if filled.values_us:
        settings = "cuMemsetD8Async over the same ranges, already mapped; then wait"
        results["memset"] = {"ok": True, "aside": True, "settings": settings, **filled.summary()}
    return results, (per_segment - first) * segments, ("memset", "perlayer")


def _cache(session: Session, memory: VirtualMemory, case: VmmCase, samples: int) -> Measured:
    num_layers = max(case.num_segments // 2, 1)
    spec = tkv.AttentionSpec(num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    one = tkv.CacheLayout("LTBNHD", spec, num_layers=num_layers, block_size=16, capacity=1)
    blocks = case.total_bytes // one.block_bytes
    first, rest = Samples(skip=1), Samples(skip=1)
    for _ in range(samples + 1):
        with tkv.KVCache.reserve(spec, num_layers=num_layers, block_size=16, capacity=blocks, memory=memory) as cache:
            memory.synchronize()
            with first.lap():
                cache.extend(1)
            if not case.first_only:
                with rest.lap():
                    cache.extend(blocks)
        _scrub(session, 0 if case.first_only else case.total_bytes)
    chosen, written = (first, 1) if case.first_only else (rest, blocks - 1)
    ours = {"ok": True, "settings": "KVCache.extend, LTBNHD, host waits", **chosen.summary()}
    ours["first_block_us"] = round(first.median_us, 1)
    return {OURS: ours}, written * one.block_bytes, ()


def _beside(session: Session, memory: VirtualMemory, case: VmmCase, samples: int) -> Measured:
    sizes = {} if session.on_gpu else {"batch": 2, "context": 40}
    return decode_beside_extension(session, memory, case.total_bytes, **sizes), 0, ("alone",)


def _require_zero(buffer: tkv.ExtensibleTensor) -> None:
    """Looks at a byte of every 64 KiB: enough to see a segment or a granule that was left out."""
    if bool(buffer.full_view()[:: 64 << 10].any()) or bool(buffer.full_view()[-1:].any()):
        raise AssertionError("the buffer is not zero after extending")


def _scrub(session: Session, num_bytes: int) -> None:
    if session.on_gpu:
        time.sleep(SCRUB_S_PER_GIB * num_bytes / GIB)


SUITE = Suite(
    name="vmm",
    about="reserving, committing and extending memory",
    cases=(
        VmmCase("vmm/reserve-16TiB", "reserve", 16 * TIB, quick=True),
        VmmCase(
            "vmm/extend-64GiB-64seg",
            "extend",
            64 * GIB,
            num_segments=64,
            quick=True,
            goals={"memset": MOST_OVER_MEMSET},
        ),
        VmmCase("vmm/extend-80GiB-160seg", "extend", 80 * GIB, num_segments=160),
        VmmCase("vmm/cache-64GiB-32layers", "cache", 64 * GIB, num_segments=64, quick=True),
        VmmCase("vmm/cache-first-block-32layers", "cache", 64 * GIB, num_segments=64, first_only=True, quick=True),
        VmmCase("vmm/commit-1GiB-2MiB-handles", "handles", GIB, handle_bytes=2 * MIB, quick=True),
        VmmCase("vmm/commit-1GiB-32MiB-handles", "handles", GIB, handle_bytes=32 * MIB),
        VmmCase("vmm/commit-1GiB-128MiB-handles", "handles", GIB, handle_bytes=128 * MIB),
        VmmCase("vmm/commit-1GiB-one-handle", "handles", GIB, handle_bytes=GIB, quick=True),
        VmmCase("vmm/commit-64GiB-1GiB-handles", "handles", 64 * GIB, handle_bytes=GIB, samples=2),
        VmmCase("vmm/decode-beside-extend-16GiB", "beside", 16 * GIB, quick=True),
    ),
    smoke_cases=(
        VmmCase("vmm/reserve-64GiB", "reserve", 64 * GIB),
        VmmCase("vmm/extend-64MiB-4seg", "extend", 64 * MIB, num_segments=4),
        VmmCase("vmm/cache-32MiB-2layers", "cache", 32 * MIB, num_segments=4),
        VmmCase("vmm/commit-16MiB-2MiB-handles", "handles", 16 * MIB, handle_bytes=2 * MIB),
        VmmCase("vmm/decode-beside-extend-64MiB", "beside", 64 * MIB),
    ),
    run=run,
    case_s=5.2,
    quick_case_s=2.4,
    setup_s=1.0,
)

"""Caches of other states than uniform K and V: extending them, zeroing included, and zeroing a few blocks."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

import triton_kv as tkv
from bench.candidate import OURS
from bench.case_result import case_result, put_ratio
from bench.floor import floor_us
from bench.peers.memset import memset
from bench.suite import Suite
from bench.timing import Samples

if TYPE_CHECKING:
    from bench.session import Session
    from triton_kv.memory import VirtualMemory
    from triton_kv.spec import LayerSpec

MIB, GIB = 1 << 20, 1 << 30
MOST_OVER_MEMSET = 1.2  # times the fill of the same ranges: mapping hides behind the zeroing
SCRUB_S_PER_GIB = 0.02  # as in the vmm suite: creating right after a release is slow for that long

ATTENTION = tkv.AttentionSpec(num_kv_heads=2, head_dim=256, dtype=torch.bfloat16)
# The gated delta net of Qwen3-Next: 48 KiB and 2 MiB.
DELTA = tkv.MambaSpec([("conv", (3, 8192), torch.bfloat16), ("delta", (32, 128, 128), torch.float32)])
MLA = tkv.MLASpec(kv_lora_rank=512, qk_rope_head_dim=64, dtype=torch.bfloat16)


def hybrid(num_layers: int) -> dict[str, LayerSpec]:
    """Every fourth layer attends to everything, the others keep a state."""
    return {f"layers.{index}": ATTENTION if index % 4 == 3 else DELTA for index in range(num_layers)}


def latent(num_layers: int) -> dict[str, LayerSpec]:
    return {f"layers.{index}": MLA for index in range(num_layers)}


@dataclass(frozen=True)
class StateCase:
    """`model` "hybrid" or "mla"; `what` "extend" to all of it, or "zero" of `num_ids` blocks."""

    id: str
    model: str
    num_layers: int
    total_bytes: int
    block_size: int = 16
    what: str = "extend"
    packed: bool = False
    num_ids: int = 0  # zero
    samples: int = 5
    quick: bool = False


def run(session: Session, case: StateCase) -> dict[str, Any]:
    """Measures one case; times are the host's, with the device waited for."""
    memory: VirtualMemory = tkv.HostMemory() if session.smoke else tkv.open_memory(session.device)
    session.enter(case.id, OURS)
    samples = 2 if session.smoke or session.quick else case.samples
    layers = hybrid(case.num_layers) if case.model == "hybrid" else latent(case.num_layers)
    options: dict[str, Any] = {"block_size": case.block_size, "packed": case.packed, "layout": "LBTNHD"}
    with tkv.KVCache.reserve(layers, capacity=1, memory=memory, **options) as one:
        blocks = case.total_bytes // one.block_bytes
    measured = _extend if case.what == "extend" else _zero
    ours, filled, bytes_written, num_segments = measured(session, memory, case, layers, blocks, options, samples)
    results: dict[str, dict[str, Any]] = {OURS: {"ok": True, "settings": "host waits", **ours.summary()}}
    if filled.values_us:
        settings = "cuMemsetD8Async over the same ranges, one call each, already mapped; then wait"
        results["memset"] = {"ok": True, "aside": True, "settings": settings, **filled.summary()}
    result = case_result(
        case.id,
        results,
        required=("memset",),
        bytes_moved=bytes_written,
        flops=0,
        floor=floor_us(session.rooflines, bytes_written=bytes_written, kind="write"),
        parameters={
            "total_bytes": case.total_bytes,
            "num_layers": case.num_layers,
            "num_blocks": blocks,
            "num_segments": num_segments,
            "num_ids": case.num_ids,
            "packed": case.packed,
            "granularity": memory.granularity,
        },
    )
    if case.what == "extend":
        put_ratio(result, "memset", MOST_OVER_MEMSET)
    return result


Measured = tuple[Samples, Samples, int, int]


def _extend(
    session: Session,
    memory: VirtualMemory,
    case: StateCase,
    layers: dict[str, LayerSpec],
    blocks: int,
    options: dict[str, Any],
    samples: int,
) -> Measured:
    """From one block to all of them."""
    ours, filled = Samples(skip=1), Samples(skip=2)
    for _ in range(samples + 1):
        with tkv.KVCache.reserve(layers, capacity=blocks, memory=memory, **options) as cache:
            cache.extend(1)
            memory.synchronize()
            with ours.lap():
                cache.extend(blocks)
            segments = segments_of(cache)
            _require_zero(cache)
            if session.peer_available("memset"):
                for _ in range(2):
                    session.synchronize()
                    with filled.lap():
                        for address, block_bytes in segments:
                            memset(address + block_bytes, (blocks - 1) * block_bytes)
                        session.synchronize()
            written = (blocks - 1) * cache.block_bytes
        if session.on_gpu:
            time.sleep(SCRUB_S_PER_GIB * case.total_bytes / GIB)
    return ours, filled, written, len(segments)


def _zero(
    session: Session,
    memory: VirtualMemory,
    case: StateCase,
    layers: dict[str, LayerSpec],
    blocks: int,
    options: dict[str, Any],
    samples: int,
) -> Measured:
    """`zero_blocks` of blocks spread over the cache, in one launch."""
    ours, filled = Samples(skip=2), Samples(skip=2)
    with tkv.KVCache.reserve(layers, capacity=blocks, memory=memory, **options) as cache:
        cache.extend(blocks)
        chosen = [index * blocks // case.num_ids for index in range(case.num_ids)]
        ids = torch.tensor(chosen, dtype=torch.int32, device=cache.device)
        segments = segments_of(cache)
        for _ in range(4 * samples + 2):
            session.synchronize()
            with ours.lap():
                cache.zero_blocks(ids)
                session.synchronize()
        if session.peer_available("memset"):
            for _ in range(samples + 2):
                session.synchronize()
                with filled.lap():
                    for address, block_bytes in segments:
                        for block in chosen:
                            memset(address + block * block_bytes, block_bytes)
                    session.synchronize()
        written = case.num_ids * cache.block_bytes
    if session.on_gpu:
        time.sleep(SCRUB_S_PER_GIB * case.total_bytes / GIB)
    return ours, filled, written, len(segments)


def segments_of(cache: tkv.KVCache) -> list[tuple[int, int]]:
    """Address and bytes a block of every segment, from the views and the geometry."""
    starts = {}
    for layer, place in zip(cache, cache.geometry.layers):
        if isinstance(layer, tkv.LayerCache):
            first = layer.k.data_ptr()
        else:
            first = layer.states[0].data_ptr() - place.tensors[0].offset_bytes
        starts[place.buffer] = first - place.base_bytes
    return [
        (starts[number] + segment * buffer.segment_stride_bytes, buffer.block_bytes)
        for number, buffer in enumerate(cache.geometry.buffers)
        for segment in range(buffer.num_segments)
    ]


def _require_zero(cache: tkv.KVCache) -> None:
    """Looks at the ends of every block of every view: enough to see a segment or a granule that was left out."""
    for layer in cache:
        for view in (layer.k, layer.v) if isinstance(layer, tkv.LayerCache) else layer.states:
            for end in (0, -1):
                column = view
                for _ in view.shape[1:]:
                    column = column[:, end]
                if not bool(column.any()):
                    continue
                raise AssertionError(f"layer {layer.name} is not zero after extending")


SUITE = Suite(
    name="states",
    about="extending and zeroing hybrid and MLA caches",
    cases=(
        StateCase("states/extend-hybrid-48layers-64GiB", "hybrid", 48, 64 * GIB, quick=True),
        StateCase("states/extend-mla-61layers-64GiB", "mla", 61, 64 * GIB, block_size=64),
        StateCase("states/extend-hybrid-48layers-64GiB-packed", "hybrid", 48, 64 * GIB, packed=True),
        StateCase("states/zero-hybrid-48layers-8blocks", "hybrid", 48, 8 * GIB, what="zero", num_ids=8),
        StateCase("states/zero-mla-61layers-64blocks", "mla", 61, 8 * GIB, block_size=64, what="zero", num_ids=64),
    ),
    smoke_cases=(
        StateCase("states/extend-hybrid-4layers-64MiB", "hybrid", 4, 64 * MIB),
        StateCase("states/extend-mla-3layers-16MiB", "mla", 3, 16 * MIB, block_size=64),
        StateCase("states/zero-hybrid-4layers-2blocks", "hybrid", 4, 64 * MIB, what="zero", num_ids=2),
    ),
    run=run,
    case_s=6.0,
    quick_case_s=6.0,
    setup_s=1.0,
)

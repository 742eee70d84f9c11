"""Sleep and wake, with contents dropped or kept on the host, against the link's own speed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

import triton_kv as tkv
from bench.candidate import OURS
from bench.case_result import case_result
from bench.suite import Suite
from bench.timing import Samples

if TYPE_CHECKING:
    from bench.session import Session
    from triton_kv.memory import VirtualMemory

MIB, GIB = 1 << 20, 1 << 30
SCRUB_S_PER_GIB = 0.02  # the driver scrubs released memory in the background, and creating right after is slow
LINK_BYTES = 1 * GIB
SPEC = tkv.AttentionSpec(num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)


@dataclass(frozen=True)
class SleepCase:
    """A cache of so many bytes; `keep` as in `KVCache.sleep`, `live` is the share of blocks kept, scattered.

    Scattered blocks pass through staging memory, or, unless `staged`, kernels reach over the link: what happens where
    no device memory is left.
    """

    id: str
    total_bytes: int
    keep: str | None = None
    live: float | None = None
    num_layers: int = 32
    layout: str = "LTBNHD"
    staged: bool = True
    samples: int = 5
    quick: bool = False


def run(session: Session, case: SleepCase) -> dict[str, Any]:
    """Measures sleep; wake is beside it. With contents kept, the floor is the copy at the link's measured speed."""
    memory: VirtualMemory = tkv.HostMemory(budget_bytes=GIB) if session.smoke else tkv.open_memory(session.device)
    session.enter(case.id, OURS)
    samples = 2 if session.smoke or session.quick else case.samples
    one = tkv.CacheLayout(case.layout, SPEC, num_layers=case.num_layers, block_size=16, capacity=1)
    capacity = case.total_bytes // one.block_bytes
    sleeping, waking, saving, restoring, mapping = (Samples(skip=1) for _ in range(5))
    options: dict[str, Any] = {}
    with tkv.KVCache.reserve(
        SPEC, num_layers=case.num_layers, block_size=16, capacity=capacity, memory=memory, layout=case.layout
    ) as cache:
        cache.extend(capacity)
        if not case.staged:
            cache._store._stage = lambda half_bytes: None  # type: ignore[method-assign]
        if case.live is not None:
            order = torch.randperm(capacity, generator=torch.Generator().manual_seed(0))
            options["live"] = order[: int(capacity * case.live)].tolist()
        pin_seconds = cache.prepare_sleep(len(options.get("live", range(capacity)))) if case.keep else 0.0
        host_bytes = 0
        for _ in range(samples + 1):
            with sleeping.lap():
                report = cache.sleep(case.keep, **options)
            host_bytes = report.host_bytes
            saving.add(report.copy_seconds * 1e6)
            _scrub(session, case.total_bytes)
            with waking.lap():
                woken = cache.wake()
            restoring.add(woken.copy_seconds * 1e6)
            mapping.add(woken.map_seconds * 1e6)
    results = {
        "wake_us": round(waking.median_us, 1),
        "wake_map_and_zero_us": round(mapping.median_us, 1),
        "freed_bytes": int(report.freed),
    }
    floor = None
    if case.keep:
        link = link_gbps(session, memory)
        copies = {"save": saving.median_us, "restore": restoring.median_us}
        for name, median_us in copies.items():
            results[f"{name}_us"] = round(median_us, 1)
            results[f"{name}_gbps"] = round(host_bytes / median_us / 1e3, 2)
            results[f"{name}_of_link"] = round(host_bytes / median_us / 1e3 / link[name], 3)
        results |= {"link_save_gbps": link["save"], "link_restore_gbps": link["restore"]}
        results["pin_us"] = round(pin_seconds * 1e6, 1)
        floor = round(host_bytes / link["save"] / 1e3, 3)
    settings = "KVCache.sleep, host waits; pinned and staging memory made beforehand (pin_us)"
    parameters = {
        "total_bytes": case.total_bytes,
        "keep": case.keep,
        "live": case.live,
        "num_layers": case.num_layers,
        "layout": case.layout,
        "staged": case.staged,
    }
    return case_result(
        case.id,
        {OURS: {"ok": True, "settings": settings, **sleeping.summary(), **results}},
        required=(),
        bytes_moved=host_bytes,
        flops=0,
        floor=floor,
        parameters=parameters,
    )


def link_gbps(session: Session, memory: VirtualMemory) -> dict[str, float]:
    """What one large copy reaches in each direction between plain device memory and pinned host memory."""
    num_bytes = LINK_BYTES if session.on_gpu else 16 * MIB
    plain = torch.empty(num_bytes, dtype=torch.uint8, device=session.device)
    session.synchronize()
    found = {}
    with memory.activate():
        pinned = memory.pin(num_bytes)
        try:
            for name, target, source in (
                ("restore", plain.data_ptr(), pinned),
                ("save", pinned, plain.data_ptr()),
            ):
                lap = Samples(skip=2)
                for _ in range(7):
                    with lap.lap():
                        memory.copy(target, source, num_bytes)
                        memory.wait()
                found[name] = round(num_bytes / lap.median_us / 1e3, 2)
        finally:
            memory.unpin(pinned, num_bytes)
    return found


def _scrub(session: Session, num_bytes: int) -> None:
    if session.on_gpu:
        time.sleep(SCRUB_S_PER_GIB * num_bytes / GIB)


SUITE = Suite(
    name="sleep",
    about="sleep and wake, with contents dropped or kept on the host",
    cases=(
        SleepCase("sleep/drop-32GiB", 32 * GIB, samples=3, quick=True),
        SleepCase("sleep/host-4GiB", 4 * GIB, keep="host", quick=True),
        SleepCase("sleep/host-4GiB-LHBNTD", 4 * GIB, keep="host", layout="LHBNTD"),
        SleepCase("sleep/host-4GiB-80layers", 4 * GIB, keep="host", num_layers=80),
        SleepCase("sleep/host-8GiB-quarter-live", 8 * GIB, keep="host", live=0.25, quick=True),
        SleepCase("sleep/host-8GiB-quarter-live-LHBNTD", 8 * GIB, keep="host", live=0.25, layout="LHBNTD", quick=True),
        SleepCase("sleep/host-1GiB-quarter-live-LHBNTD", 1 * GIB, keep="host", live=0.25, layout="LHBNTD"),
        SleepCase("sleep/host-8GiB-quarter-live-unstaged", 8 * GIB, keep="host", live=0.25, staged=False),
        SleepCase(
            "sleep/host-8GiB-quarter-live-unstaged-LHBNTD",
            8 * GIB,
            keep="host",
            live=0.25,
            layout="LHBNTD",
            staged=False,
        ),
    ),
    smoke_cases=(
        SleepCase("sleep/drop-32MiB", 32 * MIB, num_layers=2),
        SleepCase("sleep/host-32MiB", 32 * MIB, keep="host", num_layers=2),
        SleepCase("sleep/host-32MiB-live", 32 * MIB, keep="host", live=0.25, num_layers=2),
        SleepCase("sleep/host-32MiB-live-LHBNTD", 32 * MIB, "host", 0.25, num_layers=2, layout="LHBNTD", staged=False),
    ),
    run=run,
    case_s=5.0,
    quick_case_s=4.0,
    setup_s=1.0,
)

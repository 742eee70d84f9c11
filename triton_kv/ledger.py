"""What takes a device's memory before the cache may have the rest: one reading at each end of a named stage."""

from __future__ import annotations

import json
import logging
import os
import time
import weakref
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch

from triton_kv.memory import names_device, open_memory
from triton_kv.memory.wrapper import WrappedMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from triton_kv.cache import KVCache
    from triton_kv.memory import VirtualMemory

logger = logging.getLogger(__name__)

GIB = 1 << 30
MIB = 1 << 20

# The stages that a ledger knows, and how far along each is. Stages of other names may lie anywhere.
STAGES = {"start": 0, "weights": 1, "first block": 2, "profile run": 2, "capture": 3, "extend": 4}
# Less than this between two readings is the driver's own housekeeping, not a neighbour.
TOLERANCE_BYTES = 16 * MIB


@dataclass(frozen=True)
class MemoryReading:
    """One look at the device: the driver's numbers, and those of torch's allocator in this process."""

    free_bytes: int
    total_bytes: int
    allocated_bytes: int = 0  # torch: in tensors that live
    reserved_bytes: int = 0  # torch: taken from the driver, free or not
    peak_bytes: int = 0  # torch: most ever in tensors since the peak was reset
    reusable_bytes: int = 0  # torch: reserved, free, and outside the private pools of graphs
    neighbour_bytes: int | None = None  # held by other processes; None where the driver does not tell

    @property
    def used_bytes(self) -> int:
        return max(self.total_bytes - self.free_bytes, 0)


class MemoryReader:
    """Reads a device's memory through its driver, torch's allocator and, where it tells, NVML."""

    def __init__(self, memory: VirtualMemory) -> None:
        self.memory = memory
        self.device = memory.device

    def reset_peak(self) -> None:
        if self._torch_holds_memory():
            torch.cuda.reset_peak_memory_stats(self.device)

    def read(self, last: MemoryReading | None = None) -> MemoryReading:
        """Synchronises the device first.

        `last`, a reading shortly before, makes it fast: NVML is not asked again, nor the allocator for its segments
        where its counters did not move.
        """
        with self.memory.activate():
            self.memory.synchronize()
            free_bytes, total_bytes = self.memory.memory_info()
        if not self._torch_holds_memory():
            return MemoryReading(free_bytes, total_bytes)
        stats = torch.cuda.memory_stats(self.device)
        allocated = stats.get("allocated_bytes.all.current", 0)
        reserved = stats.get("reserved_bytes.all.current", 0)
        unchanged = last is not None and (last.allocated_bytes, last.reserved_bytes) == (allocated, reserved)
        reusable = last.reusable_bytes if last is not None and unchanged else self._reusable_bytes()
        neighbours = last.neighbour_bytes if last is not None else _neighbour_bytes(self.device)
        return MemoryReading(
            free_bytes,
            total_bytes,
            allocated_bytes=allocated,
            reserved_bytes=reserved,
            peak_bytes=stats.get("allocated_bytes.all.peak", 0),
            reusable_bytes=reusable,
            neighbour_bytes=neighbours,
        )

    def _torch_holds_memory(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_initialized()

    def _reusable_bytes(self) -> int:
        """What eager work can have again without asking the driver. A graph's private pool is not for eager work."""
        try:
            segments = torch.cuda.memory_snapshot()
        except RuntimeError:  # the cudaMallocAsync backend keeps no such books: count nothing as reusable
            return 0
        return sum(
            segment["total_size"] - segment["active_size"]
            for segment in segments
            if segment["device"] == self.device.index and tuple(segment.get("segment_pool_id", (0, 0))) == (0, 0)
        )


def _neighbour_bytes(device: torch.device) -> int | None:
    """What other processes hold, by NVML; None where it is missing, or does not see this process (in a container)."""
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
            held = {
                process.pid: process.usedGpuMemory for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
            }
        finally:
            pynvml.nvmlShutdown()
    except Exception as error:  # its errors have no common base across versions; without it gaps are compared instead
        logger.debug("NVML does not tell who holds memory: %s", error)
        return None
    if os.getpid() not in held or any(not isinstance(num_bytes, int) for num_bytes in held.values()):
        return None
    return sum(num_bytes for pid, num_bytes in held.items() if pid != os.getpid())


@dataclass(frozen=True)
class StageRecord:
    """A stage as measured at its end. The five amounts of memory add up to the device's total."""

    name: str
    note: str
    seconds: float
    free_bytes: int
    total_bytes: int
    torch_bytes: int  # reserved by torch's allocator: weights, activations, private pools of graphs
    cache_bytes: int  # held by the caches that the ledger watches: mapped, and kept in their pools
    other_bytes: int  # what stages took besides: workspaces, communicators, modules, the driver's part of graphs
    outside_bytes: int  # in use before the ledger began, and by neighbours
    peak_beyond_bytes: int  # torch's peak during the stage beyond what stayed
    reusable_bytes: int = 0  # of torch_bytes: free, and outside the private pools of graphs
    num_blocks: int = 0  # committed in the caches watched
    failed: bool = False  # an exception ended it

    @property
    def mapped_bytes(self) -> int:
        return self.cache_bytes


@dataclass(frozen=True)
class MemoryReservation:
    """Memory that will live beside the cache later."""

    name: str
    num_bytes: int
    held: bool  # it was held during the profile run, so torch's peak holds it too


class MemoryLedger:
    """Memory over an engine's start-up, stage by stage, for `plan_blocks`.

    ```python
    ledger = MemoryLedger("cuda")
    with ledger.stage("weights"): ...
    with ledger.stage("first block"): cache = ...; cache.extend(1); ledger.watch(cache)
    with ledger.stage("profile run"): ...      # the largest step there can be
    with ledger.stage("capture"): ...          # and every graph replayed once
    cache.extend(plan_blocks(cache, ledger))
    ```

    Every reading synchronises the device. A stage resets torch's peak counters when it begins. Memory that another
    process takes or gives back between two readings is no stage's: it is told from the gap between stages (and inside
    them where NVML sees the processes), logged as a warning, and kept in `warnings`. No amount is ever negative.

    Args:
        device: None is the memory's device, or as in `open_memory`.
        memory: a driver of your own choice instead of the device's.
        reader: what reads; by default the driver and torch's allocator.
        on_stage: called with each `StageRecord`.
    """

    def __init__(
        self,
        device: torch.device | str | None = None,
        *,
        memory: VirtualMemory | None = None,
        reader: MemoryReader | None = None,
        on_stage: Callable[[StageRecord], None] | None = None,
    ) -> None:
        if reader is None:
            reader = MemoryReader(open_memory(device) if memory is None else memory)
        if not names_device(device, reader.device):
            raise ValueError(f"device {device!s} and the memory's device {reader.device!s} differ; name one of them")
        self._reader = reader
        self._on_stage = on_stage
        self._caches: list[weakref.ref[KVCache]] = []
        self._reservations: dict[str, MemoryReservation] = {}
        self._held: dict[str, torch.Tensor] = {}
        self._open: str | None = None
        self._done: list[str] = []
        self._other_bytes = 0
        self._taken: dict[str, int] = {}  # by stage: what it took for good, torch's part and the rest
        self._last = reader.read()
        self._last_cache_bytes = 0
        self.start = self._last
        self.stages: list[StageRecord] = []
        self.warnings: list[str] = []

    @property
    def device(self) -> torch.device:
        return self._reader.device

    def watch(self, cache: KVCache) -> bool:
        """Counts what a cache holds as the cache's; False if it did so before. The cache is not kept alive.

        Call it where the cache is made. One that holds memory already makes a reading (synchronises): what was there
        at the last one was taken for a stage's other memory, and moves to the cache from the next record on. Raises
        `ValueError` for a cache of another device, on a CPU of another driver object.
        """
        require_one_device([cache], self)
        if any(known is cache for known in self._watched()):
            return False
        if held_bytes := _held_bytes(cache):
            reading = self._reader.read(self._last)
            came = self._unexplained(self._last, self._last_cache_bytes, reading, self._cache_bytes())
            there = held_bytes - min(max(came, 0), held_bytes)
            self._last_cache_bytes += there
            self._other_bytes = max(self._other_bytes - there, 0)
        self._caches.append(weakref.ref(cache))
        return True

    # Stages.

    @contextmanager
    def stage(self, name: str) -> Iterator[list[str]]:
        """Reads memory before and after the body; what the body appends to the list yielded is the stage's note.

        The names of `STAGES` may be used once each and in their order (the first block and the profile run in either);
        any other name may be used at any time. A stage that an exception ends is recorded as failed and may be
        repeated. Raises `ValueError` for a stage inside another or out of order.
        """
        self._check_order(name)
        self._observe_gap(self._reader.read())
        self._reader.reset_peak()
        self._open = name
        notes: list[str] = []
        started = time.perf_counter()
        try:
            yield notes
        except BaseException as error:
            self._open = None
            try:
                self._finish(name, notes, started, failed=True)
            except Exception as failure:  # a device that is lost cannot be read either; the first error matters
                error.add_note(f"and then memory could not be read: {failure}")
            raise
        self._open = None
        self._finish(name, notes, started, failed=False)
        self._done.append(name)

    def _check_order(self, name: str) -> None:
        if self._open is not None:
            raise ValueError(f"stage {name!r} inside stage {self._open!r}: end that one first")
        if name not in STAGES:
            return
        if name in self._done:
            raise ValueError(f"stage {name!r} was recorded already: make a new ledger for another start-up")
        later = [done for done in self._done if STAGES.get(done, -1) > STAGES[name]]
        if later:
            raise ValueError(f"stage {name!r} after stage {later[-1]!r}: the order is {', '.join(STAGES)}")

    def _finish(self, name: str, notes: Sequence[str], started: float, failed: bool) -> None:
        if name == "profile run" and not failed:
            self._held.clear()  # held long enough: the peak knows them
        before, cache_before = self._last, self._last_cache_bytes
        reading = self._reader.read()
        seconds = time.perf_counter() - started
        cache_bytes = self._cache_bytes()
        came = _change(before.neighbour_bytes, reading.neighbour_bytes)
        grown = self._unexplained(before, cache_before, reading, cache_bytes) - came
        if grown < -TOLERANCE_BYTES:
            self._warn(f"during {name!r} {-grown / MIB:.0f} MiB came free that neither torch nor a cache held")
        if abs(came) > TOLERANCE_BYTES:
            self._warn(f"during {name!r} other processes {_took(came)}")
        self._taken[name] = max(grown, 0) + max(_torch_kept(reading) - _torch_kept(before), 0)
        self._other_bytes += max(grown, 0)
        self._last, self._last_cache_bytes = reading, cache_bytes
        self.stages.append(
            self._record(
                name,
                reading,
                note="; ".join(notes),
                seconds=seconds,
                peak_beyond_bytes=max(reading.peak_bytes - reading.allocated_bytes, 0),
                failed=failed,
            )
        )
        if self._on_stage is not None:
            self._on_stage(self.stages[-1])

    def _record(self, name: str, reading: MemoryReading, **fields: object) -> StageRecord:
        """Splits what is in use: what torch and the caches hold is known, the rest is the stages' or outside."""
        used = reading.used_bytes
        cache_bytes = min(self._last_cache_bytes, used)
        torch_bytes = min(reading.reserved_bytes, used - cache_bytes)
        other_bytes = self._other_bytes = min(self._other_bytes, used - cache_bytes - torch_bytes)
        return StageRecord(
            name=name,
            free_bytes=reading.free_bytes,
            total_bytes=reading.total_bytes,
            torch_bytes=torch_bytes,
            cache_bytes=cache_bytes,
            other_bytes=other_bytes,
            outside_bytes=used - cache_bytes - torch_bytes - other_bytes,
            reusable_bytes=min(reading.reusable_bytes, torch_bytes),
            num_blocks=sum(cache.num_blocks for cache in self._watched()),
            **fields,  # type: ignore[arg-type]
        )

    def _observe_gap(self, reading: MemoryReading) -> None:
        """Between two stages only others change memory that neither torch nor a cache of ours holds."""
        cache_bytes = self._cache_bytes()
        change = self._unexplained(self._last, self._last_cache_bytes, reading, cache_bytes)
        if abs(change) > TOLERANCE_BYTES:
            after = f"after {self.stages[-1].name!r}" if self.stages else "before the first stage"
            self._warn(f"{after}, outside any stage, others {_took(change)}")
        self._last, self._last_cache_bytes = reading, cache_bytes

    @staticmethod
    def _unexplained(before: MemoryReading, cache_before: int, after: MemoryReading, cache_after: int) -> int:
        """Growth of the memory in use that is neither torch's nor a cache's; negative where memory came free."""
        by_torch = after.reserved_bytes - before.reserved_bytes
        return before.free_bytes - after.free_bytes - by_torch - (cache_after - cache_before)

    def _warn(self, text: str) -> None:
        self.warnings.append(text)
        logger.warning("%s: another process shares the device, so a plan is right only for the moment it is made", text)

    def _watched(self) -> list[KVCache]:
        return [cache for reference in self._caches if (cache := reference()) is not None]

    def _cache_bytes(self) -> int:
        return sum(_held_bytes(cache) for cache in self._watched())

    # What will live beside the cache.

    def reserve(self, name: str, what: int | torch.Tensor) -> None:
        """Keeps room for memory that lives beside the cache later: an encoder cache, a logits gather, a workspace.

        A number of bytes is announced: the plan leaves exactly as much free. A tensor on the ledger's device is held
        until the profile run has succeeded, so that torch's peak holds it (on a CPU there is no such peak: announce its
        bytes). Nothing is kept for zero bytes. Raises `ValueError`
        for negative sizes, a name used twice, a tensor of another device or after the profile run.
        """
        if isinstance(what, bool) or not isinstance(what, (int, torch.Tensor)):
            raise TypeError(f"a reservation is a tensor or a number of bytes, not {what!r}")
        num_bytes = what if isinstance(what, int) else what.nbytes
        if num_bytes < 0:
            raise ValueError(f"the reservation {name!r} must not be negative, got {num_bytes} bytes")
        if name in self._reservations:
            raise ValueError(f"the reservation {name!r} exists: withdraw it first, or choose another name")
        if isinstance(what, torch.Tensor):
            if what.device.type != self.device.type or (what.is_cuda and what.device != self.device):
                raise ValueError(f"the reservation {name!r} lies on {what.device!s}, the ledger is of {self.device!s}")
            if "profile run" in self._done:
                raise ValueError(f"the profile run is over: announce {name!r} by its {num_bytes} bytes instead")
        if num_bytes == 0:
            return
        held = isinstance(what, torch.Tensor)
        self._reservations[name] = MemoryReservation(name, num_bytes, held=held)
        if isinstance(what, torch.Tensor):
            self._held[name] = what

    def withdraw(self, name: str) -> None:
        """Forgets a reservation, once the memory was really taken or is not needed. Raises `KeyError`."""
        if self._reservations.pop(name, None) is None:
            raise KeyError(f"no reservation {name!r}: there are {', '.join(self._reservations) or 'none'}")
        self._held.pop(name, None)

    @property
    def reservations(self) -> tuple[MemoryReservation, ...]:
        return tuple(self._reservations.values())

    # What a plan needs.

    @property
    def announced_bytes(self) -> int:
        """Reservations by number: no reading knows them."""
        return sum(reservation.num_bytes for reservation in self.reservations if not reservation.held)

    @property
    def graph_bytes(self) -> int:
        """What capture (and replaying every graph once) took: pools, workspaces, communicator buffers.

        Counted from the beginning of the stage. Memory that torch holds ready for reuse counts at neither end: a
        capture begins by giving it back.
        """
        return self._taken["capture"] if self.find("capture") else 0

    def find(self, name: str) -> StageRecord | None:
        """The stage of this name, if it was completed."""
        return next((stage for stage in self.stages if stage.name == name and not stage.failed), None)

    def activation_bytes(self, reading: MemoryReading) -> int:
        """What a step needs again and torch's allocator does not hold ready: the profile run's peak beyond what stayed,
        less what is reserved and reusable now. Raises `ValueError` without a profile run."""
        if (profile := self.find("profile run")) is None:
            raise ValueError("the ledger has no stage 'profile run': record one, or pass activation_bytes")
        return max(profile.peak_beyond_bytes - reading.reusable_bytes, 0)

    def read(self) -> MemoryReading:
        """A reading now, outside any stage (synchronises). Raises `ValueError` while a stage is open."""
        if self._open is not None:
            raise ValueError(f"stage {self._open!r} is still open: end it before the plan")
        reading = self._reader.read(self._last)
        self._observe_gap(reading)
        return reading

    def to_json(self) -> str:
        return json.dumps(
            {
                "device": str(self.device),
                "start": asdict(self.start),
                "stages": [asdict(stage) for stage in self.stages],
                "reservations": [asdict(reservation) for reservation in self.reservations],
                "warnings": self.warnings,
            },
            indent=1,
        )

    def __str__(self) -> str:
        return stage_table(self.stages)


def stage_table(stages: Sequence[StageRecord]) -> str:
    """Stages as lines: seconds, then GiB held at the end of each by torch, caches, others of this process, outside."""
    lines = [
        f"{'stage':<18} {'s':>8} {'torch':>8} {'cache':>8} {'other':>8} {'outside':>8} {'free':>8} {'peak +':>8}  GiB"
    ]
    for stage in stages:
        amounts = (stage.torch_bytes, stage.cache_bytes, stage.other_bytes, stage.outside_bytes, stage.free_bytes)
        numbers = " ".join(f"{num_bytes / GIB:>8.3f}" for num_bytes in (*amounts, stage.peak_beyond_bytes))
        name = f"{stage.name} (failed)" if stage.failed else stage.name
        lines.append(f"{name:<18} {stage.seconds:>8.3f} {numbers}  {stage.note}".rstrip())
    return "\n".join(lines)


def require_one_device(caches: Sequence[KVCache], ledger: MemoryLedger | None = None) -> None:
    """Raises `ValueError` unless all live on one device; on a CPU each driver object is a device of its own."""
    devices = {cache.device for cache in caches}
    if len(devices) > 1 or (ledger is not None and devices - {ledger.device}):
        owner = f"the ledger is of {ledger.device!s}, " if ledger is not None else ""
        raise ValueError(
            f"{owner}the caches live on {', '.join(sorted(map(str, devices)))}: plan each device by itself"
        )
    if devices != {torch.device("cpu")}:
        return
    memories = [cache._store.memory for cache in caches] + ([ledger._reader.memory] if ledger is not None else [])
    if len({id(_driver(memory)) for memory in memories}) > 1:
        what = "the ledger and the cache" if ledger is not None else "the caches"
        raise ValueError(f"{what} use different memory objects of the CPU: pass the same `memory` to each of them")


def _driver(memory: VirtualMemory) -> VirtualMemory:
    while isinstance(memory, WrappedMemory):
        memory = memory.memory
    return memory


def _torch_kept(reading: MemoryReading) -> int:
    """What torch's allocator holds and would not give back: tensors, and the private pools of graphs."""
    return reading.reserved_bytes - reading.reusable_bytes


def _held_bytes(cache: KVCache) -> int:
    """What the driver counts as taken by a cache: mapped, pooled, and not given back yet."""
    stats = cache.stats()
    return stats.mapped_bytes + stats.pooled_bytes + stats.stray_bytes


def _change(before: int | None, after: int | None) -> int:
    return after - before if before is not None and after is not None else 0


def _took(change: int) -> str:
    return f"{'took' if change > 0 else 'gave back'} {abs(change) / MIB:.0f} MiB"

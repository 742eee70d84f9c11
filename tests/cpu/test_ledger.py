"""The ledger's arithmetic over readings that are given, and over a real driver."""

import json
import logging
import os
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import triton_kv as tkv
from triton_kv.ledger import TOLERANCE_BYTES

MIB = 1 << 20
TOTAL = 1000 * MIB


class Script(tkv.MemoryReader):
    """Readings as told: used by whom, in MiB; each read takes the present state."""

    def __init__(self):
        super().__init__(tkv.FakeMemory())
        self.outside, self.reserved, self.allocated, self.peak, self.reusable, self.neighbours = 50, 0, 0, 0, 0, None
        self.other = 0

    def reset_peak(self):
        self.peak = self.allocated

    def read(self, last=None):
        neighbours = None if self.neighbours is None else self.neighbours * MIB
        used = min(self.outside + self.reserved + self.other, 1000)
        numbers = (self.allocated, self.reserved, max(self.peak, self.allocated), self.reusable)
        return tkv.MemoryReading(TOTAL - used * MIB, TOTAL, *(number * MIB for number in numbers), neighbours)


def start_up(script, ledger, *, graphs=40, workspace=24):
    """Weights of 200 MiB, a step that needs 100 more, graphs with a pool of 40 and 24 outside torch."""
    with ledger.stage("weights"):
        script.reserved = script.allocated = 200
    with ledger.stage("profile run"):
        script.reserved, script.peak, script.reusable = 300, 300, 100
    with ledger.stage("capture"):
        script.reserved, script.allocated = 300 + graphs, 200 + graphs
        script.other += workspace


def test_every_byte_has_an_owner():
    script = Script()
    ledger = tkv.MemoryLedger(reader=script)
    start_up(script, ledger)
    rows = [
        (
            stage.name,
            stage.torch_bytes,
            stage.other_bytes,
            stage.outside_bytes,
            stage.free_bytes,
            stage.peak_beyond_bytes,
        )
        for stage in ledger.stages
    ]
    assert [(name, *(number // MIB for number in numbers)) for name, *numbers in rows] == [
        ("weights", 200, 0, 50, 750, 0),
        ("profile run", 300, 0, 50, 650, 100),
        ("capture", 340, 24, 50, 586, 0),
    ]
    assert ledger.graph_bytes == 64 * MIB
    assert ledger.warnings == []
    assert ledger.activation_bytes(ledger.read()) == 0, "torch still holds what the profile run needed"
    script.reserved, script.reusable = 240, 0  # empty_cache()
    assert ledger.activation_bytes(ledger.read()) == 100 * MIB
    for text in ("weights", "capture", "torch", "0.195"):
        assert text in str(ledger)
    loaded = json.loads(ledger.to_json())
    assert [stage["name"] for stage in loaded["stages"]] == ["weights", "profile run", "capture"]
    assert loaded["start"]["free_bytes"] == 950 * MIB


def change(attribute, mib):
    def apply(script):
        setattr(script, attribute, getattr(script, attribute) + mib)

    return apply


NEIGHBOURS = {  # when, what, the warning
    "one comes between stages": ("between", change("outside", 256), "outside any stage, others took 256 MiB"),
    "one goes between stages": ("between", change("outside", -40), "outside any stage, others gave back 40 MiB"),
    "one goes during a stage": ("inside", change("outside", -40), "during 'capture' 40 MiB came free"),
    "the driver's own noise": ("between", change("outside", 8), None),
    "noise downwards": ("inside", change("outside", -8), None),
}


@pytest.mark.parametrize(("when", "what", "warning"), NEIGHBOURS.values(), ids=NEIGHBOURS.keys())
def test_a_neighbour_is_seen_and_is_nobodys_growth(caplog, when, what, warning):
    script = Script()
    ledger = tkv.MemoryLedger(reader=script)
    with ledger.stage("weights"):
        script.reserved = script.allocated = 200
    if when == "between":
        what(script)
    with caplog.at_level(logging.WARNING), ledger.stage("capture"):
        script.other = 20 if when == "between" else 0
        if when == "inside":
            what(script)
    assert ledger.graph_bytes == (20 * MIB if when == "between" else 0)
    assert_sound(ledger)
    if warning is None:
        assert ledger.warnings == []
    else:
        assert len(ledger.warnings) == 1
        assert warning in ledger.warnings[0]
        assert "another process shares the device" in caplog.text


@pytest.mark.parametrize("mib", [300, -45], ids=["comes", "goes"])
def test_a_neighbour_inside_a_stage_where_the_driver_tells(mib):
    script = Script()
    script.neighbours = 50
    ledger = tkv.MemoryLedger(reader=script)
    with ledger.stage("capture"):
        script.other = 24
        script.outside += mib
        script.neighbours += mib
    assert ledger.graph_bytes == 24 * MIB
    assert ("took 300" if mib > 0 else "gave back 45") in ledger.warnings[0]
    assert_sound(ledger)


def test_memory_given_back_before_a_capture_does_not_hide_what_graphs_take():
    script = Script()
    ledger = tkv.MemoryLedger(reader=script)
    with ledger.stage("profile run"):
        script.reserved, script.allocated, script.reusable = 300, 200, 100
    with ledger.stage("capture"):
        script.reserved, script.reusable = 240, 0  # 100 given back as it begins, 40 for the graphs' pools
    assert ledger.graph_bytes == 40 * MIB
    assert_sound(ledger)


def test_graphs_are_measured_from_the_beginning_of_the_capture():
    """Neither what torch held before the first stage nor what it took between two stages is the graphs'."""
    script = Script()
    script.reserved = script.allocated = 500
    first = tkv.MemoryLedger(reader=script)
    with first.stage("capture"):
        script.reserved += 40
    assert first.graph_bytes == 40 * MIB
    later = tkv.MemoryLedger(reader=script)
    with later.stage("profile run"):
        pass
    script.reserved += 100
    with later.stage("capture"):
        script.reserved += 40
        script.other += 24
    assert later.graph_bytes == 64 * MIB


def assert_sound(ledger):
    for stage in ledger.stages:
        amounts = stage.torch_bytes, stage.cache_bytes, stage.other_bytes, stage.outside_bytes, stage.free_bytes
        assert min(*amounts, stage.peak_beyond_bytes, stage.reusable_bytes) >= 0
        assert sum(amounts) == stage.total_bytes


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 400)] * 6, st.booleans()), min_size=1, max_size=6))
def test_no_reading_makes_a_negative_amount(states):
    """Anything may happen between two readings, also what cannot: allocators that hold more than is in use."""
    script = Script()
    ledger = tkv.MemoryLedger(reader=script)
    for outside, reserved, allocated, peak, other, reusable, inside in states:
        with ledger.stage("anything"):
            if inside:
                script.other = other
            script.reserved, script.allocated, script.peak, script.reusable = reserved, allocated, peak, reusable
        script.outside = outside
    assert_sound(ledger)
    assert ledger.graph_bytes >= 0


def test_the_cache_is_told_from_the_rest():
    memory = tkv.HostMemory(4096, budget_bytes=MIB)
    spec = tkv.AttentionSpec(num_kv_heads=2, head_dim=16, dtype=torch.float32)
    heard = []
    ledger = tkv.MemoryLedger(memory=memory, on_stage=heard.append)
    with ledger.stage("first block") as notes:
        cache = tkv.KVCache.reserve(spec, block_size=16, num_layers=2, memory=memory)
        ledger.watch(cache)
        cache.extend(1)
        notes += ["one", "block"]
    with ledger.stage("extend"):
        cache.extend(100)
    first, second = ledger.stages
    assert heard == ledger.stages
    assert (first.cache_bytes, first.num_blocks, first.note) == (4 * 4096, 1, "one; block")
    assert (second.cache_bytes, second.num_blocks) == (cache.mapped_bytes, 100)
    assert first.other_bytes == second.other_bytes == 0
    assert second.free_bytes == memory.memory_info()[0]
    assert_sound(ledger)
    del cache
    assert ledger._watched() == [], "the ledger must not keep a cache alive"


CACHE_MIB, WORKSPACE_MIB = 128, 40  # 1 MiB granules in each of 128 segments


def grown_cache(memory, **options):
    spec = tkv.AttentionSpec(num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    return tkv.KVCache.reserve(spec, block_size=16, num_layers=64, memory=memory, capacity=1024, **options).extend(1)


WATCHED = {  # where the cache grows, where it is watched
    "before the ledger": ("before", "after"),
    "in the stage, watched after it": ("inside", "after"),
    "in the stage, watched two stages on": ("inside", "late"),
    "in the stage, watched in it": ("inside", "inside"),
    "between the stages": ("after", "after"),
    "between the stages, watched in the next": ("after", "capture"),
    "in the first stage, watched in the next": ("inside", "capture"),
}


@pytest.mark.parametrize(("grows", "watched"), WATCHED.values(), ids=WATCHED.keys())
def test_a_cache_watched_late_is_no_neighbour(grows, watched):
    memory = tkv.FakeMemory(MIB, budget_bytes=TOTAL)
    memory.create(50 * MIB)
    caches = []

    def at(point):
        if grows == point:
            caches.append(grown_cache(memory))
        if watched == point:
            ledger.watch(caches[0])
            ledger.watch(caches[0])

    ledger = None
    at("before")
    ledger = tkv.MemoryLedger(memory=memory)
    with ledger.stage("first block"):
        at("inside")
    if (grows, watched) == ("after", "capture"):
        # What grew unseen is a neighbour's until it is named: no reading can tell.
        at("after")
        with ledger.stage("capture"):
            at("capture")
        assert len(ledger.warnings) == 1
        assert ledger.stages[-1].cache_bytes == CACHE_MIB * MIB
        return
    at("after")
    with ledger.stage("capture"):
        at("capture")
        memory.create(WORKSPACE_MIB * MIB)
    at("late")
    with ledger.stage("anything"):
        pass
    assert ledger.warnings == []
    last = ledger.stages[-1]
    assert last.cache_bytes == CACHE_MIB * MIB
    assert last.cache_bytes + last.other_bytes + last.outside_bytes == (50 + CACHE_MIB + WORKSPACE_MIB) * MIB
    if watched != "capture":
        assert ledger.graph_bytes == WORKSPACE_MIB * MIB
    if grows != "before" and watched != "capture":
        assert (last.other_bytes, last.outside_bytes) == (WORKSPACE_MIB * MIB, 50 * MIB)
    assert_sound(ledger)


def test_what_a_cache_keeps_in_its_pool_is_no_neighbours():
    memory = tkv.FakeMemory(MIB, budget_bytes=TOTAL)
    ledger = tkv.MemoryLedger(memory=memory)
    with ledger.stage("first block"):
        cache = grown_cache(memory, handles=tkv.HandlePolicy(chunk_bytes=MIB, pool_bytes=TOTAL))
        ledger.watch(cache)
        cache.extend(128)
    cache.shrink(1)
    pooled = cache.stats().pooled_bytes
    assert pooled > TOLERANCE_BYTES
    with ledger.stage("anything"):
        pass
    cache.trim()
    with ledger.stage("nothing"):
        pass
    assert ledger.warnings == []
    assert [stage.cache_bytes for stage in ledger.stages[1:]] == [CACHE_MIB * MIB + pooled, CACHE_MIB * MIB]


# The device's numbers, by stand-ins for torch's and NVML's.


def segment(total, active, *, device=0, pool=(0, 0)):
    return {"device": device, "total_size": total, "active_size": active, "segment_pool_id": pool}


@pytest.fixture
def reader(monkeypatch):
    """A reader of a GPU whose allocator holds 100 bytes, 60 of them in tensors."""
    memory = tkv.FakeMemory()
    memory.device = torch.device("cuda", 0)
    stats = {"allocated_bytes.all.current": 60, "reserved_bytes.all.current": 100, "allocated_bytes.all.peak": 80}
    segments = [segment(50, 30), segment(20, 20, pool=(0, 3)), segment(30, 10, pool=(0, 3)), segment(70, 0, device=1)]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="abc"))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    reader = tkv.MemoryReader(memory)
    reader.stats = stats
    return reader


def test_a_reading_of_torchs_allocator(reader, monkeypatch):
    reading = reader.read()
    assert (reading.allocated_bytes, reading.reserved_bytes, reading.peak_bytes) == (60, 100, 80)
    assert reading.reusable_bytes == 20, "of this device, and outside the graphs' pools"
    assert reading.neighbour_bytes is None

    def no_books():
        raise RuntimeError("cudaMallocAsync keeps none")

    monkeypatch.setattr(torch.cuda, "memory_snapshot", no_books)
    assert reader.read(reading).reusable_bytes == 20, "counters did not move: not asked again"
    reader.stats["allocated_bytes.all.current"] = 61
    assert reader.read(reading).reusable_bytes == 0


NVML = {
    "two neighbours": ({os.getpid(): 100, 7: 30, 8: 5}, 35),
    "alone": ({os.getpid(): 100}, 0),
    "this process is not listed": ({7: 30}, None),
    "no numbers": ({os.getpid(): None, 7: 30}, None),
}


@pytest.mark.parametrize(("processes", "neighbours"), NVML.values(), ids=NVML.keys())
def test_neighbours_by_nvml(reader, monkeypatch, processes, neighbours):
    listed = [SimpleNamespace(pid=pid, usedGpuMemory=held) for pid, held in processes.items()]
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByUUID={"GPU-abc": 1}.__getitem__,
        nvmlDeviceGetComputeRunningProcesses=lambda handle: listed,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert reader.read().neighbour_bytes == neighbours


# Reservations.


def test_announced_bytes_are_kept_to_the_byte():
    ledger = tkv.MemoryLedger(reader=Script())
    ledger.reserve("sampler workspace", 256 * MIB + 1)
    ledger.reserve("nothing", 0)
    ledger.reserve("no entries", torch.empty(0, 512))
    assert [reservation.name for reservation in ledger.reservations] == ["sampler workspace"]
    assert ledger.announced_bytes == 256 * MIB + 1
    ledger.withdraw("sampler workspace")
    assert ledger.announced_bytes == 0


def test_a_tensor_is_held_until_the_profile_run_ends():
    script = Script()
    ledger = tkv.MemoryLedger(reader=script)
    encoder_cache = torch.empty(8, 1024)
    ledger.reserve("encoder cache", encoder_cache)
    assert ledger.announced_bytes == 0, "torch's peak holds it"
    assert ledger.reservations[0].num_bytes == encoder_cache.nbytes
    address, holds = encoder_cache.data_ptr(), ledger._held
    del encoder_cache
    with ledger.stage("profile run"):
        assert holds["encoder cache"].data_ptr() == address
    assert not holds
    with pytest.raises(ValueError, match="the profile run is over: announce 'late' by its 4 bytes"):
        ledger.reserve("late", torch.empty(1))


def test_a_tensor_is_still_held_when_a_profile_run_is_repeated():
    ledger = tkv.MemoryLedger(reader=Script())
    ledger.reserve("encoder cache", torch.empty(8, 1024))
    holds = ledger._held
    with pytest.raises(RuntimeError, match="too large"), ledger.stage("profile run"):
        raise RuntimeError("too large")
    with ledger.stage("profile run"):
        assert "encoder cache" in holds
    assert not holds


BAD_RESERVATIONS = {
    "negative": (-1, ValueError, "must not be negative, got -1 bytes"),
    "a bool": (True, TypeError, "a tensor or a number of bytes"),
    "a string": ("1GiB", TypeError, "a tensor or a number of bytes"),
    "another device": (torch.empty(4, device="meta"), ValueError, "lies on meta, the ledger is of cpu"),
}


@pytest.mark.parametrize(("what", "error", "message"), BAD_RESERVATIONS.values(), ids=BAD_RESERVATIONS.keys())
def test_bad_reservations(what, error, message):
    with pytest.raises(error, match=message):
        tkv.MemoryLedger(reader=Script()).reserve("x", what)


def test_reservation_names():
    ledger = tkv.MemoryLedger(reader=Script())
    ledger.reserve("x", 1)
    with pytest.raises(ValueError, match="'x' exists"):
        ledger.reserve("x", 1)
    with pytest.raises(KeyError, match="there are x"):
        ledger.withdraw("y")


# Order.


def record(ledger, *names):
    for name in names:
        with ledger.stage(name):
            pass


ORDERS = {
    "as written": (["start", "weights", "first block", "profile run", "capture", "extend"], None),
    "profile run first": (["weights", "profile run", "first block", "capture"], None),
    "others anywhere": (["weights", "compile", "capture", "compile"], None),
    "weights after the profile run": (["profile run", "weights"], "'weights' after stage 'profile run'"),
    "profile run after capture": (["capture", "profile run"], "'profile run' after stage 'capture'"),
    "twice": (["weights", "weights"], "'weights' was recorded already"),
}


@pytest.mark.parametrize(("names", "message"), ORDERS.values(), ids=ORDERS.keys())
def test_order(names, message):
    ledger = tkv.MemoryLedger(reader=Script())
    if message is None:
        record(ledger, *names)
        assert [stage.name for stage in ledger.stages] == names
        return
    with pytest.raises(ValueError, match=message):
        record(ledger, *names)


def test_a_stage_inside_a_stage():
    ledger = tkv.MemoryLedger(reader=Script())
    with pytest.raises(ValueError, match="stage 'capture' inside stage 'weights'"), ledger.stage("weights"):
        record(ledger, "capture")


def abandon(ledger, what):
    with ledger.stage("capture"):
        what()
        raise RuntimeError("abandoned")


def test_a_failed_stage_is_recorded_and_may_be_repeated():
    script = Script()
    ledger = tkv.MemoryLedger(reader=script)
    with pytest.raises(RuntimeError, match="abandoned"):
        abandon(ledger, lambda: setattr(script, "other", 20))
    assert ledger.graph_bytes == 0
    with ledger.stage("capture"):
        script.other = 50
    assert [(stage.name, stage.failed) for stage in ledger.stages] == [("capture", True), ("capture", False)]
    assert ledger.graph_bytes == 30 * MIB
    assert "capture (failed)" in str(ledger)


def test_a_device_that_is_lost_does_not_hide_the_error():
    script = Script()
    ledger = tkv.MemoryLedger(reader=script)

    def lost(last=None):
        raise tkv.DriverError("cuMemGetInfo", "CUDA_ERROR_ILLEGAL_ADDRESS")

    with pytest.raises(RuntimeError, match="abandoned") as caught:
        abandon(ledger, lambda: setattr(script, "read", lost))
    assert "memory could not be read" in caught.value.__notes__[0]


def test_a_cache_over_another_driver_of_the_cpu():
    spec = tkv.AttentionSpec(num_kv_heads=2, head_dim=16, dtype=torch.float32)
    cache = tkv.KVCache.reserve(spec, block_size=16, num_layers=2, memory=tkv.FakeMemory(budget_bytes=MIB))
    with pytest.raises(ValueError, match="different memory objects of the CPU"):
        tkv.MemoryLedger("cpu").watch(cache)
    with tkv.KVCache.reserve(spec, block_size=16, num_layers=2, capacity=4, device="cpu") as plain:
        ledger = tkv.MemoryLedger("cpu")
        assert ledger.watch(plain)
        assert not ledger.watch(plain)


def test_another_device():
    with pytest.raises(ValueError, match="differ; name one of them"):
        tkv.MemoryLedger("cuda", memory=tkv.HostMemory())


def test_the_tolerance_is_below_what_matters():
    assert TOLERANCE_BYTES < 150 * MIB, "the plan's default headroom must cover what goes unseen"

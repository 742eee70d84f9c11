"""Shrink, sleep, wake, coalesce, aliases, copies: what each does, on the host driver."""

from __future__ import annotations

import logging
import threading

import pytest
import test_cache
import torch
from elastic_store import CAPACITY, G, Model, faulty, held, make_store, segments
from hypothesis import given, settings
from hypothesis import strategies as st

import triton_kv as tkv
from triton_kv import AttentionSpec, KVCache
from triton_kv.errors import (
    AddressSpaceExhausted,
    Asleep,
    BadAccess,
    Broken,
    CaptureError,
    Closed,
    DriverError,
    OutOfMemory,
    Unavailable,
)
from triton_kv.extensible import ExtensibleTensor
from triton_kv.groups import LayerGroup
from triton_kv.host_copy import host_bytes_for
from triton_kv.kernels.blocks import copy_blocks_kernel
from triton_kv.kernels.gather import gather_blocks_kernel
from triton_kv.memory import AllocatedMemory, FaultyMemory, HandlePolicy, HostMemory, PoisonedMemory
from triton_kv.store import BlockStore, MemoryChange

SPEC = AttentionSpec(num_kv_heads=2, head_dim=16, dtype=torch.float32)


def filled(num_blocks: int, *steps: int, **options: object) -> tuple[BlockStore, Model]:
    store = make_store(faulty("host"), **options)  # type: ignore[arg-type]
    model = Model(store)
    for size in (*steps, num_blocks):
        store.extend(size)
    model.resize(num_blocks)
    model.write_all(store)
    return store, model


def free_bytes(store: BlockStore) -> int:
    return store.memory.memory_info()[0]


# Shrink.


@pytest.mark.parametrize("policy", [None, HandlePolicy(2 * G)], ids=["one handle a run", "chunks"])
@pytest.mark.parametrize("target", range(0, 21, 4))
def test_shrink_gives_back_to_the_granule(target: int, policy: HandlePolicy | None) -> None:
    store, model = filled(20, 1, 9, handles=policy)
    before, epoch = free_bytes(store), store.epoch
    freed = store.shrink(target)
    model.resize(target)
    model.check(store)
    assert freed == free_bytes(store) - before
    assert store.mapped_bytes == store.mapped_bytes_at(target)
    assert (freed.kept_bytes, freed.reasons) == (0, ())
    assert (store.epoch > epoch) == (freed > 0)
    store.extend(CAPACITY)
    model.resize(CAPACITY)
    model.check(store)  # zeros, although all of it had been written


def test_shrink_with_too_little_memory_to_replace_a_handle() -> None:
    # One handle a segment of 20 blocks, and no memory beside them: no handle can be cut.
    probe, _ = filled(20)
    budget = probe.mapped_bytes
    store = make_store(faulty("host", budget))
    model = Model(store)
    store.extend(20)
    model.resize(20)
    model.write_all(store)
    freed = store.shrink(12)
    model.resize(12)
    model.check(store)
    assert freed == 0
    assert freed.kept_bytes == store.mapped_bytes - store.mapped_bytes_at(12) > 0
    assert all("ENOMEM" in reason for reason in freed.reasons)
    # Once there is memory, the same call gives it back.
    store.memory.memory.memory._budget_bytes += 8 * G  # type: ignore[attr-defined]
    again = store.shrink(12)
    assert again == freed.kept_bytes
    assert store.mapped_bytes == store.mapped_bytes_at(12)
    model.check(store)


def test_shrink_needs_the_memory_of_one_handle_only() -> None:
    probe, _ = filled(20)
    largest = max(run.num_bytes for buffer, _ in probe.buffers for run in buffer._reservation.runs)
    store = make_store(faulty("host", probe.mapped_bytes + largest))
    model = Model(store)
    store.extend(20)
    model.resize(20)
    model.write_all(store)
    freed = store.shrink(19)
    model.resize(19)
    model.check(store)
    assert freed.kept_bytes == 0
    assert store.mapped_bytes == store.mapped_bytes_at(19)


def test_the_fewest_blocks_that_release_a_handle() -> None:
    store, _ = filled(20, 2, 9)
    number = store.min_release_blocks()
    assert number == 9  # a handle of the dense buffer's last growth goes at 11 blocks, one of the padded at 9

    def released(num_blocks: int) -> int:
        return sum(
            len(buffer._reservation.unneeded(buffer._ranges(0, num_blocks * block_bytes)))
            for buffer, block_bytes in store.buffers
        )

    assert [released(20 - blocks) > 0 for blocks in (number - 1, number)] == [False, True]
    assert make_store(faulty("host")).min_release_blocks() == 0


def test_order_of_a_shrink() -> None:
    store, _ = filled(20, 4)
    seen: list[tuple[str, int, int]] = []
    inner = store.memory.memory

    class Recorder(FaultyMemory):
        def _pass(self, call: str) -> None:
            seen.append((call, store.num_blocks, int(store.control[0])))

    recorder = Recorder(inner)
    store.memory = recorder
    for buffer, _ in store.buffers:
        buffer._memory = buffer._reservation.memory = buffer._reservation._estate.memory = recorder
    store.shrink(4)
    calls = [call for call, _, _ in seen]
    assert seen[0] == ("synchronize", 4, 4), "count and watermark come first, then the wait"
    assert "release" not in calls[: len(calls) - calls[::-1].index("unmap")], "released only when all is unmapped"


def test_shrink_waits_for_what_it_is_told() -> None:
    store, _ = filled(20, 4)

    class Event:
        waited = 0

        def synchronize(self) -> None:
            self.waited += 1
            assert store.num_blocks == int(store.control[0]) == 4
            assert store.mapped_bytes == store.mapped_bytes_at(20)

    event = Event()
    calls = store.memory.calls["synchronize"]
    store.shrink(4, after=event)
    assert event.waited == 1
    assert store.memory.calls["synchronize"] == calls


def test_pooled_handles_are_used_again() -> None:
    store, model = filled(20, handles=HandlePolicy(2 * G, pool_bytes=6 * G))
    before = free_bytes(store)
    freed = store.shrink(2)
    model.resize(2)
    pooled = store.stats().pooled_bytes
    assert 0 < pooled <= 2 * 6 * G
    assert freed == free_bytes(store) - before
    created = store.memory.calls["create"]
    store.extend(20)
    model.resize(20)
    model.check(store)
    assert store.stats().pooled_bytes < pooled
    new_handles = sum(buffer.num_handles for buffer, _ in store.buffers)
    assert store.memory.calls["create"] - created < new_handles
    store.shrink(2)
    before = free_bytes(store)
    assert store.trim() == free_bytes(store) - before > 0
    assert store.stats().pooled_bytes == 0


def test_a_pool_gives_way_to_a_growth_that_needs_its_memory() -> None:
    store = make_store(faulty("host"), handles=HandlePolicy(3 * G, pool_bytes=64 * G))
    store.extend(20)
    store.shrink(0)
    assert store.stats().pooled_bytes > 0
    store.memory.memory.memory._budget_bytes = store.mapped_bytes_at(CAPACITY)  # type: ignore[attr-defined]
    store.extend(CAPACITY)
    assert store.num_blocks == CAPACITY


STATES = {
    "open": lambda store: None,
    "emptied": lambda store: store.shrink(0),
    "asleep": lambda store: store.sleep(),
    "asleep in part": lambda store: store.sleep(only=[0]),
    "awake again": lambda store: (store.sleep(keep="host"), store.wake()),
    "coalesced": lambda store: store.coalesce(),
}


@pytest.mark.parametrize("state", STATES)
def test_trim_gives_back_what_is_pooled_in_every_state(state: str) -> None:
    store, _ = filled(13, handles=HandlePolicy(2 * G, pool_bytes=64 * G))
    store.shrink(5)
    STATES[state](store)
    before = held(store)
    assert store.trim() == free_bytes(store) - before.free_bytes
    assert store.stats().pooled_bytes == 0
    assert held(store)._replace(num_handles=0, live=(), free_bytes=0) == before._replace(
        num_handles=0, live=(), free_bytes=0
    )
    assert store.trim() == 0
    store.close(lambda: None)
    with pytest.raises(Closed):
        store.trim()
    assert store.memory.live == (0, 0, 0)


@pytest.mark.parametrize(
    "call", ["unmap", "map", "copy", "create", "synchronize", "release", "wait", "reserve", "free"]
)
def test_growth_and_shrinking_after_a_shrink_that_failed(call: str) -> None:
    store, model = filled(20, 4)
    store.memory.fail(call, code="EIO")
    try:
        store.shrink(7)
        model.resize(7)
    except DriverError:
        store.memory.heal()
    model.check(store)
    for target in (CAPACITY, 0, 3, 9):
        (store.extend if target > store.num_blocks else store.shrink)(target)
        model.resize(target)
        model.check(store)
        assert store.mapped_bytes == store.mapped_bytes_at(target)
    assert store.stats().stray_bytes == 0


# Coalesce.


def test_coalesce_makes_one_handle_a_segment() -> None:
    store, model = filled(20, 1, 2, 7, 11)
    expected, before = store.coalesce_bytes(), held(store)
    report = store.coalesce()
    model.check(store)
    num_segments = sum(buffer.num_segments for buffer, _ in store.buffers)
    assert report == (num_segments, expected, num_segments)
    assert expected > 0
    after = held(store)
    assert after.mapped_bytes == before.mapped_bytes
    assert after.num_handles == num_segments < before.num_handles
    assert after.epoch == before.epoch + 1
    assert store.coalesce() == (0, 0, num_segments)
    assert store.epoch == after.epoch, "nothing to do, nothing moved"
    store.shrink(5)
    model.resize(5)
    model.check(store)


@given(
    capacity=st.integers(1, 5 * G),
    segments=st.integers(1, 5),
    chunk=st.sampled_from([None, G, 2 * G]),
    steps=st.lists(st.tuples(st.sampled_from(["grow", "shrink", "coalesce"]), st.floats(0, 1)), max_size=12),
)
@settings(max_examples=150, deadline=None)
def test_coalescing_a_dense_buffer_after_any_history(capacity, segments, chunk, steps) -> None:
    memory = PoisonedMemory(HostMemory(G))
    policy = HandlePolicy(chunk)
    buffer = ExtensibleTensor(segments * capacity, num_segments=segments, memory=memory, handles=policy)
    for step, share in [*steps, ("coalesce", 0.0)]:
        before = buffer.bytes_per_segment
        if step == "grow":
            buffer.resize_per_segment_(max(before, int(share * capacity)), zero_new=True)
        elif step == "shrink":
            buffer.shrink_per_segment_(int(share * before))
        else:
            buffer.coalesce_()
            assert buffer.scattered() == []
            assert buffer.num_handles <= segments
        assert buffer.mapped_bytes == buffer.mapped_bytes_at(buffer.bytes_per_segment)
        for segment in range(segments):
            at = segment * capacity
            contents = buffer.full_view()[at : at + buffer.bytes_per_segment]
            kept = min(before, buffer.bytes_per_segment)
            assert bool((contents[:kept] == segment + 1).all())
            assert not contents[kept:].any()
            contents.fill_(segment + 1)
    buffer.free()
    assert memory.live[1:] == (0, 0)


def test_coalesce_without_memory_says_what_it_needs() -> None:
    probe, _ = filled(20, 1, 2, 7, 11)
    store = make_store(faulty("host", probe.mapped_bytes))
    model = Model(store)
    for size in (1, 2, 7, 11, 20):
        store.extend(size)
    model.resize(20)
    model.write_all(store)
    with pytest.raises(OutOfMemory, match="coalesce") as caught:
        store.coalesce()
    assert caught.value.asked_bytes == probe.coalesce_bytes()
    model.check(store)
    assert store.state == "open"


# Sleep and wake.


@pytest.mark.parametrize("live", [None, [0, 3, 4, 12], []], ids=["all", "some", "none"])
@pytest.mark.parametrize("keep", [None, "host"])
def test_sleep_and_wake(keep: str | None, live: list[int] | None) -> None:
    if keep is None and live is not None:
        with pytest.raises(ValueError, match="live blocks are kept only"):
            filled(3)[0].sleep(live=live)
        return
    store, model = filled(13, 2)
    addresses = [buffer.base_ptr for buffer, _ in store.buffers]
    before = held(store)
    report = store.sleep(keep=keep, live=live)
    assert report.freed == free_bytes(store) - before.free_bytes == before.mapped_bytes
    kept = range(13) if live is None else live
    assert report.host_bytes == (len(kept) * store.block_bytes if keep else 0)
    # With the list of ids, which kernels that gather read.
    assert store.stats().host_bytes == (host_bytes_for(len(kept), store.block_bytes) if keep else 0)
    assert (store.state, store.num_blocks, int(store.control[0]), store.mapped_bytes) == ("asleep", 0, 0, 0)
    woken = store.wake()
    assert (woken.num_blocks, woken.host_bytes) == (13, report.host_bytes)
    for block in range(13):
        if keep is None or block not in kept:
            model.values[block] = 0
    model.check(store)
    assert [buffer.base_ptr for buffer, _ in store.buffers] == addresses
    assert store.epoch == before.epoch + 2
    assert store.mapped_bytes == before.mapped_bytes
    assert store.stats().host_bytes == 0
    assert store.wake().host_bytes == 0, "nothing sleeps any more"


def test_host_memory_made_beforehand() -> None:
    store, model = filled(13)
    seconds = store.prepare_sleep()
    assert seconds > 0
    assert store.stats().host_bytes == host_bytes_for(13, store.block_bytes)
    pins = store.memory.calls["pin"]
    for _ in range(3):
        assert store.sleep(keep="host").pin_seconds == 0
        store.wake()
        model.check(store)
    assert store.memory.calls["pin"] == pins
    store.close(lambda: None)
    assert store.memory.pinned_bytes == 0


def gathering(monkeypatch: pytest.MonkeyPatch, batch_bytes: int = 5 * G) -> None:
    """Kernels gather whatever there is, in batches of so many bytes."""
    monkeypatch.setattr("triton_kv.host_copy.should_gather", lambda *arguments: True)
    monkeypatch.setattr("triton_kv.host_copy.BATCH_BYTES", batch_bytes)


def keep_alone(model: Model, live: list[int]) -> None:
    for block in set(range(len(model.values))) - set(live):
        model.values[block] = 0


@pytest.mark.parametrize("live", [[0, 3, 4, 7, 12], [5], [], list(range(13))], ids=str)
@pytest.mark.parametrize("batch_bytes", [1, 5 * G, 1 << 20], ids=["one block", "a few", "all"])
def test_scattered_blocks_are_gathered_first(
    monkeypatch: pytest.MonkeyPatch, live: list[int], batch_bytes: int
) -> None:
    gathering(monkeypatch, batch_bytes)
    store, model = filled(13, 2)
    copies = store.memory.calls["copy"]
    store.sleep(keep="host", live=live)
    if batch_bytes > 5 * G:
        assert store.memory.calls["copy"] - copies == 2 * bool(live), "one copy over the link for each buffer"
    assert store.mapped_bytes == store.stats().staging_bytes == 0
    store.wake()
    assert store.stats().staging_bytes == 0
    keep_alone(model, live)
    model.check(store)


@pytest.mark.parametrize("short", ["sleep", "wake", "both"])
@pytest.mark.parametrize("code", ["create", "reserve"])
def test_kernels_reach_over_the_link_where_no_staging_memory_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, short: str, code: str
) -> None:
    gathering(monkeypatch)
    store, model = filled(13)
    copies, live = store.memory.calls["copy"], [1, 5, 6, 9]

    def fails(*arguments: object, **options: object) -> None:
        raise AddressSpaceExhausted("reserve", "ENOMEM") if code == "reserve" else DriverError("create", "ENOMEM")

    with monkeypatch.context() as context:
        if short != "wake":
            context.setattr("triton_kv.store.Staging", fails)
        store.sleep(keep="host", live=live)
    gathered = store.memory.calls["copy"] - copies
    assert (gathered == 0) == (short != "wake")
    with monkeypatch.context() as context:
        if short != "sleep":
            context.setattr("triton_kv.store.Staging", fails)
        store.wake()
    keep_alone(model, live)
    model.check(store)
    assert "bytes of device memory to gather blocks in, so kernels" in caplog.text


def test_blocks_go_run_by_run_where_no_kernel_can_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    gathering(monkeypatch)
    store, model = filled(13)
    copies, live = store.memory.calls["copy"], [1, 5, 6, 9]
    with monkeypatch.context() as context:
        context.setattr("triton_kv.host_copy.can_launch", lambda memory, launches: False)
        store.sleep(keep="host", live=live)
    assert store.memory.calls["copy"] - copies >= 3 * 5, "every run of blocks in every segment"
    store.wake()  # with kernels: what lies in the host's memory is the same
    keep_alone(model, live)
    model.check(store)


def test_staging_memory_is_made_beforehand_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    gathering(monkeypatch)
    store, model = filled(13)
    free = free_bytes(store)
    assert store.prepare_sleep() > 0
    staging = store.stats().staging_bytes
    assert staging == free - free_bytes(store) > 0
    assert store.prepare_sleep() == 0
    for _ in range(2):
        free = free_bytes(store)
        report = store.sleep(keep="host", live=[2, 4, 9])
        assert report.freed == free_bytes(store) - free
        assert store.stats().staging_bytes == 0
        store.wake()
        keep_alone(model, [2, 4, 9])
        model.check(store)
        assert store.stats().staging_bytes > 0, "for the next sleep"
    free = free_bytes(store)
    assert store.trim() == free_bytes(store) - free > 0
    assert store.stats().staging_bytes == 0
    store.prepare_sleep()
    assert store.stats().staging_bytes == staging
    store.close(lambda: None)
    assert store.memory.live == (0, 0, 0)
    assert store.memory.pinned_bytes == 0


def test_staging_memory_gives_way_to_a_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    gathering(monkeypatch)
    store = make_store(faulty("host"))
    store.extend(20)
    store.prepare_sleep()
    store.memory.memory.memory._budget_bytes = store.mapped_bytes_at(CAPACITY)  # type: ignore[attr-defined]
    store.extend(CAPACITY)
    assert (store.num_blocks, store.stats().staging_bytes) == (CAPACITY, 0)


def test_a_sleep_with_an_event_waits_for_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else another thread's capture would end: also where staging memory is given back."""
    gathering(monkeypatch)
    store, _ = filled(13)
    calls = store.memory.calls["synchronize"]
    store.sleep(keep="host", live=[1, 4], after=type("Event", (), {"synchronize": lambda self: None})())
    assert store.memory.calls["synchronize"] == calls


def test_a_sleep_gives_pooled_handles_back() -> None:
    store, model = filled(13, handles=HandlePolicy(G, pool_bytes=64 * G))
    store.shrink(7)
    model.resize(7)
    before = free_bytes(store)
    assert store.stats().pooled_bytes > 0
    report = store.sleep(keep="host")
    assert report.freed == free_bytes(store) - before
    assert (store.stats().pooled_bytes, store.memory.live.handles) == (0, 0)
    store.wake()
    model.check(store)


def test_everything_is_refused_while_asleep() -> None:
    store, _ = filled(5)
    store.sleep()
    for use in (
        lambda: store.extend(6),
        lambda: store.extend_async(6),
        lambda: store.shrink(1),
        lambda: store.sleep(),
        lambda: store.coalesce(),
        lambda: store.copy_blocks([(0, 1)]),
        lambda: store.compaction_plan([0]),
        lambda: store.require_committed(),
        lambda: store.prepare_sleep(),
    ):
        with pytest.raises(Asleep, match=r"call wake\(\) first"):
            use()
    store.close(lambda: None)
    assert store.memory.live == (0, 0, 0)


def test_wake_with_too_little_memory_works_later() -> None:
    store, model = filled(13)
    store.sleep(keep="host")
    asleep = held(store)
    host = store.memory.memory.memory
    other = host.create((64 << 20) - G)  # type: ignore[attr-defined]
    with pytest.raises(OutOfMemory, match=r"wake\(\) from 0 blocks \(create: ENOMEM\)") as caught:
        store.wake()
    assert caught.value.free_bytes == G
    assert held(store)._replace(free_bytes=0, live=()) == asleep._replace(free_bytes=0, live=())
    host.release(other)  # type: ignore[attr-defined]
    store.wake()
    model.check(store)


def test_buffers_sleep_alone() -> None:
    store, model = filled(9)
    before = held(store)
    report = store.sleep(keep="host", only=[1])
    assert report.freed == store.buffers[1].buffer.mapped_bytes_at(9 * store.buffers[1].block_bytes)
    assert (store.num_blocks, int(store.control[0]), store.state) == (9, 9, "asleep")
    store.require_committed(0)
    with pytest.raises(Asleep):
        store.require_committed(1)
    with pytest.raises(Asleep):
        store.extend(10)
    with pytest.raises(Asleep):
        store.sleep(only=[1])
    store.sleep(only=[0])
    assert (store.num_blocks, store.mapped_bytes) == (0, 0)
    store.wake([1])
    assert (store.num_blocks, store.state) == (9, "asleep")
    store.wake()
    model.values[:, :2] = 0  # of the buffer whose contents were dropped
    model.check(store)
    assert store.mapped_bytes == before.mapped_bytes


# Two steps, and those who watch.


@pytest.mark.parametrize(
    "change",
    [
        lambda store: store.growing(15),
        lambda store: store.shrinking(3),
        lambda store: store.sleeping(keep="host"),
    ],
    ids=["growing", "shrinking", "sleeping"],
)
def test_an_exception_between_the_steps_undoes_the_first(change) -> None:
    store, model = filled(9, 2)
    before = held(store)

    with pytest.raises(ConnectionError), change(store):
        raise ConnectionError("another rank could not")
    assert held(store) == before
    model.check(store)
    with change(store):
        pass
    assert held(store) != before


def test_waking_is_undone_too() -> None:
    store, model = filled(9, 2)
    store.sleep(keep="host")
    before = held(store)
    with pytest.raises(KeyboardInterrupt), store.waking():
        raise KeyboardInterrupt
    assert held(store) == before
    store.wake()
    model.check(store)


def test_watchers_are_told_and_may_refuse() -> None:
    store, model = filled(9, 2)
    told: list[MemoryChange] = []
    stop = store.watch(told.append)
    store.extend(12)
    store.shrink(4)
    store.sleep()
    store.wake()
    assert [(change.phase, change.old_num_blocks, change.num_blocks) for change in told] == [
        ("after", 9, 12),
        ("before", 12, 4),
        ("after", 12, 4),
        ("before", 4, 0),
        ("after", 4, 0),
        ("after", 0, 4),
    ]
    assert told[-1].epoch == store.epoch

    def refuse(change: MemoryChange) -> None:
        raise ConnectionError("cannot register")

    del told[:]
    refusing = store.watch(refuse)
    model.resize(0)
    model.resize(4)
    for change in (lambda: store.extend(9), lambda: store.shrink(1), lambda: store.sleep(keep="host")):
        before = held(store)
        with pytest.raises(ConnectionError, match="cannot register"):
            change()
        assert held(store) == before
        model.check(store)
    assert [change.phase for change in told] == ["after", "before", "before", "after", "before", "after"]
    refusing()
    stop()
    store.extend(9)
    assert len(told) == 6


# Undo that fails.


@pytest.mark.parametrize("later", [1, 2, 3, 5])
@pytest.mark.parametrize("operation", ["extend", "shrink", "sleep", "wake", "coalesce"])
def test_a_failed_undo_breaks_the_store_and_close_frees_all(operation: str, later: int) -> None:
    broken = 0
    for nth in range(1, 60):
        store, _ = filled(12, 3, 7)
        if operation == "wake":
            store.sleep(keep="host")
        memory = store.memory
        apply = {
            "extend": lambda s=store: s.extend(20),
            "shrink": lambda s=store: s.shrink(5),
            "sleep": lambda s=store: s.sleep(keep="host"),
            "wake": store.wake,
            "coalesce": store.coalesce,
        }[operation]
        memory.fail("any", nth, code="EIO")
        memory.fail("any", nth + later, code="EIO")
        raised = None
        try:
            apply()
        except DriverError as error:
            raised = error
        if raised is not None and raised.undo_failures:
            broken += 1
            assert store.state == "broken"
            assert all(str(failure) in " ".join(raised.__notes__) for failure in raised.undo_failures)
            for use in (lambda s=store: s.extend(24), lambda s=store: s.shrink(0), store.require_committed):
                with pytest.raises(Broken, match=r"close\(\) frees what it can"):
                    use()
        memory.heal()
        store.close(lambda: None)
        assert memory.live == (0, 0, 0)
        assert memory.pinned_bytes == 0
    assert broken, "no undo failed: the test says nothing"


# Aliases.


def test_aliases_cost_one_granule_a_buffer_until_the_first_extend() -> None:
    store = make_store(faulty("host"), alias=True)
    store.extend(1)
    assert store.mapped_bytes == 2 * G
    assert free_bytes(store) == (64 << 20) - 2 * G
    first, second, *_ = segments(store)
    first[:] = 7
    assert bool((second == 7).all()), "both segments show one granule"
    epoch = store.epoch
    store.extend(1)
    assert store.epoch == epoch
    model = Model(store)
    store.extend(9)
    model.resize(9)
    model.check(store)  # also block 0 is zero: what it held is lost
    assert store.epoch == epoch + 1
    assert store.mapped_bytes == store.mapped_bytes_at(9) == (64 << 20) - free_bytes(store)
    store.shrink(1)
    assert store.mapped_bytes == store.mapped_bytes_at(1), "only the first time"


HISTORIES = {
    "nothing": ({}, []),
    "some blocks": ({}, [3, 7]),
    "aliases to come": ({"alias": True}, []),
    "aliases": ({"alias": True}, [1]),
    "past aliases": ({"alias": True}, [1, 5]),
    "pooled": ({"handles": HandlePolicy(2 * G, 6 * G)}, [12, -4]),
    "handles that could not be cut": ({}, [12, -4]),
}


@pytest.mark.parametrize("history", HISTORIES)
def test_what_would_fit_fits_and_no_block_more(history: str) -> None:
    options, steps = HISTORIES[history]
    answers = set()
    for budget in range(1, 80):
        store = make_store(faulty("host", budget * G), **options)  # type: ignore[arg-type]
        try:
            for step in steps:
                store.extend(step) if step > 0 else store.shrink(-step)
        except OutOfMemory:
            store.close(lambda: None)
            continue
        before = held(store)
        while True:
            try:
                store.extend(CAPACITY)
                break
            except OutOfMemory as error:
                assert held(store)._replace(num_handles=0, live=(), free_bytes=0) == before._replace(
                    num_handles=0, live=(), free_bytes=0
                ), "but for pooled handles"
                fits = error.would_fit if error.asked_bytes > error.free_bytes else None
                assert fits is not None
                answers.add(fits)
                with pytest.raises(OutOfMemory):
                    store.extend(fits + 1)
                store.extend(fits)
                assert store.num_blocks == fits >= before.num_blocks
                break
        store.close(lambda: None)
    assert len(answers) > 3


@pytest.mark.parametrize("operation", ["close", "sleep", "shrink"])
def test_aliased_memory_goes_like_any_other(operation: str) -> None:
    store = make_store(faulty("host"), alias=True)
    store.extend(1)
    if operation == "sleep":
        store.sleep(keep="host")
        assert store.mapped_bytes == 0
        store.wake()
        assert store.mapped_bytes == store.mapped_bytes_at(1)
    if operation == "shrink":
        assert store.shrink(0) == 2 * G
    store.close(lambda: None)
    assert store.memory.live == (0, 0, 0)


# In the background.


def test_extend_async_shows_blocks_only_when_complete() -> None:
    store, model = filled(3)
    inner = store.memory
    entered, proceed = threading.Event(), threading.Event()
    real = inner.wait

    def slow() -> None:
        if threading.current_thread().name == "triton_kv extend":
            entered.set()
            assert proceed.wait(20)
        real()

    inner.wait = slow  # type: ignore[method-assign]
    future = store.extend_async(9)
    assert entered.wait(20)
    assert not future.done()
    assert (store.num_blocks, int(store.control[0])) == (3, 3)
    store.require_committed()
    store.copy_blocks([(0, 1)])  # serving goes on
    proceed.set()
    future.result(20)
    model.resize(9)
    model.values[1] = model.values[0]
    model.check(store)


def test_extend_async_reports_errors() -> None:
    store, _ = filled(3)
    before = held(store)
    store.memory.fail("create")
    with pytest.raises(OutOfMemory):
        store.extend_async(9).result(20)
    assert held(store) == before
    store.sleep()
    with pytest.raises(Asleep):
        store.extend_async(9)


def test_changes_queue_behind_an_extension_in_the_background() -> None:
    store, model = filled(3)
    entered, proceed = threading.Event(), threading.Event()
    real = store.memory.wait

    def slow() -> None:
        entered.set()
        assert proceed.wait(20)
        real()

    store.memory.wait = slow  # type: ignore[method-assign]
    first = store.extend_async(9)
    assert entered.wait(20)
    futures = [store.extend_async(target) for target in (15, 5, 12)]  # not "inside another change"
    proceed.set()
    for future in (first, *futures):
        future.result(20)
    assert store.num_blocks == 15
    model.resize(15)
    model.check(store)


def test_an_extension_that_comes_after_a_sleep_or_close_says_so() -> None:
    store, model = filled(3)
    with store.locked():
        future = store.extend_async(9)
        store.sleep(keep="host")
    with pytest.raises(Asleep):
        future.result(20)
    store.wake()
    model.check(store)
    with store.locked():
        future = store.extend_async(9)
        store.close(lambda: None)
    with pytest.raises(Closed):
        future.result(20)
    assert store.memory.live == (0, 0, 0)


# Captures.


def test_no_change_during_a_capture() -> None:
    store, _ = filled(5)
    before = held(store)
    store.memory.is_capturing = lambda: True  # type: ignore[method-assign]
    for change in (
        lambda: store.extend(6),
        lambda: store.extend_async(6),
        lambda: store.shrink(1),
        lambda: store.sleep(),
        lambda: store.coalesce(),
        lambda: store.trim(),
        lambda: store.copy_blocks([(0, 1)]),
        lambda: store.close(lambda: None),
    ):
        with pytest.raises(CaptureError, match="capture"):
            change()
    assert store.stats().num_blocks == 5
    del store.memory.is_capturing
    assert held(store) == before
    store.sleep()
    store.memory.is_capturing = lambda: True  # type: ignore[method-assign]
    with pytest.raises(CaptureError):
        store.wake()


# Copies and compaction.


@pytest.mark.parametrize(
    "pairs",
    [
        [(0, 5)],
        [(0, 1), (1, 0)],
        [(0, 1), (1, 2), (2, 3), (3, 0), (7, 8)],
        [(4, 2), (4, 3), (-1, 0), (5, 5)],
        [],
    ],
    ids=["one", "swap", "cycle", "fan and padding", "none"],
)
def test_copies_on_the_host_are_as_if_at_once(pairs: list[tuple[int, int]]) -> None:
    store, model = filled(9)
    before = model.values.copy()
    store.copy_blocks(pairs)
    for source, target in pairs:
        if source >= 0 and target >= 0:
            model.values[target] = before[source]
    model.check(store)


def test_launches_of_copies_are_known_before_the_first() -> None:
    store, _ = filled(5)
    launches = store.copy_launches()
    store.memory.is_capturing = lambda: True  # type: ignore[method-assign]
    store.copy_blocks(torch.tensor([[0, 1]], dtype=torch.int32))  # the table is there, so it may be captured
    scatters = [launch.arguments["SCATTER"] for launch in launches if launch.kernel is gather_blocks_kernel]
    assert scatters == [False, True] * len(store.buffers)
    launches = [launch for launch in launches if launch.kernel is copy_blocks_kernel]
    flags = {(launch.arguments["SOURCE_BOUNDED"], launch.arguments["TARGET_BOUNDED"]) for launch in launches}
    assert flags == {(True, True), (False, True), (True, False)}
    dtypes = {launch.arguments["pairs_ptr"].dtype for launch in launches}
    assert dtypes == {torch.int32, torch.int64}


def test_copies_that_cannot_be() -> None:
    store, _ = filled(9)
    with pytest.raises(ValueError, match="block 9 is not one of the 9 committed"):
        store.copy_blocks([(9, 0)])
    with pytest.raises(ValueError, match="two copies have block 3"):
        store.copy_blocks([(1, 3), (2, 3)])
    store.copy_blocks(torch.tensor([[1, 9], [2, 3]], dtype=torch.int32))
    assert store.check() == (1, "block copied", 0, 9)


@pytest.mark.parametrize("live", [[0, 7, 18], [], range(20), [19], [1, 2, 17, 3, 19]], ids=str)
def test_compaction_frees_what_it_promises(live) -> None:
    store, model = filled(20)
    plan = store.compaction_plan(live)
    before = free_bytes(store)
    old = model.values.copy()
    store.copy_blocks(plan.moves)
    freed = store.shrink(plan.num_blocks)
    assert freed == plan.freed_bytes == free_bytes(store) - before
    model.resize(plan.num_blocks)
    for block in live:
        model.values[int(plan.remapping[block])] = old[block]
    model.check(store)


@given(live=st.lists(st.integers(-3, 23), max_size=40))
@settings(max_examples=60, deadline=None)
def test_compaction_of_any_list(live: list[int]) -> None:
    store = make_store(faulty("fake"))
    store.extend(20)
    if any(not 0 <= block < 20 for block in live):
        with pytest.raises(ValueError, match="is not one of the 20 committed blocks"):
            store.compaction_plan(live)
        return
    plan = store.compaction_plan(live)
    assert plan.num_blocks == len(set(live))
    assert {int(plan.remapping[block]) for block in live} == set(range(plan.num_blocks))
    sources, targets = {source for source, _ in plan.moves.tolist()}, {target for _, target in plan.moves.tolist()}
    assert not sources & targets
    assert not targets & set(live)
    assert store.mapped_bytes - plan.freed_bytes == store.mapped_bytes_at(plan.num_blocks)


def test_compaction_of_blocks_that_are_not_there() -> None:
    with pytest.raises(ValueError, match="live block 9 is not one of the 9"):
        filled(9)[0].compaction_plan([1, 9])


# Accounting.


def test_stats_agree_with_the_driver() -> None:
    store, _ = filled(13, 2)
    stats = store.stats()
    assert stats.mapped_bytes == (64 << 20) - free_bytes(store)
    assert stats.committed_bytes == 13 * store.block_bytes
    assert stats.padding_bytes == stats.mapped_bytes - stats.committed_bytes
    assert stats.num_handles == store.memory.live.handles
    store.memory.fail("map")
    with pytest.raises(DriverError):
        store.extend(20)
    store.shrink(3)
    store.sleep()
    stats = store.stats()
    assert (stats.extends, stats.shrinks, stats.sleeps, stats.failures) == (2, 1, 1, 1)
    assert (stats.state, stats.mapped_bytes, stats.num_handles) == ("asleep", 0, 0)
    text = stats.prometheus({"model": 'a "b"\n'})
    assert f'triton_kv_reserved_bytes{{model="a \\"b\\"\\n"}} {stats.reserved_bytes}\n' in text
    assert '# TYPE triton_kv_extends_total counter\ntriton_kv_extends_total{model="a \\"b\\"\\n"} 2\n' in text
    assert 'triton_kv_info{state="asleep",' in text
    for line in text.splitlines():
        assert line.startswith("# TYPE triton_kv_") or line.split("}")[-1].strip().isdigit()


def test_a_handle_that_is_not_released_is_counted_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    store, _ = filled(20, 4)
    before = free_bytes(store)
    store.memory.fail("release")
    with caplog.at_level(logging.WARNING):
        freed = store.shrink(4)
    assert freed == free_bytes(store) - before
    assert freed.kept_bytes == store.stats().stray_bytes > 0
    assert freed.reasons == ("release failed with EIO: injected",)
    assert "a later shrink gives back" in caplog.text
    assert store.shrink(4) == freed.kept_bytes
    assert store.stats().stray_bytes == 0


# Checked mode.


def test_checked_mode_raises_in_the_next_op_and_poisons() -> None:
    store, _ = filled(9, checked=True)
    store.copy_blocks(torch.tensor([[0, 11]], dtype=torch.int32))
    with pytest.raises(BadAccess, match=r"1 accesses outside the 9 committed blocks .* block copied at row 0: 11"):
        store.require_committed()
    store.check(reset=True)
    store.require_committed()
    padded, block_bytes = store.buffers[0]
    store.shrink(4)
    rest = padded.view(4 * block_bytes, -4 * block_bytes % G)
    assert rest.numel()
    assert bool((rest == 0xFF).all()), "what stays mapped behind the last block"
    model = Model(store)
    model.resize(4)
    model.write_all(store)
    model.check(store)


# KVCache.


def cache_of(memory=None, **options) -> KVCache:
    options = {"num_layers": 3, "block_size": 4, "capacity": CAPACITY, **options}
    return KVCache.reserve(SPEC, memory=memory or PoisonedMemory(HostMemory(G)), **options)


def test_a_cache_shrinks_sleeps_and_wakes() -> None:
    with cache_of() as cache:
        cache.extend(CAPACITY)
        layer = cache[1]
        layer.k[:CAPACITY] = torch.arange(CAPACITY)[:, None, None, None]
        pointer = layer.k.data_ptr()
        assert cache.shrink(9) > 0
        with pytest.raises(TypeError, match="num_blocks must be an integer"):
            cache.shrink(True)
        with pytest.raises(ValueError, match="not negative"):
            cache.shrink(-1)
        with pytest.raises(ValueError, match="use extend"):
            cache.shrink(10)
        report = cache.sleep("host", live=[2, 5])
        assert report.host_bytes == 2 * cache.block_bytes
        assert cache.asleep
        with pytest.raises(Asleep):
            layer.check_usable()
        cache.wake()
        assert cache[1].k.data_ptr() == pointer
        assert cache[1].k[:9, 0, 0, 0].tolist() == [0, 0, 2, 0, 0, 5, 0, 0, 0]
        assert cache.stats().epoch == cache.epoch == 3
        future = cache.extend_async(12)
        future.result(20)
        assert cache.num_blocks == 12
        with pytest.raises(ValueError, match="beyond the capacity"):
            cache.extend_async(CAPACITY + 1)
        cache.copy_blocks([(2, 11)])
        assert cache[1].k[11, 0, 0, 0] == 2
        plan = cache.compaction_plan([2, 5, 11])
        cache.copy_blocks(plan.moves)
        cache.shrink(plan.num_blocks)
        assert sorted(cache[1].k[:3, 0, 0, 0].tolist()) == [2, 2, 5]
        assert cache.coalesce().num_segments == 0
        assert cache.min_release_blocks() <= 3


def test_groups_of_a_cache_sleep_alone() -> None:
    groups = [LayerGroup(name, {f"{name}.{i}": SPEC for i in range(2)}) for name in ("main", "draft")]
    with KVCache.reserve(groups, block_size=4, capacity=CAPACITY, memory=PoisonedMemory(HostMemory(G))) as cache:
        cache.extend(5)
        if len({place.buffer for place in cache.geometry.layers}) > 1:
            cache["main.0"].k[:5] = 3
            cache["draft.0"].k[:5] = 4
            cache.sleep(groups=["draft"])
            cache["main.0"].check_usable()
            with pytest.raises(Asleep):
                cache["draft.0"].check_usable()
            cache.wake(["draft"])
            assert bool((cache["main.0"].k[:5] == 3).all())
            assert not cache["draft.0"].k[:5].any()
        with pytest.raises(ValueError, match="no group 'other': this cache has draft, main"):
            cache.sleep(groups=["other"])
        with pytest.raises(TypeError, match=r"sequence of names, such as \['main'\]"):
            cache.sleep(groups="main")


def test_checked_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_KV_CHECKED", "1")
    with cache_of() as cache:
        assert cache._store.checked


def test_another_configuration_in_the_same_process() -> None:
    memory = HostMemory(G, budget_bytes=8 << 20)
    for num_layers in (1, 3, 2):
        with cache_of(memory, num_layers=num_layers, commit="all"):
            assert memory.memory_info()[0] < 8 << 20
        assert memory.memory_info()[0] == 8 << 20
        assert memory.live == (0, 0, 0)


# Plain memory.


def test_without_virtual_memory_the_error_names_the_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton_kv.memory.probe", lambda device: (False, "no such thing here"))
    monkeypatch.setattr("triton_kv.memory._open", {})
    options = {"num_layers": 2, "block_size": 4, "device": "cpu"}
    with pytest.raises(Unavailable, match=r'no such thing here.*fallback="allocate"'):
        KVCache.reserve(SPEC, capacity=8, **options)
    with pytest.raises(ValueError, match='fallback must be None or "allocate"'):
        KVCache.reserve(SPEC, capacity=8, fallback="x", **options)
    with pytest.raises(ValueError, match="state the capacity"):
        KVCache.reserve(SPEC, fallback="allocate", **options)
    with KVCache.reserve(SPEC, capacity=8, fallback="allocate", **options) as cache:
        assert "no such thing here" in cache.fallback_reason
        assert "plain torch memory: device 'cpu' cannot back a reservation: no such" in cache.describe()
        assert (cache.num_blocks, cache.mapped_bytes) == (8, cache.reserved_bytes)
        assert not cache[0].k.any()
        cache[1].v[:] = 5
        assert cache.shrink(3) == 0, "plain memory stays"
        cache.extend(8)
        assert bool((cache[1].v[:3] == 5).all())
        assert not cache[1].v[3:].any()
        with pytest.raises(ValueError, match="beyond the capacity"):
            cache.extend(9)
        report = cache.sleep("host")
        assert report.freed == 0
        cache.wake()
        assert bool((cache[1].v[:3] == 5).all())
        cache.copy_blocks([(0, 7)])
        assert bool((cache[1].v[7] == 5).all())
    assert cache.mapped_bytes == 0


CONTRACT = {
    "a number below": test_cache.test_a_number_at_or_below_the_committed_blocks_changes_nothing,
    "commit all": test_cache.test_commit_all,
    "storages": test_cache.test_views_have_a_storage_of_their_own,
    "kv": test_cache.test_kv_is_both_halves_in_one_view,
    "unlike dims": test_cache.test_k_and_v_dims_that_differ,
    "committed views": lambda: test_cache.test_committed_views_can_be_printed_and_pickled("LTBNHD"),
    "heads as segments": test_cache.test_committed_views_where_heads_are_segments,
    "repr": test_cache.test_repr_touches_no_memory,
    "check": test_cache.test_check_reports_the_first_error_and_resets,
    "closed or empty": test_cache.test_ops_on_a_closed_or_empty_cache,
    "fork": test_cache.test_a_forked_child_is_told,
}


@pytest.mark.parametrize("test", CONTRACT.values(), ids=CONTRACT)
def test_plain_memory_keeps_the_contract(monkeypatch: pytest.MonkeyPatch, test) -> None:
    original = test_cache.reserve

    def plain(layout: str = "LTBNHD", memory=None, **options) -> KVCache:
        cache = original(layout, AllocatedMemory("cpu"), **options)
        if options.get("commit") != "all":
            cache.shrink(0)  # all of it is there from the start
        return cache

    monkeypatch.setattr(test_cache, "reserve", plain)
    test()


def test_plain_memory_is_given_back_at_close() -> None:
    memory = AllocatedMemory("cpu")
    cache = cache_of(memory)
    assert cache.fallback_reason == "asked for"
    view = cache[0].k
    cache.close()
    assert memory.live == (1, 0, 0), "a view keeps it"
    del view
    cache_of(memory).close()
    assert memory.live == (0, 0, 0)


GROUPS = [
    tkv.LayerGroup("a", {"a.0": tkv.AttentionSpec(2, 16, torch.float32)}),
    tkv.LayerGroup(
        "b", {"b.0": tkv.AttentionSpec(2, 16, torch.float32), "b.1": tkv.AttentionSpec(2, 16, torch.float32)}
    ),
]


def reserve_groups(**options):
    memory = tkv.HostMemory(4096, budget_bytes=64 << 20)
    return tkv.KVCache.reserve(GROUPS, block_size=16, capacity=64, memory=memory, **options)


@pytest.mark.parametrize("keep", [None, "host"])
def test_groups_sleep_alone_while_one_granule_stands_for_all_segments(keep):
    with reserve_groups(alias=True) as cache:
        cache.extend(1)
        cache["a.0"].k[:1] = 3
        held_bytes, mapped_bytes = cache.memory_info()[0], cache.mapped_bytes
        report = cache.sleep(keep, groups=["a"])
        assert report.freed == cache.memory_info()[0] - held_bytes == 4096, "one of the two granules"
        cache["b.0"].k[:1] = 5
        cache.wake()
        assert bool((cache["a.0"].k[0] == (3 if keep else 0)).all())
        assert bool((cache["b.0"].k[0] == 5).all())
        assert cache.mapped_bytes == mapped_bytes + 4096, "what wakes is real memory, one granule a segment"
        epoch = cache.epoch
        cache.extend(32)
        assert cache.epoch == epoch + 1
        assert cache.mapped_bytes == cache.mapped_bytes_at(32)
        for layer in cache:
            assert not layer.k[:32].any()
            assert not layer.v[:32].any()
        cache["b.0"].k[:32] = 1
        assert not cache["b.0"].v[:32].any()
        assert not cache["b.1"].k[:32].any()


def test_groups_that_sleep_one_after_the_other_wake_without_aliases():
    with reserve_groups(alias=True) as cache:
        cache.extend(1)
        cache.sleep(groups=["a"])
        cache.sleep(groups=["b"])
        assert cache.mapped_bytes == 0
        cache.wake()
        assert cache.mapped_bytes == cache.mapped_bytes_at(1)
        cache["a.0"].k[:1] = 3
        epoch = cache.epoch
        cache.extend(32)
        assert cache.epoch == epoch
        assert bool((cache["a.0"].k[0] == 3).all())


@pytest.mark.parametrize("inner", ["extend", "shrink", "sleep", "close", "coalesce"])
def test_a_watcher_cannot_change_the_cache_it_watches(inner):
    cache = reserve_groups()
    cache.extend(4)
    failures = []

    def watcher(change):
        try:
            getattr(cache, inner)(*{"extend": (60,), "shrink": (1,)}.get(inner, ()))
        except tkv.TritonKVError as error:
            failures.append(str(error))

    end = cache.watch(watcher)
    cache.extend(32)
    assert failures
    assert all(f"{inner} inside another change of this cache" in text for text in failures)
    assert (cache.num_blocks, int(cache.control[0])) == (32, 32)
    cache["a.0"].k[:32] = 1
    end()
    cache.close()


def test_each_registration_of_a_watcher_ends_by_itself():
    seen = []
    with reserve_groups() as cache:
        ends = [cache.watch(seen.append), cache.watch(seen.append)]
        ends[0]()
        ends[0]()
        cache.extend(1)
        assert len(seen) == 1
        ends[1]()
        cache.extend(2)
        assert len(seen) == 1


def test_a_watcher_that_ends_itself_hides_nothing_from_the_next():
    seen = []
    with reserve_groups() as cache:
        end = cache.watch(lambda change: end())
        cache.watch(seen.append)
        cache.extend(1)
        assert len(seen) == 1


def test_sleeping_no_group_changes_nothing():
    with reserve_groups() as cache:
        cache.extend(4)
        epoch = cache.epoch
        cache.sleep(groups=[])
        assert (cache.epoch, cache.state) == (epoch, "open")


def test_waking_a_group_asks_for_its_own_memory():
    memory = tkv.HostMemory(4096, budget_bytes=100 * 4096)
    with tkv.KVCache.reserve(GROUPS, block_size=16, capacity=64, memory=memory) as cache:
        cache.extend(8)
        cache.sleep(groups=["a"])
        handle = memory.create(memory.memory_info()[0])
        asked = 2 * 8 * 16 * 2 * 16 * 4
        with pytest.raises(tkv.OutOfMemory, match=f"asked for {asked} bytes") as caught:
            cache.wake(groups=["a"])
        assert caught.value.would_fit is None
        memory.release(handle)
        cache.wake()


def test_a_new_group_has_the_layout_of_the_cache():
    with reserve_groups(layout="LBTNHD") as cache:
        cache.add_group(tkv.LayerGroup("c", {"c.0": GROUPS[0].layers["a.0"]}))
        assert cache["c.0"].layout == cache["a.0"].layout == "LBTNHD"


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda cache: cache.zero_blocks([0.9]), id="zero_blocks"),
        pytest.param(lambda cache: cache.copy_blocks([(1.7, 0)]), id="copy_blocks"),
        pytest.param(lambda cache: cache.compaction_plan([1.5]), id="compaction_plan"),
    ],
)
def test_block_ids_are_no_floats(change):
    with reserve_groups() as cache:
        cache.extend(4)
        with pytest.raises(TypeError, match="must be an integer"):
            change(cache)


@pytest.mark.parametrize("blocks", [-1, 65])
def test_sleep_is_prepared_for_blocks_that_can_be(blocks):
    with reserve_groups() as cache:
        cache.extend(4)
        with pytest.raises(ValueError, match=r"num_blocks must lie in 0\.\.64"):
            cache.prepare_sleep(blocks)


def test_stats_after_close_are_empty():
    cache = reserve_groups()
    cache.extend(4)
    cache.prepare_sleep()
    cache.sleep("host")
    cache.close()
    stats = cache.stats()
    assert stats.state == "closed"
    held_bytes = [stats.committed_bytes, stats.mapped_bytes, stats.pooled_bytes, stats.staging_bytes, stats.host_bytes]
    assert [stats.num_blocks, stats.num_handles, *held_bytes] == [0] * 7
    cache.close()


def test_an_awake_group_shows_its_committed_blocks():
    with reserve_groups() as cache:
        cache.extend(4)
        cache.sleep(groups=["a"])
        assert cache.committed("b.0").k.shape[0] == 4
        with pytest.raises(tkv.Asleep):
            cache.committed("a.0")

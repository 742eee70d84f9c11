"""Every driver call of every change fails once, on every software driver: as before, or done; and the retry works."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from elastic_store import G, Held, Model, faulty, held, make_store

from triton_kv import AttentionSpec, KVCache, LayerGroup
from triton_kv.errors import DriverError, OutOfMemory
from triton_kv.memory import FaultyMemory, HandlePolicy, HostMemory, PoisonedMemory, VirtualMemory
from triton_kv.memory.reservation import reap
from triton_kv.memory.wrapper import WrappedMemory
from triton_kv.store import BlockStore


class Change(NamedTuple):
    """A store brought to some state, and one change of it."""

    prepare: Callable[[BlockStore, Model], None]
    apply: Callable[[BlockStore], object]
    model: Callable[[Model], None]  # what the change does to the blocks
    policy: HandlePolicy | None = None
    alias: bool = False
    tight: bool = False  # with memory for one handle beside what is held
    gather: bool = False  # scattered blocks meet on the device before they go to the host


def grow(*sizes: int) -> Callable[[BlockStore, Model], None]:
    def prepare(store: BlockStore, model: Model) -> None:
        for size in sizes:
            store.extend(size)
            model.resize(size)
        model.write_all(store)

    return prepare


def grow_and_prepare(*sizes: int) -> Callable[[BlockStore, Model], None]:
    def prepare(store: BlockStore, model: Model) -> None:
        grow(*sizes)(store, model)
        store.prepare_sleep()
        assert store.stats().staging_bytes

    return prepare


def grow_and_sleep(
    keep: str | None, live: list[int] | None = None, *, prepared: bool = False
) -> Callable[[BlockStore, Model], None]:
    def prepare(store: BlockStore, model: Model) -> None:
        (grow_and_prepare if prepared else grow)(2, 13)(store, model)
        store.sleep(keep=keep, live=live)
        kept = model.values.copy()
        model.resize(0)
        model.kept = [block for block in range(13) if keep and (live is None or block in live)]  # type: ignore[attr-defined]
        model.before = kept  # type: ignore[attr-defined]

    return prepare


def awake(model: Model) -> None:
    model.resize(13)
    for block in model.kept:  # type: ignore[attr-defined]
        model.values[block] = model.before[block]  # type: ignore[attr-defined]


def to(num_blocks: int) -> Callable[[Model], None]:
    return lambda model: model.resize(num_blocks)


def same(model: Model) -> None:
    pass


def emptied(model: Model) -> None:
    model.values[:] = 0
    model.resize(9)


CHANGES = {
    "extend the first": Change(grow(), lambda store: store.extend(5), to(5)),
    "extend": Change(grow(1, 4), lambda store: store.extend(19), to(19)),
    "extend in chunks": Change(grow(1, 4), lambda store: store.extend(19), to(19), HandlePolicy(2 * G)),
    "extend in the background": Change(grow(1), lambda store: store.extend_async(9).result(), to(9)),
    "extend from the pool": Change(
        lambda store, model: (grow(20)(store, model), store.shrink(3), model.resize(3)),
        lambda store: store.extend(20),
        to(20),
        HandlePolicy(G, 8 * G),
    ),
    "extend aliased": Change(grow(), lambda store: store.extend(1), to(1), alias=True),
    "extend past the aliases": Change(
        lambda store, model: (store.extend(1), model.resize(1)), lambda store: store.extend(9), emptied, alias=True
    ),
    "shrink whole handles": Change(grow(1, 4, 20), lambda store: store.shrink(4), to(4)),
    "shrink through handles": Change(grow(20), lambda store: store.shrink(7), to(7)),
    "shrink within a granule": Change(grow(5), lambda store: store.shrink(4), to(4)),
    "shrink to nothing": Change(grow(3, 20), lambda store: store.shrink(0), to(0)),
    "shrink with memory for one handle": Change(grow(20), lambda store: store.shrink(17), to(17), tight=True),
    "shrink into the pool": Change(grow(20), lambda store: store.shrink(3), to(3), HandlePolicy(G, 6 * G)),
    "coalesce": Change(grow(1, 3, 9, 20), lambda store: store.coalesce(), same),
    "coalesce with memory for one handle": Change(grow(1, 3, 9, 20), lambda store: store.coalesce(), same, tight=True),
    "trim": Change(
        lambda store, model: (grow(20)(store, model), store.shrink(3), model.resize(3)),
        lambda store: store.trim(),
        same,
        HandlePolicy(G, 8 * G),
    ),
    "sleep": Change(grow(2, 13), lambda store: store.sleep(), to(0)),
    "sleep with contents": Change(grow(2, 13), lambda store: store.sleep(keep="host"), to(0)),
    "sleep with live blocks": Change(grow(2, 13), lambda store: store.sleep(keep="host", live=[0, 5, 6]), to(0)),
    "sleep with gathered blocks": Change(
        grow(2, 13), lambda store: store.sleep(keep="host", live=[0, 5, 6]), to(0), gather=True
    ),
    "wake with gathered blocks": Change(
        grow_and_sleep("host", [3, 4, 12]), lambda store: store.wake(), awake, gather=True
    ),
    "prepare a sleep": Change(grow(2, 13), lambda store: store.prepare_sleep(), same, gather=True),
    "sleep as prepared": Change(
        grow_and_prepare(2, 13), lambda store: store.sleep(keep="host", live=[0, 5, 6]), to(0), gather=True
    ),
    "wake as prepared": Change(
        grow_and_sleep("host", [3, 4, 12], prepared=True), lambda store: store.wake(), awake, gather=True
    ),
    "wake": Change(grow_and_sleep(None), lambda store: store.wake(), awake),
    "wake with contents": Change(grow_and_sleep("host"), lambda store: store.wake(), awake),
    "wake with live blocks": Change(grow_and_sleep("host", [3, 4, 12]), lambda store: store.wake(), awake),
}

TIGHT = 19 * G  # what the largest replacement of the tight changes takes


def start(name: str, change: Change) -> tuple[FaultyMemory, BlockStore, Model]:
    memory = faulty(name, None if change.tight else 64 << 20)
    store = make_store(memory, handles=change.policy, alias=change.alias)
    model = Model(store)
    if change.tight:  # learn how much the start takes, then allow one handle more
        change.prepare(store, model)
        taken, largest = store.mapped_bytes, max(run.num_bytes for b, _ in store.buffers for run in b._reservation.runs)
        jobs = [job.num_bytes for b, _ in store.buffers for job in b.scattered()]
        store.close(lambda: None)
        memory = faulty(name, taken + max([largest, *jobs]))
        store = make_store(memory, handles=change.policy)
        model = Model(store)
    change.prepare(store, model)
    return memory, store, model


def settled(store: BlockStore) -> Held:
    """The state once what the driver refused to take back has been tried again."""
    store.trim(sum(buffer.pooled_bytes for buffer, _ in store.buffers))
    if not store.asleep:
        store.shrink(store.num_blocks)
    assert reap(store.memory) == []
    return held(store)


@pytest.mark.parametrize(
    ("name", "error"), [("host", "driver"), ("host", "interrupt"), ("fake", "driver"), ("allocated", "driver")]
)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_call_of_a_change_may_fail(
    monkeypatch: pytest.MonkeyPatch, change: Change, name: str, error: str
) -> None:
    if change.gather:
        if name != "host":
            pytest.skip("books have no blocks to gather, and plain memory does not crowd the device")
        monkeypatch.setattr("triton_kv.host_copy.should_gather", lambda *arguments: True)
    if change.tight and name == "allocated":
        pytest.skip("plain memory is all there from the start")
    memory, store, model = start(name, change)
    change.apply(store)
    change.model(model)
    model.check(store)
    expected = settled(store)
    store.close(lambda: None)
    nth = num_raised = 0
    while True:
        nth += 1
        memory, store, model = start(name, change)
        before = held(store)
        memory.fail("any", nth, code="EIO" if error == "driver" else KeyboardInterrupt())
        try:
            change.apply(store)
        except (DriverError, OutOfMemory, KeyboardInterrupt) as raised:
            num_raised += 1
            raised.__traceback__ = None  # its frames keep views of staging addresses
            assert not getattr(raised, "undo_failures", ())  # noqa: PT017
            memory.heal()
            if change.gather and held(store) != before:  # as do cycles
                gc.collect()
                assert reap(memory) == []
            after = held(store)
            if after == before:
                model.check(store)
            else:  # the change was complete, or several of them are one after the other, and something was given back
                assert error == "interrupt" or change.tight, f"call {nth}: {before} became {after}"
            if after[:2] == before[:2]:
                change.apply(store)
        untouched = memory.num_planned == 1
        memory.heal()
        change.model(model)
        model.check(store)
        assert settled(store)._replace(epoch=0) == expected._replace(epoch=0), f"call {nth}"
        store.close(lambda: None)
        assert memory.live == (0, 0, 0)
        assert memory.pinned_bytes == 0
        if untouched:
            break
    never_raises = {"trim", "coalesce"} if name == "allocated" else {"trim"}
    assert num_raised > 0 or change in [CHANGES[each] for each in never_raises]


class LateInterrupts(WrappedMemory):
    """An interrupt strikes when the n-th of the calls that return nothing is done, and nobody has noted that yet."""

    def __init__(self, memory: VirtualMemory) -> None:
        super().__init__(memory)
        self.remaining = 0  # 0: no interrupt

    def _pass(self) -> None:
        self.remaining -= self.remaining > 0
        if self.remaining == 0 and self.is_armed:
            self.is_armed = False
            raise KeyboardInterrupt

    is_armed = False

    def arm(self, nth: int) -> None:
        self.remaining, self.is_armed = nth, True


def _late(name: str) -> Callable[..., None]:
    def call(self: LateInterrupts, *arguments: object, **options: object) -> None:
        getattr(self.memory, name)(*arguments, **options)
        self._pass()

    return call


for _name in ("map", "set_access", "unmap", "fill", "copy", "wait", "synchronize"):
    setattr(LateInterrupts, _name, _late(_name))


INTERRUPTED = (
    "extend in chunks",
    "extend past the aliases",
    "shrink through handles",
    "coalesce",
    "sleep with gathered blocks",
    "wake with gathered blocks",
    "sleep as prepared",
)


@pytest.mark.parametrize("change", [CHANGES[name] for name in INTERRUPTED], ids=INTERRUPTED)
def test_an_interrupt_may_strike_when_a_call_is_done(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    if change.gather:
        monkeypatch.setattr("triton_kv.host_copy.should_gather", lambda *arguments: True)
    nth = 0
    while True:
        nth += 1
        memory = LateInterrupts(PoisonedMemory(HostMemory(G, 64 << 20)))
        store = make_store(memory, handles=change.policy, alias=change.alias)
        model = Model(store)
        change.prepare(store, model)
        before = held(store)
        memory.arm(nth)
        try:
            change.apply(store)
        except KeyboardInterrupt as raised:
            raised.__traceback__ = None
            assert not getattr(raised, "undo_failures", ())  # noqa: PT017
            if change.gather and held(store) != before:
                gc.collect()
                assert reap(memory) == []
        untouched, memory.is_armed = memory.is_armed, False
        if held(store)[:2] == before[:2]:
            if not untouched:
                assert held(store) == before, f"call {nth}"
            model.check(store)
            change.apply(store)
        change.model(model)
        model.check(store)
        store.close(lambda: None)
        assert memory.live == (0, 0, 0)
        assert memory.pinned_bytes == 0
        if untouched:
            break


SPEC = AttentionSpec(num_kv_heads=2, head_dim=16, dtype=torch.float32)
ADDED = LayerGroup("added", {"added.0": SPEC, "added.1": SPEC})


ADDITIONS = {
    "before any block": (0, False, {}),
    "one buffer": (5, False, {}),
    "two buffers": (5, True, {}),
    "two buffers, dense": (5, True, {"dense": True}),
    "beside aliases": (1, True, {"alias": True}),
}


@pytest.mark.parametrize(
    ("name", "error"), [("host", "driver"), ("host", "interrupt"), ("fake", "driver"), ("allocated", "driver")]
)
@pytest.mark.parametrize(("num_blocks", "separate", "options"), ADDITIONS.values(), ids=ADDITIONS)
def test_every_call_of_adding_a_group_may_fail(
    num_blocks: int, separate: bool, options: dict[str, bool], name: str, error: str
) -> None:
    group = replace(ADDED, separate=separate)
    nth = num_raised = 0
    while True:
        nth += 1
        memory = faulty(name)
        cache = KVCache.reserve(SPEC, num_layers=2, block_size=4, capacity=24, memory=memory, **options)
        if name == "allocated":
            cache.shrink(0)
        cache.extend(num_blocks)
        has_bytes = name != "fake"
        if has_bytes:
            cache[1].v[: cache.num_blocks] = 7
        before, names = held(cache._store), [layer.name for layer in cache.geometry.layers]
        memory.fail("any", nth, code="EIO" if error == "driver" else KeyboardInterrupt())
        try:
            cache.add_group(group)
        except (DriverError, KeyboardInterrupt) as raised:
            num_raised += 1
            raised.__traceback__ = None
            assert not getattr(raised, "undo_failures", ())  # noqa: PT017
            memory.heal()
            assert reap(memory) == []
            assert held(cache._store) == before, f"call {nth}"
            assert [layer.name for layer in cache.geometry.layers] == names
            assert len(cache) == 2
            with pytest.raises(KeyError):
                cache["added.0"]
            cache.add_group(group)
        untouched = memory.num_planned == 1
        memory.heal()
        assert len(cache) == 4
        if has_bytes:
            assert bool((cache[1].v[: cache.num_blocks] == 7).all())
            for added in ("added.0", "added.1"):
                assert not cache[added].k[: cache.num_blocks].any()
                cache[added].v[: cache.num_blocks] = 9
            if num_blocks:
                cache.zero_blocks([0])
                assert not cache["added.1"].v[:1].any()
        if not options.get("alias"):
            assert cache.mapped_bytes == cache.mapped_bytes_at(cache.num_blocks)
        cache.extend(24)
        assert cache.num_blocks == 24
        cache.close()
        assert reap(memory) == []
        assert memory.live[1:] == (0, 0)
        if untouched:
            break
    assert num_raised > 0


def test_adding_a_group_takes_what_pools_and_staging_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton_kv.host_copy.should_gather", lambda *arguments: True)
    memory = faulty("host")
    handles = HandlePolicy(pool_bytes=64 * G)
    with KVCache.reserve(SPEC, num_layers=2, block_size=4, capacity=24, memory=memory, handles=handles) as cache:
        cache.extend(24)
        cache.shrink(8)
        cache.prepare_sleep()
        memory.memory.memory._budget_bytes = 2 * cache.mapped_bytes_at(8)  # type: ignore[attr-defined]
        cache.add_group(ADDED)
        assert cache.stats().pooled_bytes == cache.stats().staging_bytes == 0

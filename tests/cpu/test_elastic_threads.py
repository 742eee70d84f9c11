"""Many threads at one store, and hundreds of cycles: no deadlock, no growth, counters as a recount gives them."""

from __future__ import annotations

import gc
import os
import random
import resource
import threading
import time

import pytest
from elastic_store import CAPACITY, G, Model, faulty, make_store

from triton_kv.errors import Asleep, NothingCommitted, OutOfMemory
from triton_kv.memory import FakeMemory, HandlePolicy, HostMemory
from triton_kv.store import BlockStore


def recount(store: BlockStore) -> None:
    """The store's counters against the driver's books and the predicted bytes."""
    stats = store.stats()
    total, free = store.memory.memory_info()[::-1]
    assert total - free == stats.mapped_bytes + stats.pooled_bytes + stats.stray_bytes
    assert store.memory.live.handles == stats.num_handles
    assert stats.mapped_bytes == (0 if store.asleep else store.mapped_bytes_at(store.num_blocks))
    assert int(store.control[0]) == store.num_blocks


class SlowMemory(HostMemory):
    """Other threads get their turn in the middle of every change."""

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        time.sleep(0)
        super().map(address, num_bytes, handle)
        time.sleep(2e-5)

    def unmap(self, address: int, num_bytes: int) -> None:
        time.sleep(2e-5)
        super().unmap(address, num_bytes)


@pytest.mark.parametrize(
    ("driver", "policy"),
    [(HostMemory, None), (HostMemory, HandlePolicy(2 * G, pool_bytes=8 * G)), (SlowMemory, None)],
    ids=["one handle a run", "pooled", "slow driver"],
)
def test_eight_threads_do_five_hundred_changes_each(driver: type[HostMemory], policy: HandlePolicy | None) -> None:
    store = make_store(driver(G, budget_bytes=200 * G), handles=policy)
    unexpected: list[BaseException] = []
    done: list[int] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(500):
            target = rng.randrange(CAPACITY + 1)
            change = rng.choice(
                [
                    lambda n=target: store.extend(n),
                    lambda n=target: store.extend(n),
                    lambda n=target: store.shrink(n),
                    lambda: store.sleep(keep=rng.choice([None, "host"])),
                    store.wake,
                    store.coalesce,
                    store.trim,
                    store.stats,
                    lambda n=target: store.mapped_bytes_at(n),
                    lambda: store.compaction_plan([0]),
                ]
            )
            try:
                change()
            except (Asleep, NothingCommitted, OutOfMemory, ValueError):  # somebody else was first
                pass
            except BaseException as failure:
                unexpected.append(failure)
        done.append(seed)

    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(done) == list(range(8)), "a thread hangs"
    assert not unexpected, unexpected[0]
    recount(store)
    store.wake()
    recount(store)
    store.close(lambda: None)
    assert store.memory.live == (0, 0, 0)
    assert store.memory.pinned_bytes == 0


def test_readers_never_wait_for_a_change() -> None:
    store = make_store(faulty("fake"))
    store.extend(3)
    with store._lock:
        seen: list[object] = []
        thread = threading.Thread(target=lambda: seen.append((store.stats().num_blocks, store.mapped_bytes_at(9))))
        thread.start()
        thread.join(20)
        assert seen == [(3, store.mapped_bytes_at(9))]


CYCLES = {
    "extend and shrink": lambda store: (store.extend(20), store.shrink(7), store.shrink(3)),
    "sleep and wake": lambda store: (store.sleep(keep="host"), store.wake()),
    "coalesce": lambda store: (store.extend(12), store.extend(20), store.coalesce(), store.shrink(3)),
    "in the background": lambda store: (store.extend_async(9).result(20), store.shrink(3)),
    "copies": lambda store: (store.copy_blocks([(0, 1), (1, 0)]), store.copy_blocks([(0, 2)])),
    "compaction": lambda store: (store.extend(9), store.copy_blocks(store.compaction_plan([8, 1, 5]).moves)),
    "failures": lambda store: fail_once(store),
}


def fail_once(store: BlockStore) -> None:
    store.memory.fail("set_access", 2)
    with pytest.raises(Exception, match="injected"):
        store.extend(20)


@pytest.mark.parametrize("cycle", CYCLES.values(), ids=CYCLES)
def test_two_hundred_cycles_leave_nothing_behind(cycle) -> None:
    store = make_store(faulty("host"))
    store.extend(3)
    model = Model(store)
    model.resize(3)

    def measure() -> tuple[object, ...]:
        store.shrink(3)
        gc.collect()
        host = store.memory.memory.memory
        return (host.live, host.memory_info()[0], host.pinned_bytes, host._file_bytes(), threads_and_descriptors())

    for _ in range(3):
        cycle(store)
    store.coalesce()
    before, resident = measure(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(200):
        cycle(store)
    store.coalesce()
    assert measure() == before
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident < 8 << 10  # KiB


def threads_and_descriptors() -> tuple[int, int]:
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


def test_two_hundred_lives_leave_nothing_behind() -> None:
    memory = FakeMemory(G)
    gc.collect()
    before = threads_and_descriptors()
    for index in range(200):
        store = make_store(memory, alias=index % 2 == 0)
        store.extend(1)
        store.extend(15)
        store.shrink(4)
        store.sleep(keep="host", live=[1])
        if index % 3:
            store.wake()
        store.close(lambda: None)
        assert memory.live == (0, 0, 0)
        assert memory.pinned_bytes == 0
    threads, descriptors = threads_and_descriptors()
    assert threads == before[0]
    assert descriptors <= before[1]  # other tests' files may be collected meanwhile

"""A cache in every state at exit, fork, exceptions in flight: each in a process of its own, exit code 0, no noise."""

from __future__ import annotations

import signal
import textwrap
from collections.abc import Iterator

import pytest
from test_lifetime import Nursery

PRELUDE = """
import faulthandler; faulthandler.disable()
import logging, time
logging.getLogger("triton_kv").setLevel(logging.ERROR)
from triton_kv import AttentionSpec, KVCache
from triton_kv.memory import HandlePolicy

SPEC = AttentionSpec(num_kv_heads=2, head_dim=16, dtype=torch.float32)

def cache_of(memory=None, **options):
    options = {"num_layers": 3, "block_size": 4, "capacity": 24, **options}
    return KVCache.reserve(SPEC, memory=memory or FaultyMemory(PoisonedMemory(HostMemory(G))), **options)

def calls(cache):
    return cache._store.memory.calls.total()

class SlowMemory(FakeMemory):
    def fill(self, *arguments, **options):
        time.sleep(0.05)
        super().fill(*arguments, **options)
"""


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path_factory.mktemp("nursery"))
    yield nursery
    nursery.process.communicate(timeout=60)


def run(nursery: Nursery, code: str) -> tuple[int, str, str]:
    return nursery.run(PRELUDE + textwrap.dedent(code))


QUIET_EXITS = {
    "open, with views and operands": "cache = cache_of(); cache.extend(5); kept = [cache[0], cache[1].k]",
    "asleep with contents": "cache = cache_of(); cache.extend(5); cache.sleep('host')",
    "asleep, dropped": "cache = cache_of(); cache.extend(5); cache.sleep('host'); del cache; gc.collect()",
    "pinned beforehand": "cache = cache_of(); cache.extend(5); cache.prepare_sleep()",
    "aliased": "cache = cache_of(alias=True); cache.extend(1); view = cache[2].v",
    "pooled": """
        cache = cache_of(handles=HandlePolicy(G, pool_bytes=9 * G))
        cache.extend(20)
        cache.shrink(2)
    """,
    "closed while asleep, twice": """
        cache = cache_of()
        cache.extend(5)
        cache.sleep("host")
        cache.close()
        cache.close()
        memory = cache._store.memory
        assert (memory.live, memory.pinned_bytes) == ((0, 0, 0), 0)
    """,
    "extending in the background": """
        cache = cache_of(SlowMemory(G))
        future = cache.extend_async(20)
    """,
    "extending in the background, dropped": """
        future = cache_of(SlowMemory(G)).extend_async(20)
        gc.collect()
    """,
    "closed while extending in the background": """
        cache = cache_of(SlowMemory(G))
        future = cache.extend_async(20)
        cache.close()
        assert future.done()
    """,
    "half grown, exception in flight": """
        cache = cache_of()
        cache._store.memory.fail("set_access", 3)
        try:
            cache.extend(9)
        except DriverError as error:
            kept = error
        assert cache.num_blocks == 0
    """,
    "half built": """
        memory = FaultyMemory(HostMemory(G))
        memory.fail("create", 2)
        try:
            cache_of(memory, commit="all")
        except OutOfMemory as error:
            kept = error
        assert memory.live[1:] == (0, 0)
    """,
    "never initialised": "cache = KVCache.__new__(KVCache); del cache; gc.collect()",
    "broken": """
        cache = cache_of()
        memory = cache._store.memory
        memory.fail("set_access", 3)
        memory.fail("unmap")
        try:
            cache.extend(9)
        except DriverError as error:
            kept = error
        assert cache.stats().state == "broken"
        view_refused = False
        try:
            cache[0].check_usable()
        except Broken:
            view_refused = True
        assert view_refused
    """,
    "a cycle through a watcher": """
        cache = cache_of()
        cache.watch(lambda change: cache.num_blocks)
        cache.extend(5)
        del cache
        gc.collect()
    """,
    "interrupted between two steps": """
        cache = cache_of()
        cache._store.memory.fail("map", 4, code=KeyboardInterrupt())
        try:
            cache.extend(9)
        except KeyboardInterrupt:
            pass
        assert cache.num_blocks == 0
        cache.extend(9)
    """,
    "plain memory": "cache = cache_of(__import__('triton_kv').memory.AllocatedMemory('cpu')); view = cache[0].k",
}


@pytest.mark.parametrize("code", QUIET_EXITS.values(), ids=QUIET_EXITS.keys())
def test_exit_is_silent(nursery: Nursery, code: str) -> None:
    assert run(nursery, code) == (0, "", "")


FAULTS = {
    "asleep": "cache = cache_of(); cache.extend(5); view = cache[0].k; cache.sleep(); view[0, 0, 0, 0].item()",
    "closed while asleep": """
        cache = cache_of(); cache.extend(5); view = cache[0].k; cache.sleep('host'); cache.close(); view[0, 0].sum()
    """,
    "shrunk through a handle": "cache = cache_of(commit='all'); view = cache[0].k; cache.shrink(1); view[20].sum()",
}


@pytest.mark.parametrize("code", FAULTS.values(), ids=FAULTS.keys())
def test_what_is_gone_faults(nursery: Nursery, code: str) -> None:
    assert run(nursery, code) == (-signal.SIGSEGV, "", "")


def test_the_forked_child_of_a_changing_process(nursery: Nursery) -> None:
    code = """
        cache = cache_of()
        cache.extend(5)
        cache.prepare_sleep()
        layer = cache[0]
        sleeping = cache_of()
        sleeping.extend(5)
        sleeping.sleep("host")
        before = calls(cache), calls(sleeping)
        holding, done = threading.Event(), threading.Event()
        def hold():
            with cache._store._lock:
                holding.set()
                done.wait()
        thread = threading.Thread(target=hold)
        thread.start()
        holding.wait()
        pid = os.fork()
        if pid == 0:
            for use in (
                lambda: cache.extend(6), lambda: cache.extend_async(6), lambda: cache.shrink(1), cache.sleep,
                cache.wake, cache.coalesce, cache.trim, cache.prepare_sleep, lambda: cache.copy_blocks([(0, 1)]),
                lambda: cache.compaction_plan([0]), cache.close, sleeping.wake, sleeping.close,
                layer.check_usable, lambda: cache[1],
            ):
                try:
                    use()
                    print("not refused", use)
                except Forked:
                    pass
            assert (calls(cache), calls(sleeping)) == before
            del cache, sleeping, layer
            gc.collect()
            own = cache_of()
            own.extend(3)
            own.close()
            sys.exit(0)
        done.set()
        thread.join()
        assert os.waitpid(pid, 0)[1] == 0
        assert (calls(cache), calls(sleeping)) == before
        sleeping.wake()
        cache.shrink(1)
        del layer
        for each in (cache, sleeping):
            memory = each._store.memory
            each.close()
            assert (memory.live, memory.pinned_bytes) == ((0, 0, 0), 0)
    """
    assert run(nursery, code) == (0, "", "")


def test_a_dropped_sleeping_cache_is_reaped_without_calls_in_a_finaliser(nursery: Nursery) -> None:
    code = """
        memory = FaultyMemory(HostMemory(G))
        cache = cache_of(memory)
        cache.extend(5)
        cache.sleep("host")
        before = memory.calls.total()
        del cache
        gc.collect()
        assert memory.calls.total() == before
        assert memory.pinned_bytes > 0
        assert reap(memory) == []
        assert (memory.live, memory.pinned_bytes) == ((0, 0, 0), 0)
    """
    assert run(nursery, code) == (0, "", "")

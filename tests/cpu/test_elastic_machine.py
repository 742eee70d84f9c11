"""Random changes, writes and failures of a store, against a plain byte model. `make test-nightly` runs thousands."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from elastic_store import CAPACITY, G, Held, Model, held, make_store
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from triton_kv.errors import DriverError, OutOfMemory
from triton_kv.memory import FaultyMemory, HandlePolicy, HostMemory, PoisonedMemory
from triton_kv.memory.reservation import reap

EXAMPLES = int(os.environ.get("TRITON_KV_EXAMPLES", "200"))

POLICIES = [None, HandlePolicy(2 * G), HandlePolicy(G, pool_bytes=4 * G), HandlePolicy(pool_bytes=9 * G)]
BLOCKS = st.integers(0, CAPACITY)
LIVE = st.sets(BLOCKS)

# A failure that strikes one of the next calls, or none.
FAILURE = st.none() | st.tuples(st.integers(1, 40), st.sampled_from(["EIO", "ENOMEM", "interrupt"]))
is_awake = precondition(lambda self: not self.store.asleep)


def unchanged(state: Held) -> tuple[object, ...]:
    """What a failed change leaves as it was. Handles that an earlier release failed for may go at any time."""
    return state.state, state.num_blocks, state.watermark, state.epoch, state.mapped_bytes


class StoreLife(RuleBasedStateMachine):
    @initialize(
        policy=st.sampled_from(POLICIES), budget=st.sampled_from([30 * G, 45 * G, 200 * G]), checked=st.booleans()
    )
    def make(self, policy: HandlePolicy | None, budget: int, checked: bool) -> None:
        self.inner = HostMemory(G, budget)
        self.memory = FaultyMemory(PoisonedMemory(self.inner))
        self.store = make_store(self.memory, handles=policy, checked=checked)
        self.model = Model(self.store)
        self.kept: dict[int, object] = {}  # the model's rows of a sleeping store, those to be restored
        self.sleeping = 0
        self.bases = [buffer.base_ptr for buffer, _ in self.store.buffers]
        self.views: list[torch.Tensor] = []

    def attempt(self, change: Callable[[], object], failure: tuple[int, str] | None, *, in_parts: bool = False) -> bool:
        """Whether the change was made. If not, nothing is different, but for handles of what is done `in_parts`."""
        before = held(self.store)
        if failure is not None:
            nth, code = failure
            self.memory.fail("any", nth, code=KeyboardInterrupt() if code == "interrupt" else code)
        error: BaseException | None = None
        try:
            change()
        except (DriverError, OutOfMemory, KeyboardInterrupt) as raised:
            error = raised
        self.memory.heal()
        if error is None:
            return True
        if getattr(error, "undo_failures", ()):  # out of memory, and then the failure struck the undo
            assert failure is not None
            assert self.store.state == "broken"
            self.close()
            self.make(None, 45 * G, False)
            return False
        after = held(self.store)
        if after[:2] != before[:2] and isinstance(error, KeyboardInterrupt):
            return True  # it was complete and memory was being given back
        if not (after.epoch != before.epoch and (in_parts or isinstance(error, KeyboardInterrupt))):
            assert unchanged(after) == unchanged(before)
        assert after[:3] == before[:3]
        return False

    @is_awake
    @rule(num_blocks=BLOCKS, failure=FAILURE, in_background=st.booleans())
    def extend(self, num_blocks: int, failure: tuple[int, str] | None, in_background: bool) -> None:
        before = self.store.num_blocks
        extend = self.store.extend
        if in_background:
            extend = lambda target: self.store.extend_async(target).result(30)  # noqa: E731
        if self.attempt(lambda: extend(num_blocks), failure):
            self.model.resize(max(before, num_blocks))

    @is_awake
    @rule(data=st.data(), failure=FAILURE)
    def shrink(self, data: st.DataObject, failure: tuple[int, str] | None) -> None:
        target = data.draw(st.integers(0, self.store.num_blocks))
        freed = []
        before = self.inner.memory_info()[0]
        if self.attempt(lambda: freed.append(self.store.shrink(target)), failure):
            self.model.resize(target)
        if freed:
            assert freed[0] == self.inner.memory_info()[0] - before
            excess = self.store.mapped_bytes - self.store.mapped_bytes_at(target)
            assert freed[0].kept_bytes == excess + self.store.stats().stray_bytes

    @is_awake
    @rule(live=LIVE, keep=st.booleans(), failure=FAILURE)
    def sleep(self, live: set[int], keep: bool, failure: tuple[int, str] | None) -> None:
        live = {block for block in live if block < self.store.num_blocks}
        num_blocks = self.store.num_blocks
        options = {"keep": "host", "live": live} if keep else {}
        if self.attempt(lambda: self.store.sleep(**options), failure):
            self.kept = {block: self.model.values[block].copy() for block in live} if keep else {}
            self.sleeping = num_blocks
            self.model.resize(0)

    @precondition(lambda self: self.store.asleep)
    @rule(failure=FAILURE)
    def wake(self, failure: tuple[int, str] | None) -> None:
        if self.attempt(self.store.wake, failure):
            self.model.resize(self.sleeping)
            for block, row in self.kept.items():
                self.model.values[block] = row

    @is_awake
    @rule(failure=FAILURE)
    def coalesce(self, failure: tuple[int, str] | None) -> None:
        if self.attempt(self.store.coalesce, failure, in_parts=True):
            assert self.store.coalesce_bytes() == 0

    @rule(limit=st.integers(0, 4), failure=FAILURE)
    def trim(self, limit: int, failure: tuple[int, str] | None) -> None:
        self.attempt(lambda: self.store.trim(limit * G), failure)

    @precondition(lambda self: self.store.num_blocks)
    @rule(live=LIVE)
    def compact(self, live: set[int]) -> None:
        live = {block for block in live if block < self.store.num_blocks}
        plan = self.store.compaction_plan(live)
        old = self.model.values.copy()
        self.store.copy_blocks(plan.moves)
        for source, target in plan.moves.tolist():
            self.model.values[target] = old[source]
        self.model.check(self.store)
        assert self.attempt(lambda: self.store.shrink(plan.num_blocks), None)
        self.model.resize(plan.num_blocks)
        for block in live:
            assert (self.model.values[int(plan.remapping[block])] == old[block]).all()

    @precondition(lambda self: self.store.num_blocks)
    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        block = st.integers(0, self.store.num_blocks - 1)
        pairs = data.draw(st.lists(st.tuples(block, block), max_size=6, unique_by=lambda pair: pair[1]))
        old = self.model.values.copy()
        self.store.copy_blocks(pairs)
        for source, target in pairs:
            self.model.values[target] = old[source]

    @precondition(lambda self: self.store.num_blocks)
    @rule(data=st.data(), value=st.integers(0, 254))
    def write(self, data: st.DataObject, value: int) -> None:
        self.model.write(self.store, data.draw(st.integers(0, self.store.num_blocks - 1)), value)

    @rule()
    def take_a_view(self) -> None:
        self.views = [*self.views[-3:], self.store.buffers[0].buffer.full_view()]

    @rule(fails=st.sampled_from([None, "unmap", "release", "free", "synchronize"]))
    def close_and_reserve_anew(self, fails: str | None) -> None:
        self.close(fails)
        self.make(None, 45 * G, False)

    def close(self, fails: str | None = None) -> None:
        if fails is not None:
            self.memory.fail(fails)
        try:
            self.store.close(lambda: None)
        except DriverError:
            self.store.close(lambda: None)
        self.memory.heal()
        num_views = len({view.data_ptr() for view in self.views})
        assert self.memory.live == (num_views, 0, 0)
        self.views.clear()
        assert reap(self.memory) == []
        assert self.memory.live == (0, 0, 0)
        assert self.memory.pinned_bytes == 0

    @invariant()
    def every_byte_is_as_in_the_model(self) -> None:
        if not hasattr(self, "store"):
            return
        self.model.check(self.store)
        assert [buffer.base_ptr for buffer, _ in self.store.buffers] == self.bases
        for view in self.views:
            assert view.data_ptr() == self.bases[0]
        taken = self.inner.memory_info()[1] - self.inner.memory_info()[0]
        assert taken == sum(buffer.held_bytes for buffer, _ in self.store.buffers)
        assert self.store.mapped_bytes >= self.store.mapped_bytes_at(self.store.num_blocks)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.close()


StoreLife.TestCase.settings = settings(
    max_examples=EXAMPLES,
    report_multiple_bugs=True,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestStoreLife = StoreLife.TestCase

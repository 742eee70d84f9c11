"""A random life of a cache of many kinds: grow, shrink, write, zero, add groups, and any driver call failing."""

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import triton_kv as tkv
from tests.cpu.test_states_properties import EXAMPLES, HOST_GRANULE, attention_specs, state_specs, views_of

CAPACITY, BUDGET = 9, 64 << 20


class Life(RuleBasedStateMachine):
    """Beside the cache a model: which byte fills each view of each block."""

    @initialize(data=st.data(), packed=st.booleans())
    def begin(self, data, packed):
        self.driver = tkv.HostMemory(HOST_GRANULE, budget_bytes=BUDGET)
        self.memory = tkv.FaultyMemory(tkv.PoisonedMemory(self.driver))
        self.num_groups = 0
        groups = [self.new_group(data) for _ in range(data.draw(st.integers(1, 2)))]
        self.cache = tkv.KVCache.reserve(
            groups, block_size=4, capacity=CAPACITY, layout="LBTNHD", packed=packed, memory=self.memory
        )
        self.cache.extend(data.draw(st.integers(0, CAPACITY)))
        self.bytes: dict[tuple[str, int, int], int] = {}  # layer, view, block -> byte; absent: zero

    def new_group(self, data) -> tkv.LayerGroup:
        self.num_groups += 1
        specs = data.draw(
            st.lists(st.one_of(state_specs(HOST_GRANULE), attention_specs(equal_dims=True)), min_size=1, max_size=2)
        )
        name = f"g{self.num_groups}"
        return tkv.LayerGroup(name, {f"{name}.{index}": spec for index, spec in enumerate(specs)})

    def forget(self, blocks) -> None:
        self.bytes = {key: byte for key, byte in self.bytes.items() if key[2] not in blocks}

    @rule(size=st.integers(0, CAPACITY))
    def extend(self, size):
        self.cache.extend(size)
        assert self.cache.num_blocks >= size

    @rule(size=st.integers(0, CAPACITY))
    def shrink(self, size):
        size = min(size, self.cache.num_blocks)
        self.cache.shrink(size)
        self.forget(range(size, CAPACITY))

    @rule(data=st.data(), byte=st.integers(1, 255))
    def write(self, data, byte):
        if not self.cache.num_blocks:
            return
        layer = data.draw(st.sampled_from(list(self.cache)))
        block = data.draw(st.integers(0, self.cache.num_blocks - 1))
        number = data.draw(st.integers(0, len(views_of(layer)) - 1))
        view = views_of(layer)[number]
        view[block] = torch.full_like(view[block].contiguous().view(torch.uint8), byte).view(view.dtype)
        self.bytes[layer.name, number, block] = byte

    @rule(ids=st.lists(st.integers(-2, CAPACITY), max_size=4))
    def zero(self, ids):
        if not self.cache.num_blocks:
            return
        self.cache.zero_blocks(torch.tensor(ids, dtype=torch.int32))
        self.forget([block for block in ids if 0 <= block < self.cache.num_blocks])
        assert self.cache.check(reset=True).num_errors == sum(block >= self.cache.num_blocks for block in ids)

    @rule(data=st.data())
    def add(self, data):
        if self.num_groups < 5:
            self.cache.add_group(self.new_group(data))

    @rule(data=st.data(), call=st.sampled_from(["reserve", "create", "map", "set_access", "fill"]))
    def add_and_fail(self, data, call):
        if self.num_groups >= 5:
            return
        before = (self.cache.signature(), len(self.cache))
        nth = self.memory.calls[call]
        self.memory.fail(call)
        try:
            self.cache.add_group(self.new_group(data))
        except tkv.TritonKVError:
            assert (self.cache.signature(), len(self.cache)) == before
        else:  # nothing is committed, so the call was not made
            assert self.memory.calls[call] == nth
        self.clear_faults(call)

    @rule(call=st.sampled_from(["create", "map", "set_access", "fill"]), nth=st.integers(1, 4))
    def extend_and_fail(self, call, nth):
        before = self.cache.num_blocks
        self.memory.fail(call, nth=nth)
        try:
            self.cache.extend(CAPACITY)
        except tkv.TritonKVError:
            assert self.cache.num_blocks == before
        self.clear_faults(call)

    def clear_faults(self, call):
        self.memory._planned.clear()

    @invariant()
    def every_byte_is_known(self):
        if not hasattr(self, "cache"):
            return
        count = self.cache.num_blocks
        assert int(self.cache.control[0]) == count
        assert BUDGET - self.driver.memory_info()[0] == self.cache.mapped_bytes
        assert (
            self.cache.mapped_bytes >= self.cache.mapped_bytes_at(count) == self.cache.geometry.mapped_bytes_at(count)
        )
        for layer in self.cache:
            for number, view in enumerate(views_of(layer)):
                for block in range(count):
                    wanted = self.bytes.get((layer.name, number, block), 0)
                    assert (view[block].contiguous().view(torch.uint8) == wanted).all()

    def teardown(self):
        if hasattr(self, "cache"):
            self.cache.close()
            assert (self.driver.live.handles, self.driver.live.mappings) == (0, 0)


Life.TestCase.settings = settings(
    max_examples=EXAMPLES, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
test_a_random_life = pytest.mark.timeout(300)(Life.TestCase)

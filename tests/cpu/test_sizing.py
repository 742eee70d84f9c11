"""fit_blocks is arithmetic, so its answers are known; plan_blocks reads a real driver."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import triton_kv as tkv

MIB = 1 << 20


def mapped(num_blocks: int) -> int:
    """8 segments of 64 KiB a block, in granules of 2 MiB: 32 blocks a granule."""
    return 8 * -(-num_blocks * 64 * 1024 // (2 * MIB)) * 2 * MIB


def fit(**changes):
    numbers = {
        "capacity": 100_000,
        "mapped_bytes": 16 * MIB,
        "total_bytes": 1000 * MIB,
        "free_bytes": 600 * MIB,
        "utilization": 0.9,
    }
    return tkv.fit_blocks(mapped, **{**numbers, **changes})


CASES = {  # growth allowed = min(900 - 400, 600) MiB less what is kept free; 16 MiB are mapped already
    "bound by utilization": ({}, 32 * 32, "utilization"),  # 516 MiB hold 32 granules of 16 MiB
    "bound by what is free": (
        {"utilization": 1.0, "headroom_bytes": 1, "free_bytes": 600 * MIB},
        38 * 32,
        "free",
    ),
    "activations": ({"activation_bytes": 100 * MIB}, 26 * 32, "utilization"),
    "one byte short of a granule": ({"headroom_bytes": 4 * MIB + 1}, 31 * 32, "utilization"),
    "exactly a granule": ({"headroom_bytes": 4 * MIB}, 32 * 32, "utilization"),
    "capacity": ({"capacity": 40}, 40, "capacity"),
    "max_blocks": ({"max_blocks": 33}, 33, "max_blocks"),
}


@pytest.mark.parametrize(("changes", "blocks", "bound_by"), CASES.values(), ids=CASES.keys())
def test_the_arithmetic(changes, blocks, bound_by):
    plan = fit(**changes)
    assert (plan.num_blocks, plan.bound_by) == (blocks, bound_by)
    assert plan.mapped_bytes == mapped(blocks)


@given(
    total=st.integers(32 * MIB, 1 << 40),
    free_share=st.floats(0.2, 1.0),
    utilization=st.floats(0.9, 1.0),
    activation=st.integers(0, 4 * MIB),
)
def test_the_answer_is_the_largest_that_fits(total, free_share, utilization, activation):
    free = int(total * free_share)
    numbers = {
        "capacity": 1 << 40, "mapped_bytes": 0, "total_bytes": total, "free_bytes": free,
        "utilization": utilization, "activation_bytes": activation,
    }  # fmt: skip
    limit = min(int(utilization * total) - (total - free), free) - activation
    if limit < mapped(1):
        with pytest.raises(tkv.OutOfMemory):
            tkv.fit_blocks(mapped, **numbers)
        return
    plan = tkv.fit_blocks(mapped, **numbers)
    assert mapped(plan.num_blocks) <= limit < mapped(plan.num_blocks + 1)


@given(st.integers(0, 600 * MIB), st.integers(0, 600 * MIB))
def test_blocks_never_rise_with_the_activation_peak(a, b):
    def blocks(peak: int) -> int:
        try:
            return fit(activation_bytes=peak).num_blocks
        except tkv.OutOfMemory:
            return 0

    low, high = sorted((a, b))
    assert blocks(low) >= blocks(high)


BAD = {
    "utilization 0": ({"utilization": 0.0}, r"\(0, 1\], got 0.0"),
    "utilization above 1": ({"utilization": 1.01}, r"\(0, 1\], got 1.01"),
    "negative headroom": ({"headroom_bytes": -1}, "headroom_bytes must not be negative, got -1"),
    "negative activations": ({"activation_bytes": -1}, "activation_bytes must not be negative"),
    "max_blocks 0": ({"max_blocks": 0}, "max_blocks must be at least 1, got 0"),
}


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input(changes, message):
    with pytest.raises(ValueError, match=message):
        fit(**changes)


def test_not_even_one_block():
    with pytest.raises(tkv.OutOfMemory, match=r"not even one block fits.*raise utilization, lower headroom"):
        fit(headroom_bytes=700 * MIB)


def test_a_plan_over_a_real_driver_fits_to_the_granule():
    spec = tkv.AttentionSpec(num_kv_heads=2, head_dim=16, dtype=torch.float32)
    memory = tkv.HostMemory(4096, budget_bytes=MIB)
    with tkv.KVCache.reserve(spec, block_size=16, num_layers=2, memory=memory) as cache:
        cache.extend(1)
        plan = tkv.plan_blocks(cache, utilization=1.0, headroom_bytes=0)
        assert cache.extend(plan).num_blocks == plan.num_blocks == 128
        assert memory.memory_info()[0] == 0
        assert cache.mapped_bytes == plan.mapped_bytes == MIB
        assert "128 blocks" in str(plan)


def test_a_plan_of_a_closed_cache():
    spec = tkv.AttentionSpec(num_kv_heads=2, head_dim=16, dtype=torch.float32)
    cache = tkv.KVCache.reserve(spec, block_size=16, num_layers=2, capacity=4, device="cpu")
    cache.close()
    with pytest.raises(tkv.Closed):
        tkv.plan_blocks(cache)

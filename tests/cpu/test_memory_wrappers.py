"""The wrappers that tests use: failures on demand, and poison."""

from __future__ import annotations

import copy

import pytest
from memory_drivers import GRANULARITY as G
from memory_drivers import MAKERS

from triton_kv.errors import AddressSpaceExhausted, DriverError
from triton_kv.memory import FaultyMemory, HostMemory, PoisonedMemory, VirtualMemory


def _cycle(memory: VirtualMemory) -> None:
    address = memory.reserve(G)
    handle = memory.create(G)
    memory.map(address, G, handle)
    memory.set_access(address, G)
    memory.fill(address, G)
    memory.wait()
    memory.synchronize()
    memory.unmap(address, G)
    memory.release(handle)
    memory.free(address, G)


@pytest.mark.parametrize("name", ["host", "fake", "poisoned"])
@pytest.mark.parametrize("call", ["reserve", "create", "map", "set_access", "unmap", "release", "free", "fill", "wait"])
def test_the_nth_call_fails_once(name: str, call: str) -> None:
    memory = FaultyMemory(MAKERS[name]())
    memory.fail(call, 2)
    _cycle(memory)
    assert (memory.calls[call], memory.num_planned) == (1, 1)
    with pytest.raises(DriverError, match=f"{call} failed with E[A-Z]+: .*injected") as caught:
        _cycle(memory)
    assert caught.value.out_of_memory == (call == "create")
    assert isinstance(caught.value, AddressSpaceExhausted) == (call == "reserve")
    assert (memory.calls[call], memory.num_planned) == (2, 0)
    _cycle(memory)


def test_a_failed_call_does_not_reach_the_driver() -> None:
    memory = FaultyMemory(HostMemory(G))
    memory.fail("create")
    with pytest.raises(DriverError):
        memory.create(G)
    assert memory.live == (0, 0, 0)


def test_codes_are_chosen() -> None:
    memory = FaultyMemory(HostMemory(G))
    memory.fail("map", code="CUDA_ERROR_NOT_PERMITTED")
    with pytest.raises(DriverError, match="map failed with CUDA_ERROR_NOT_PERMITTED"):
        _cycle(memory)
    memory.fail("create", code="CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(DriverError) as caught:
        memory.create(G)
    assert caught.value.out_of_memory


def test_several_failures_and_healing() -> None:
    memory = FaultyMemory(HostMemory(G))
    memory.fail("any", 3)
    memory.fail("create", 2)
    assert memory.num_planned == 2
    memory.create(G)
    with pytest.raises(DriverError, match="create"):
        memory.create(G)
    with pytest.raises(DriverError, match="create"):
        memory.create(G)
    memory.fail("any")
    memory.heal()
    memory.create(G)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [(("mapp",), "unknown call 'mapp': choose one of reserve, create"), (("map", 0), "nth must be at least 1, got 0")],
)
def test_impossible_failures(arguments: tuple[str, int], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        FaultyMemory(HostMemory(G)).fail(*arguments)


def test_poison_is_put_once_into_each_handle() -> None:
    memory = PoisonedMemory(HostMemory(G))
    address, handle = memory.reserve(2 * G), memory.create(G)
    memory.map(address, G, handle)
    memory.set_access(address, G)
    view = memory.view(address, 2 * G, None)
    assert (view[:G] == 0xFF).all()
    view[:G] = 1
    memory.unmap(address, G)
    memory.map(address + G, G, handle)
    memory.set_access(address + G, G)
    assert (view[G:] == 1).all(), "memory that is mapped again keeps its contents"
    fresh = memory.create(G)
    memory.map(address, G, fresh)
    memory.set_access(address, 2 * G)
    assert (view[:G] == 0xFF).all()
    assert (view[G:] == 1).all()


@pytest.mark.parametrize("wrapper", [FaultyMemory, PoisonedMemory])
def test_wrappers_can_be_copied(wrapper: type) -> None:
    memory = wrapper(HostMemory(G))
    assert copy.copy(memory).memory is memory.memory
    assert memory.live == (0, 0, 0)
    with pytest.raises(AttributeError):
        memory.nothing_of_the_kind  # noqa: B018


def test_failures_due_at_one_call_follow_each_other() -> None:
    memory = FaultyMemory(HostMemory(G))
    memory.fail("create", code="EIO")
    memory.fail("any", code="EFAULT")
    for code in ("EIO", "EFAULT"):
        with pytest.raises(DriverError, match=f"create failed with {code}"):
            memory.create(G)
    memory.release(memory.create(G))


def test_a_reserve_that_fails_for_another_reason_does_not_speak_of_addresses() -> None:
    memory = FaultyMemory(HostMemory(G))
    memory.fail("reserve", code="EINVAL")
    with pytest.raises(DriverError, match="reserve failed with EINVAL") as caught:
        memory.reserve(G)
    assert not isinstance(caught.value, AddressSpaceExhausted)

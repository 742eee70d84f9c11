"""What every driver must do, in one suite."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from memory_drivers import MAKERS, drivers, has_contents, nothing_live

from triton_kv.errors import AddressSpaceExhausted, DriverError
from triton_kv.memory import VirtualMemory


class Owner:
    pass


@pytest.fixture(params=drivers("host", "fake", "faulty", "poisoned", "cuda"))
def memory(request: pytest.FixtureRequest) -> Iterator[VirtualMemory]:
    memory = MAKERS[request.param]()
    with memory.activate():
        yield memory
    assert nothing_live(memory)


@pytest.fixture
def mapped(memory: VirtualMemory) -> Iterator[int]:
    """Address of four accessible granules."""
    size = 4 * memory.granularity
    address, handle = memory.reserve(size), memory.create(size)
    memory.map(address, size, handle)
    memory.set_access(address, size)
    yield address
    memory.synchronize()
    memory.unmap(address, size)
    memory.release(handle)
    memory.free(address, size)


def test_is_a_virtual_memory(memory: VirtualMemory) -> None:
    assert isinstance(memory, VirtualMemory)
    assert memory.granularity > 0
    assert memory.device.type in ("cpu", "cuda")
    assert not memory.is_capturing()


def test_address_space_is_aligned_and_disjoint(memory: VirtualMemory) -> None:
    size = 3 * memory.granularity
    addresses = sorted(memory.reserve(size) for _ in range(4))
    assert all(address > 0 and address % memory.granularity == 0 for address in addresses)
    assert all(after - before >= size for before, after in pairwise(addresses))
    for address in addresses:
        memory.free(address, size)


def test_address_space_costs_no_memory(memory: VirtualMemory) -> None:
    free, total = memory.memory_info()
    address = memory.reserve(4 * -(-total // memory.granularity) * memory.granularity)
    assert abs(memory.memory_info()[0] - free) < memory.granularity or memory.device.type == "cpu"
    memory.free(address, 4 * -(-total // memory.granularity) * memory.granularity)


def test_reserving_too_much_speaks_of_addresses(memory: VirtualMemory) -> None:
    with pytest.raises(AddressSpaceExhausted, match="address space, not memory"):
        memory.reserve(1 << 56)


def test_create_takes_memory_and_release_gives_it_back(memory: VirtualMemory) -> None:
    size = 4 * memory.granularity
    free, total = memory.memory_info()
    assert 0 < size <= free <= total
    handle = memory.create(size)
    assert memory.memory_info()[0] <= free - size
    memory.release(handle)
    assert memory.memory_info() == (free, total) or memory.device.type == "cuda"


def test_creating_too_much_leaves_the_driver_usable(memory: VirtualMemory) -> None:
    total = memory.memory_info()[1]
    with pytest.raises(DriverError) as caught:
        memory.create(2 * -(-total // memory.granularity) * memory.granularity)
    assert caught.value.out_of_memory
    assert caught.value.call in ("create", "cuMemCreate")
    assert caught.value.code in str(caught.value)
    memory.release(memory.create(memory.granularity))


def test_handles_are_mapped_and_unmapped_whole(memory: VirtualMemory) -> None:
    granule = memory.granularity
    address, handle = memory.reserve(4 * granule), memory.create(2 * granule)
    with pytest.raises(DriverError):
        memory.map(address, granule, handle)
    memory.map(address, 2 * granule, handle)
    memory.set_access(address, 2 * granule)
    for start, size in ((address, granule), (address + granule, granule)):
        with pytest.raises(DriverError):
            memory.unmap(start, size)
    with pytest.raises(DriverError):
        memory.map(address, 2 * granule, handle)
    memory.unmap(address, 2 * granule)
    memory.release(handle)
    memory.free(address, 4 * granule)


def test_one_access_call_covers_many_handles(memory: VirtualMemory) -> None:
    granule = memory.granularity
    address = memory.reserve(3 * granule)
    handles = [memory.create(granule) for _ in range(3)]
    for index, handle in enumerate(handles):
        memory.map(address + index * granule, granule, handle)
    memory.set_access(address, 3 * granule)
    memory.fill(address, 3 * granule, 7)
    memory.wait()
    if has_contents(memory):
        assert (memory.view(address, 3 * granule, None) == 7).all()
    memory.synchronize()
    memory.unmap(address, 3 * granule)
    for handle in handles:
        memory.release(handle)
    memory.free(address, 3 * granule)


def test_a_released_handle_lives_until_it_is_unmapped(memory: VirtualMemory) -> None:
    size = memory.granularity
    address, handle = memory.reserve(size), memory.create(size)
    memory.map(address, size, handle)
    memory.set_access(address, size)
    memory.release(handle)
    memory.fill(address, size, 5)
    memory.wait()
    if has_contents(memory):
        assert (memory.view(address, size, None) == 5).all()
    memory.synchronize()
    memory.unmap(address, size)
    memory.free(address, size)


def test_one_handle_at_two_addresses(memory: VirtualMemory) -> None:
    size = memory.granularity
    address, handle = memory.reserve(2 * size), memory.create(size)
    for start in (address, address + size):
        memory.map(start, size, handle)
        memory.set_access(start, size)
    memory.fill(address, size, 3)
    memory.wait()
    if has_contents(memory):
        assert (memory.view(address + size, size, None) == 3).all()
    memory.synchronize()
    for start in (address, address + size):
        memory.unmap(start, size)
    memory.release(handle)
    memory.free(address, 2 * size)


@pytest.mark.parametrize(
    ("offset", "num_bytes", "value", "stride", "count"),
    [
        pytest.param(0, 1, 0, 0, 1, id="one byte"),
        pytest.param(5, 4099, 0, 0, 1, id="odd start and size"),
        pytest.param(16, 8192, 0xA5, 0, 1, id="not zero"),
        pytest.param(3, 1001, 0, 7013, 9, id="strided odd"),
        pytest.param(64, 4096, 0, 8192, 5, id="strided aligned"),
        pytest.param(1, 513, 0x5A, 2048, 7, id="strided not zero"),
        pytest.param(32, 0, 0, 64, 3, id="no bytes"),
        pytest.param(32, 64, 0, 64, 0, id="no ranges"),
    ],
)
def test_fill_touches_exactly_its_ranges(
    memory: VirtualMemory, mapped: int, offset: int, num_bytes: int, value: int, stride: int, count: int
) -> None:
    size = 4 * memory.granularity
    memory.fill(mapped, size, 0x77)
    memory.fill(mapped + offset, num_bytes, value, stride=stride, count=count)
    memory.wait()
    if not has_contents(memory):
        return
    expected = torch.full((size,), 0x77, dtype=torch.uint8)
    for index in range(count):
        expected[offset + index * stride :][:num_bytes] = value
    assert torch.equal(memory.view(mapped, size, None).cpu(), expected)


def test_a_large_zero_fill_keeps_its_neighbours(memory: VirtualMemory) -> None:
    size = -(-(3 << 20) // memory.granularity) * memory.granularity
    address, handle = memory.reserve(size), memory.create(size)
    memory.map(address, size, handle)
    memory.set_access(address, size)
    memory.fill(address, size, 0xEE)
    memory.fill(address + 1000, size - 2001, 0)
    memory.wait()
    if has_contents(memory):
        view = memory.view(address, size, None).cpu()
        assert (view[:1000] == 0xEE).all()
        assert (view[-1001:] == 0xEE).all()
        assert not view[1000:-1001].any()
    memory.synchronize()
    memory.unmap(address, size)
    memory.release(handle)
    memory.free(address, size)


def test_view_over_nothing_keeps_its_owner(memory: VirtualMemory) -> None:
    if not has_contents(memory):
        with pytest.raises(RuntimeError, match="HostMemory"):
            memory.view(memory.granularity, 1, None)
        return
    size = 8 * memory.granularity
    address = memory.reserve(size)
    owner = Owner()
    alive = weakref.ref(owner)
    view = memory.view(address + 4, size - 4, owner)
    del owner
    part = view[10:20].view(2, 5)
    assert view.data_ptr() == view.untyped_storage().data_ptr() == address + 4
    assert (view.shape, view.dtype) == ((size - 4,), torch.uint8)
    assert view.untyped_storage().nbytes() == size - 4
    assert view.device.type == memory.device.type
    assert part.data_ptr() == address + 14
    del view
    gc.collect()
    assert alive() is not None
    del part
    gc.collect()
    assert alive() is None
    assert memory.view(address, 0, None).shape == (0,)
    memory.free(address, size)


def test_works_from_a_bare_thread_and_nested(memory: VirtualMemory) -> None:
    failures = []

    def cycle() -> None:
        try:
            size = memory.granularity
            with memory.activate():
                address = memory.reserve(size)
                with memory.activate():
                    handle = memory.create(size)
                memory.map(address, size, handle)
                memory.set_access(address, size)
            memory.fill(address, size)
            memory.wait()
            memory.synchronize()
            with memory.activate():
                memory.unmap(address, size)
                memory.release(handle)
                memory.free(address, size)
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=cycle)
    thread.start()
    thread.join()
    assert not failures


def test_copies_move_bytes_and_nothing_else(memory: VirtualMemory, mapped: int) -> None:
    size = memory.granularity
    host = memory.pin(size)
    memory.fill(mapped, 4 * size, 3)
    memory.fill(mapped + size, 100, 7)
    memory.copy(mapped + 2 * size + 5, mapped + size - 10, 120)  # ten 3s, a hundred 7s, ten 3s
    memory.copy(host, mapped + 2 * size, size)
    memory.copy(mapped, host, size)
    memory.wait()
    if has_contents(memory):
        expected = torch.full((size,), 3, dtype=torch.uint8)
        expected[15:115] = 7
        for at in (mapped, mapped + 2 * size):
            assert torch.equal(memory.view(at, size, None).cpu(), expected)
        assert bool((memory.view(mapped + 3 * size, size, None) == 3).all())
    memory.unpin(host, size)


def test_pinned_memory_is_counted_and_given_back_once(memory: VirtualMemory) -> None:
    first, second = memory.pin(1000), memory.pin(1)
    assert getattr(memory, "pinned_bytes", 1001) == 1001
    memory.unpin(first, 1000)
    if memory.device.type == "cpu":
        with pytest.raises(DriverError, match="unpin failed with EINVAL"):
            memory.unpin(first, 1000)
    memory.unpin(second, 1)
    assert getattr(memory, "pinned_bytes", 0) == 0

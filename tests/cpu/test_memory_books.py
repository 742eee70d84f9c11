"""The software drivers refuse what the CUDA driver refuses, and say what and why."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from memory_drivers import GRANULARITY as G
from memory_drivers import MAKERS

from triton_kv.errors import DriverError
from triton_kv.memory import FakeMemory, HostMemory, VirtualMemory


def _mapped(memory: VirtualMemory) -> tuple[int, int]:
    address, handle = memory.reserve(4 * G), memory.create(2 * G)
    memory.map(address, 2 * G, handle)
    return address, handle


def _free_mapped(memory: VirtualMemory) -> None:
    memory.free(_mapped(memory)[0], 4 * G)


def _free_half(memory: VirtualMemory) -> None:
    memory.free(memory.reserve(4 * G), 2 * G)


def _free_twice(memory: VirtualMemory) -> None:
    address = memory.reserve(G)
    memory.free(address, G)
    memory.free(address, G)


def _release_twice(memory: VirtualMemory) -> None:
    handle = memory.create(G)
    memory.release(handle)
    memory.release(handle)


def _map_released(memory: VirtualMemory) -> None:
    address, handle = _mapped(memory)
    memory.release(handle)
    memory.map(address + 2 * G, 2 * G, handle)


def _map_unreserved(memory: VirtualMemory) -> None:
    address = memory.reserve(G)
    memory.map(address, 2 * G, memory.create(2 * G))


def _map_misaligned(memory: VirtualMemory) -> None:
    memory.map(memory.reserve(4 * G) + 4096, G, memory.create(G))


def _map_twice(memory: VirtualMemory) -> None:
    address, _ = _mapped(memory)
    memory.map(address + G, G, memory.create(G))


def _access_unmapped(memory: VirtualMemory) -> None:
    memory.set_access(_mapped(memory)[0], 3 * G)


def _unmap_shifted(memory: VirtualMemory) -> None:
    memory.unmap(_mapped(memory)[0] + G, 2 * G)


def _unmap_nothing(memory: VirtualMemory) -> None:
    memory.unmap(_mapped(memory)[0] + 2 * G, 2 * G)


CASES = [
    pytest.param(lambda memory: memory.reserve(G + 1), "reserve", "EINVAL", id="reserve half a granule"),
    pytest.param(lambda memory: memory.create(0), "create", "EINVAL", id="create nothing"),
    pytest.param(lambda memory: memory.create(G - 1), "create", "EINVAL", id="create half a granule"),
    pytest.param(_free_mapped, "free", "EBUSY", id="free with a mapping"),
    pytest.param(_free_half, "free", "EINVAL", id="free half"),
    pytest.param(_free_twice, "free", "EINVAL", id="free twice"),
    pytest.param(_release_twice, "release", "EINVAL", id="release twice"),
    pytest.param(_map_released, "map", "EINVAL", id="map a released handle"),
    pytest.param(_map_unreserved, "map", "EINVAL", id="map past the reservation"),
    pytest.param(_map_misaligned, "map", "EINVAL", id="map at an odd address"),
    pytest.param(_map_twice, "map", "EINVAL", id="map over a mapping"),
    pytest.param(_access_unmapped, "set_access", "EFAULT", id="access past the mapping"),
    pytest.param(_unmap_shifted, "unmap", "EINVAL", id="unmap a shifted range"),
    pytest.param(_unmap_nothing, "unmap", "EINVAL", id="unmap nothing"),
]


@pytest.mark.parametrize("name", ["host", "fake"])
@pytest.mark.parametrize(("misuse", "call", "code"), CASES)
def test_misuse_is_refused(name: str, misuse: Callable[[VirtualMemory], object], call: str, code: str) -> None:
    memory = MAKERS[name]()
    with pytest.raises(DriverError, match=f"{call} failed with {code}: ") as caught:
        misuse(memory)
    assert (caught.value.call, caught.value.code, caught.value.out_of_memory) == (call, code, False)


@pytest.mark.parametrize("kind", [HostMemory, FakeMemory])
@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        pytest.param({"granularity": 0}, "granularity must be", id="no granule"),
        pytest.param({"granularity": -4096}, "granularity must be", id="negative granule"),
        pytest.param({"budget_bytes": -1}, "budget_bytes must not be negative, got -1", id="negative budget"),
    ],
)
def test_impossible_devices(kind: type, arguments: dict[str, int], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        kind(**arguments)


def test_host_granule_is_whole_pages() -> None:
    with pytest.raises(ValueError, match=r"multiple of the page size 4096, got 5000"):
        HostMemory(granularity=5000)


def test_live_counts() -> None:
    memory = FakeMemory(G)
    address, handle = _mapped(memory)
    assert memory.live == (1, 1, 1)
    memory.release(handle)
    assert memory.live == (1, 0, 1)
    assert memory.memory_info()[1] - memory.memory_info()[0] == 2 * G  # still mapped
    memory.unmap(address, 2 * G)
    assert memory.live == (1, 0, 0)
    assert memory.memory_info()[0] == memory.memory_info()[1]
    memory.free(address, 4 * G)
    assert memory.live == (0, 0, 0)


def test_budget_is_exact() -> None:
    memory = FakeMemory(G, budget_bytes=3 * G)
    handles = [memory.create(G) for _ in range(3)]
    with pytest.raises(DriverError, match="ENOMEM"):
        memory.create(G)
    memory.release(handles.pop())
    memory.create(G)


def test_host_gives_pages_back_to_the_machine() -> None:
    memory = HostMemory(G)
    size = 64 * G
    address, handle = memory.reserve(size), memory.create(size)
    memory.map(address, size, handle)
    memory.set_access(address, size)
    resident = memory._file_bytes()
    memory.fill(address, size, 1)
    assert memory._file_bytes() - resident == size
    memory.unmap(address, size)
    memory.release(handle)
    assert memory._file_bytes() == 0
    memory.free(address, size)

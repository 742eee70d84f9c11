"""Ranges and handles of one reservation, against a model that counts granules one by one."""

from __future__ import annotations

import gc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triton_kv.errors import AddressSpaceExhausted, Closed, DriverError
from triton_kv.memory import FakeMemory, FaultyMemory, HostMemory
from triton_kv.memory.reservation import Reservation, granule_bytes, reap, round_up
from triton_kv.memory.transaction import Transaction

G = 4096


def _grow(reservation: Reservation, *ranges: tuple[int, int]) -> list[int]:
    """Returns the indices in the order of the callbacks."""
    order: list[int] = []
    with Transaction() as transaction:
        reservation.ensure(ranges, transaction, order.append)
    return order


def _shrink(reservation: Reservation, *ranges: tuple[int, int]) -> tuple[int, list[BaseException]]:
    """Bytes given back, and what could not be."""
    with Transaction() as transaction:
        reservation.take_out(reservation.unneeded(ranges), transaction)
    before = reservation.held_bytes
    failures = reservation.settle()
    return before - reservation.held_bytes, failures


def _granules(ranges: list[tuple[int, int]], granularity: int = G) -> set[int]:
    return {
        granule
        for offset, size in ranges
        if size
        for granule in range(offset // granularity, (offset + size - 1) // granularity + 1)
    }


@st.composite
def disjoint_ranges(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Ascending and disjoint, within 64 granules."""
    edges = sorted(draw(st.sets(st.integers(0, 64 * G), max_size=12)))
    pairs = zip(edges[::2], edges[1::2])
    return [(start, end - start) for start, end in pairs]


@pytest.mark.parametrize(
    ("ranges", "handles", "mapped"),
    [
        pytest.param([(0, 1)], 1, 1, id="one byte"),
        pytest.param([(0, 16 * G)], 1, 16, id="one handle however large"),
        pytest.param([(0, 3 * G + 1)], 1, 4, id="cut at the end, in whole granules"),
        pytest.param([(0, G), (4 * G, 2 * G), (8 * G, 1)], 3, 4, id="one handle a range"),
        pytest.param([(0, G), (G, G), (2 * G, G)], 3, 3, id="neighbours stay apart"),
        pytest.param([(0, 3 * G // 2), (3 * G // 2, 3 * G // 2)], 2, 3, id="a shared granule is mapped once"),
        pytest.param([(0, 100), (100, 100), (200, 100)], 1, 1, id="three ranges in one granule"),
        pytest.param([(5, 0), (3 * G, 0)], 0, 0, id="empty ranges"),
        pytest.param([], 0, 0, id="no ranges"),
    ],
)
def test_one_handle_a_missing_run(ranges: list[tuple[int, int]], handles: int, mapped: int) -> None:
    memory = FakeMemory(G)
    reservation = Reservation(memory, 16 * G)
    assert _grow(reservation, *ranges) == list(range(len(ranges)))
    assert memory.live == (1, handles, handles)
    assert reservation.mapped_bytes == mapped * G == granule_bytes(ranges, G)
    assert reservation.num_handles == handles
    _grow(reservation, *ranges)
    assert memory.live == (1, handles, handles)
    reservation.close()
    assert memory.live == (0, 0, 0)


def test_only_the_missing_part_is_mapped() -> None:
    memory = FaultyMemory(FakeMemory(G))
    reservation = Reservation(memory, 16 * G)
    _grow(reservation, (2 * G, G), (6 * G, G))
    _grow(reservation, (G, 8 * G))
    assert memory.calls["create"] == 2 + 3  # before, between and behind what was there
    assert reservation.mapped_bytes == 8 * G


def test_committing_a_tebibyte_walks_no_granules() -> None:
    memory = FaultyMemory(FakeMemory())
    reservation = Reservation(memory, 64 << 34)
    _grow(reservation, *((segment << 34, 1 << 34) for segment in range(64)))
    assert reservation.mapped_bytes == 1 << 40
    assert memory.calls == {"reserve": 1, "create": 64, "map": 64, "set_access": 64}


@given(disjoint_ranges(), disjoint_ranges(), disjoint_ranges())
@settings(max_examples=150, deadline=None)
def test_mapped_is_the_union_of_granules(
    first: list[tuple[int, int]], second: list[tuple[int, int]], kept: list[tuple[int, int]]
) -> None:
    memory = FakeMemory(G)
    reservation = Reservation(memory, 64 * G)
    _grow(reservation, *first)
    assert reservation.mapped_bytes == len(_granules(first)) * G == granule_bytes(first, G)
    _grow(reservation, *second)
    mapped = _granules(first) | _granules(second)
    assert reservation.mapped_bytes == len(mapped) * G
    runs = [(run.start, run.end - run.start) for run in reservation._estate.runs]
    staying = [run for run in runs if any(run[0] < o + s and o < sum(run) for o, s in kept if s)]
    released, failures = _shrink(reservation, *kept)
    assert not failures
    assert released == (len(mapped) - len(_granules(staying))) * G
    assert reservation.mapped_bytes == len(_granules(staying)) * G
    assert memory.memory_info()[1] - memory.memory_info()[0] == reservation.mapped_bytes
    reservation.close()
    assert memory.live == (0, 0, 0)


def test_failed_unmap_leaves_everything_mapped() -> None:
    inner = HostMemory(G)
    memory = FaultyMemory(inner)
    reservation = Reservation(memory, 8 * G)
    for start in range(4):
        _grow(reservation, (start * G, G))
    view = reservation.view(0, 8 * G)
    view[: 4 * G] = 9
    memory.fail("unmap", 3)
    with pytest.raises(DriverError, match="unmap failed with EIO"):
        _shrink(reservation, (0, 1))
    assert inner.live == (1, 4, 4)
    assert (view[: 4 * G] == 9).all()
    assert _shrink(reservation, (0, 1)) == (3 * G, [])
    assert reservation.mapped_bytes == G
    reservation.close()


def test_failed_release_is_tried_again() -> None:
    inner = FakeMemory(G)
    memory = FaultyMemory(inner)
    reservation = Reservation(memory, 8 * G)
    for start in range(4):
        _grow(reservation, (start * G, G))
    memory.fail("release", 2)
    released, failures = _shrink(reservation)
    assert [str(failure) for failure in failures] == ["release failed with EIO: injected"]
    assert released == 3 * G
    assert inner.live == (1, 1, 0)
    assert (reservation.mapped_bytes, reservation.stray_bytes, reservation.num_handles) == (0, G, 1)
    assert _shrink(reservation) == (G, [])
    assert inner.live == (1, 0, 0)
    reservation.close()


def test_address_space_exhausted_leaves_nothing() -> None:
    inner = FakeMemory(G)
    memory = FaultyMemory(inner)
    memory.fail("reserve")
    with pytest.raises(AddressSpaceExhausted, match="address space, not memory") as caught:
        Reservation(memory, G)
    assert not caught.value.out_of_memory
    assert inner.live == (0, 0, 0)
    Reservation(memory, G).close()


def test_closed_reservation_refuses_use() -> None:
    reservation = Reservation(HostMemory(G), 4 * G)
    reservation.close()
    reservation.close()
    for use in (
        lambda: reservation.view(0, 1),
        lambda: _shrink(reservation),
        lambda: _grow(reservation, (0, 1)),
    ):
        with pytest.raises(Closed, match="reserve a new one"):
            use()
    assert "closed" in repr(reservation)


@pytest.mark.parametrize(("offset", "size"), [(-1, 2), (0, 4 * G + 1), (4 * G, 1), (0, -1)])
def test_view_stays_inside(offset: int, size: int) -> None:
    reservation = Reservation(HostMemory(G), 4 * G - 5)
    assert reservation.num_bytes == 4 * G
    with pytest.raises(ValueError, match=f"of a reservation of {4 * G} bytes"):
        reservation.view(offset, size)


def test_addresses_are_freed_when_the_last_view_dies() -> None:
    memory = HostMemory(G)
    reservation = Reservation(memory, 4 * G)
    _grow(reservation, (0, 4 * G))
    view = reservation.view(G, G)[10:20]
    reservation.close()
    assert memory.live == (1, 0, 0)
    other = Reservation(memory, 4 * G)
    assert other.address + other.num_bytes <= reservation.address or other.address >= reservation.address + 4 * G
    del view
    assert memory.live == (2, 0, 0), "a finaliser must not call the driver"
    other.close()
    assert memory.live == (0, 0, 0)


def test_a_dropped_reservation_is_reaped_after_waiting() -> None:
    memory = FaultyMemory(FakeMemory(G))
    reservation = Reservation(memory, 4 * G)
    _grow(reservation, (0, 4 * G))
    calls = memory.calls.total()
    del reservation
    gc.collect()
    assert memory.calls.total() == calls, "a finaliser must not call the driver"
    assert reap(memory) == []
    assert memory.live == (0, 0, 0)
    assert memory.calls["synchronize"] == 1


def test_views_alone_keep_the_contents() -> None:
    memory = HostMemory(G)
    reservation = Reservation(memory, 4 * G)
    _grow(reservation, (0, 4 * G))
    view = reservation.view(0, 4 * G)
    view[:] = 3
    del reservation
    gc.collect()
    assert reap(memory) == []
    assert memory.live == (1, 1, 1)
    assert (view == 3).all()
    del view
    assert reap(memory) == []
    assert memory.live == (0, 0, 0)


def test_reaping_waits_until_a_capture_ends() -> None:
    memory = FakeMemory(G)
    _grow(Reservation(memory, 4 * G), (0, G))
    memory.is_capturing = lambda: True  # type: ignore[method-assign]
    assert reap(memory) == []
    assert memory.live == (1, 1, 1)
    del memory.is_capturing
    assert reap(memory) == []
    assert memory.live == (0, 0, 0)


def test_what_cannot_be_reaped_is_tried_again() -> None:
    inner = FakeMemory(G)
    memory = FaultyMemory(inner)
    _grow(Reservation(memory, 4 * G), (0, G))
    memory.fail("unmap")
    assert [str(failure) for failure in reap(memory)] == ["unmap failed with EIO: injected"]
    assert inner.live == (1, 0 + 1, 1)
    assert reap(memory) == []
    assert inner.live == (0, 0, 0)


@pytest.mark.parametrize(("size", "rounded"), [(0, 0), (1, G), (G, G), (G + 1, 2 * G)])
def test_round_up(size: int, rounded: int) -> None:
    assert round_up(size, G) == rounded


def test_a_kept_log_keeps_nothing_alive(caplog: pytest.LogCaptureFixture) -> None:
    memory = FaultyMemory(FakeMemory(G))
    _grow(Reservation(memory, 4 * G), (0, G))
    memory.fail("unmap")
    reservation = Reservation(memory, G)  # reaps, fails, says so
    assert "unmap failed with EIO" in caplog.text
    del reservation
    assert reap(memory) == []
    assert memory.live == (0, 0, 0)


def test_an_orphan_whose_handle_could_not_be_released_frees_its_addresses_once() -> None:
    inner = FakeMemory(G)
    memory = FaultyMemory(inner)
    reservation = Reservation(memory, 2 * G)
    _grow(reservation, (0, G))
    memory.fail("release")
    del reservation
    assert [str(failure) for failure in reap(memory)] == ["release failed with EIO: injected"]
    assert inner.live == (0, 1, 0)
    assert reap(memory) == []
    assert inner.live == (0, 0, 0)

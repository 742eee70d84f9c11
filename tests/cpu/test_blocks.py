"""Zeroing and copying on the CPU, how a launch is cut for a grid, and which moves compact a cache."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import copy_cases, zero_cases
from triton_kv.blocks import copy_block_pairs, copy_table, order_copies, zero_launches, zero_ranges
from triton_kv.compaction import CompactionPlan, compact

CPU = torch.device("cpu")


@pytest.mark.parametrize("case", zero_cases.CASES, ids=str)
def test_only_the_ranges_become_zero(case):
    zero_cases.check(case, CPU)


@pytest.mark.parametrize(
    ("num_bytes", "stride", "count", "grids"),
    [
        (1, 0, 1, [(1, 1)]),
        (4096, 0, 1, [(1, 1)]),
        (4097, 8192, 3, [(2, 3)]),
        (64 << 30, 0, 1, [((64 << 30) // 4096, 1)]),
        (16, 16, 65536, [(1, 65535), (1, 1)]),
        (9 << 40, 0, 1, [(2**31 - 1, 1), (268435457, 1)]),
        (0, 0, 1, []),
        (16, 16, 0, []),
    ],
    ids=["byte", "one_program", "three_ranges", "64_GiB", "many_ranges", "beyond_grid_0", "nothing", "no_range"],
)
def test_launches(num_bytes, stride, count, grids):
    launches = zero_launches(1 << 40, num_bytes, stride=stride, count=count)
    assert [launch.grid for launch in launches] == grids
    covered = sum(launch.arguments["num_bytes"] * launch.grid[1] for launch in launches)
    assert covered == num_bytes * count
    for launch in launches:  # an address and sizes, but one specialisation
        assert set(launch.arguments) == {"address", "num_bytes", "stride", "BLOCK_WORDS"}
        assert launch.arguments["BLOCK_WORDS"] == 1024


def test_launches_follow_each_other():
    first, second = zero_launches(1 << 40, 16, stride=32, count=65536)
    assert second.arguments["address"] == first.arguments["address"] + 65535 * 32
    first, second = zero_launches(1 << 40, 9 << 40, stride=0, count=1)
    assert second.arguments["address"] == first.arguments["address"] + first.arguments["num_bytes"]


@pytest.mark.parametrize(
    ("address", "num_bytes", "count"), [(-1, 1, 1), (0, -1, 1), (0, 1, -1)], ids=["address", "num_bytes", "count"]
)
def test_negative_numbers(address, num_bytes, count):
    with pytest.raises(ValueError, match=f"must not be negative, got {address}, {num_bytes} and {count}"):
        zero_ranges(address, num_bytes, stride=0, count=count, device=CPU)


@pytest.mark.parametrize("case", copy_cases.CASES, ids=str)
def test_blocks_are_copied(case):
    copy_cases.check(case, CPU)


def test_the_op_declares_what_it_changes():
    case = next(case for case in copy_cases.CASES if case.name == "beyond_the_watermark")
    spans = copy_cases.make(case, CPU)
    pairs = torch.tensor(case.pairs, dtype=torch.int32)
    control = torch.tensor([8] + [0] * 7, dtype=torch.int32)
    arguments = (
        [buffer.clone() for buffer in spans.buffers],
        None,
        pairs,
        copy_table(spans, spans).addresses,
        control,
        list(spans.num_segments),
        list(spans.segment_strides),
        None,
        list(spans.block_bytes),
        1,
        True,
        True,
    )
    torch.library.opcheck(torch.ops.triton_kv.copy_blocks.default, arguments)


@pytest.mark.parametrize(
    ("pairs", "error", "match"),
    [
        (torch.zeros(2, 2), TypeError, "int32 or int64, got torch.float32"),
        (torch.zeros(4, dtype=torch.int32), ValueError, r"contiguous \[n, 2\], got \(4,\)"),
        (torch.zeros(2, 3, dtype=torch.int32), ValueError, r"contiguous \[n, 2\], got \(2, 3\)"),
        (torch.zeros(2, 2, dtype=torch.int32).T, ValueError, "contiguous"),
        (torch.zeros(2, 2, dtype=torch.int32, device="meta"), ValueError, "pairs are on meta"),
    ],
    ids=["floats", "one_dimension", "triples", "strided", "elsewhere"],
)
def test_pairs_that_cannot_be(pairs, error, match):
    spans = copy_cases.make(copy_cases.CASES[0], CPU)
    with pytest.raises(error, match=match):
        copy_block_pairs(spans, spans, pairs, copy_table(spans, spans))


@given(st.lists(st.tuples(st.integers(-1, 9), st.integers(-1, 9)), max_size=12))
def test_overlapping_copies_are_as_if_all_at_once(pairs):
    useful = [(a, b) for a, b in pairs if a >= 0 and b >= 0 and a != b]
    if len({b for _, b in useful}) < len(useful):
        with pytest.raises(ValueError, match="as their target"):
            order_copies(pairs)
        return
    order = order_copies(pairs)
    now, expected = list(range(10)), list(range(10))
    for source, target in useful:
        expected[target] = source
    staging = [now[source] for source, _ in order.staged]
    for source, target in order.direct:
        assert now[source] == source, "a source was overwritten before it was read"
        now[target] = now[source]
    for value, (_, target) in zip(staging, order.staged):
        now[target] = value
    assert now == expected


@given(st.integers(0, 40).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, max(n - 1, 0)), max_size=n))))
def test_compaction_moves_as_little_as_possible(case):
    num_blocks, chosen = case
    live = sorted(block for block in chosen if block < num_blocks)
    moves, new = compact(live, num_blocks)
    assert len(moves) == sum(block >= len(live) for block in live)
    assert not {source for source, _ in moves} & {target for _, target in moves}
    assert sorted(new[block] for block in live) == list(range(len(live)))
    assert all(new[block] == -1 for block in range(num_blocks) if block not in live)
    assert all(new[source] == target for source, target in moves)


def test_tables_are_translated():
    plan = CompactionPlan(2, torch.zeros(0, 2), torch.tensor([-1, 1, -1, 0], dtype=torch.int32), 0)
    table = torch.tensor([[1, 3, -1], [3, 2, -1]], dtype=torch.int32)
    assert plan.remap(table).tolist() == [[1, 0, -1], [0, -1, -1]]
    assert plan.remap(table.long()).dtype == torch.int64
    stale = torch.tensor([[len(plan.remapping), 2**31 - 1, -7, -1]], dtype=torch.int32)
    assert plan.remap(stale).tolist() == [[-1] * 4]
    assert plan.remap(stale).dtype == torch.int32

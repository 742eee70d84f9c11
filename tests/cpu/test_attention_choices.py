"""How attention launches are cut: the measured table, limits of the hardware, and grids that cover any batch."""

import dataclasses
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention_cases import (
    BF16,
    DECODE_CASES,
    F16,
    F32,
    NUM_SEQS,
    PLAIN_SCORING,
    QUERY_LENS,
    SHAPES,
    AttentionShape,
    make_tensors,
    shape_launches,
    shape_operands,
)
from triton_kv.batch import Batch
from triton_kv.choices import (
    DECODE_LOOPS,
    DecodeChoice,
    Hardware,
    PrefillChoice,
    choose_decode,
    choose_prefill,
    hardware_of,
    kind_of_decode,
)
from triton_kv.copy_engine import boxes, refuse_cache
from triton_kv.decode import decode_launches, partial_elements, spreading_step
from triton_kv.layer import operands_of
from triton_kv.prefill import prefill_launches
from triton_kv.prefill_hopper import use_prefill_kernel
from triton_kv.scoring import Scoring

H200 = Hardware(num_sms=132, architecture=90)
PLAIN = Scoring(**PLAIN_SCORING)
HARDWARE = {
    "sm_80": Hardware(108, 80),
    "sm_89": Hardware(142, 89),
    "sm_90": H200,
    "sm_100": Hardware(148, 100),
    "sm_120": Hardware(188, 120),
    "gfx942": Hardware(304, "hip"),
    "interpreter": hardware_of(torch.device("cpu")),
}


def decode_choice(shape, num_seqs, hardware):
    return choose_decode(
        num_seqs,
        shape.num_kv_heads,
        shape.group,
        shape.head_dim,
        shape.v_head_dim,
        shape.block_size,
        shape.dtype.itemsize,
        hardware,
    )


@pytest.mark.parametrize(
    ("num_seqs", "expected"),
    [
        pytest.param(1, (64, 4, 3, 33, 16), id="1"),
        pytest.param(63, (64, 4, 3, 33, 64), id="63"),
        pytest.param(64, (32, 2, 3, 66, 64), id="64"),
        pytest.param(256, (32, 2, 3, 66, 256), id="256"),
        pytest.param(5000, (32, 2, 3, 66, 1024), id="5000"),
    ],
)
def test_what_was_measured_on_the_h200(num_seqs, expected):
    choice = choose_decode(num_seqs, 8, 4, 128, 128, 16, 2, H200)
    assert (choice.tile, choice.num_warps, choice.num_stages, choice.num_chunks, choice.scan) == expected
    assert choice.one_scan == (num_seqs <= 1024)
    assert choice.rows == 16
    assert choice.use_pdl


@pytest.mark.parametrize("num_programs", [1, 2, 3, 33, 132, 264, 528, 1056, 3 * 5 * 7 * 11])
def test_a_spreading_step_visits_every_program_and_parts_neighbours(num_programs):
    step = spreading_step(num_programs)
    places = [program * step % num_programs for program in range(num_programs)]
    assert sorted(places) == list(range(num_programs))
    if num_programs > 32:
        idle = sorted(places.index(share) for share in range(num_programs - 8, num_programs))
        gaps = [b - a for a, b in zip(idle, [*idle[1:], idle[0] + num_programs])]
        assert min(gaps) >= num_programs // 48


@pytest.mark.parametrize("name", ["idle_chunk", "idle_chunk_group_40"])
def test_programs_of_idle_chunks_are_spread_in_the_cases_for_it(name):
    case = next(case for case in DECODE_CASES if case.name == name)
    tensors = make_tensors(case)
    launch, _ = decode_launches(
        tensors.q,
        operands_of(tensors.layer),
        Batch.of(tensors.metadata),
        tensors.out(),
        None,
        PLAIN,
        hardware=Hardware(case.num_sms, 80),
    )
    arguments = launch.arguments
    num_tiles = sum(-(-length // arguments["TILE"]) for length in case.lengths)
    per_chunk = -(-num_tiles // arguments["NUM_CHUNKS"])
    assert arguments["STEP"] > 1
    assert num_tiles <= per_chunk * (arguments["NUM_CHUNKS"] - 1)


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        pytest.param((63, 8, 16, 128, 2), "few", id="few"),
        pytest.param((64, 8, 16, 128, 2), "many", id="many"),
        pytest.param((64, 1, 16, 128, 2), "few", id="one_kv_head"),
        pytest.param((64, 8, 32, 128, 2), "rows", id="rows"),
        pytest.param((1, 8, 32, 256, 2), "rows_wide", id="rows_wide"),
        pytest.param((64, 8, 64, 512, 2), "widest", id="widest"),
        pytest.param((64, 8, 64, 512, 4), "float32", id="float32"),
    ],
)
def test_kinds_of_decode_are_rows_of_the_table(arguments, kind):
    assert kind_of_decode(*arguments) == kind
    assert kind in DECODE_LOOPS
    assert kind_of_decode(*arguments, batch_invariant=True) == ("few" if kind == "many" else kind)


@pytest.mark.parametrize("architecture", [90, 100, 103, 120])
def test_what_would_not_fit_into_the_registers_of_sm_100(architecture):
    """Tiles of 128 tokens of 64 lanes, and two warps over several query tokens of many sequences."""
    hardware, is_sm_100 = Hardware(148, architecture), architecture in (100, 103)
    small = choose_decode(1, 8, 4, 64, 64, 64, 2, hardware)
    assert small.tile == (64 if is_sm_100 or architecture == 120 else 128)
    several = choose_decode(2000, 4, 7, 128, 128, 16, 2, hardware, queries=2)
    assert several.num_warps == (4 if is_sm_100 else 2)
    assert choose_decode(2000, 4, 7, 128, 128, 16, 2, hardware).num_warps == 2


def test_the_interpreter_gets_small_grids_and_no_pdl():
    choice = choose_decode(4, 2, 4, 64, 64, 16, 4, HARDWARE["interpreter"])
    assert choice.num_chunks <= 4
    assert not choice.use_pdl


@pytest.mark.parametrize("hardware", HARDWARE.values(), ids=HARDWARE)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode_choices(shape, hardware):
    for num_seqs in NUM_SEQS:
        choice = decode_choice(shape, num_seqs, hardware)
        parts = -(-shape.group // choice.rows)
        assert choice.use_pdl == (hardware.architecture in (90, 100, 120))
        # Whole waves: at most four programs an SM, unless the heads alone are more.
        assert choice.num_chunks * shape.num_kv_heads * parts <= max(4 * hardware.num_sms, shape.num_kv_heads * parts)
        if shape.block_size >= 16 and shape.block_size & (shape.block_size - 1) == 0:
            assert choice.tile <= 8 * shape.block_size
            assert choice.tile % shape.block_size == 0 or shape.block_size % choice.tile == 0
        bytes_held = 4 * choice.rows * max(128, shape.v_head_dim) / (32 * choice.num_warps)
        assert bytes_held <= 4 * 128, "the accumulator alone would fill the registers"


@pytest.mark.parametrize("hardware", HARDWARE.values(), ids=HARDWARE)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_launches_come_from_shapes_on_the_meta_device(shape, hardware):
    launches = shape_launches(shape, hardware)
    assert {name.split("-")[0] for name in launches} == {"decode", "join", "prefill"}
    for launch in launches.values():
        assert launch.launch_pdl == launch.arguments.get("USE_PDL", False)
        # Exactly the kernel's parameters, in its order.
        assert list(launch.arguments) == [parameter.name for parameter in launch.kernel.params]


def test_nothing_that_growth_changes_is_in_a_launch():
    few, many = shape_operands(SHAPES[0], 10), shape_operands(SHAPES[0], 100_000)
    meta = {"device": "meta"}
    q = torch.empty(8, 32, 128, dtype=torch.bfloat16, **meta)
    for table_width in (1, 8192):
        table = torch.empty(8, table_width, dtype=torch.int32, **meta)
        lens = torch.empty(8, dtype=torch.int32, **meta)
        found = []
        for operands in (few, many):
            batch = Batch(table, lens, None, None, 1)
            decode, join = decode_launches(q, operands, batch, q, None, PLAIN, hardware=H200)
            found.append(
                (decode.grid, join.grid, decode.arguments["NUM_CHUNKS"], decode.arguments["partials_ptr"].shape)
            )
        assert found[0] == found[1]
        assert found[0][0] == (33 * 8,)


def test_the_workspace_does_not_depend_on_the_batch():
    choices = [choose_decode(n, 8, 4, 128, 128, 16, 2, H200) for n in range(1, 64)]
    sizes = {partial_elements(choice, n, 9000, 32, 1, 128) for n, choice in enumerate(choices, 1)}
    assert sizes == {2 * 33 * 32 * 132}


def test_batch_invariance_shapes_the_arithmetic_by_the_geometry_alone():
    choices = [choose_decode(n, 8, 4, 128, 128, 16, 2, H200, batch_invariant=True) for n in (1, 63, 64, 256, 5000)]
    assert len({(choice.tile, choice.rows, choice.num_warps, choice.split_tokens) for choice in choices}) == 1
    assert partial_elements(choices[0], 3, 4097, 32, 1, 128) == 3 * 3 * 32 * 132


@settings(max_examples=300, deadline=None)
@given(
    query_lens=st.lists(st.integers(0, 300), min_size=1, max_size=20),
    padding=st.integers(0, 40),
    group=st.integers(1, 128),
)
def test_prefill_tiles_cover_every_row_once(query_lens, padding, group):
    """The arithmetic of prefill_kernel: the sequence of a tile by its first-tile bound, the rest of the grid idle."""
    starts = [0]
    for query_len in query_lens:
        starts.append(starts[-1] + query_len)
    num_tokens, num_seqs = starts[-1] + padding, len(query_lens)
    if num_tokens == 0:
        return
    meta = {"device": "meta"}
    shape = dataclasses.replace(SHAPES[0], num_kv_heads=1, group=group)
    q = torch.empty(num_tokens, group, 128, dtype=torch.bfloat16, **meta)
    table, lens = torch.empty(num_seqs, 9, dtype=torch.int32, **meta), torch.empty(num_seqs, dtype=torch.int32, **meta)
    batch = Batch(table, lens, torch.empty(num_seqs + 1, dtype=torch.int32, **meta), None, max(1, *query_lens))
    with use_prefill_kernel("portable"):
        (launch,) = prefill_launches(q, shape_operands(shape), batch, q, None, PLAIN, hardware=H200)
    rows = launch.arguments["ROWS"]
    ends = [*starts[1:], num_tokens]
    first_tiles = [start * group // rows + index for index, start in enumerate(starts)]
    covered = []
    for tile in range(launch.grid[0]):
        index = sum(first <= tile for first in first_tiles) - 1
        first_row = (tile - first_tiles[index]) * rows
        num_rows = (ends[index] - starts[index]) * group
        covered += [starts[index] * group + row for row in range(first_row, min(first_row + rows, num_rows))]
    assert sorted(covered) == list(range(num_tokens * group))


@pytest.mark.parametrize("hardware", HARDWARE.values(), ids=HARDWARE)
def test_prefill_rows_follow_the_longest_query(hardware):
    rows = [choose_prefill(4, query_len, 4, 128, 128, 16, 2, hardware).rows for query_len in QUERY_LENS]
    assert rows == sorted(rows)
    assert rows[:3] == [16, 16, 64]


MODEL = AttentionShape(8, 4, 128, 128, 64, BF16)


def portable(shape, query_len=512, hardware=H200, operands=None, **scoring):
    heads, meta = shape.num_kv_heads * shape.group, {"device": "meta"}
    q = torch.empty(query_len, heads, shape.head_dim, dtype=shape.dtype, **meta)
    out = torch.empty(query_len, heads, shape.v_head_dim, dtype=shape.dtype, **meta)
    table, lens, starts = (torch.empty(*size, dtype=torch.int32, **meta) for size in ((1, 9), (1,), (2,)))
    operands = shape_operands(shape) if operands is None else operands
    with use_prefill_kernel("portable"):
        (launch,) = prefill_launches(
            q,
            operands,
            Batch(table, lens, starts, None, query_len),
            out,
            None,
            PLAIN._replace(**scoring),
            hardware=hardware,
        )
    return launch


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({}, (128, 64, 64, 8, 3), id="block_64"),
        pytest.param({"block_size": 128}, (128, 64, 128, 8, 3), id="block_128"),
        pytest.param({"block_size": 512}, (128, 64, 128, 8, 3), id="block_512"),
        pytest.param({"dtype": F16, "head_dim": 64, "v_head_dim": 64}, (128, 64, 64, 8, 3), id="dim_64"),
        pytest.param({"head_dim": 80, "v_head_dim": 80}, (128, 64, 64, 8, 3), id="dim_80"),
        pytest.param({"head_dim": 192}, (64, 32, 64, 8, 3), id="dim_192_128"),
        pytest.param({"head_dim": 256, "v_head_dim": 256, "block_size": 128}, (64, 16, 64, 8, 2), id="dim_256"),
        pytest.param({"block_size": 32}, None, id="block_32"),
        pytest.param({"block_size": 192}, None, id="block_192"),
        pytest.param({"head_dim": 32, "v_head_dim": 32}, None, id="dim_32"),
        pytest.param({"head_dim": 512, "v_head_dim": 512}, None, id="dim_512"),
        pytest.param({"dtype": F32}, None, id="f32"),
        pytest.param({"head_dim": 84, "v_head_dim": 84}, None, id="dim_84"),
    ],
)
def test_what_the_copy_engine_brings(changes, expected):
    launch = portable(dataclasses.replace(MODEL, **changes))
    arguments = launch.arguments
    boxes = [arguments[name] for name in ("k_desc", "v_desc")]
    if expected is None:
        assert (arguments["BOX"], *boxes) == (0, None, None)
        assert arguments["EDGE_TILE"] == arguments["TILE"]
        return
    names = ("TILE", "EDGE_TILE", "BOX")
    assert (*(arguments[name] for name in names), launch.num_warps, launch.num_stages) == expected
    assert arguments["ROWS"] == 128
    for desc, lanes in zip(boxes, ("K_LANES", "V_LANES"), strict=True):
        assert desc.block_shape == [1, 1, arguments["BOX"], arguments[lanes]]
        assert desc.shape[:3] == [1000, 8, arguments["BLOCK_SIZE"]]


@pytest.mark.parametrize(
    ("scoring", "box"),
    [
        pytest.param({"window": 300}, 32, id="window"),
        pytest.param({"softcap": 30.0}, 64, id="softcap"),
        pytest.param({"causal": False}, 64, id="non_causal"),
        pytest.param({"scale": -1.0}, 64, id="negative_scale"),
    ],
)
def test_a_window_takes_registers(scoring, box):
    launch = portable(dataclasses.replace(MODEL, head_dim=256, v_head_dim=256), **scoring)
    assert launch.arguments["BOX"] == box
    edge_tile = portable(MODEL, **scoring).arguments["EDGE_TILE"]
    assert edge_tile == (32 if "window" in scoring else 64)


@pytest.mark.parametrize(
    ("query_len", "architecture", "box"),
    [
        pytest.param(16, 90, 0, id="64_rows"),
        pytest.param(17, 90, 64, id="68_rows"),
        pytest.param(17, 100, 64, id="blackwell"),
        pytest.param(17, 120, 0, id="small_blackwell"),
        pytest.param(17, 80, 0, id="ampere"),
        pytest.param(17, "hip", 0, id="amd"),
    ],
)
def test_few_rows_and_other_gpus_gather_by_pointers(query_len, architecture, box):
    assert portable(MODEL, query_len, Hardware(132, architecture)).arguments["BOX"] == box


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        pytest.param({"k_strides": (8 * 64 * 128 + 4, 1024, 128)}, "K's strides", id="k_blocks"),
        pytest.param({"v_strides": (8 * 64 * 128, 1028, 128)}, "V's strides", id="v_tokens"),
        pytest.param({"v_strides": (1 << 40, 1024, 128)}, "V's strides", id="tib_between_blocks"),
        pytest.param({"k_strides": (8 * 64 * 128, 1024, 0)}, "K's strides", id="heads_in_one_place"),
        pytest.param({"v_offset": 4}, "must start at", id="start_of_v"),
    ],
)
def test_caches_that_the_copy_engine_cannot_read_are_gathered_by_pointers(changes, reason):
    operands = shape_operands(MODEL)
    assert refuse_cache(operands) is None
    operands = operands._replace(**changes)
    assert reason in refuse_cache(operands)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert portable(MODEL, operands=operands).arguments["BOX"] == 0


def test_a_descriptor_takes_any_layout():
    k = torch.empty(9, 2, 64, 4, 96, dtype=BF16, device="meta")[:, 0]  # K and V interleaved
    desc = boxes(k, 64, 128)
    assert (desc.shape, desc.block_shape) == ([9, 4, 64, 96], [1, 1, 64, 128])
    assert desc.strides == [2 * 64 * 4 * 96, 96, 4 * 96, 1]


@pytest.mark.parametrize("hardware", HARDWARE.values(), ids=HARDWARE)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_tree_mask_changes_a_choice_only_beside_a_window(shape, hardware):
    """Rows stay, and so does the grid; `compile_kernels` finds its batches by the choice without a mask."""
    operands, meta = shape_operands(shape), {"device": "meta"}
    heads = shape.num_kv_heads * shape.group
    for query_len in (20, 64):
        q = torch.empty(4 * query_len, heads, shape.head_dim, dtype=shape.dtype, **meta)
        out = torch.empty(4 * query_len, heads, shape.v_head_dim, dtype=shape.dtype, **meta)
        table, lens, starts = (torch.empty(*size, dtype=torch.int32, **meta) for size in ((4, 9), (4,), (5,)))
        batch = Batch(table, lens, starts, None, query_len)
        words = torch.empty(4 * query_len, dtype=torch.int64, **meta)
        for window in (0, 100):
            plain, masked = (
                prefill_launches(q, operands, batch, out, None, scoring, hardware=hardware)[0]
                for scoring in (
                    PLAIN._replace(window=window, softcap=1.0, tree_mask=tree_mask) for tree_mask in (None, words)
                )
            )
            assert masked.arguments["tree_mask_ptr"] is words
            assert plain.arguments["tree_mask_ptr"] is None
            tiles = plain.arguments["TILE"], masked.arguments["TILE"]
            if not (window and plain.arguments["BOX"]):  # with both, tiles come by pointers
                assert tiles[1] == (max(16, tiles[0] // 2) if window else tiles[0])
            assert masked.arguments["BOX"] == (0 if window else plain.arguments["BOX"])
            assert masked.grid == plain.grid
            if not window:
                assert (masked.num_warps, masked.max_registers) == (plain.num_warps, plain.max_registers)


def test_choices_say_what_is_wrong():
    fields = {"rows": 16, "num_warps": 4, "num_stages": 3, "num_chunks": 1, "scan": 16, "one_scan": True}
    fields |= {"join_warps": 1, "join_channels": 128, "split_tokens": 0, "join_by_sequence": True}
    with pytest.raises(ValueError, match="tile must be a power of two, got 48"):
        DecodeChoice(tile=48, join_parts=16, use_pdl=False, **fields)
    with pytest.raises(ValueError, match="tile 8 and rows 16 must be at least 16"):
        DecodeChoice(tile=8, join_parts=16, use_pdl=False, **fields)
    with pytest.raises(ValueError, match="rows must be a power of two, at least 16, got 100"):
        PrefillChoice(rows=100, tile=64, edge_tile=64, num_warps=4, num_stages=3, scan=16, one_scan=True)
    fields = {"rows": 128, "num_warps": 8, "num_stages": 3, "scan": 16, "one_scan": True}
    with pytest.raises(ValueError, match="edge_tile 128 must not be larger than the tile 64"):
        PrefillChoice(tile=64, edge_tile=128, **fields)
    with pytest.raises(ValueError, match="a tile of 128 keys must be one box or two, not boxes of 32"):
        PrefillChoice(tile=128, edge_tile=64, box=32, **fields)

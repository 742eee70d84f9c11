"""When the Hopper prefill kernel is chosen, how it cuts a batch, and how the portable kernel stands in for it."""

import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention_cases import BF16, F16, F32, SHAPES, AttentionShape, shape_operands
from tests.prefill_cases import HOPPER_VARIANTS, hopper_pair
from triton_kv import AttentionSpec, HostMemory, KVCache, attention, compilation, prefill_hopper
from triton_kv.batch import Batch
from triton_kv.choices import (
    HOPPER_CONSUMER_ROWS,
    HOPPER_TRITONS,
    Hardware,
    HopperChoice,
    choose_hopper,
    most_work_words,
    refuse_hopper,
)
from triton_kv.layer import operands_of
from triton_kv.prefill import prefill_launches
from triton_kv.prefill_hopper import use_prefill_kernel
from triton_kv.scoring import Scoring

H200 = Hardware(num_sms=132, architecture=90)
MODEL = AttentionShape(8, 4, 128, 128, 16, BF16)
KNOWN = HOPPER_TRITONS[0]
MAX_SMEM_BYTES = 227 << 10


@pytest.fixture(autouse=True)
def _with_a_known_triton(monkeypatch):
    """Whatever release runs the tests: nothing is compiled here."""
    monkeypatch.setattr(prefill_hopper, "TRITON_VERSION", KNOWN)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        pytest.param({}, None, id="taken"),
        pytest.param({"dtype": F16, "head_dim": 64, "v_head_dim": 64, "block_size": 256}, None, id="taken_f16_64"),
        pytest.param({"head_dim": 256, "v_head_dim": 256}, None, id="taken_256"),
        pytest.param({"architecture": 80}, "compute capability 9.0, not 80", id="sm_80"),
        pytest.param({"architecture": 100}, "compute capability 9.0, not 100", id="sm_100"),
        pytest.param({"architecture": "hip"}, "compute capability 9.0, not hip", id="hip"),
        pytest.param({"triton_version": (3, 8)}, "with Triton 3.6, 3.7, not 3.8", id="triton_3.8"),
        pytest.param({"triton_version": (3, 9)}, "with Triton 3.6, 3.7, not 3.9", id="triton_3.9"),
        pytest.param({"dtype": F32}, "not torch.float32", id="f32"),
        pytest.param({"head_dim": 96, "v_head_dim": 96}, "not 96 and 96", id="head_dim"),
        pytest.param({"v_head_dim": 64}, "not 128 and 64", id="v_head_dim"),
        pytest.param({"block_size": 12}, "not 12", id="block_12"),
        pytest.param({"block_size": 8}, "not 8", id="block_8"),
    ],
)
def test_what_the_kernel_refuses(changes, reason):
    arguments = {"architecture": 90, "triton_version": KNOWN, "dtype": BF16, "head_dim": 128, "v_head_dim": 128}
    found = refuse_hopper(**{**arguments, "block_size": 16, **changes})
    assert found is None if reason is None else found is not None and reason in found


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        pytest.param({"window": 100}, "it has no window", id="window"),
        pytest.param({"softcap": 30.0}, "it has no softcap", id="softcap"),
        pytest.param({"sinks": torch.zeros(32, device="meta")}, "it has no sinks", id="sinks"),
        pytest.param({"alibi_slopes": torch.zeros(32, device="meta")}, "it has no alibi_slopes", id="alibi"),
        pytest.param({"tree_mask": torch.ones(200, dtype=torch.int64)}, "it has no tree_mask", id="tree"),
        pytest.param({"scale": -0.1}, "a scale of at least", id="negative_scale"),
        pytest.param({"scale": 0.0}, "a scale of at least", id="no_scale"),
    ],
)
def test_scores_that_the_kernel_has_not(changes, reason):
    with pytest.raises(ValueError, match=reason):
        hopper_pair(MODEL, 2, 100, True, H200, **changes)


def call(q, out=None, operands=None, hardware=H200):
    words = {"dtype": torch.int32, "device": "meta"}
    batch = Batch(torch.empty(2, 9, **words), torch.empty(2, **words), torch.empty(3, **words), None, q.shape[0])
    scoring = Scoring(0.1, True, 0, 0.0, None, None)
    operands = shape_operands(MODEL) if operands is None else operands
    return prefill_launches(q, operands, batch, q if out is None else out, None, scoring, hardware=hardware)


def rows(*strides, start=0):
    storage = torch.empty(1 << 20, dtype=BF16, device="meta")
    return storage.as_strided((100, 32, 128), (*strides, 1), start)


@pytest.mark.parametrize(
    ("q", "changes", "reason"),
    [
        pytest.param(rows(4096, 128), {}, None, id="contiguous"),
        pytest.param(rows(6144, 128), {}, None, id="fused_qkv"),
        pytest.param(rows(4100, 128), {}, "q must start", id="odd_token_stride"),
        pytest.param(rows(4352, 132), {}, "q must start", id="odd_head_stride"),
        pytest.param(rows(4096, 128), {"k_strides": (16384, 1028, 128)}, "K's strides", id="odd_token_stride_of_k"),
        pytest.param(rows(4096, 128), {"v_strides": (1 << 40, 1024, 128)}, "V's strides", id="tib_between_blocks"),
        pytest.param(rows(4096, 128), {"v_offset": 4}, "K and V must start", id="odd_start_of_v"),
    ],
)
def test_tensors_that_the_copy_engine_takes(q, changes, reason):
    operands = shape_operands(MODEL)._replace(**changes)
    out = rows(4096, 128)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a call that does not suit the kernel is nothing to warn of
        kernels = [launch.kernel.__name__ for launch in call(q, out, operands)]
    assert kernels == (["prefill_kernel"] if reason else ["work_kernel", "hopper_kernel"])
    if reason:
        with use_prefill_kernel("hopper"), pytest.raises(ValueError, match=reason):
            call(q, out, operands)


def test_a_tree_mask_goes_to_the_portable_kernel_silently(monkeypatch):
    monkeypatch.setattr(attention, "hardware_of", lambda device: H200)
    q, words = rows(4096, 128)[:64], torch.ones(64, dtype=torch.int64, device="meta")
    batch = Batch(*(torch.empty(*size, dtype=torch.int32, device="meta") for size in ((2, 9), (2,), (3,))), None, 64)
    for tree_mask, expected in ((None, ["work_kernel", "hopper_kernel"]), (words, ["prefill_kernel"])):
        scoring = Scoring(0.1, True, 0, 0.0, None, None, tree_mask)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            launches = attention._launches(q, shape_operands(MODEL), batch, q, None, scoring, False, None)
        assert [launch.kernel.__name__ for launch in launches] == expected


def test_each_choice_can_be_forced():
    q = rows(4096, 128)
    with use_prefill_kernel("portable"):
        assert len(call(q)) == 1
        with use_prefill_kernel(None):
            assert len(call(q)) == 2
    with use_prefill_kernel("hopper"):
        assert len(call(q)) == 2
        with pytest.raises(ValueError, match="not 80"):
            call(q, hardware=Hardware(108, 80))
    assert len(call(q, hardware=Hardware(108, 80))) == 1
    with pytest.raises(ValueError, match="no prefill kernel 'fast'"), use_prefill_kernel("fast"):
        pass


def test_without_gluon_the_portable_kernel_runs_and_says_so_once(monkeypatch):
    monkeypatch.setattr(prefill_hopper, "_gluon_refusal", lambda: "Gluon is missing: ImportError: of this test")
    q = rows(4096, 128)
    with pytest.warns(RuntimeWarning, match=r"cannot run \(Gluon is missing"):
        assert len(call(q)) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(call(q)) == 1


@pytest.mark.parametrize("variant", HOPPER_VARIANTS, ids=lambda variant: f"{variant[0]}-{variant[1]}x{variant[2]}")
def test_launches_hold_exactly_the_parameters(variant):
    for launch in hopper_pair(*variant, H200):
        assert list(launch.arguments) == [parameter.name for parameter in launch.kernel.params]
    work, launch = hopper_pair(*variant, H200)
    assert launch.arguments["work_ptr"] is work.arguments["work_ptr"]
    assert launch.grid <= (132,)
    assert not launch.launch_pdl  # started early it is slower
    assert not work.launch_pdl


LAYOUTS = ("LTBNHD", "LBTNHD", "LBTHND", "TLBNHD", "BLTNHD")
LAYOUTS += ("LBNHTD", "LBHNTD", "LHBNTD", "BLNHTD", "BLHNTD", "BHLNTD")


@pytest.mark.parametrize("num_kv_heads", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_a_matrix_of_rows(layout, num_kv_heads):
    spec = AttentionSpec(num_kv_heads, 64, F16)
    memory = HostMemory(granularity=4096)
    with KVCache.reserve(spec, num_layers=2, block_size=16, capacity=3, layout=layout, memory=memory) as cache:
        operands = operands_of(cache.extend(1)[1])
        steps = prefill_hopper._row_steps(operands)
        assert steps is not None
        for view in operands.views():
            token_stride = view.stride(1)
            assert steps.block * token_stride == view.stride(0)
            assert num_kv_heads == 1 or steps.head * token_stride + steps.head_channels == view.stride(2)
            assert steps.head_channels * (num_kv_heads - 1) + 64 <= token_stride, "a head ends within its row"


@pytest.mark.parametrize(
    ("block_stride", "token_stride", "head_stride"),
    [
        pytest.param(16 * 128 + 8, 128, 64, id="block_between_rows"),
        pytest.param(16 * 128, 72, 16 * 64, id="head_between_rows"),
        pytest.param(128 << 30, 128, 64, id="more_rows_than_are_counted"),
    ],
)
def test_strides_without_a_row_in_common_keep_four_coordinates(block_stride, token_stride, head_stride):
    cache = torch.empty_strided((4, 16, 2, 64), (block_stride, token_stride, head_stride, 1), dtype=F16, device="meta")
    assert prefill_hopper._row_steps(operands_of((cache, cache))) is None


@pytest.mark.parametrize(
    ("query_len", "group", "packed"),
    [
        pytest.param(8192, 4, 4, id="group_4"),
        pytest.param(8192, 1, 1, id="group_1"),
        pytest.param(8192, 7, 1, id="group_7_long"),
        pytest.param(16, 7, 8, id="group_7_short"),
        pytest.param(8192, 6, 2, id="group_6"),
        pytest.param(8192, 16, 16, id="group_16"),
        pytest.param(8192, 64, 64, id="group_64"),
        pytest.param(8192, 128, 64, id="group_128"),
    ],
)
def test_heads_packed_into_a_tile(query_len, group, packed):
    assert choose_hopper(4, query_len, group, 128, H200).packed == packed


@settings(max_examples=200, deadline=None)
@given(num_seqs=st.integers(1, 5000), query_len=st.integers(1, 20000), group=st.integers(1, 128))
def test_choices_within_the_hardware(num_seqs, query_len, group):
    for head_dim in (64, 128, 256):
        choice = choose_hopper(num_seqs, query_len, group, head_dim, H200)
        rows = HOPPER_CONSUMER_ROWS * choice.consumers
        assert choice.tokens * choice.packed == rows
        assert choice.packed < 2 * group
        ring = 2 * choice.stages * choice.keys * head_dim * 2
        places = 3 if choice.q_buffers == 2 else 1  # queries twice, results once; or in one place
        rows_bytes = places * rows * head_dim * 2
        assert ring + rows_bytes < MAX_SMEM_BYTES
        assert choice.span * 2 * choice.keys * head_dim * 2 <= 50_000_000


@pytest.mark.parametrize("field", ["packed", "keys", "items", "scan"])
def test_choices_say_what_is_wrong(field):
    choice = HopperChoice(consumers=2, packed=4, keys=128, stages=2, span=9, items=32, scan=16)
    with pytest.raises(ValueError, match=f"{field} must be a power of two, got 12"):
        replace(choice, **{field: 12})


@pytest.mark.parametrize(
    ("strides", "expected"),
    [
        pytest.param((16 * 1024, 1024, 128), (16, 0, 128), id="tokens_of_all_heads"),
        pytest.param((16 * 1024, 128, 16 * 128), (128, 16, 0), id="heads_of_all_tokens"),
        pytest.param((32 * 1024, 1024, 128), (32, 0, 128), id="values_behind_keys"),
        pytest.param((16 * 128, 128, 1000 * 16 * 128), (16, 16000, 0), id="blocks_within_heads"),
        pytest.param((16 * 1024 + 8, 1024, 128), None, id="padded_by_half_a_row"),
        pytest.param((16 * 1024, 1024, 1032), None, id="heads_between_rows"),
        pytest.param((16 * 128, 128, (1 << 28) * 128), None, id="more_rows_than_are_counted"),
    ],
)
def test_a_cache_as_rows(strides, expected):
    operands = shape_operands(MODEL)._replace(k_strides=strides, v_strides=strides)
    steps = prefill_hopper._row_steps(operands)
    assert (None if steps is None else (steps.block, steps.head, steps.head_channels)) == expected
    if steps is not None:  # every row is where the strides say
        for block, token, head in ((0, 0, 0), (1, 0, 0), (3, 15, 7), (999, 7, 2)):
            row = block * steps.block + head * steps.head + token
            offset = row * strides[1] + head * steps.head_channels
            assert offset == block * strides[0] + token * strides[1] + head * strides[2]
    assert prefill_hopper._row_steps(operands._replace(v_strides=(2 * strides[0], *strides[1:]))) is None


def constants(launch):
    return launch.kernel.__name__, tuple(value for name, value in launch.arguments.items() if name.isupper())


@pytest.mark.parametrize("shape", [SHAPES[0], AttentionShape(4, 7, 128, 128, 16, BF16)], ids=str)
def test_everything_that_serving_reaches_is_compiled_ahead(shape, monkeypatch):
    monkeypatch.setattr(compilation, "hardware_of", lambda device: H200)
    max_seqs, max_tokens = 300, 2048
    calls = compilation._Calls(
        shape_operands(shape), shape.num_kv_heads * shape.group, False, False, 0, 0.0, False, False
    )
    launches = calls.prefills(max_seqs, max_tokens, True)
    compiled = {constants(launch) for launch in launches}
    assert {name for name, _ in compiled} == {"work_kernel", "hopper_kernel", "prefill_kernel"}
    # The list is made in a call or by a plan, and scans one of five numbers of sequences.
    assert len([launch for launch in launches if launch.kernel.__name__ == "work_kernel"]) <= 2 * 5 * 3
    assert len(compiled) < 40
    reached = set()
    for num_seqs in (1, 2, 14, 15, 16, 30, 31, 40, 63, 64, 100, 127, 128, 256, 300):
        for query_len in (9, 17, 33, 64, 100, 128, 129, 500, 770, 897, 1000, 1025, 2048):
            calls_of = Batch(
                *(torch.empty(*size, dtype=torch.int32, device="meta") for size in ((num_seqs, 9), (num_seqs,))),
                torch.empty(num_seqs + 1, dtype=torch.int32, device="meta"),
                None,
                query_len,
            )
            q = torch.empty(2048, shape.num_kv_heads * shape.group, 128, dtype=BF16, device="meta")
            scoring = Scoring(0.1, True, 0, 0.0, None, None)
            launches = prefill_launches(q, shape_operands(shape), calls_of, q, None, scoring, hardware=H200)
            reached |= {constants(launch) for launch in launches}
            if prefill_hopper.takes_list(shape_operands(shape), calls_of, shape.group, 0, H200):
                work = torch.empty(1 << 20, dtype=torch.int32, device="meta")
                planned = prefill_hopper.prepare_work_launch(
                    shape_operands(shape), calls_of, shape.group, work, num_tokens=2048, hardware=H200
                )
                reached.add(constants(planned))
    assert reached <= compiled


def test_tree_masks_are_compiled_ahead(monkeypatch):
    monkeypatch.setattr(compilation, "hardware_of", lambda device: H200)
    heads = MODEL.num_kv_heads * MODEL.group
    calls = compilation._Calls(shape_operands(MODEL), heads, False, False, 0, 0.0, False, False, True)
    launches = [*calls.decodes(300, 2048, False, False), *calls.prefills(300, 2048, False)]
    launches = [launch for launch in launches if launch.kernel.__name__ != "join_kernel"]
    assert all(launch.arguments["tree_mask_ptr"].dtype == torch.int64 for launch in launches)
    compiled = {constants(launch) for launch in launches}
    assert {name for name, _ in compiled} == {"decode_kernel", "prefill_kernel"}
    monkeypatch.setattr(attention, "hardware_of", lambda device: H200)
    for num_seqs in (1, 15, 64, 255, 256, 300):
        for query_len in (None, 1, 4, 8, 9, 16, 17, 32, 33, 64):
            q = torch.empty(num_seqs * (query_len or 1), heads, 128, dtype=BF16, device="meta")
            table, lens, starts = (
                torch.empty(*size, dtype=torch.int32, device="meta")
                for size in ((num_seqs, 9), (num_seqs,), (num_seqs + 1,))
            )
            batch = Batch(table, lens, None if query_len is None else starts, None, query_len or 1)
            words = torch.empty(q.shape[0], dtype=torch.int64, device="meta")
            scoring = Scoring(0.1, True, 0, 0.0, None, None, words)
            launch, *_ = attention._launches(q, shape_operands(MODEL), batch, q, None, scoring, False, None)
            assert constants(launch) in compiled


def test_a_forced_kernel_takes_batches_that_would_decode():
    q = rows(4096, 128)[:8]
    words = {"dtype": torch.int32, "device": "meta"}
    batch = Batch(torch.empty(2, 9, **words), torch.empty(2, **words), torch.empty(3, **words), None, 4)
    scoring = Scoring(0.1, True, 0, 0.0, None, None)

    def kernels():
        launches = attention._launches(q, shape_operands(MODEL), batch, q, None, scoring, False, None)
        return [launch.kernel.__name__ for launch in launches]

    assert kernels() == ["decode_kernel", "join_kernel"]
    with use_prefill_kernel("portable"):
        assert kernels() == ["prefill_kernel"]


@pytest.mark.parametrize(
    ("query_len", "expected"),
    [
        pytest.param(4, "decode_kernel", id="16_rows"),
        pytest.param(8, "decode_kernel", id="32_rows"),
        pytest.param(9, "prefill_kernel", id="36_rows"),
        pytest.param(16, "prefill_kernel", id="64_rows"),
        pytest.param(17, "work_kernel", id="68_rows"),
        pytest.param(32, "work_kernel", id="128_rows"),
    ],
)
def test_rows_of_the_longest_sequence_choose_the_kernel(query_len, expected, monkeypatch):
    monkeypatch.setattr(attention, "hardware_of", lambda device: H200)
    words = {"dtype": torch.int32, "device": "meta"}
    batch = Batch(torch.empty(64, 9, **words), torch.empty(64, **words), torch.empty(65, **words), None, query_len)
    q = torch.empty(64 * query_len, 32, 128, dtype=BF16, device="meta")
    scoring = Scoring(0.1, True, 0, 0.0, None, None)
    launches = attention._launches(q, shape_operands(MODEL), batch, q, None, scoring, False, None)
    assert launches[0].kernel.__name__ == expected


@settings(max_examples=200, deadline=None)
@given(
    num_seqs=st.integers(1, 600),
    query_len=st.integers(1, 3000),
    num_tokens=st.integers(1, 9000),
    group=st.integers(1, 128),
    num_kv_heads=st.integers(1, 9),
)
def test_a_plans_list_holds_that_of_every_smaller_batch(num_seqs, query_len, num_tokens, group, num_kv_heads):
    choice = choose_hopper(num_seqs, query_len, group, 128, H200)
    needed = choice.work_words(num_tokens, num_seqs, num_kv_heads)
    assert needed <= most_work_words(num_tokens, num_seqs, group, num_kv_heads)
    assert most_work_words(num_tokens, num_seqs, group, num_kv_heads) <= most_work_words(9000, 600, group, num_kv_heads)


def test_a_given_list_leaves_out_the_launch_that_makes_one():
    words = {"dtype": torch.int32, "device": "meta"}
    batch = Batch(torch.empty(2, 9, **words), torch.empty(2, **words), torch.empty(3, **words), None, 100)
    q, work = rows(4096, 128), torch.empty(5000, **words)
    scoring = Scoring(0.1, True, 0, 0.0, None, None)
    operands = shape_operands(MODEL)
    (launch,) = prefill_launches(q, operands, batch, q, None, scoring, hardware=H200, work=work)
    assert launch.kernel.__name__ == "hopper_kernel"
    assert launch.arguments["work_ptr"] is work


def test_cascades_are_compiled_ahead(monkeypatch):
    """Each launch of a causal call has one beside it without the mask; joins and lists of a plan do not ask."""
    monkeypatch.setattr(compilation, "hardware_of", lambda device: H200)
    heads = MODEL.num_kv_heads * MODEL.group
    compiled = []
    for causal in (True, False):
        calls = compilation._Calls(shape_operands(MODEL), heads, True, False, 0, 0.0, False, False, False, causal)
        launches = [*calls.decodes(70, 2048, False, False), *calls.prefills(70, 2048, False)]
        masked = [launch for launch in launches if "IS_CAUSAL" in launch.arguments]
        assert {launch.arguments["IS_CAUSAL"] for launch in masked} == {causal}
        compiled.append({(launch.kernel.__name__, launch.num_warps) for launch in masked})
    assert compiled[0] == compiled[1]
    (merge,) = calls.merges(2048)
    assert merge.kernel.__name__ == "merge_kernel"

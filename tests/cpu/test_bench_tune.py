"""`bench tune`: which choices it sets side by side, and the table that it makes of their times."""

from dataclasses import asdict, replace

import pytest
import torch

from bench.__main__ import main
from bench.suites.decode import SUITE
from bench.tune import LOOPS, candidates, fastest, row_of, table_text, tune
from triton_kv.choices import DECODE_LOOPS, Hardware, choose_decode, kind_of_decode

H200 = Hardware(num_sms=132, architecture=90)
CASES = {case.id: case for case in SUITE.cases}


def default_of(case):
    heads, group, dim = case.num_kv_heads, case.num_query_heads // case.num_kv_heads, case.head_dim
    return choose_decode(case.num_seqs, heads, group, dim, dim, case.block_size, case.torch_dtype.itemsize, H200)


def measured(choices, times):
    """What the record holds of a case; a time of None is a choice that was wrong."""
    return [
        {"choice": asdict(choice), "ok": time is not None}
        | ({"median_us": time} if time is not None else {"error": "wrong"})
        for choice, time in zip(choices, times, strict=True)
    ]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_candidates_are_the_default_and_others_that_fit_a_kernel(case):
    default = default_of(case)
    found = candidates(case, default, H200.num_sms)
    assert found[:2] == [default, replace(default, spreads_idle=not default.spreads_idle)]
    assert len(set(found)) == len(found) > len(LOOPS)
    # Each of the others changes the loop or the join, not both.
    for choice in found:
        same_loop = (choice.tile, choice.num_warps, choice.num_stages, choice.num_chunks) == (
            *(default.tile, default.num_warps, default.num_stages),
            default.num_chunks,
        )
        same_join = (choice.join_parts, choice.join_channels, choice.join_warps) == (
            *(default.join_parts, default.join_channels),
            default.join_warps,
        )
        assert same_loop or same_join
        assert choice.tile <= 8 * case.block_size
        assert choice.join_channels <= max(64, case.head_dim)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_default_as_a_row_is_the_row_that_it_was_chosen_from(case):
    kind = kind_of_decode(case.num_seqs, case.num_kv_heads, 16, case.head_dim, 2)
    assert kind == ("many" if case.num_seqs >= 64 and case.num_kv_heads > 1 else "few")
    assert row_of(case, default_of(case), H200.num_sms) == DECODE_LOOPS[kind]


def test_the_table_names_the_fastest_choice_that_was_right():
    case = CASES["decode/B64-L8k"]
    default = default_of(case)
    choices = [default, replace(default, tile=64, num_warps=4, num_chunks=24), replace(default, num_stages=4)]
    entry = fastest(case, measured(choices, [100.0, 90.0, None]), H200.num_sms)
    assert entry == {
        "id": "decode/B64-L8k",
        "kind": "many",
        "row": (64, 4, 3, 1.5),
        "join": (16, 128, 1),
        "spreads_idle": True,
        "median_us": 90.0,
        "of_default": 0.9,
    }
    assert fastest(case, measured(choices, [80.0, 90.0, None]), H200.num_sms)["of_default"] == 1.0
    wrong = fastest(case, measured(choices, [None, None, 95.0]), H200.num_sms)
    assert (wrong["row"], wrong["of_default"]) == ((32, 2, 4, 4), None)
    assert fastest(case, measured(choices, [None] * 3), H200.num_sms) is None
    assert table_text([entry, wrong]).splitlines() == [
        '"many": (64, 4, 3, 1.5),  # decode/B64-L8k, 0.900 of the default; join 16x128x1, spread',
        '"many": (32, 2, 4, 4),  # decode/B64-L8k, the default was wrong; join 16x128x1, spread',
    ]


def test_the_record_carries_the_table_and_it_is_printed_at_the_end(monkeypatch, tmp_path, capsys):
    import bench.tune as module

    class Session:
        def __init__(self, device):
            self.device, self.elapsed_s = device, 0.0

    def measure(session, case):
        default = default_of(case)
        return {"id": case.id, "choices": measured([default, replace(default, num_stages=4)], [20.0, 10.0])}

    monkeypatch.setattr(module, "WORKERS", 0)
    monkeypatch.setattr(module, "Session", Session)
    monkeypatch.setattr(module, "measure_rooflines", lambda device, quick: {})
    monkeypatch.setattr(module, "provenance", lambda command: {"source_id": "0" * 16})
    monkeypatch.setattr(module, "hardware_of", lambda device: H200)
    monkeypatch.setattr(module, "_measure", measure)
    record = tune("decode/B1-L8k,decode/B64-L8k", tmp_path / "tune.json")
    assert [entry["id"] for entry in record["table"]] == ["decode/B1-L8k", "decode/B64-L8k"]
    assert [entry["row"] for entry in record["table"]] == [(64, 4, 4, 2), (32, 2, 4, 4)]
    assert {entry["of_default"] for entry in record["table"]} == {0.5}
    assert (tmp_path / "tune.json").read_text().count('"of_default"') == 2
    assert capsys.readouterr().out.splitlines()[-2:] == table_text(record["table"]).splitlines()


def test_without_a_gpu_and_without_a_case(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["tune"]) == 2
    assert capsys.readouterr().err == "error: no CUDA device here: `bench tune` measures a GPU\n"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert main(["tune", "--case", "decode/none"]) == 2
    assert capsys.readouterr().err == "error: no case matches 'decode/none'\n"

"""The sizing suite: what ends a method, what of it is kept, and what an attempt prints."""

from dataclasses import replace

import pytest
import torch

from bench.session import Session
from bench.suites import sizing
from examples.engine.engine import Engine

SMOKE = replace(sizing.SUITE.smoke_cases[0], guesses=("legacy-1GiB",))


def fail(monkeypatch, error, *, legacy):
    plain = Engine.start

    def start(self, model):
        plain(self, model)
        if self.options.legacy is legacy:
            raise error

    monkeypatch.setattr(Engine, "start", start)


def session(**options):
    return Session(torch.device("cpu"), smoke=True, **options)


@pytest.mark.parametrize(
    ("legacy", "error", "ok", "text"),
    [
        pytest.param(True, RuntimeError("a bug"), True, "in 'serving a full batch': RuntimeError: a bug", id="guess"),
        pytest.param(False, RuntimeError("a bug"), False, "failed at 0.5", id="ours"),
        pytest.param(
            True, MemoryError("CUDA out of memory"), True, "out of memory in 'serving a full batch'", id="no-memory"
        ),
    ],
)
def test_a_method_that_fails_leaves_the_others_figures(monkeypatch, capsys, legacy, error, ok, text):
    fail(monkeypatch, error, legacy=legacy)
    case = sizing.run(session(), SMOKE)
    assert case["ok"] is ok
    ours, guess = case["ours"], case["peers"]["legacy-1GiB"]
    failed, other = (guess, ours) if legacy else (ours, guess)
    assert text in failed["error"]
    assert not failed["ok"]
    assert [attempt["ok"] for attempt in failed["attempts"]] == [False]
    assert [attempt["num_blocks"] for attempt in other["attempts"]] == sorted(
        attempt["num_blocks"] for attempt in other["attempts"]
    )
    assert len(other["attempts"]) == 2
    shown = capsys.readouterr().out
    assert "sizing/tiny ours: at 0.5: " in shown
    assert "sizing/tiny legacy-1GiB: at 0.5: " in shown


def test_a_banned_guess_is_left_out():
    bans = {"sizing/tiny legacy-1GiB": "legacy-1GiB ended the process (signal 11)"}
    case = sizing.run(session(bans=bans), SMOKE)
    assert case["ok"]
    assert "signal 11" in case["peers"]["legacy-1GiB"]["error"]


def test_quick_runs_start_at_one_utilization():
    case = sizing.run(session(quick=True), SMOKE)
    assert [attempt["utilization"] for attempt in case["ours"]["attempts"]] == [0.5]


def test_the_stepping_case_has_all_steps_and_both_guesses():
    cases = {case.id: case for case in sizing.SUITE.cases}
    assert set(cases) == {"sizing/llama-8b", "sizing/qwen3-0.6b", "sizing/smollm2-135m"}
    assert cases["sizing/llama-8b"].utilizations == (0.90, 0.95, 0.98, 0.99, 0.995)
    assert cases["sizing/llama-8b"].guesses == ("legacy-3GiB", "legacy-1GiB")
    assert len([size for size in sizing.BATCH_SIZES if size <= min(case.batch for case in cases.values())]) >= 20

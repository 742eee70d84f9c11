"""The sizing suite: what ends a method, what of it is kept, and what an attempt prints."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import triton_kv as tkv
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


def test_the_first_start_makes_the_weights_in_a_stage(monkeypatch):
    made, memories = [], []
    plain, host_memory = sizing.random_weights, tkv.HostMemory

    def open_memory(*arguments):
        memories.append(host_memory(*arguments))
        return memories[-1]

    def make(*arguments, **options):
        made.append(1)
        memories[-1].create(4096)  # in the books of the attempt's memory
        return plain(*arguments, **options)

    monkeypatch.setattr(tkv, "HostMemory", open_memory)
    monkeypatch.setattr(sizing, "random_weights", make)
    case = sizing.run(session(), SMOKE)
    assert made == [1], "the same weights serve all"
    stages = [stage["name"] for stage in case["ours"]["stages"]]
    assert stages[:3] == ["weights", "first block", "profile run"]
    assert case["peers"]["legacy-1GiB"]["stages"][0]["name"] == "first block"
    assert case["parameters"]["weight_bytes"] > 0
    assert [attempt["lost_bytes"] for attempt in case["ours"]["attempts"]] == [0, 0], "weights stay, and are not lost"


def test_weights_that_cannot_be_made_leave_it_to_the_next_start(monkeypatch):
    plain, failures = sizing.random_weights, [MemoryError("CUDA out of memory")]

    def fail_once(*arguments, **options):
        if failures:
            raise failures.pop()
        return plain(*arguments, **options)

    monkeypatch.setattr(sizing, "random_weights", fail_once)
    case = sizing.run(session(), SMOKE)
    assert "out of memory in 'weights'" in case["ours"]["attempts"][0]["error"]
    assert case["peers"]["legacy-1GiB"]["stages"][0]["name"] == "weights"


MIB = 1 << 20


def engine_left(free_mib, *, peak_mib=0, reusable_mib=0):
    """A started engine on a GPU of 1000 MiB."""
    reading = tkv.MemoryReading(free_mib * MIB, 1000 * MIB, reusable_bytes=reusable_mib * MIB)
    ledger = SimpleNamespace(
        read=lambda: reading, activation_bytes=lambda reading: max(peak_mib * MIB - reading.reusable_bytes, 0)
    )
    return SimpleNamespace(ledger=ledger, memory=SimpleNamespace(device=torch.device("cuda", 0)))


BUDGETS = {  # engine, tolerance in MiB, whether it kept to 900 MiB with 150 of headroom
    "to the byte": (engine_left(250), 0, True),
    "below": (engine_left(249), 0, False),
    "below, within the plan's tolerance": (engine_left(249), 1, True),
    "activations": (engine_left(250, peak_mib=40), 0, False),
    "activations that torch holds": (engine_left(250, peak_mib=40, reusable_mib=40), 0, True),
}


@pytest.mark.parametrize(("engine", "tolerance_mib", "within"), BUDGETS.values(), ids=BUDGETS.keys())
def test_the_budget_counts_what_must_stay_free(engine, tolerance_mib, within):
    assert sizing._is_within_budget(engine, 0.9, tolerance_mib * MIB) is within


def attempt(utilization, blocks=None, *, within=True, error="", off=0):
    return {
        "utilization": utilization,
        "ok": not error,
        "error": error,
        "num_blocks": blocks,
        "within_budget": within,
        "plan_error_bytes": off,
        "plan_tolerance_bytes": 4,
    }


NO_MEMORY = "out of memory in 'capture': CUDA out of memory"
OURS = [attempt(0.9, 100), attempt(0.99, 120)]
VERDICTS = {  # attempts of ours, of a guess, what is said
    "fewer blocks in the guess": (OURS, [attempt(0.9, 90), attempt(0.99, 110)], []),
    "equal": (OURS, OURS, []),
    "more, beyond the budget": (OURS, [attempt(0.9, 130, within=False)], []),
    "more, within it": (OURS, [attempt(0.9, 101)], ["legacy-0 has more blocks at 0.9"]),
    "the guess runs out first": (OURS, [attempt(0.9, 130, within=False), attempt(0.99, error=NO_MEMORY)], []),
    "ours runs out first": (
        [attempt(0.9, 100), attempt(0.99, error=NO_MEMORY)],
        [attempt(0.9, 90), attempt(0.99, 150, within=False)],
        ["legacy-0 goes further"],
    ),
    "both run out": ([attempt(0.9, error=NO_MEMORY)], [attempt(0.9, error=NO_MEMORY)], []),
    "the guess is broken": (OURS, [attempt(0.9, error="in 'capture': RuntimeError: a bug")], []),
    "ours is broken": (
        [attempt(0.9, error="in 'capture': RuntimeError: a bug")],
        [attempt(0.9, error=NO_MEMORY)],
        ["failed at 0.9: in 'capture': RuntimeError: a bug"],
    ),
    "a plan within its tolerance": ([attempt(0.9, 100, off=4)], [attempt(0.9, 90)], []),
    "a plan that is off": ([attempt(0.9, 100, off=5)], [attempt(0.9, 90)], ["the plan is 5 bytes off at 0.9"]),
}


def verdict(ours, guess, outputs=()):
    def result(attempts):
        furthest = max((one["utilization"] for one in attempts if one["ok"]), default=0.0)
        return {"attempts": attempts, "furthest_utilization": furthest}

    case = replace(SMOKE, guesses=("legacy-0",))
    return sizing._problems(case, {"ours": result(ours), "legacy-0": result(guess)}, list(outputs))


@pytest.mark.parametrize(("ours", "guess", "said"), VERDICTS.values(), ids=VERDICTS.keys())
def test_verdicts(ours, guess, said):
    assert verdict(ours, guess) == said


def test_other_tokens_are_a_problem():
    same = [("ours", [[1, 2]]), ("legacy-0", [[1, 2]])]
    assert verdict(OURS, OURS, same) == []
    assert verdict(OURS, OURS, [*same, ("legacy-1GiB", [[1, 3]])]) == ["the methods generate different tokens"]


def test_the_stepping_case_has_all_steps_and_guesses():
    cases = {case.id: case for case in sizing.SUITE.cases}
    assert set(cases) == {"sizing/llama-8b", "sizing/qwen3-0.6b", "sizing/smollm2-135m"}
    assert cases["sizing/llama-8b"].utilizations == (0.90, 0.95, 0.98, 0.99, 0.995)
    assert cases["sizing/llama-8b"].guesses == ("legacy-3GiB", "legacy-1GiB", "legacy-0")
    assert list(sizing.GUESSES.values()) == sorted(sizing.GUESSES.values(), reverse=True), "the bolder ones last"
    assert len([size for size in sizing.BATCH_SIZES if size <= min(case.batch for case in cases.values())]) >= 20

"""Measuring: a wrong or broken candidate is never timed, and never won."""

import pytest
import torch

from bench.candidate import Candidate, NotApplicableError, WrongResultError
from bench.case_result import best_peer, case_result
from bench.measure import Effort, measure
from bench.peers.registry import peer_candidates, probe_peers
from bench.session import Session
from bench.table import is_loss

SESSION = Session(torch.device("cpu"), smoke=True)


def verify(output, index):
    if output is None or output[0] != index:
        raise WrongResultError(f"{output}")
    return 0.0


def raising(error):
    def run(index):
        raise error

    return run


def run_case(candidates, required=("fa3", "flashinfer"), session=SESSION):
    results = measure(
        session,
        "decode/x",
        candidates,
        sets=2,
        floor_us=None,
        effort=Effort(),
        verify=verify,
        poison=lambda index: None,
    )
    return case_result("decode/x", results, required=required, bytes_moved=8, flops=0, floor=None, parameters={})


RIGHT = Candidate("ours", lambda index: [index])
FA3 = Candidate("fa3", lambda index: [index])
FLASHINFER = Candidate("flashinfer-fa3", lambda index: [index])


@pytest.mark.parametrize(
    ("peer", "text"),
    [
        pytest.param(Candidate("fa3", lambda index: [index + 1]), "WrongResultError", id="wrong"),
        pytest.param(Candidate("fa3", raising(RuntimeError("no kernel image"))), "no kernel image", id="raises"),
        pytest.param(
            Candidate("fa3", lambda index: [index], plan=lambda: 1 / 0), "ZeroDivisionError", id="plan-raises"
        ),
    ],
)
def test_a_bad_peer_is_failed_and_the_case_not_compared(peer, text):
    case = run_case([RIGHT, peer, FLASHINFER])
    assert case["ok"]
    assert not case["compared"]
    assert text in case["peers"]["fa3"]["error"]
    assert "median_us" not in case["peers"]["fa3"]
    assert best_peer(case)[0] == "flashinfer-fa3"


@pytest.mark.parametrize(
    "ours",
    [
        pytest.param(Candidate("ours", lambda index: [index + 1]), id="wrong"),
        pytest.param(Candidate("ours", lambda index: [float("nan")]), id="nan"),
        pytest.param(Candidate("ours", raising(ValueError("bad"))), id="raises"),
    ],
)
def test_ours_wrong_is_a_failed_case(ours):
    case = run_case([ours, FA3, FLASHINFER])
    assert not case["ok"]
    assert not case["compared"]
    assert case["error"]


def test_compared_needs_both_families():
    assert run_case([RIGHT, FA3, FLASHINFER])["compared"]
    assert not run_case([RIGHT, FA3])["compared"]


def test_a_peer_that_does_not_do_the_case_is_not_failed():
    case = run_case([RIGHT, Candidate("fa3", raising(NotApplicableError("no float32"))), FLASHINFER])
    assert case["not_applicable"] == {"fa3": "NotApplicableError: no float32"}
    assert "fa3" not in case["peers"]
    assert not case["compared"]


def test_what_took_the_process_down_is_left_out():
    session = Session(torch.device("cpu"), smoke=True, bans={"decode/x fa3": "fa3 ended the process (signal 11)"})
    calls = []
    peer = Candidate("fa3", lambda index: calls.append(index) or [index])
    case = run_case([RIGHT, peer, FLASHINFER], session=session)
    assert calls == []
    assert "signal 11" in case["peers"]["fa3"]["error"]


def test_poison_comes_before_each_check():
    events = []
    candidate = Candidate("ours", lambda index: events.append("run") or [index])
    measure(
        SESSION,
        "x/y",
        [candidate],
        sets=1,
        floor_us=None,
        effort=Effort(),
        verify=verify,
        poison=lambda index: events.append("poison"),
    )
    assert events[:2] == ["poison", "run"]


def test_noise_and_losses():
    case = run_case([RIGHT, FA3, FLASHINFER])
    assert case["ours"]["noise"] >= 0
    case["ours"] |= {"median_us": 100.0, "noise": 0.02}
    case["peers"]["fa3"]["median_us"] = 99.0
    case["peers"]["flashinfer-fa3"]["median_us"] = 120.0
    assert not is_loss(case)  # inside the noise
    case["peers"]["fa3"]["median_us"] = 90.0
    assert is_loss(case)
    case["peers"]["fa3"]["aside"] = True
    assert not is_loss(case)


def test_absent_peers_have_a_reason_and_no_candidate():
    peers = probe_peers()
    assert not peers["fa3"]["available"]
    assert peers["fa3"]["reason"]
    assert not peers["sglang"]["available"]
    session = Session(torch.device("cpu"), peers=peers)
    assert peer_candidates(session, ("fa3",), lambda module: [FA3]) == []


def test_a_peer_that_fails_while_set_up_fails_when_run():
    session = Session(torch.device("cpu"), peers={"sdpa": {"available": True}})

    def build(module):
        raise RuntimeError("no workspace")

    (candidate,) = peer_candidates(session, ("sdpa",), build)
    with pytest.raises(RuntimeError, match="no workspace"):
        candidate.run(0)

"""The GPU's path of measuring, run on a CPU over a stand-in for torch.cuda: what is launched, in which order."""

import contextlib
import itertools

import pytest
import torch

from bench import replay
from bench.candidate import Candidate, WrongResultError
from bench.measure import Effort, measure
from bench.session import Session


class GpuSession(Session):
    """Says it is on a GPU."""

    on_gpu = True


class FakeCuda:
    """Records launches; a graph's replay runs its calls again, each 5 us long."""

    def __init__(self):
        self.clock_us, self.capturing, self.slept = 0.0, None, 0
        outer = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = outer.clock_us

            def elapsed_time(self, end):
                return (end.at - self.at) / 1e3

        class Graph:
            def __init__(self):
                self.calls = []

            def replay(self):
                for call in self.calls:
                    call()

        @contextlib.contextmanager
        def graph(which):
            outer.capturing = which
            yield
            outer.capturing = None

        class Stream:
            def wait_stream(self, other):
                pass

        self.Event, self.CUDAGraph, self.graph, self.Stream = Event, Graph, graph, Stream
        self.current_stream = Stream

    def stream(self, which):
        return contextlib.nullcontext()

    def synchronize(self, device=None):
        assert self.capturing is None

    def _sleep(self, cycles):
        self.slept += 1

    def launch(self, work):
        """What a kernel launch does: nothing but being recorded while captured."""
        if self.capturing is not None:
            self.capturing.calls.append(lambda: self.launch(work))
        else:
            self.clock_us += 5.0
            work()


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(torch, "cuda", fake)
    return fake


def make_candidate(cuda, log, name="ours", wrong_from=None):
    out = [None]
    count = itertools.count()

    def run(index):
        def work():
            number = next(count)
            log.append((name, index))
            out[0] = index if wrong_from is None or number < wrong_from else -1

        cuda.launch(work)
        return out

    return Candidate(name, run)


def verify(output, index):
    if output[0] != index:
        raise WrongResultError(f"{output[0]} instead of {index}")
    return 0.0


@pytest.mark.parametrize("captured", [pytest.param(True, id="graph"), pytest.param(False, id="queued")])
def test_durations_and_rotation(cuda, captured):
    log = []
    effort = Effort(rounds=2, samples=3, replay_us=60.0, idle_s=0.0, captured=captured, host_calls=1)
    session = GpuSession(torch.device("cpu"))
    results = measure(
        session,
        "decode/x",
        [make_candidate(cuda, log)],
        sets=3,
        floor_us=5.0,
        effort=effort,
        verify=verify,
        poison=lambda index: None,
    )
    ours = results["ours"]
    assert ours["ok"], ours
    assert ours["median_us"] == pytest.approx(5.0)
    assert ours["noise"] == pytest.approx(0.0)
    assert ours["launches"] == 12  # 60 us of 5 us each, a multiple of the 3 sets
    assert [index for _, index in log[-12:]] == [0, 1, 2] * 4
    assert bool(cuda.slept) is not captured


def test_a_graph_that_replays_wrongly_is_failed(cuda):
    """Right while called eagerly, wrong when replayed: what a stale pointer in a graph would do."""
    log = []
    session = GpuSession(torch.device("cpu"))
    effort = Effort(rounds=1, samples=1, idle_s=0.0, host_calls=0)
    candidate = make_candidate(cuda, log, wrong_from=3)
    results = measure(session, "decode/x", [candidate], sets=1, floor_us=5.0, effort=effort, verify=verify)
    assert not results["ours"]["ok"]


def test_what_a_candidate_enters_while_captured_is_over_when_replayed(cuda):
    """A graph captured while lengths are short runs over the case's lengths."""
    lengths, seen = [7], []

    @contextlib.contextmanager
    def short():
        lengths[0] = 1
        yield
        lengths[0] = 7

    def run(index):
        cuda.launch(lambda: seen.append((cuda.replaying, lengths[0])))
        return [index]

    def replay(graph, calls=cuda.CUDAGraph.replay):
        cuda.replaying = True
        calls(graph)
        cuda.replaying = False

    cuda.replaying, cuda.CUDAGraph.replay = False, replay
    candidate = Candidate("ours", run, capturing=short)
    effort = Effort(rounds=1, samples=2, replay_us=5.0, idle_s=0.0, host_calls=0)
    session = GpuSession(torch.device("cpu"))
    measure(session, "decode/x", [candidate], sets=1, floor_us=5.0, effort=effort, verify=verify)
    assert {length for replaying, length in seen if replaying} == {7}
    assert [length for replaying, length in seen if not replaying] == [7, 1]  # checked, then warmed up for the capture


def test_turns_alternate(cuda):
    log = []
    session = GpuSession(torch.device("cpu"))
    effort = Effort(rounds=3, samples=1, replay_us=5.0, idle_s=0.0, host_calls=0)
    candidates = [make_candidate(cuda, log, name) for name in ("ours", "fa3", "vllm")]
    measure(session, "decode/x", candidates, sets=1, floor_us=5.0, effort=effort, verify=verify)
    turns = [name[0] for name, _ in itertools.groupby(name for name, _ in log)]
    # Prepared, then three rounds that each start one later; ours has a second turn at the end of the list.
    assert "".join(turns) == "ofv" + "ofvo" + "fvo" + "vof"


def test_the_first_replay_of_a_group_is_not_counted(cuda):
    calls = []
    durations = replay.cuda_group_us(replay.Replay(lambda: calls.append(1), 1, 0, None), samples=4)
    assert len(durations) == 4
    assert len(calls) == 5

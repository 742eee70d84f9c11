"""A candidate that kills the process is left out of its case, and the run goes on."""

import subprocess
import sys

import pytest

from bench.provenance import ROOT
from bench.record import read_record
from bench.run import RunOptions
from bench.supervise import supervise

# A measuring process with a suite of its own, whose peer, or ours, dies in one case.
WORKER = """
import os, signal, sys
from dataclasses import dataclass
from pathlib import Path
sys.path.insert(0, {root!r})
import bench.run
from bench.candidate import Candidate
from bench.case_result import case_result
from bench.measure import Effort, measure
from bench.suite import Suite

@dataclass(frozen=True)
class Case:
    id: str
    dies: str = ""
    quick: bool = True

def die(index):
    {how}

def run(session, case):
    candidates = [Candidate(n, die if n == case.dies else (lambda index: [index])) for n in ("ours", "fa3", "vllm")]
    results = measure(session, case.id, candidates, sets=1, floor_us=None, effort=Effort(), verify=lambda o, i: 0.0)
    return case_result(case.id, results, required=("fa3",), bytes_moved=1, flops=0, floor=None, parameters={{}})

cases = (Case("zero/a"), Case("zero/b", {dies!r}), Case("zero/c"))
bench.run.load_suites = lambda names: [Suite("zero", "", cases, cases, run, 1.0)]
bench.run.run(bench.run.RunOptions.from_json(sys.argv[1]), Path(sys.argv[2]))
"""


@pytest.mark.parametrize(
    ("how", "dies", "text"),
    [
        pytest.param("os.kill(os.getpid(), signal.SIGSEGV)", "fa3", "fa3 ended the process (signal 11)", id="peer"),
        pytest.param("os._exit(3)", "ours", "ours ended the process (exit code 3)", id="ours"),
    ],
)
def test_the_run_goes_on(tmp_path, how, dies, text):
    script = tmp_path / "worker.py"
    script.write_text(WORKER.format(root=str(ROOT), how=how, dies=dies))
    out = tmp_path / "zero.json"
    code = supervise(RunOptions(smoke=True, out=str(out)), (sys.executable, str(script)))
    assert code == 0
    cases = {case["id"]: case for case in read_record(out)["cases"]}
    assert list(cases) == ["zero/a", "zero/b", "zero/c"]
    assert cases["zero/a"]["compared"]
    assert cases["zero/c"]["compared"]
    dead = cases["zero/b"]
    if dies == "ours":
        assert not dead["ok"]
        assert text in dead["error"]
    else:
        assert dead["ok"]
        assert not dead["compared"]
        assert text in dead["peers"]["fa3"]["error"]
        assert dead["peers"]["vllm"]["ok"]


def test_a_worker_that_cannot_start_ends_the_run():
    assert supervise(RunOptions(smoke=True), (sys.executable, "-c", "import sys; sys.exit(5)")) == 5


def test_no_gpu_is_a_clear_error():
    code = "from bench.__main__ import main; import sys; sys.exit(main(['run', 'zero', '--out', 'unused']))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert done.returncode == 2
    assert "no CUDA device" in done.stderr

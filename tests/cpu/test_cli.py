"""`python -m triton_kv doctor` on whatever machine this is."""

import json
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "triton_kv", *arguments], capture_output=True, text=True, cwd=ROOT, timeout=120
    )


def test_doctor_as_json():
    done = run("doctor", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0
    assert report["versions"]["torch"] == torch.__version__
    assert report["devices"][-1]["device"] == "cpu"
    assert report["devices"][-1]["granularity_bytes"] > 0
    assert any("no GPU" in line for line in report["missing"]) == (not torch.cuda.is_available())


def test_doctor_for_people():
    done = run("doctor")
    assert done.returncode == 0
    for word in ("torch", "driver", "granules of", "missing:"):
        assert word in done.stdout


def test_no_command_is_an_error():
    done = run()
    assert done.returncode == 2
    assert "doctor" in done.stderr

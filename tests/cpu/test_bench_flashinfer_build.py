"""Building FlashInfer's modules ahead, over a stand-in for the package: what was ready in time, what not, and why."""

import os
import signal
import subprocess
import sys
import time

import pytest

from bench.peers import flashinfer_build
from bench.provenance import ROOT

PACKAGE = {
    "flashinfer/__init__.py": "",
    "flashinfer/jit/__init__.py": "",
    "flashinfer/jit/env.py": """
from pathlib import Path
FLASHINFER_JIT_DIR = Path(__file__).parents[2] / "built"
FLASHINFER_AOT_DIR = Path(__file__).parents[1] / "data" / "aot"
""",
    "flashinfer/jit/attention.py": """
import threading
import time
from .env import FLASHINFER_JIT_DIR
class Spec:
    def __init__(self, name):
        self.name = name
    def build_and_load(self):
        if "_64" in self.name:
            raise RuntimeError("Ninja build failed. nvcc: no such file")
        if "_256" in self.name:
            for other in threading.enumerate():  # a thread prints its module's line before it ends
                if other not in (threading.main_thread(), threading.current_thread()):
                    other.join()
            FLASHINFER_JIT_DIR.mkdir(exist_ok=True)
            (FLASHINFER_JIT_DIR / "still-building").touch()
            time.sleep(600)
        (FLASHINFER_JIT_DIR / self.name).mkdir(parents=True)
        (FLASHINFER_JIT_DIR / self.name / f"{self.name}.so").write_text("library")
def gen_batch_prefill_module(backend, q, kv, o, idx, dim_qk, dim_vo, pos, window, softcap, f16):
    assert (q, dim_qk, pos, window, softcap, f16) == (kv, dim_vo, 0, False, False, False)
    return Spec(f"{backend}_{dim_qk}")
""",
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    for name, text in PACKAGE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    monkeypatch.chdir(ROOT)
    return tmp_path


def test_what_is_ready_in_time(package):
    """The limit falls while the last module builds, however long the machine took to get there."""
    process = flashinfer_build.start(["fa2:bfloat16:128", "fa2:bfloat16:64", "fa3:bfloat16:256"])
    deadline = time.monotonic() + 400
    while process.poll() is None and not (package / "built/still-building").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    outcome = flashinfer_build.wait(process, 1)
    assert outcome["fa2:bfloat16:128"].startswith("built in")
    assert "nvcc: no such file" in outcome["fa2:bfloat16:64"]
    assert "fa3:bfloat16:256" not in outcome
    assert process.returncode == -signal.SIGKILL


def test_waiting_ends_with_the_last_module(package):
    process = flashinfer_build.start(["fa2:bfloat16:128"])
    outcome = flashinfer_build.wait(process, 400)
    assert outcome["fa2:bfloat16:128"].startswith("built in")
    assert process.returncode == 0


def test_pack_and_unpack(package):
    command = [sys.executable, "-m", "bench.peers.flashinfer_build"]
    archive = package / "built.tar.xz"
    subprocess.run([*command, "fa2:bfloat16:128", "--pack", str(archive)], check=True)
    subprocess.run([*command, "--unpack", str(archive)], check=True)
    assert (package / "flashinfer/data/aot/fa2_128/fa2_128.so").read_text() == "library"

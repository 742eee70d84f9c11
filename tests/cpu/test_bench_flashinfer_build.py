"""Building FlashInfer's modules ahead, over a stand-in for the package: what was ready in time, what not, and why."""

import os
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
import time
from .env import FLASHINFER_JIT_DIR
class Spec:
    def __init__(self, name):
        self.name = name
    def build_and_load(self):
        if "_64" in self.name:
            raise RuntimeError("Ninja build failed. nvcc: no such file")
        if "_256" in self.name:
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
    begin = time.monotonic()
    process = flashinfer_build.start(["fa2:bfloat16:128", "fa2:bfloat16:64", "fa3:bfloat16:256"])
    outcome = flashinfer_build.wait(process, 25)
    assert outcome["fa2:bfloat16:128"].startswith("built in")
    assert "nvcc: no such file" in outcome["fa2:bfloat16:64"]
    assert "fa3:bfloat16:256" not in outcome
    assert process.returncode != 0
    assert time.monotonic() - begin < 60


def test_pack_and_unpack(package):
    command = [sys.executable, "-m", "bench.peers.flashinfer_build"]
    archive = package / "built.tar.xz"
    subprocess.run([*command, "fa2:bfloat16:128", "--pack", str(archive)], check=True)
    subprocess.run([*command, "--unpack", str(archive)], check=True)
    assert (package / "flashinfer/data/aot/fa2_128/fa2_128.so").read_text() == "library"

"""Known launches through Triton's own launcher reach the CUDA driver byte for byte as new ones do."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import triton

HERE = Path(__file__).parent


@pytest.mark.skipif(shutil.which("gcc") is None, reason="Triton's launcher and the recorder are compiled by gcc")
def test_known_launches_reach_the_driver_as_new_ones(tmp_path):
    include = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    library = tmp_path / "libcuda.so.1"
    source = [HERE / "recording_cuda.c", "-I", include, "-Wl,-soname,libcuda.so.1"]
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", *source, "-o", library], check=True)
    environment = os.environ | {
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        "TRITON_LIBCUDA_PATH": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(HERE.parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    environment.pop("TRITON_INTERPRET", None)
    program = [sys.executable, HERE / "recorded_launches.py", library]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "as recorded" in done.stdout

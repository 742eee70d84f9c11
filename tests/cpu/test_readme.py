"""The README's quick start runs as printed, it keeps its promises of size, and the design names every module."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_quick_start_runs_as_printed():
    text = (ROOT / "README.md").read_text()
    code = re.search(r"## Quick start\n\n```python\n(.*?)```", text, re.DOTALL).group(1)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=250)
    assert done.returncode == 0, done.stderr
    assert "256 of" in done.stdout
    assert "torch.Size([2, 32, 128]) True" in done.stdout


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_design_names_every_module():
    rooms = re.search(r"## Rooms\n```\n(.*?)```", (ROOT / "docs/design.md").read_text(), re.DOTALL).group(1)
    words = set(re.findall(r"\w+", rooms))
    folders = [ROOT / name for name in ("triton_kv", "triton_kv/memory", "kernels")]
    modules = {path.stem for folder in folders for path in folder.glob("*.py")}
    assert modules - words - {"__init__", "__main__", "version"} == set()


def test_import_is_light_and_initialises_no_gpu():
    code = (
        "import time, torch, triton; t = time.process_time(); import triton_kv; "  # others may keep the cores busy
        "print(time.process_time() - t); assert not torch.cuda.is_initialized()"
    )
    times = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True, timeout=120
        )
        times.append(float(done.stdout))
    assert min(times) < 0.3

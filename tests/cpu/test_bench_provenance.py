"""The source id: what counts, what does not, and that no Python version changes it."""

import shutil
import subprocess
import sys

import pytest

from bench.provenance import ROOT, gpu_state, provenance, source_id, tree_text

SAMPLE = '''
"""Docstring."""
from __future__ import annotations
@decorate(1, key=None)
class A(B, metaclass=M):
    """Doc."""
    x: int = 3
    async def f(self, a, /, b=2, *args, c: str = "s", **kw) -> None:
        """Doc."""
        return f"pre{a!r:>{b}}" f"post{c=}" "tail" f"{{}}" u"u"
def g():
    'only a docstring'
{**k, 'a': None, 1: ..., b'x': 1e-9}
'''
# ast.dump of this text differs between 3.11, 3.12 (type_params) and 3.13 (empty fields left out).
SAMPLE_TEXT_SHA = "301e52bdcbcb5cd2"


def write_tree(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


BASE = {"triton_kv/a.py": "x = 1\n", "kernels/k.py": "def f(a):\n    return a\n"}


@pytest.mark.parametrize(
    "files",
    [
        pytest.param({"triton_kv/a.py": "# why\nx   =  1\n\n"}, id="comment-and-spaces"),
        pytest.param({"triton_kv/a.py": '"""Text."""\nx = 1\n'}, id="module-docstring"),
        pytest.param({"kernels/k.py": 'def f(a):\n    """Text."""\n    return a\n'}, id="function-docstring"),
        pytest.param({"bench/b.py": "y = 2\n"}, id="other-folder"),
        pytest.param({"triton_kv/a.txt": "y"}, id="no-python-file"),
        pytest.param({"triton_kv/kernels/k.py": BASE["kernels/k.py"]}, id="link-replaced-by-a-copy"),
    ],
)
def test_what_does_not_count(tmp_path, files):
    before = source_id(write_tree(tmp_path / "a", BASE))
    assert source_id(write_tree(tmp_path / "b", BASE | files)) == before


@pytest.mark.parametrize(
    "files",
    [
        pytest.param({"triton_kv/a.py": "x = 2\n"}, id="value"),
        pytest.param({"triton_kv/a.py": "x = 1.0\n"}, id="type-of-a-value"),
        pytest.param({"triton_kv/a.py": "x = None\n"}, id="none"),
        pytest.param({"triton_kv/a.py": "x = 1\n'text'\n"}, id="text-that-is-no-docstring"),
        pytest.param({"kernels/k.py": "def f(b):\n    return b\n"}, id="name-in-a-kernel"),
        pytest.param({"kernels/l.py": "x = 1\n"}, id="new-file"),
        pytest.param({"triton_kv/memory/c.py": ""}, id="new-empty-file"),
    ],
)
def test_what_counts(tmp_path, files):
    before = source_id(write_tree(tmp_path / "a", BASE))
    assert source_id(write_tree(tmp_path / "b", BASE | files)) != before


def test_link_is_counted_once(tmp_path):
    root = write_tree(tmp_path, BASE)
    before = source_id(root)
    (root / "triton_kv" / "kernels").symlink_to("../kernels")
    assert source_id(root) == before


def test_docstring_only_function_differs_from_none():
    assert tree_text("def f():\n    'doc'\n") != tree_text("def f():\n    pass\n")


def test_text_of_a_tree_is_the_same_on_every_python():
    import hashlib

    assert hashlib.sha256(tree_text(SAMPLE).encode()).hexdigest()[:16] == SAMPLE_TEXT_SHA


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_other_interpreters_agree(version):
    python = shutil.which(f"python{version}")
    if python is None or subprocess.run([python, "-c", ""], capture_output=True).returncode:
        pytest.skip(f"no python{version} here")
    code = "from bench.provenance import source_id; print(source_id())"
    found = subprocess.run([python, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == source_id()


def test_command_prints_the_id_last():
    done = subprocess.run(
        [sys.executable, "-m", "bench.provenance"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    last = done.stdout.splitlines()[-1]
    assert last == source_id()
    assert len(last) >= 16
    assert set(last) <= set("0123456789abcdef")


def test_record_fields():
    facts = provenance(["python", "-m", "bench", "run", "a b"])
    assert facts["command"] == "python -m bench run 'a b'"
    for name in ("source_id", "gpu", "driver", "python", "torch", "triton", "cuda_bindings", "sm_clock_mhz"):
        assert name in facts


@pytest.mark.parametrize(("visible", "asked"), [(None, "0"), ("", "0"), ("1", "1"), ("2,0", "2")])
def test_the_first_visible_gpu_is_asked(visible, asked, monkeypatch):
    commands = []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    def run(command, **_):
        commands.append(command)
        raise OSError

    monkeypatch.setattr(subprocess, "run", run)
    assert set(gpu_state().values()) == {None}
    assert commands[0][:3] == ["nvidia-smi", "-i", asked]

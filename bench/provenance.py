"""Where a figure comes from: the code that was measured, the machine, the versions, the command.

`python -m bench.provenance` prints the environment and, as its last line, the `source_id` alone.
"""

from __future__ import annotations

import ast
import hashlib
import os
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "triton_kv"
KERNELS = "kernels"  # triton_kv/kernels is a link to it
ID_DIGITS = 16


def source_id(root: Path = ROOT) -> str:
    """A hash over the syntax trees of the Python files under `triton_kv/` and `kernels/`, hexadecimal.

    Comments, docstrings and layout do not count; names, values and file paths do. It is the same on every supported
    Python version. Raises `SyntaxError` for a file that does not parse.
    """
    digest = hashlib.sha256()
    for path in source_files(root):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0")
        digest.update(tree_text(path.read_text(encoding="utf-8")).encode() + b"\0")
    return digest.hexdigest()[:ID_DIGITS]


def source_files(root: Path) -> list[Path]:
    """The hashed files in a fixed order; those behind `triton_kv/kernels` appear once, under `kernels/`."""
    found: list[Path] = []
    for top in (PACKAGE, KERNELS):
        for folder, names, files in os.walk(root / top):
            if Path(folder) == root / PACKAGE and KERNELS in names:  # also where a copy has replaced the link
                names.remove(KERNELS)
            found += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def tree_text(source: str) -> str:
    """The syntax tree of `source` as text, without docstrings, positions and what differs between Python versions."""
    return "".join(_pieces(ast.parse(source)))


def _pieces(node: Any) -> Iterator[str]:
    """`ast.dump` is not usable here: 3.12 added `type_params`, 3.13 leaves out empty fields.

    Empty fields are left out; a field's name stands before its value, so nothing can be taken for something else.
    """
    if isinstance(node, list):
        yield "["
        for item in node:
            yield from _pieces(item)
            yield ","
        yield "]"
        return
    if not isinstance(node, ast.AST):
        yield repr(node)
        return
    yield f"{type(node).__name__}("
    for name in node._fields:
        value: Any = getattr(node, name, None)
        if isinstance(node, ast.Constant):
            if name == "kind":  # the u of u"text"
                continue
        elif name == "body" and _has_docstring(node):
            value = value[1:]
        elif name == "values" and isinstance(node, ast.JoinedStr):
            value = _joined(value)
        if (value is None or value == []) and not isinstance(node, ast.Constant):
            continue
        yield f"{name}="
        yield from _pieces(value)
        yield ","
    yield ")"


def _has_docstring(node: ast.AST) -> bool:
    if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) or not node.body:
        return False
    first = node.body[0]
    return isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)


def _joined(values: Sequence[ast.expr]) -> list[ast.expr]:
    """The parts of an f-string with neighbouring texts merged: how they are cut is the parser's affair."""
    merged: list[ast.expr] = []
    for value in values:
        is_text = isinstance(value, ast.Constant) and isinstance(value.value, str)
        if is_text and merged and isinstance(merged[-1], ast.Constant):
            merged[-1] = ast.Constant(str(merged[-1].value) + str(value.value))  # type: ignore[attr-defined]
        elif not is_text or value.value:  # type: ignore[attr-defined]
            merged.append(value)
    return merged


def provenance(command: Sequence[str] | str | None = None) -> dict[str, Any]:
    """What every record carries: `source_id`, GPU, driver, versions, clocks and the command.

    Clocks are those seen at the call, in MHz. Values that this machine lacks are None. Initialises no CUDA context.
    """
    command = sys.argv if command is None else command
    words = shlex.split(command) if isinstance(command, str) else list(command)
    return {
        "source_id": source_id(),
        "command": shlex.join(_without_paths(words)),
        **gpu_state(),
        "python": platform.python_version(),
        "torch": version_of("torch"),
        "cuda": _torch_cuda(),
        "triton": version_of("triton"),
        "cuda_bindings": version_of("cuda-bindings"),
        "numpy": version_of("numpy"),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _without_paths(words: list[str]) -> list[str]:
    """A command without where its record goes, which says nothing about how it was made."""
    kept = []
    for word, before in zip(words, ["", *words]):
        if word != "--out" and before != "--out" and not word.startswith("--out="):
            kept.append(word)
    return kept


GPU_FIELDS = {  # name in the record -> field of nvidia-smi
    "gpu": "name",
    "driver": "driver_version",
    "sm_clock_mhz": "clocks.sm",
    "sm_clock_max_mhz": "clocks.max.sm",
    "memory_clock_mhz": "clocks.mem",
    "power_watts": "power.draw",
    "power_limit_watts": "power.limit",
    "temperature_c": "temperature.gpu",
}


def gpu_state() -> dict[str, Any]:
    """Name, driver, clocks, power and temperature of the first visible GPU now by nvidia-smi; None where it cannot."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    query = ["nvidia-smi", "-i", first, f"--query-gpu={','.join(GPU_FIELDS.values())}", "--format=csv,noheader,nounits"]
    try:
        line = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return dict.fromkeys(GPU_FIELDS)
    return dict(zip(GPU_FIELDS, (_number(text.strip()) for text in line.splitlines()[0].split(","))))


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _torch_cuda() -> str | None:
    import torch

    return torch.version.cuda


def _number(text: str) -> float | str | None:
    try:
        return float(text)
    except ValueError:
        return None if text.startswith("[") else text  # "[N/A]"


def main() -> None:
    """Prints the environment, then the `source_id` alone."""
    facts = provenance()
    for name, value in facts.items():
        print(f"{name}: {value}")
    print(facts["source_id"])


if __name__ == "__main__":
    main()

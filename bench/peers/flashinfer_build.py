"""Builds FlashInfer's modules ahead of timing: `start` and `wait`, or this file as a command with modules to build.

A module is `backend:dtype:head_dim` ("fa3:bfloat16:128") or `page`. What is built stays in FlashInfer's cache folder
(under FLASHINFER_WORKSPACE_BASE, else the home folder), so a later run finds it.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def start(modules: Sequence[str]) -> subprocess.Popen[str]:
    """Starts building all of them, in a process group of their own."""
    return subprocess.Popen(
        [sys.executable, "-m", "bench.peers.flashinfer_build", *modules],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait(process: subprocess.Popen[str], limit_s: float) -> dict[str, str]:
    """Module -> "built" or why not, of those that ended within `limit_s`. What still builds then is stopped."""
    outcome: dict[str, str] = {}

    def collect() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            tag, _, rest = line.partition(" ")
            if tag == "flashinfer-module":
                name, _, text = rest.strip().partition(" ")
                outcome[name] = text

    reader = threading.Thread(target=collect, daemon=True)
    reader.start()
    reader.join(limit_s)
    if process.poll() is None:
        try:
            process.wait(1 if reader.is_alive() else 10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    reader.join(5)
    return outcome


def build(module: str) -> None:
    """Builds one module; returns when it lies in the cache."""
    import torch
    from flashinfer.jit.attention import gen_batch_prefill_module

    if module == "page":
        from flashinfer.jit.page import gen_page_module

        gen_page_module().build_and_load()
        return
    backend, dtype_name, head_dim = module.split(":")
    dtype = getattr(torch, dtype_name)
    spec = gen_batch_prefill_module(
        backend,
        dtype,  # q
        dtype,  # kv
        dtype,  # out
        torch.int32,  # indices
        int(head_dim),
        int(head_dim),
        0,  # no position encoding
        False,  # sliding window
        False,  # logits soft cap
        False,  # f16 QK reduction
    )
    spec.build_and_load()


def build_all(modules: Sequence[str]) -> None:
    """Builds the modules side by side and prints a line for each as it ends."""
    import flashinfer  # noqa: F401 - once, before the threads

    os.environ["PATH"] = f"{os.path.dirname(sys.executable)}:{os.environ.get('PATH', '')}"  # where ninja lies
    # Each compiler takes 2-4 GB, and ninja alone would start one a core for every module.
    os.environ.setdefault("MAX_JOBS", str(max(2, (os.cpu_count() or 1) * 5 // 4 // max(len(modules), 1))))

    def one(module: str) -> None:
        begin = time.monotonic()
        try:
            build(module)
            text = f"built in {time.monotonic() - begin:.0f} s"
        except Exception as error:
            text = f"failed: {type(error).__name__}: {' '.join(str(error).split())[-300:]}"
        print(f"flashinfer-module {module} {text}", flush=True)

    threads = [threading.Thread(target=one, args=(module,)) for module in modules]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def pack(path: str) -> None:
    """Puts the built libraries into an archive."""
    from flashinfer.jit import env

    with tarfile.open(path, "w:xz") as archive:
        for library in sorted(env.FLASHINFER_JIT_DIR.glob("*/*.so")):
            archive.add(library, f"{library.parent.name}/{library.name}")


def unpack(path: str) -> None:
    """Puts an archive's libraries where FlashInfer looks for kernels compiled ahead of time."""
    from flashinfer.jit import env

    env.FLASHINFER_AOT_DIR.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path) as archive:
        archive.extractall(env.FLASHINFER_AOT_DIR, filter="data")


def modules_of_all_suites() -> list[str]:
    """What the suites' full runs need."""
    from bench.suites import load_suites

    wanted = [name for suite in load_suites(()) if suite.modules is not None for name in suite.modules(suite.cases)]
    return list(dict.fromkeys(wanted))


def main() -> None:
    """The command line: `all` or modules to build, then `--pack`; or `--unpack` alone."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers.flashinfer_build")
    parser.add_argument("modules", nargs="*")
    parser.add_argument("--pack", metavar="FILE")
    parser.add_argument("--unpack", metavar="FILE")
    asked = parser.parse_args()
    if asked.unpack:
        unpack(asked.unpack)
    if asked.modules:
        modules = modules_of_all_suites() if asked.modules == ["all"] else asked.modules
        build_all(modules)
    if asked.pack:
        pack(asked.pack)


if __name__ == "__main__":
    main()

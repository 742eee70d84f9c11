"""Ahead-of-time compilation of launches for GPUs that are not here, through Triton's own JIT.

A driver that only names a target stands in for the GPU's: `warmup` then makes the signature, specialisation, alignment
and options exactly as a launch on such a GPU would, meta tensors taking the place of device tensors.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from triton_kv.choices import Hardware
from triton_kv.launch import Launch

_KIB = 1024


@dataclass(frozen=True)
class Target:
    """One GPU architecture and what its kernels may use."""

    name: str
    gpu: GPUTarget
    shared_limit_bytes: int  # that one program may ask for
    num_sms: int  # of the product that the launch choosers are asked about

    @property
    def is_cuda(self) -> bool:
        return self.gpu.backend == "cuda"

    @property
    def hardware(self) -> Hardware:
        """The target as launch choosers see it."""
        return Hardware(self.num_sms, self.gpu.arch if self.is_cuda else "hip")

    def __str__(self) -> str:
        return self.name


TARGETS = (
    Target("sm_80", GPUTarget("cuda", 80, 32), 163 * _KIB, 108),  # A100
    Target("sm_89", GPUTarget("cuda", 89, 32), 99 * _KIB, 142),  # L40S
    Target("sm_90", GPUTarget("cuda", 90, 32), 227 * _KIB, 132),  # H100, H200
    Target("sm_100", GPUTarget("cuda", 100, 32), 227 * _KIB, 148),  # B200
    Target("sm_120", GPUTarget("cuda", 120, 32), 99 * _KIB, 188),  # RTX PRO 6000
    Target("gfx942", GPUTarget("hip", "gfx942", 64), 64 * _KIB, 304),  # MI300X
)

SM_90 = TARGETS[2]


class _NamedTarget:
    """As much of a Triton driver as compilation asks for."""

    def __init__(self, target: Target) -> None:
        self._gpu = target.gpu
        # The JIT keeps binders and compiled kernels by device number: one number a target, none of a GPU that is here.
        self._device = 1000 + TARGETS.index(target)

    def get_current_target(self) -> GPUTarget:
        return self._gpu

    def get_current_device(self) -> int:
        return self._device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


@contextmanager
def compiling_for(target: Target) -> Iterator[None]:
    """Launches compile for `target` inside the block. They cannot run."""
    before = driver._active  # reset_active() would look for a GPU
    driver.set_active(_NamedTarget(target))
    try:
        yield
    finally:
        driver.set_active(before)


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of one launch."""

    target: Target
    kernel: Any  # triton.compiler.CompiledKernel

    @property
    def shared_bytes(self) -> int:
        return int(self.kernel.metadata.shared)

    @property
    def text(self) -> str:
        """PTX, or AMD's assembly."""
        return str(self.kernel.asm["ptx" if self.target.is_cuda else "amdgcn"])

    @cached_property
    def resources(self) -> dict[str, int]:
        """REG, STACK, LOCAL, ... of a CUDA kernel, from the bundled `cuobjdump -res-usage`; spills show in STACK."""
        with tempfile.TemporaryDirectory() as folder:
            cubin = Path(folder, "kernel.cubin")
            cubin.write_bytes(self.kernel.asm["cubin"])
            tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
            text = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
        found = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", text)}
        assert {"REG", "STACK", "LOCAL"} <= set(found), f"cuobjdump said something unexpected:\n{text}"
        return found

    @property
    def vector_spills(self) -> int:
        """Vector registers that an AMD kernel spills."""
        return sum(int(n) for n in re.findall(r"^\s*\.vgpr_spill_count:\s*(\d+)", self.text, re.MULTILINE))

    @property
    def matrix_instructions(self) -> int:
        pattern = r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b" if self.target.is_cuda else r"\bv_mfma_"
        return len(re.findall(pattern, self.text))


@dataclass(frozen=True, eq=False)
class Job:
    """One launch for one target, built when it is needed."""

    name: str
    target: Target
    build: Callable[[], Launch]

    def compile(self) -> Compiled:
        """Compiles, unless this process or Triton's disk cache already has that specialisation for the target."""
        with compiling_for(self.target):
            return Compiled(self.target, self.build().compile(load=False))

    def __str__(self) -> str:
        return f"{self.target}-{self.name}"


def per_target(name: str, build: Callable[[Target], Launch], *, quick: bool = False) -> list[Any]:
    """pytest parameters: one job a target; `quick` marks that of sm_90, which stands for all on other Tritons."""
    return [
        pytest.param(
            Job(name, target, partial(build, target)), marks=pytest.mark.quick if quick and target is SM_90 else ()
        )
        for target in TARGETS
    ]


def assert_fits(compiled: Compiled, *, stack_bytes: int = 0) -> None:
    """No more stack than `stack_bytes`, no spills, and not more shared memory than a program may have."""
    target = compiled.target
    limit = target.shared_limit_bytes
    assert compiled.shared_bytes <= limit, f"{compiled.shared_bytes} bytes of shared memory, {target} has {limit}"
    if target.is_cuda:
        assert compiled.resources["STACK"] <= stack_bytes, f"spills or a stack: {compiled.resources}"
        assert compiled.resources["LOCAL"] == 0, f"local memory: {compiled.resources}"
    else:
        assert compiled.vector_spills == 0, f"{compiled.vector_spills} spilled registers"


def num_specialisations(kernel: Any, target: Target) -> int:
    """How many variants of a kernel exist in this process for the target."""
    return len(kernel.device_caches[1000 + TARGETS.index(target)][0])

"""How kernels are launched and ops registered: the one place between a pure launch builder and the device.

Every op builds its launches with a pure function that looks at shapes, strides and dtypes only, so that the same
function serves an eager call, a warm-up before capture (`Launch.compile`) and ahead-of-time tests over meta tensors.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch.utils._device import DeviceContext

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Bound once: each lookup through torch._C costs about as much as the call.
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_function_mode_at = torch._C._get_function_stack_at
_stream_handle: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_functorch_level = torch._C._functorch.peek_interpreter_stack

LIBRARY = torch.library.Library("triton_kv", "DEF")
_NOTHING = nullcontext()


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch, complete but for the device and stream, which are the current ones when it runs.

    Integers among the arguments that change from step to step belong into the kernel's `do_not_specialize`, and carry
    an annotation (`num_bytes: tl.int64`) where they may pass 2^31: else Triton compiles a second variant there.
    """

    kernel: Any  # a @triton.jit function
    grid: tuple[int, ...]  # programs along axes 0, 1, 2
    arguments: dict[str, Any]  # by the kernel's parameter names: tensors, ints, floats, constexprs, None
    num_warps: int
    num_stages: int
    launch_pdl: bool = False  # may start before its predecessor on the stream ends (CUDA, compute capability 9.0 up)
    max_registers: int | None = None  # a thread (CUDA); where it is stated, ptxas spills less to fit in more programs

    def run(self, device: torch.device | None = None) -> Any:
        """Launch on the current stream of `device` (None: of the current device). Does not synchronise.

        Returns Triton's compiled kernel, or None from the interpreter.
        """
        with on_device(device):
            return self.kernel[self.grid](**self.arguments, **self.options())

    def compile(self, *, load: bool = True) -> Any:
        """Compile for the current device without launching, and return Triton's compiled kernel.

        Only dtypes, alignments and constexprs are looked at, so tensors may be on the meta device. `load` also loads
        the module onto the device, because one that is loaded lazily takes device memory after the cache was sized.
        """
        compiled = self.kernel.warmup(**self.arguments, **self.options(), grid=self.grid)
        if load:
            compiled._init_handles()
        return compiled

    def options(self) -> dict[str, Any]:
        """Compile options; the interpreter ignores them."""
        options: dict[str, Any] = {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": True,  # Triton 3.10 flips the default
        }
        if self.launch_pdl:  # AMD's backend does not know the option
            options["launch_pdl"] = True
        if self.max_registers is not None:
            options["maxnreg"] = self.max_registers
        return options


def on_device(device: torch.device | None) -> AbstractContextManager[None]:
    """A context in which a CUDA device is the current one. Where it is already, entering costs nearly nothing."""
    if device is None or device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return _NOTHING
    return torch.cuda.device(device)


def raw_stream(device: torch.device) -> int:
    """The handle of a CUDA device's current stream."""
    if _stream_handle is None:
        return torch.cuda.current_stream(device).cuda_stream
    return _stream_handle(torch.cuda.current_device() if device.index is None else device.index)


def register(name: str, schema: str, implementation: Callable[..., None]) -> Any:
    """Define `triton_kv::<name><schema>` for CPU and CUDA tensors and return the op.

    `schema` is the part after the name, for example `"(Tensor(a!) x, int n) -> ()"`. Ops return nothing: they mutate
    the tensors that the schema declares, and those only. `define` and `impl` cost less a call than `custom_op`.
    """
    LIBRARY.define(name + schema)
    LIBRARY.impl(name, implementation, "CPU")
    LIBRARY.impl(name, implementation, "CUDA")
    torch.library.register_fake(f"triton_kv::{name}", lambda *arguments: None, lib=LIBRARY)
    return getattr(torch.ops.triton_kv, name).default


def eager(*tensors: torch.Tensor | None) -> bool:
    """Whether a call over these tensors may go straight to its implementation, past the dispatcher.

    Not under `torch.compile` or another tracer, not where a dispatch or function mode or a functorch transform is
    active, and not for tensor subclasses: all of them must see the registered op. The mode of
    `torch.set_default_device` concerns only factory functions and does not count.
    """
    if torch.compiler.is_compiling() or _dispatch_modes() or _functorch_level() is not None:
        return False
    num_modes = _function_modes()
    if num_modes and any(type(_function_mode_at(i)) is not DeviceContext for i in range(num_modes)):
        return False
    for tensor in tensors:  # noqa: SIM110 - a generator inside all() costs as much as the rest
        if tensor is not None and type(tensor) is not torch.Tensor:
            return False
    return True


def interpreted(kernel: Any) -> bool:
    """Whether the kernel runs in Triton's interpreter (`TRITON_INTERPRET=1` was set when it was imported)."""
    return not isinstance(kernel, triton.runtime.JITFunction)


@contextmanager
def count_compilations() -> Iterator[list[str]]:
    """Collect one line for each Triton specialisation compiled, or loaded from the disk cache, inside the block.

    An empty list after serving a step means that nothing was compiled since capture.
    """
    compiled: list[str] = []
    previous = triton.knobs.runtime.jit_cache_hook

    def hook(**call: Any) -> Any:
        compiled.append(call["repr"])
        return previous(**call) if previous is not None else None

    triton.knobs.runtime.jit_cache_hook = hook
    try:
        yield compiled
    finally:
        triton.knobs.runtime.jit_cache_hook = previous


__all__ = ["LIBRARY", "Launch", "count_compilations", "eager", "interpreted", "on_device", "raw_stream", "register"]

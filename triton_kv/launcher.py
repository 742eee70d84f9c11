"""Triton's launcher proper, which its runner calls: found by letting Triton's own code call us in its place once.

So no version's order of arguments, nor its encoding of tensor maps, is written down here (Triton 3.6 passes a kernel's
arguments one by one to a function compiled for each signature, 3.7 and later as one sequence to a function for all).
"""

from __future__ import annotations

import copy
import inspect
from typing import TYPE_CHECKING, Any

import triton

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Launcher:
    """The function that launches a compiled kernel, and what it takes besides the stream and the kernel's arguments.

    A descriptor among the kernel's arguments is a tensor map to it, followed by integers: `expand`.
    """

    def __init__(
        self,
        compiled: Any,
        launch: Callable[..., Any],
        around: Callable[[Callable[..., Any], dict[str, Any], list[Any]], Callable[..., Any]],
        grid: tuple[int, int, int],
    ) -> None:
        self._compiled = compiled  # kept because its module may be unloaded with it
        self._around = around
        self._grid = grid
        self._signature: dict[str, Any] = dict(compiled.src.signature)
        self.parameters = list(self._signature)  # of the kernel
        described = [name for name, kind in self._signature.items() if _is_descriptor_type(kind)]
        self._metadata = dict(zip(described, getattr(compiled.metadata, "tensordesc_meta", None) or (), strict=True))
        self.launch = launch
        stream = object()
        base = self._received(stream, {}, ())
        self.nested = isinstance(base[-1], (tuple, list))  # else the kernel's arguments follow one by one
        if self.nested:
            base.pop()
        place = next(index for index, value in enumerate(base) if value is stream)
        self._num_base = len(base)
        self.before = tuple(base[:place])
        self.after = tuple(base[place + 1 :])

    def __call__(self, stream: int, values: list[Any]) -> None:
        """Launch on a stream with the kernel's arguments as `takes` says. Does not synchronise."""
        if self.nested:
            self.launch(*self.before, stream, *self.after, values)
        else:
            self.launch(*self.before, stream, *self.after, *values)

    def expand(self, name: str, descriptor: Any) -> list[Any]:
        """What a parameter's descriptor is to the launcher: the tensor map at its base, then integers."""
        return self._kernel_arguments({name: self._signature[name]}, [descriptor])

    def takes(self, arguments: dict[str, Any], values: list[Any], maps: Sequence[int]) -> bool:
        """Whether Triton hands `values` to the launcher for the kernel's `arguments`, maps at `maps` aside."""
        received = self._kernel_arguments(self._signature, list(arguments.values()))
        if len(received) != len(values):
            return False
        pairs = enumerate(zip(received, values, strict=True))
        return all(index in maps or found is value or found == value for index, (found, value) in pairs)

    def _kernel_arguments(self, signature: dict[str, Any], values: list[Any]) -> list[Any]:
        received = self._received(None, signature, values)
        return list(received[-1]) if self.nested else received[self._num_base :]

    def _received(self, stream: Any, signature: dict[str, Any], values: Sequence[Any]) -> list[Any]:
        """What Triton passes to the launcher for these kernel arguments, without hooks."""
        received: list[Any] = []
        compiled = self._compiled
        shadow = copy.copy(compiled.run)
        metadata = [self._metadata[name] for name, kind in signature.items() if _is_descriptor_type(kind)]
        shadow.launch = self._around(lambda *arguments: received.extend(arguments), signature, metadata)
        shadow(*self._grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *values)
        return received


def find_launcher(compiled: Any, grid: tuple[int, int, int]) -> Launcher | None:
    """The launcher of a compiled kernel; None where this Triton, its backend or this kernel needs the runner."""
    if not isinstance(compiled, triton.compiler.CompiledKernel):
        return None
    try:
        from triton.backends.nvidia import driver

        run, around = compiled.run, driver.wrap_handle_tensordesc
        if type(run) is not driver.CudaLauncher or run.global_scratch_size or run.profile_scratch_size:
            return None  # scratch is allocated in each launch
        if getattr(run, "gsan_enabled", False):  # a sanitizer's state is looked up in each launch
            return None
        launch = run.launch
        if any(map(_is_descriptor_type, compiled.src.signature.values())):  # then Triton's encoding lies around it
            launch = inspect.getclosurevars(launch).nonlocals["launcher"]
        return Launcher(compiled, launch, around, grid)
    # Whatever another version's internals answer to the questions above: it has the public runner all the same.
    except (ImportError, AttributeError, KeyError, TypeError, ValueError, StopIteration, IndexError):
        return None


def _is_descriptor_type(kind: Any) -> bool:
    return isinstance(kind, str) and kind.startswith("tensordesc")


__all__ = ["Launcher", "find_launcher"]

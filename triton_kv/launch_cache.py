"""Eager calls of an op that was called with the same shapes before, without Triton's and our own preparations."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from triton_kv.launch import on_device

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from triton_kv.launch import Launch

_MAX_ENTRIES = 4096


class _Prepared(NamedTuple):
    run: Callable[..., None]  # launches the compiled kernel on the current device and stream
    arguments: list[Any]  # in the kernel's order; None where a tensor goes
    moves: list[tuple[int, int]]  # (position in `arguments`, index of the tensor)


class LaunchCache:
    """Compiled launches of one op, by all that they depend on except which tensors of those shapes they get.

    Triton binds, specialises and hashes every argument of a launch anew (docs/decode.md, host cost).
    A key must hold whatever shapes the launches' integers, constexprs and specialisation: shapes, strides, dtypes,
    which tensors are None, the device, and the alignment of pointers that are specialised on. Launches whose other
    arguments hold tensors are not kept, and prepared anew in each call.

    `names`: the kernels' parameters that take the tensors, in the order in which a call passes them.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._index = {name: index for index, name in enumerate(names)}
        self._known: dict[Hashable, list[_Prepared] | None] = {}

    def knows(self, key: Hashable) -> bool:
        """Whether calls with this key have launched before, so that their arguments are known to fit."""
        return self._known.get(key) is not None

    def run(
        self,
        key: Hashable,
        device: torch.device,
        tensors: Sequence[torch.Tensor | None],
        build: Callable[[], Sequence[Launch]],
    ) -> None:
        """Launches what `build()` gave for this key the first time, with these tensors. Does not synchronise."""
        known = self._known.get(key)
        if known is None:
            launches = build()
            compiled = [launch.run(device) for launch in launches]
            if key not in self._known:
                if len(self._known) >= _MAX_ENTRIES:
                    self._known.clear()
                self._known[key] = self._prepare(launches, compiled)
            return
        with on_device(device):
            for run, template, moves in known:
                arguments = template.copy()
                for position, index in moves:
                    arguments[position] = address(tensors[index])
                run(*arguments)

    def _prepare(self, launches: Sequence[Launch], compiled: Sequence[Any]) -> list[_Prepared] | None:
        prepared = []
        for launch, kernel in zip(launches, compiled, strict=True):
            arguments, moves = [], []
            for position, (name, value) in enumerate(launch.arguments.items()):
                index = self._index.get(name)
                if index is not None:
                    moves.append((position, index))
                    value = None
                elif value is not None and not isinstance(value, (bool, int, float)):
                    return None
                arguments.append(value)
            grid = (*launch.grid, 1, 1)[:3]
            prepared.append(_Prepared(kernel[grid], arguments, moves))
        return prepared


def described(tensor: torch.Tensor | None) -> tuple[Hashable, ...] | None:
    """What a key says of a tensor."""
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() % 16


def address(tensor: torch.Tensor | None) -> int | None:
    """What Triton's launcher takes as it is. Of a tensor it would ask the driver whether the GPU can reach it."""
    return None if tensor is None else tensor.data_ptr()


class SameLaunch:
    """A launch whose arguments never change: from the second run on without Triton's preparations.

    Keeps the launch's tensors alive.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._again: Callable[[], None] | None = None

    def run(self, device: torch.device) -> None:
        """Launches on the current stream of `device`. Does not synchronise."""
        if self._again is not None:
            with on_device(device):
                self._again()
            return
        compiled = self._launch.run(device)
        if compiled is not None:  # not interpreted
            values = self._launch.arguments.values()
            arguments = [address(value) if isinstance(value, torch.Tensor) else value for value in values]
            self._again = partial(compiled[(*self._launch.grid, 1, 1)[:3]], *arguments)

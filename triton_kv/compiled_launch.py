"""A compiled kernel launched again, with tensors at other addresses."""

from __future__ import annotations

import copy
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton

from triton_kv.launch import raw_stream
from triton_kv.launcher import find_launcher

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from triton_kv.launcher import Launcher

_MAX_TENSOR_MAPS = 4096  # of one table; a map and its key take about 500 bytes

TensorMaps = dict[tuple[int, int], Any]  # by the number of the descriptor and the base address

_runtime = triton.knobs.runtime
_numbers = count()


class Pointer(NamedTuple):
    """A kernel's argument that is a tensor of the call, lies in one, or describes one."""

    position: int  # in the kernel's arguments
    tensor: int  # index of the call's tensor
    offset_bytes: int  # from the start of the call's tensor


class Address:
    """Stands for the base of a descriptor, of which Triton's launchers want nothing but the address."""

    __slots__ = ("_address",)

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


def is_descriptor(value: Any) -> bool:
    """Whether an argument is a host descriptor of a tensor (Triton has a class for each of its languages)."""
    return hasattr(value, "block_shape") and hasattr(getattr(value, "base", None), "data_ptr")


def current_stream(device: torch.device) -> int | None:
    """The current stream of a CUDA device, for launches past Triton's runner; None where the runner must launch.

    That is where Triton's launch hooks are set, which the runner calls.
    """
    if device.type != "cuda":
        return None
    enter, leave = _runtime.launch_enter_hook, _runtime.launch_exit_hook
    # An empty chain of hooks calls nobody, though the runner prepares for it.
    if (enter is not None and getattr(enter, "calls", True)) or (leave is not None and getattr(leave, "calls", True)):
        return None
    return raw_stream(device)


_Described = tuple[int, int, int, "Callable[[int], Any]"]


class _Template(NamedTuple):
    """Arguments of a launch but for addresses."""

    values: list[Any]  # None where an address goes
    pointers: list[tuple[int, int, int]]  # position in `values`, index of the call's tensor, bytes from its start
    described: list[_Described]  # likewise, and what describes a tensor at an address

    def at(self, addresses: Sequence[int | None]) -> list[Any]:
        values = self.values.copy()
        for position, tensor, offset_bytes in self.pointers:
            values[position] = addresses[tensor] + offset_bytes  # type: ignore[operator]
        for position, tensor, offset_bytes, of_address in self.described:
            values[position] = of_address(addresses[tensor] + offset_bytes)  # type: ignore[operator]
        return values


class CompiledLaunch:
    """One compiled kernel, its grid and its arguments but for addresses. Keeps no tensor alive.

    `arguments` are the kernel's, in its order, tensors as their addresses. Those that `pointers` name take another
    address in each run, or are descriptors that take it as their base. Past Triton's runner encoded descriptors are
    kept in `maps`: a tensor map is a function of geometry, which is fixed here, and of the base address, so one that
    outlives its tensor is right for whatever lies there later.
    """

    def __init__(
        self,
        compiled: Any,
        grid: tuple[int, ...],  # as in `Launch`
        arguments: dict[str, Any],
        pointers: Sequence[Pointer] = (),
        maps: TensorMaps | None = None,
    ) -> None:
        x, y, z = (*grid, 1, 1)[:3]
        self._runner = compiled[x, y, z]
        self._maps: TensorMaps = {} if maps is None else maps
        arguments = {
            name: _moved(value, value.base.data_ptr()) if is_descriptor(value) else value
            for name, value in arguments.items()
        }
        self._public = _Template(list(arguments.values()), [], [])
        for position, tensor, offset_bytes in pointers:
            value = self._public.values[position]
            if is_descriptor(value):
                self._public.described.append((position, tensor, offset_bytes, partial(_moved, value)))
            else:
                self._public.pointers.append((position, tensor, offset_bytes))
        self._launcher = find_launcher(compiled, (x, y, z))
        self._direct = None if self._launcher is None else self._expanded(self._launcher, arguments)
        for position, _, _ in pointers:
            self._public.values[position] = None

    @property
    def can_move(self) -> bool:
        """Whether descriptors can be moved: Triton's launcher is known, and took them with a bare address as base."""
        return self._direct is not None or not self._public.described

    def run(self, addresses: Sequence[int | None], stream: int | None) -> None:
        """Launches on the current device, on the stream that `current_stream` gave. Does not synchronise."""
        direct = self._direct
        if stream is None or direct is None:
            self._runner(*self._public.at(addresses))
        else:
            self._launcher(stream, direct.at(addresses))  # type: ignore[misc]

    def _expanded(self, launcher: Launcher, arguments: dict[str, Any]) -> _Template | None:
        """The arguments as the launcher takes them, where a descriptor is a tensor map and integers behind it."""
        if list(arguments) != launcher.parameters:
            return None
        template = _Template([], [], [])
        places = []
        for name, value in arguments.items():
            places.append(len(template.values))
            template.values.extend(launcher.expand(name, value) if is_descriptor(value) else [value])
        for position, tensor, offset_bytes in self._public.pointers:
            template.pointers.append((places[position], tensor, offset_bytes))
        names = list(arguments)
        for position, tensor, offset_bytes, moved in self._public.described:
            encode = partial(self._tensor_map, next(_numbers), partial(launcher.expand, names[position]), moved)
            template.described.append((places[position], tensor, offset_bytes, encode))
        maps_at = [place for place, _, _, _ in template.described]
        if not launcher.takes(arguments, template.values, maps_at):
            return None
        for place in (*maps_at, *(place for place, _, _ in template.pointers)):
            template.values[place] = None
        return template

    def _tensor_map(
        self, number: int, expand: Callable[[Any], list[Any]], moved: Callable[[int], Any], address: int
    ) -> Any:
        tensor_map = self._maps.get((number, address))
        if tensor_map is None:
            tensor_map = expand(moved(address))[0]
            if len(self._maps) >= _MAX_TENSOR_MAPS:
                self._maps.clear()
            self._maps[number, address] = tensor_map
        return tensor_map


def _moved(descriptor: Any, address: int) -> Any:
    """The descriptor with another base. Past its constructor, whose checks hold for whatever is aligned alike."""
    moved = copy.copy(descriptor)
    moved.base = Address(address)
    return moved


__all__ = ["Address", "CompiledLaunch", "Pointer", "TensorMaps", "current_stream", "is_descriptor"]

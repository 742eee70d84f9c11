"""Eager calls of an op that was called with the same shapes before, without Triton's and our own preparations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from triton_kv.compiled_launch import CompiledLaunch, Pointer, TensorMaps, current_stream, is_descriptor
from triton_kv.launch import on_device

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from triton_kv.launch import Launch

_MAX_ENTRIES = 4096


class Temporary(NamedTuple):
    """A tensor that the launches of a call share and nobody else sees, where the call brings none."""

    tensor: int  # its index among the tensors of a call
    shape: torch.Size
    dtype: torch.dtype


class Prepared(NamedTuple):
    """The launches of calls with one key."""

    launches: list[CompiledLaunch]
    temporaries: list[Temporary]


class LaunchCache:
    """Compiled launches of one op, by all that they depend on except which tensors of those shapes they get.

    Triton binds, specialises and hashes every argument of a launch anew (docs/decode.md, host cost).
    A key must hold whatever shapes the launches' integers, constexprs, descriptors and specialisation: shapes, strides,
    dtypes, which tensors are None, the device, and the alignment of pointers that are specialised on or described.
    Launches whose other arguments hold tensors are not kept, and prepared anew in each call; nor are descriptors where
    Triton's launcher is not known.

    `names`: the kernels' parameters that take the tensors, in the order in which a call passes them. Where a call
    passes None and its launches have a tensor, each later call gets a new one of that shape.
    `derived`: further parameters that take a view of a tensor, or a descriptor of one, and the name of that tensor. How
    far from the tensor's start it begins must follow from the key.
    """

    def __init__(self, names: Sequence[str], derived: Mapping[str, str] | None = None) -> None:
        self._index = {name: index for index, name in enumerate(names)}
        self._derived = {name: self._index[source] for name, source in (derived or {}).items()}
        self._known: dict[Hashable, Prepared | None] = {}
        self._maps: TensorMaps = {}

    def knows(self, key: Hashable) -> bool:
        """Whether calls with this key have launched before, so that their arguments are known to fit."""
        return self._known.get(key) is not None

    def find(self, key: Hashable) -> Prepared | None:
        """The launches of calls with this key, for `run_prepared`; None where there are none."""
        return self._known.get(key)

    def run(
        self,
        key: Hashable,
        device: torch.device,
        tensors: Sequence[torch.Tensor | None],
        build: Callable[[], Sequence[Launch]],
    ) -> None:
        """Launches what `build()` gave for this key the first time, with these tensors. Does not synchronise."""
        prepared = self._known.get(key)
        if prepared is not None:
            run_prepared(prepared, device, tensors)
            return
        launches = build()
        compiled = [launch.run(device) for launch in launches]
        if key not in self._known and None not in compiled:  # the interpreter compiles nothing
            if len(self._known) >= _MAX_ENTRIES:
                self._known.clear()
                self._maps.clear()
            with on_device(device):  # descriptors are encoded
                self._known[key] = self._prepare(launches, compiled, tensors)

    def _prepare(
        self, launches: Sequence[Launch], compiled: Sequence[Any], tensors: Sequence[torch.Tensor | None]
    ) -> Prepared | None:
        given = list(tensors)
        temporaries = []
        for launch in launches:
            for name, value in launch.arguments.items():
                index = self._index.get(name)
                if index is None or given[index] is not None or not isinstance(value, torch.Tensor):
                    continue
                if not value.is_contiguous():
                    return None
                given[index] = value
                temporaries.append(Temporary(index, value.shape, value.dtype))
        prepared = []
        for launch, kernel in zip(launches, compiled, strict=True):
            arguments, pointers = {}, []
            for position, (name, value) in enumerate(launch.arguments.items()):
                arguments[name] = value
                if value is None or isinstance(value, (bool, int, float)):
                    continue
                index = self._index.get(name, self._derived.get(name, -1))
                tensor = value.base if is_descriptor(value) else value
                source = None if index < 0 else given[index]
                if source is None or not isinstance(tensor, torch.Tensor) or not _lies_in(tensor, source):
                    return None
                offset_bytes = tensor.data_ptr() - source.data_ptr()
                if name in self._index and offset_bytes:
                    return None
                if tensor is value:
                    arguments[name] = value.data_ptr()
                pointers.append(Pointer(position, index, offset_bytes))
            again = CompiledLaunch(kernel, launch.grid, arguments, pointers, self._maps)
            if not again.can_move:
                return None
            prepared.append(again)
        return Prepared(prepared, temporaries)


def run_prepared(prepared: Prepared, device: torch.device, tensors: Sequence[torch.Tensor | None]) -> None:
    """Launches with these tensors, on the current stream of the device. Does not synchronise."""
    addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    with on_device(device):
        temporaries = []  # held until all is launched
        for index, shape, dtype in prepared.temporaries:
            tensor = torch.empty(shape, dtype=dtype, device=device)
            temporaries.append(tensor)
            addresses[index] = tensor.data_ptr()
        stream = current_stream(device)
        for launch in prepared.launches:
            launch.run(addresses, stream)


def _lies_in(tensor: torch.Tensor, source: torch.Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()


def described(tensor: torch.Tensor | None) -> tuple[Hashable, ...] | None:
    """What a key says of a tensor."""
    if not isinstance(tensor, torch.Tensor):  # None; a caller's mistake is told by its type, until it is checked
        return None if tensor is None else (type(tensor),)
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() % 16


class SameLaunch:
    """A launch whose arguments never change: from the second run on without Triton's preparations.

    Keeps the launch's tensors alive.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._again: CompiledLaunch | None = None

    def run(self, device: torch.device) -> None:
        """Launches on the current stream of `device`. Does not synchronise."""
        if self._again is not None:
            with on_device(device):
                self._again.run((), current_stream(device))
            return
        compiled = self._launch.run(device)
        if compiled is not None:  # not interpreted
            arguments = {
                name: value.data_ptr() if isinstance(value, torch.Tensor) else value
                for name, value in self._launch.arguments.items()
            }
            with on_device(device):
                self._again = CompiledLaunch(compiled, self._launch.grid, arguments)

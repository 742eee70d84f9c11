"""What an op needs to know about one layer of a cache: tensors, strides and bounds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from triton_kv.spec import StateSpec


class LayerOperands(NamedTuple):
    """One layer's K and V as the ops take them: one tensor (or two), and geometry in elements.

    A cache's layer is passed as a single flat tensor, because `torch.compile` clones the base of two views that one op
    mutates; a pair of plain tensors is passed as it is. An op takes the fields in this order, as its last arguments.
    """

    k_cache: torch.Tensor  # flat storage of the layer, or a plain [num_blocks, block_size, num_kv_heads, head_dim]
    v_cache: torch.Tensor | None  # None: V lies in k_cache, v_offset elements in
    v_offset: int
    control: torch.Tensor | None  # int32 [8]; None: num_blocks is the bound
    num_blocks: int  # the first dimension of the views
    block_size: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    k_strides: Sequence[int]  # block, token, head
    v_strides: Sequence[int]

    @property
    def dtype(self) -> torch.dtype:
        return self.k_cache.dtype

    @property
    def device(self) -> torch.device:
        return self.k_cache.device

    def __repr__(self) -> str:
        # A tuple's own would print the tensors, and so touch memory that is not committed (a traceback is enough).
        tensors = ("k_cache", "v_cache", "control")
        fields = (f"{name}={value}" for name, value in self._asdict().items() if name not in tensors)
        return f"LayerOperands(dtype={self.dtype}, device={self.device}, {', '.join(fields)})"

    def views(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K `[num_blocks, block_size, num_kv_heads, head_dim]` and V `[..., v_head_dim]` over the same memory."""
        k_shape = (self.num_blocks, self.block_size, self.num_kv_heads, self.head_dim)
        v_shape = (self.num_blocks, self.block_size, self.num_kv_heads, self.v_head_dim)
        if self.v_cache is not None:
            return self.k_cache, self.v_cache
        start = self.k_cache.storage_offset()
        k = self.k_cache.as_strided(k_shape, (*self.k_strides, 1), start)
        v = self.k_cache.as_strided(v_shape, (*self.v_strides, 1), start + self.v_offset)
        return k, v


# The fields of `LayerOperands` in the schema of an op that reads the cache, and of one that writes it. Bad accesses are
# counted in `control`.
OPERANDS_SCHEMA = (
    "Tensor k_cache, Tensor? v_cache, int v_offset, Tensor(c!)? control, SymInt num_blocks, int block_size, "
    "int num_kv_heads, int head_dim, int v_head_dim, int[] k_strides, int[] v_strides"
)
WRITTEN_OPERANDS_SCHEMA = OPERANDS_SCHEMA.replace(
    "Tensor k_cache, Tensor? v_cache", "Tensor(a!) k_cache, Tensor(b!)? v_cache"
)


@dataclass(frozen=True, eq=False, repr=False)
class LayerCache:
    """One layer of a `KVCache`: views over its reserved range, of which the committed blocks may be touched.

    The views have a storage of their own that starts at the layer's base and keeps the address range reserved. Blocks
    at or past the watermark must not be touched: behind the granule that the last committed block ends in, that
    faults. `repr` reads no memory.
    """

    name: str
    index: int
    k: torch.Tensor  # [capacity, block_size, num_kv_heads, head_dim], in the layout's strides
    v: torch.Tensor  # [capacity, block_size, num_kv_heads, v_head_dim]
    pair: torch.Tensor | None  # [2, capacity, block_size, num_kv_heads, head_dim] where K and V have one shape
    flat: torch.Tensor  # [span], the layer's storage as one dimension
    control: torch.Tensor  # int32 [8], shared by all layers
    operands: LayerOperands | None  # None: the innermost dimension is not D, so our ops cannot read it
    layout: str
    check_usable: Callable[[], None] = field(compare=False)  # raises Closed or NothingCommitted

    @property
    def kv(self) -> torch.Tensor:
        """K and V as one view `[2, capacity, block_size, num_kv_heads, head_dim]`.

        Raises `ValueError` where K and V have different head dims, which no single view can describe.
        """
        if self.pair is None:
            raise ValueError(
                f"layer {self.name!r} has K head_dim {self.k.shape[-1]} and V head_dim {self.v.shape[-1]}: "
                "no single view holds both; use .k and .v"
            )
        return self.pair

    def __repr__(self) -> str:
        blocks, block_size, heads, dim = self.k.shape
        return (
            f"LayerCache({self.name!r}, layout={self.layout!r}, capacity={blocks}, block_size={block_size}, "
            f"num_kv_heads={heads}, head_dim={dim}, dtype={self.k.dtype}, device={self.k.device})"
        )


@dataclass(frozen=True, eq=False, repr=False)
class StateCache:
    """One layer of a `KVCache` that keeps no K and V: a view of each of its state tensors over the reserved range.

    Kernels index the first dimension by block id (or state slot). Each view has a storage of its own, which starts at
    the tensor's place in block 0 and keeps the address range reserved. Blocks at or past the watermark fault. `repr`
    reads no memory.
    """

    name: str
    index: int
    spec: StateSpec
    states: tuple[torch.Tensor, ...]  # [capacity, *shape] each, in the spec's order; the block stride may exceed a page
    names: tuple[str, ...]  # of the states
    control: torch.Tensor  # int32 [8], shared by all layers
    layout: str  # "LB" or "BL"
    check_usable: Callable[[], None] = field(compare=False)  # raises Closed or NothingCommitted

    def state(self, name: str) -> torch.Tensor:
        """The view of one state, `[capacity, *shape]`. Raises `KeyError` with the names there are."""
        if name not in self.names:
            raise KeyError(f"layer {self.name!r} has no state {name!r}, only {', '.join(self.names)}")
        return self.states[self.names.index(name)]

    @property
    def latent(self) -> torch.Tensor:
        """The latent vectors of an MLA layer, `[capacity, block_size, kv_lora_rank + qk_rope_head_dim]`.

        Raises `ValueError` for a layer that has none.
        """
        if "latent" not in self.names:
            raise ValueError(f"layer {self.name!r} keeps {', '.join(self.names)} and no latent vector; use .states")
        return self.state("latent")

    def __repr__(self) -> str:
        states = ", ".join(
            f"{name}: {list(view.shape)} {view.dtype}" for name, view in zip(self.names, self.states, strict=True)
        )
        return f"StateCache({self.name!r}, layout={self.layout!r}, {states}, device={self.control.device})"


def operands_of(layer: LayerCache | tuple[torch.Tensor, torch.Tensor]) -> LayerOperands:
    """The operands of a cache's layer or of a pair of plain K and V tensors.

    A pair is `[num_blocks, block_size, num_kv_heads, head_dim]` twice, any strides with D contiguous; its bound is the
    first dimension. Raises `Closed` after `close()`, `NothingCommitted` before the first `extend`, `ValueError` or
    `TypeError` for tensors that are no such pair. Never synchronises.
    """
    if isinstance(layer, LayerCache):
        if not torch.compiler.is_compiling():  # a guard on the block count would recompile after every extend
            layer.check_usable()
        if layer.operands is None:
            raise ValueError(
                f"layout {layer.layout!r} does not keep D innermost: our ops read whole head vectors; "
                "choose a layout that ends in D, or use the views with kernels of your own"
            )
        return layer.operands
    if isinstance(layer, StateCache):
        raise TypeError(
            f"layer {layer.name!r} keeps {', '.join(layer.names)}, no K and V: our attention ops do not read it; pass "
            ".states or .latent to kernels of your own"
        )
    if not (isinstance(layer, (tuple, list)) and len(layer) == 2):
        raise TypeError(f"layer must be a LayerCache or a pair (k, v) of tensors, not {type(layer).__name__}")
    k, v = layer
    if not (isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)):
        raise TypeError(f"layer must be a LayerCache or a pair (k, v) of tensors, not {type(layer).__name__}")
    k_shape, v_shape = k.shape, v.shape  # asked for once: this runs in every eager call
    if len(k_shape) != 4 or len(v_shape) != 4:
        raise ValueError(
            "a plain K/V pair must be 4-D [num_blocks, block_size, num_kv_heads, head_dim], "
            f"got {tuple(k_shape)} and {tuple(v_shape)}"
        )
    num_blocks, block_size, num_kv_heads, head_dim = k_shape
    if k_shape[:3] != v_shape[:3]:
        raise ValueError(f"K and V must agree in all but head_dim, got {tuple(k_shape)} and {tuple(v_shape)}")
    if block_size == 0 or num_kv_heads == 0 or head_dim == 0 or v_shape[3] == 0:
        raise ValueError(f"K and V need at least one token a block, head and channel, got {tuple(k_shape)}")
    if k.dtype != v.dtype or k.device != v.device:
        raise ValueError(
            f"K and V must agree in dtype and device, got {k.dtype} on {k.device}, {v.dtype} on {v.device}"
        )
    k_strides, v_strides = k.stride(), v.stride()
    if k_strides[3] != 1 or v_strides[3] != 1:
        raise ValueError(f"head_dim must be innermost with stride 1, got strides {k_strides} and {v_strides}")
    return LayerOperands(
        k_cache=k,
        v_cache=v,
        v_offset=0,
        control=None,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=v_shape[3],
        k_strides=k_strides[:3],
        v_strides=v_strides[:3],
    )


__all__ = ["OPERANDS_SCHEMA", "WRITTEN_OPERANDS_SCHEMA", "LayerCache", "LayerOperands", "StateCache", "operands_of"]

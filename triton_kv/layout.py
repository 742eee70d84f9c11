"""Where the bytes of a cache live, derived from the order of six dimensions alone.

A layout is a string of the letters L (layer), T (two: K then V), B (block), N (token in the block), H (KV head) and
D (channel), outermost first. Everything in front of B cuts the reservation into segments of equal size; inside a
segment B is the outermost dimension, so the first n blocks of the cache are the first n pages of every segment. That
prefix is what extend commits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from triton_kv.spec import AttentionSpec, positive_int

LETTERS = "LTBNHD"
_MEANING = "L layer, T key then value, B block, N token in the block, H KV head, D channel"


class Extent(NamedTuple):
    """Bytes of one block in one segment."""

    segment: int
    offset: int  # bytes from the start of the segment
    num_bytes: int


class _Geometry(NamedTuple):
    """Bytes that the walk over the order finds; strides by letter, one dictionary for K and one for V."""

    k_strides: dict[str, int]
    v_strides: dict[str, int]
    v_offset: int  # from the first key of a layer to its first value
    num_segments: int
    page_bytes: int
    segment_block_bytes: int
    segment_stride_bytes: int


def expand_order(order: str) -> str:
    """The six letters of `order`; a C in it stands for TD (key then value of one head), as in vLLM's `LBNHC`.

    Raises `ValueError` for unknown, missing or repeated letters, `TypeError` for what is no string.
    """
    if not isinstance(order, str):
        raise TypeError(f"a layout is a string such as 'LTBNHD', got {order!r}")
    letters = order.replace("C", "TD")
    unknown = sorted({letter for letter in letters if letter not in LETTERS})
    repeated = sorted({letter for letter in letters if letter in LETTERS and letters.count(letter) > 1})
    missing = sorted(set(LETTERS) - set(letters))
    problems = [
        f"{problem} {', '.join(found)}"
        for problem, found in (("unknown", unknown), ("repeated", repeated), ("missing", missing))
        if found
    ]
    if problems:
        raise ValueError(
            f"layout {order!r}: letters {'; '.join(problems)}. Write each of the six letters {LETTERS} once, outermost "
            f"dimension first ({_MEANING}; C may stand for TD)"
        )
    return letters


@dataclass(frozen=True)
class CacheLayout:
    """The byte layout of `num_layers` equal attention layers of `capacity` blocks each, in one reservation.

    order: the six letters of docs/design.md, outermost first; C for TD is accepted and stored as TD.
    block_size: tokens a block. capacity: blocks reserved.
    granularity: bytes; segments start on multiples of it (their stride is padded, capacity stays as asked), so that no
        granule holds two segments. `None` packs them densely.
    block_stride_bytes: from one block of a segment to the next, where a page is padded or shares its block with other
        layers' pages; `None` is the page itself.

    K and V dims may differ only where T comes after B (every segment must hold the same bytes a block), D after T (key
    and value are parts of one page, not alternating channels) and L before T (all layers share one geometry).

    Offsets and sizes are bytes, strides of views are elements. Nothing here touches a device. Raises `ValueError` for
    an order or a size that is impossible, `TypeError` for sizes that are no integers.
    """

    order: str
    spec: AttentionSpec
    num_layers: int = field(kw_only=True)
    block_size: int = field(kw_only=True)
    capacity: int = field(kw_only=True)
    granularity: int | None = field(default=None, kw_only=True)
    block_stride_bytes: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "order", expand_order(self.order))
        for name in ("num_layers", "block_size", "capacity", "granularity", "block_stride_bytes"):
            value = getattr(self, name)
            if name not in ("granularity", "block_stride_bytes") or value is not None:
                object.__setattr__(self, name, positive_int(name, value))
        spec = self.spec
        if not isinstance(spec, AttentionSpec):
            raise TypeError(f"spec must be an AttentionSpec, got {spec!r}")
        if self.granularity is not None and self.granularity % spec.itemsize_bytes:
            raise ValueError(
                f"granularity must be a multiple of the {spec.itemsize_bytes} bytes of one element, "
                f"got {self.granularity}"
            )
        if spec.head_dim != spec.value_dim:
            self._check_different_dims()
        if self.block_stride_bytes is not None and (
            self.block_stride_bytes < self.page_bytes or self.block_stride_bytes % spec.itemsize_bytes
        ):
            raise ValueError(
                f"block_stride_bytes {self.block_stride_bytes} must be at least the {self.page_bytes} bytes of a block "
                f"in one segment, and a multiple of the {spec.itemsize_bytes} bytes of an element"
            )

    def _check_different_dims(self) -> None:
        spec = self.spec
        needs = f"layout {self.order!r}: head_dim {spec.head_dim} and v_head_dim {spec.value_dim} differ, which needs"
        position = self.order.index
        if position("T") < position("B"):
            raise ValueError(
                f"{needs} T after B: in front of B, K and V are segments, and a page does not divide into equal "
                "segments. Use a layout such as 'LBTNHD', or pad the smaller dim"
            )
        if position("D") < position("T"):
            raise ValueError(f"{needs} D after T: channels of K and V cannot alternate. Use a layout such as 'LBTNHD'")
        if position("T") < position("L"):
            raise ValueError(
                f"{needs} L before T: otherwise the distance from K to V differs by layer. Use one such as 'BLTNHD'"
            )

    @classmethod
    def from_backend(
        cls,
        shape_for_one_block: Sequence[int],
        block_dim: int,
        stride_order: Sequence[int] | None = None,
        *,
        dtype: torch.dtype,
        num_layers: int,
        capacity: int,
        names: str | None = None,
        page_bytes: int | None = None,
        granularity: int | None = None,
    ) -> CacheLayout:
        """The layout that an attention backend states for one layer's cache.

        shape_for_one_block: the logical shape of a cache of one block, such as `(2, 1, 16, 8, 128)` (FlashAttention)
            or `(1, 2, 16, 8, 128)` (FlashInfer).
        block_dim: which of its dimensions is the block; its extent is 1 here.
        stride_order: the logical dimensions in physical order, outermost first, as vLLM's backends return them. `None`
            is the identity: the tensor is contiguous as it stands. With one entry more than the shape, dimension 0 is
            the layers in front of the shape; otherwise layers are outermost, one buffer each.
        names: the letters of the shape's dimensions, such as `'TBNHD'`, or `'BNHC'` where K and V of a head share the
            last dimension. `None` takes the usual `(2, N, H, D)` with the block put in at block_dim; say it where heads
            come before tokens, since sizes cannot tell the two apart.
        page_bytes: bytes of one block of one layer as the backend states them, checked against the shape.

        Raises `ValueError` where these contradict each other, and where a page does not divide into the segments of a
        layer.
        """
        shape = tuple(positive_int("every extent of shape_for_one_block", extent) for extent in shape_for_one_block)
        if not -len(shape) <= block_dim < len(shape):
            raise ValueError(f"block_dim {block_dim} is outside of a shape with {len(shape)} dimensions, {shape}")
        block_dim %= len(shape)
        if shape[block_dim] != 1:
            raise ValueError(
                f"the shape for one block must have extent 1 in dimension {block_dim}, got {shape[block_dim]} in "
                f"{shape}; the number of blocks goes into capacity="
            )
        letters = _names_of(shape, block_dim, names)
        extents = dict(zip(letters, shape, strict=True))
        if "C" in extents and extents["C"] % 2:
            raise ValueError(f"dimension C holds K then V of one head, so {extents['C']} must be even")
        spec = AttentionSpec(extents["H"], extents["D"] if "D" in extents else extents["C"] // 2, dtype)
        layout = cls(
            _physical_order(letters, stride_order),
            spec,
            num_layers=num_layers,
            block_size=extents["N"],
            capacity=capacity,
            granularity=granularity,
        )
        if page_bytes is not None:
            if positive_int("page_bytes", page_bytes) % layout.segments_per_layer:
                raise ValueError(
                    f"a page of {page_bytes} bytes does not divide into the {layout.segments_per_layer} segments that "
                    f"a layer has in layout {layout.order!r}; make it a multiple of {layout.segments_per_layer}"
                )
            expected = spec.token_bytes * layout.block_size
            if page_bytes != expected:
                raise ValueError(
                    f"a page of {page_bytes} bytes contradicts the shape {shape} of {dtype}, which holds {expected} "
                    "bytes; padded pages are not supported"
                )
        return layout

    @cached_property
    def _geometry(self) -> _Geometry:
        spec, extents = self.spec, self._extents
        outer, inner = self.order.split("B")
        k_strides: dict[str, int] = {}
        v_strides: dict[str, int] = {}
        v_offset = 0
        k = v = spec.itemsize_bytes
        for letter in reversed(inner):
            k_strides[letter], v_strides[letter] = k, v
            if letter == "T":
                v_offset = k
                k = v = k + v
            elif letter == "D":
                k, v = k * spec.head_dim, v * spec.value_dim
            else:
                k, v = k * extents[letter], v * extents[letter]
        assert k == v  # __post_init__ admits different dims only inside T
        page = k
        if self.block_stride_bytes is not None:
            k = self.block_stride_bytes
        k_strides["B"] = v_strides["B"] = k
        granularity = self.granularity or 1
        segment_stride = -(-k * self.capacity // granularity) * granularity
        stride = segment_stride
        for letter in reversed(outer):
            k_strides[letter] = v_strides[letter] = stride
            if letter == "T":
                v_offset = stride
            stride *= extents[letter]
        return _Geometry(k_strides, v_strides, v_offset, stride // segment_stride, page, k, segment_stride)

    @property
    def _extents(self) -> dict[str, int]:
        """Extents by letter; D is the key's."""
        return {
            "L": self.num_layers,
            "T": 2,
            "B": self.capacity,
            "N": self.block_size,
            "H": self.spec.num_kv_heads,
            "D": self.spec.head_dim,
        }

    @property
    def num_segments(self) -> int:
        """Segments of the reservation: the product of the extents in front of B."""
        return self._geometry.num_segments

    @property
    def segments_per_layer(self) -> int:
        """Segments that hold bytes of one layer: all of them where L comes after B."""
        return self.num_segments // (self.num_layers if self.order.index("L") < self.order.index("B") else 1)

    @property
    def page_bytes(self) -> int:
        """Bytes of one block in one segment that hold K and V: without what `block_stride_bytes` adds."""
        return self._geometry.page_bytes

    @property
    def segment_block_bytes(self) -> int:
        """Bytes of one block in one segment: what each segment grows by when the cache grows by a block."""
        return self._geometry.segment_block_bytes

    @property
    def segment_capacity_bytes(self) -> int:
        """Bytes of `capacity` blocks in one segment, without padding."""
        return self.segment_block_bytes * self.capacity

    @property
    def segment_stride_bytes(self) -> int:
        """Bytes from the start of one segment to the next: the segment's capacity, padded to granules unless dense."""
        return self._geometry.segment_stride_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers and segments."""
        return self.num_segments * self.segment_block_bytes

    @property
    def total_bytes(self) -> int:
        """Address space that all segments span, padding included."""
        return self.num_segments * self.segment_stride_bytes

    def layer_base_bytes(self, layer: int) -> int:
        """Bytes from the start of the reservation to the first key of `layer`, where the layer's own storage starts."""
        return self._checked("layer", layer, self.num_layers) * self._geometry.k_strides["L"]

    @cached_property
    def layer_span_bytes(self) -> int:
        """Bytes from a layer's base to the end of its last element, the same for every layer.

        Other layers' bytes may lie in between (a block-major layout interleaves them).
        """
        strides = self._geometry.v_strides  # the last element is a value: T puts values behind keys in every order
        last = sum((extent - 1) * strides[name] for name, extent in zip("BNHD", self._view_shape(self.spec.value_dim)))
        return self._geometry.v_offset + last + self.spec.itemsize_bytes

    @cached_property
    def k_strides(self) -> tuple[int, int, int, int]:
        """Strides of a layer's keys, in elements: block, token, head, dim."""
        return self._elements(self._geometry.k_strides)

    @cached_property
    def v_strides(self) -> tuple[int, int, int, int]:
        """Strides of a layer's values, in elements: block, token, head, dim."""
        return self._elements(self._geometry.v_strides)

    @cached_property
    def v_offset(self) -> int:
        """Elements from a layer's base to its first value."""
        return self._geometry.v_offset // self.spec.itemsize_bytes

    @property
    def kv_stride(self) -> int | None:
        """Elements from a key to the value of the same place; `None` where K and V dims differ (no view holds both)."""
        return self.v_offset if self.spec.head_dim == self.spec.value_dim else None

    @property
    def d_innermost(self) -> bool:
        """Whether the channels of one head are contiguous, which kernels that read whole head vectors need."""
        return self.k_strides[3] == self.v_strides[3] == 1

    def locate(self, layer: int, kv: int, block: int, head: int, token: int) -> tuple[int, int]:
        """(segment, bytes from its start) of channel 0 of one token's key (`kv` 0) or value (`kv` 1) in one head.

        Where D stands in front of B each channel has a segment of its own; channel 0's is returned. Raises `ValueError`
        for an index outside of its dimension.
        """
        geometry = self._geometry
        strides = geometry.v_strides if kv else geometry.k_strides
        address = (
            self.layer_base_bytes(layer)
            + self._checked("kv", kv, 2) * geometry.v_offset
            + self._checked("block", block, self.capacity) * strides["B"]
            + self._checked("head", head, self.spec.num_kv_heads) * strides["H"]
            + self._checked("token", token, self.block_size) * strides["N"]
        )
        return divmod(address, geometry.segment_stride_bytes)

    def extents(self, block: int) -> tuple[Extent, ...]:
        """The bytes of one block, one extent a segment."""
        offset = self._checked("block", block, self.capacity) * self.segment_block_bytes
        return tuple(Extent(segment, offset, self.segment_block_bytes) for segment in range(self.num_segments))

    def views(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K `[capacity, block_size, num_kv_heads, head_dim]` and V `[..., v_head_dim]` of a layer, in this layout.

        flat: 1-D tensor of the spec's dtype over the layer's span: it starts at `layer_base_bytes(layer)` and is
        `layer_span_bytes` long. The views share its storage; no memory is touched.
        """
        start = self._check_flat(flat)
        k = flat.as_strided(self._view_shape(self.spec.head_dim), self.k_strides, start)
        v = flat.as_strided(self._view_shape(self.spec.value_dim), self.v_strides, start + self.v_offset)
        return k, v

    def kv_view(self, flat: torch.Tensor) -> torch.Tensor:
        """K and V of a layer as one view, `[2, capacity, block_size, num_kv_heads, head_dim]`.

        flat: as for `views`. Raises `ValueError` where K and V dims differ.
        """
        if self.kv_stride is None:
            raise ValueError(
                f"head_dim {self.spec.head_dim} and v_head_dim {self.spec.value_dim} differ, so no single view holds "
                "K and V; use views(), which gives the two"
            )
        start = self._check_flat(flat)
        return flat.as_strided((2, *self._view_shape(self.spec.head_dim)), (self.kv_stride, *self.k_strides), start)

    def _view_shape(self, head_dim: int) -> tuple[int, int, int, int]:
        return self.capacity, self.block_size, self.spec.num_kv_heads, head_dim

    def _elements(self, strides: dict[str, int]) -> tuple[int, int, int, int]:
        block, token, head, dim = (strides[letter] // self.spec.itemsize_bytes for letter in "BNHD")
        return block, token, head, dim

    def _check_flat(self, flat: torch.Tensor) -> int:
        """Storage offset of `flat` once dtype, rank and length are what the layer's span asks for."""
        elements = self.layer_span_bytes // self.spec.itemsize_bytes
        if flat.dtype != self.spec.dtype or flat.shape != (elements,) or not flat.is_contiguous():
            raise ValueError(
                f"flat must be a contiguous 1-D tensor of {elements} elements of {self.spec.dtype}, "
                f"got shape {tuple(flat.shape)} of {flat.dtype} with strides {flat.stride()}"
            )
        return int(flat.storage_offset())

    @staticmethod
    def _checked(name: str, value: int, extent: int) -> int:
        if not 0 <= value < extent:
            raise ValueError(f"{name} {value} is outside of 0..{extent - 1}")
        return value


def _names_of(shape: tuple[int, ...], block_dim: int, names: str | None) -> str:
    """One letter for each dimension of a backend's shape."""
    if names is not None:
        expand_order(names if "L" in names else "L" + names)
        if "L" in names or len(names) != len(shape) or names.index("B") != block_dim:
            raise ValueError(
                f"names {names!r} must give one letter to each dimension of {shape} (no L) and put B at block_dim "
                f"{block_dim}"
            )
    else:
        usual = "TNHD"
        names = usual[:block_dim] + "B" + usual[block_dim:]
        if len(shape) != len(names):
            raise ValueError(
                f"a shape of {len(shape)} dimensions, {shape}, needs names= (such as 'BNHC' where K and V of a head "
                "share the last one)"
            )
    if "T" in names and shape[names.index("T")] != 2:
        raise ValueError(
            f"dimension {names.index('T')} of {shape} holds K and V and must have extent 2, "
            f"got {shape[names.index('T')]}; pass names= if another dimension holds them"
        )
    return names


def _physical_order(letters: str, stride_order: Sequence[int] | None) -> str:
    """The letters of a backend's shape, and L, in physical order."""
    if stride_order is None:
        return "L" + letters
    permutation = tuple(stride_order)
    if sorted(permutation) == list(range(len(letters))):
        return "L" + "".join(letters[dim] for dim in permutation)
    if sorted(permutation) == list(range(len(letters) + 1)):
        return "".join(("L" + letters)[dim] for dim in permutation)
    raise ValueError(
        f"stride_order {permutation} must name each of the {len(letters)} dimensions once (or {len(letters) + 1} of "
        "them, where dimension 0 is the layers)"
    )

"""Where every layer's bytes lie, over any number of buffers: a pure function of specs, layouts and sizes.

A buffer is one reservation of equal segments, and one block takes the same bytes in each of them. Inside a buffer a
layer has segments of its own, or a slot in every block: a slot of a packed block starts where the one before it ends,
and the layers of a shared slot overlay each other, for groups of which a block belongs to one at a time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from triton_kv.description import describe
from triton_kv.groups import DEFAULT_ORDER, LayerGroup, block_major, check_names, checked_order, is_hybrid
from triton_kv.layout import CacheLayout
from triton_kv.memory.reservation import granule_bytes, round_up
from triton_kv.picture import picture_as_svg, picture_as_text
from triton_kv.spec import AttentionSpec, BlockTensor, LayerSpec, positive_int, whole_number


@dataclass(frozen=True)
class PlacedLayer:
    """One layer's place: its page of block b starts `base_bytes + b * block_stride_bytes` into its buffer.

    Where K and V (or more) are segments of their own, `layout` says how far apart they are.
    """

    name: str
    index: int  # in the cache
    group: str
    spec: LayerSpec
    order: str  # six letters for K and V, else "LB" or "BL"
    block_size: int  # tokens
    capacity: int  # blocks
    buffer: int  # which of the cache's buffers
    base_bytes: int  # from the buffer's first byte to the layer's
    offset_bytes: int  # from the start of a block, in each segment, to the layer's page there
    num_segments: int  # that hold bytes of this layer
    page_bytes: int  # of one block over the layer's segments, padding left out
    slot_bytes: int  # the same with padding: what no other layer has, or only layers that overlay this one
    block_stride_bytes: int  # from one block of a segment to the next
    segment_stride_bytes: int
    layout: CacheLayout | None  # of K and V; None for states
    tensors: tuple[BlockTensor, ...]  # of a state's page; empty for K and V

    @property
    def padding_bytes(self) -> int:
        """Bytes of a block that the layer's page leaves unused."""
        return self.slot_bytes - self.page_bytes

    @property
    def span_bytes(self) -> int:
        """Bytes from the layer's base to the end of its last element; other layers' bytes may lie in between."""
        if self.layout is not None:
            return self.layout.layer_span_bytes
        return (self.capacity - 1) * self.block_stride_bytes + self.page_bytes


@dataclass(frozen=True)
class BufferGeometry:
    """One reservation."""

    num_segments: int
    block_bytes: int  # of one block in each segment
    segment_stride_bytes: int
    capacity: int  # blocks
    layers: tuple[str, ...]

    @property
    def segment_capacity_bytes(self) -> int:
        return self.block_bytes * self.capacity

    @property
    def reserved_bytes(self) -> int:
        """Bytes of addresses from the first to the last, not rounded to granules."""
        return self.segment_stride_bytes * (self.num_segments - 1) + self.segment_capacity_bytes

    def mapped_bytes_at(self, num_blocks: int, granularity: int) -> int:
        """Physical bytes of `num_blocks` blocks, in whole granules."""
        size = num_blocks * self.block_bytes
        if self.segment_stride_bytes % granularity == 0:
            return self.num_segments * round_up(size, granularity)
        return granule_bytes([(s * self.segment_stride_bytes, size) for s in range(self.num_segments)], granularity)


@dataclass(frozen=True)
class CacheGeometry:
    """Groups, layers and buffers of a cache of `capacity` blocks; `arrange` makes it. Nothing here touches a device."""

    block_size: int  # tokens a block, where a group states no other
    capacity: int  # blocks
    granularity: int  # bytes of a granule
    groups: tuple[LayerGroup, ...]
    layers: tuple[PlacedLayer, ...]  # by index
    buffers: tuple[BufferGeometry, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all buffers and segments, padded pages included."""
        return sum(buffer.block_bytes * buffer.num_segments for buffer in self.buffers)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of addresses, whole granules."""
        return sum(round_up(buffer.reserved_bytes, self.granularity) for buffer in self.buffers)

    @property
    def padding_bytes(self) -> dict[str, int]:
        """By group: bytes of a block that its layers' pages leave unused."""
        totals = dict.fromkeys((group.name for group in self.groups), 0)
        for layer in self.layers:
            totals[layer.group] += layer.padding_bytes
        return totals

    def mapped_bytes_at(self, num_blocks: int) -> int:
        """Physical bytes of `num_blocks` committed blocks over all buffers, whole granules, exact.

        While the segments of a cache with `alias=True` share their first granules it holds less.
        """
        num_blocks = whole_number("num_blocks", num_blocks)
        if not 0 <= num_blocks <= self.capacity:
            raise ValueError(f"num_blocks must lie in 0..{self.capacity} (the capacity), got {num_blocks}")
        return sum(buffer.mapped_bytes_at(num_blocks, self.granularity) for buffer in self.buffers)

    def layers_of(self, group: str) -> tuple[PlacedLayer, ...]:
        return tuple(layer for layer in self.layers if layer.group == group)

    def describe(self, num_blocks: int) -> str:
        """A table for people: groups, layers, layouts, pages, segments, padding, and bytes at `num_blocks` blocks."""
        return describe(self, whole_number("num_blocks", num_blocks))

    def layout_picture(self, num_blocks: int, *, form: str = "svg") -> str:
        """A drawing of segments, blocks and granules with `num_blocks` committed, as `form` "svg" or "text".

        For small examples: raises `ValueError` for more blocks or segments than a page can show.
        """
        if form not in ("svg", "text"):
            raise ValueError(f'form must be "svg" or "text", got {form!r}')
        num_blocks = whole_number("num_blocks", num_blocks)
        return picture_as_svg(self, num_blocks) if form == "svg" else picture_as_text(self, num_blocks)

    def signature(self) -> str:
        """What ranks that share block ids must agree on, as JSON: block sizes, groups, layers, specs, layouts, pages.

        Capacity and granules are left out: they may differ from device to device without changing what a block is.
        """
        groups = [
            {
                "name": group.name,
                "layers": [
                    {
                        "name": layer.name,
                        "index": layer.index,
                        "spec": repr(layer.spec),
                        "layout": layer.order,
                        "block_size": layer.block_size,
                        "page_bytes": layer.page_bytes,
                        "slot_bytes": layer.slot_bytes,
                        "segments": layer.num_segments,
                        "buffer": layer.buffer,
                        "offset_bytes": layer.offset_bytes,
                        "block_stride_bytes": layer.block_stride_bytes,
                    }
                    for layer in self.layers_of(group.name)
                ],
            }
            for group in self.groups
        ]
        return json.dumps({"block_size": self.block_size, "groups": groups}, sort_keys=True)


class _Page(NamedTuple):
    """What a layer needs of a block before it has a place."""

    name: str
    group: LayerGroup
    spec: LayerSpec
    order: str
    block_size: int
    num_segments: int
    used_bytes: int  # in each segment
    segment_bytes: int  # the same, padded as the group asks and rounded to the alignment
    alignment_bytes: int


def arrange(
    groups: Sequence[LayerGroup],
    *,
    block_size: int,
    capacity: int,
    granularity: int,
    layout: str = DEFAULT_ORDER,
    names: Sequence[str] | None = None,
    dense: bool = False,
    shared_by: str | Iterable[Iterable[str]] = (),
    packed: bool | Iterable[Iterable[str]] = (),
    beside: Sequence[LayerSpec] = (),
) -> CacheGeometry:
    """Places every layer of every group.

    block_size: tokens a block. capacity: blocks. granularity: bytes of a granule, on which segments start unless
        `dense`. layout: the order of groups that state none. names: all layers in the cache's order; `None` is the
        groups' order.
    shared_by: sets of layers that overlay each other, or "groups": layer i of every group overlays buffer i. The slot
        is the least that holds each page.
    packed: sets of layers of which a block holds all pages side by side, so that each one's block stride exceeds its
        page; True packs all layers into one buffer. Layers that overlay each other have one slot there.
    beside: what the layers keep that the cache already holds; it is a hybrid model's with them.

    Raises `ValueError` for what contradicts itself, with the names of the layers, `TypeError` for sizes that are no
    integers.
    """
    block_size = positive_int("block_size", block_size)
    capacity = positive_int("capacity", capacity)
    grouped = [name for group in groups for name in group.names]
    check_names(grouped)
    index_of = {name: index for index, name in enumerate(grouped if names is None else names)}
    hybrid = is_hybrid([*beside, *(spec for group in groups for spec in group.specs)])
    pages: dict[str, _Page] = {}
    for group in groups:
        for name, page in zip(group.names, _pages(group, layout, block_size, hybrid)):
            _check_alignment(page, granularity)
            pages[name] = page
    slots = _shared_slots(groups, shared_by, pages)
    blocks = _packed_blocks(packed, slots, pages)
    _check_block_sizes(groups, slots, pages, block_size)

    places: dict[str, PlacedLayer] = {}
    buffers: list[BufferGeometry] = []

    def stride_of(block_bytes: int) -> int:
        return block_bytes * capacity if dense else round_up(block_bytes * capacity, granularity)

    def add_buffer(block_bytes: int, num_segments: int, layers: Sequence[str]) -> None:
        buffers.append(BufferGeometry(num_segments, block_bytes, stride_of(block_bytes), capacity, tuple(layers)))

    def place(
        page: _Page, *, base: int, offset: int, slot: int, stride: int, layout: CacheLayout | None = None
    ) -> None:
        kv = isinstance(page.spec, AttentionSpec)
        if kv and layout is None:
            layout = _layout_of_one(page, capacity, None if dense else granularity, stride)
        places[page.name] = PlacedLayer(
            name=page.name,
            index=index_of[page.name],
            group=page.group.name,
            spec=page.spec,
            order=page.order,
            block_size=page.block_size,
            capacity=capacity,
            buffer=len(buffers),
            base_bytes=base,
            offset_bytes=offset,
            num_segments=page.num_segments,
            page_bytes=page.used_bytes * page.num_segments,
            slot_bytes=slot * page.num_segments,
            block_stride_bytes=stride,
            segment_stride_bytes=stride_of(stride),
            layout=layout,
            tensors=() if isinstance(page.spec, AttentionSpec) else tuple(page.spec.block_tensors(page.block_size)),
        )

    for block in blocks:
        offsets, stride = _side_by_side([[pages[name] for name in slot] for slot in block])
        num_segments = pages[block[0][0]].num_segments
        for slot, (offset, slot_bytes) in zip(block, offsets):
            for name in slot:
                place(pages[name], base=offset, offset=offset, slot=slot_bytes, stride=stride)
        add_buffer(stride, num_segments, [name for slot in block for name in slot])

    for group in groups:
        free = [pages[name] for name in group.names if name not in places]
        if not free:
            continue
        order = free[0].order
        uniform = len(set(group.specs)) == 1 and isinstance(free[0].spec, AttentionSpec)
        whole = uniform and len(free) == len(group.names) and group.page_bytes is None
        if whole and not group.separate:
            cut = CacheLayout(
                order,
                free[0].spec,  # type: ignore[arg-type]
                num_layers=len(free),
                block_size=free[0].block_size,
                capacity=capacity,
                granularity=None if dense else granularity,
            )
            bytes_of_one = free[0].spec.page_bytes(free[0].block_size) // cut.segments_per_layer
            for index, page in enumerate(free):
                base = cut.layer_base_bytes(index)
                place(
                    page._replace(num_segments=cut.segments_per_layer, used_bytes=bytes_of_one),
                    base=base,
                    offset=base % cut.segment_stride_bytes,
                    slot=bytes_of_one,
                    stride=cut.segment_block_bytes,
                    layout=cut,
                )
            add_buffer(cut.segment_block_bytes, cut.num_segments, group.names)
            continue
        if all(page.order.startswith("BL") for page in free) and not group.separate:
            offsets, stride = _side_by_side([[page] for page in free])
            for page, (offset, slot_bytes) in zip(free, offsets):
                place(page, base=offset, offset=offset, slot=slot_bytes, stride=stride)
            add_buffer(stride, 1, [page.name for page in free])
            continue
        if not all(page.order.startswith("L") for page in free):
            why = "a reservation each" if group.separate else "pages of their own"
            raise ValueError(
                f"group {group.name!r}: layout {order!r} interleaves equal layers in one reservation, but its layers "
                f"are to have {why}; use a layout that starts with L"
                + ("" if group.separate else ", or with BL to pack them")
            )
        alike: dict[object, list[_Page]] = {}
        for page in free:
            alike.setdefault(page.name if group.separate else page.segment_bytes, []).append(page)
        for members in alike.values():
            size, first = members[0].segment_bytes, 0
            for page in members:
                place(page, base=first * stride_of(size), offset=0, slot=size, stride=size)
                first += page.num_segments
            add_buffer(size, first, [page.name for page in members])

    return CacheGeometry(
        block_size=block_size,
        capacity=capacity,
        granularity=granularity,
        groups=tuple(groups),
        layers=tuple(places[name] for name in index_of),
        buffers=tuple(buffers),
    )


def joined(first: CacheGeometry, second: CacheGeometry) -> CacheGeometry:
    """One cache with the layers of both; those of `second` come behind, in buffers of their own."""
    check_names([layer.name for layer in (*first.layers, *second.layers)])
    titles = [group.name for group in (*first.groups, *second.groups)]
    if len(set(titles)) < len(titles):
        raise ValueError(f"groups named twice in {titles}; give the new one a name of its own")
    moved = tuple(
        replace(layer, index=layer.index + len(first.layers), buffer=layer.buffer + len(first.buffers))
        for layer in second.layers
    )
    return replace(
        first,
        groups=first.groups + second.groups,
        layers=first.layers + moved,
        buffers=first.buffers + second.buffers,
    )


def _pages(group: LayerGroup, layout: str, block_size: int, hybrid: bool) -> list[_Page]:
    pages = []
    block_size = group.block_size or block_size
    order = group.layout or checked_order(layout, group.specs)
    for name, spec in zip(group.names, group.specs):
        alignment = positive_int(f"layer {name!r}: alignment_bytes", spec.alignment_bytes)
        if isinstance(spec, AttentionSpec):
            letters = block_major(order) if hybrid else order
            one = CacheLayout("L" + letters.replace("L", ""), spec, num_layers=1, block_size=block_size, capacity=1)
            num_segments, used = one.num_segments, one.page_bytes
        else:
            letters = "LB" if order.index("L") < order.index("B") else "BL"
            num_segments, used = 1, _checked_page(name, spec, block_size)
        padded = used
        if group.page_bytes is not None:
            if group.page_bytes < used * num_segments or group.page_bytes % num_segments:
                raise ValueError(
                    f"group {group.name!r}: page_bytes {group.page_bytes} must hold the {used * num_segments} bytes of "
                    f"layer {name!r} and divide into its {num_segments} segments"
                )
            padded = group.page_bytes // num_segments
            if padded % alignment:
                raise ValueError(
                    f"group {group.name!r}: the alignment of {alignment} bytes of layer {name!r} cannot be met with "
                    f"pages of {padded} bytes a segment; make page_bytes a multiple of {alignment * num_segments}"
                )
        pages.append(
            _Page(name, group, spec, letters, block_size, num_segments, used, round_up(padded, alignment), alignment)
        )
    return pages


def _checked_page(name: str, spec: LayerSpec, block_size: int) -> int:
    """Bytes of a state's page, once its tensors are inside it and do not overlap."""
    assert not isinstance(spec, AttentionSpec)
    size = positive_int(f"layer {name!r}: page_bytes", spec.page_bytes(block_size))
    end = 0
    tensors = tuple(spec.block_tensors(block_size))
    if not tensors:
        raise ValueError(f"layer {name!r}: its spec has no tensors; a page without them cannot be viewed")
    for tensor in tensors:
        if not isinstance(tensor, BlockTensor):
            raise TypeError(f"layer {name!r}: block_tensors must give BlockTensors, got {tensor!r}")
    names = [tensor.name for tensor in tensors]
    if len(set(names)) < len(names):
        raise ValueError(f"layer {name!r}: tensors are named twice in {names}; give each a name of its own")
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset_bytes):
        if tensor.num_bytes < 1:
            raise ValueError(f"layer {name!r}: tensor {tensor.name!r} of shape {tensor.shape} has no elements")
        if tensor.offset_bytes % tensor.dtype.itemsize or spec.alignment_bytes % tensor.dtype.itemsize:
            raise ValueError(
                f"layer {name!r}: tensor {tensor.name!r} of {tensor.dtype} at byte {tensor.offset_bytes} of a page "
                f"aligned to {spec.alignment_bytes} bytes is not aligned to its own {tensor.dtype.itemsize} bytes"
            )
        if tensor.offset_bytes < end or tensor.offset_bytes + tensor.num_bytes > size:
            raise ValueError(
                f"layer {name!r}: tensor {tensor.name!r}, bytes {tensor.offset_bytes} to "
                f"{tensor.offset_bytes + tensor.num_bytes}, overlaps another one or leaves its page of {size} bytes"
            )
        end = tensor.offset_bytes + tensor.num_bytes
    return size


def _check_alignment(page: _Page, granularity: int) -> None:
    alignment = page.alignment_bytes
    if alignment < 1 or alignment & (alignment - 1) or granularity % alignment:
        raise ValueError(
            f"layer {page.name!r}: an alignment of {alignment} bytes cannot be met: it must be a power of two that "
            f"divides the {granularity} bytes of a granule, on which segments start"
        )


def _shared_slots(
    groups: Sequence[LayerGroup], shared_by: str | Iterable[Iterable[str]], pages: Mapping[str, _Page]
) -> list[tuple[str, ...]]:
    """The sets of layers that overlay each other."""
    if isinstance(shared_by, str):
        if shared_by != "groups":
            raise ValueError(f'shared_by takes sets of layer names or "groups", got {shared_by!r}')
        longest = max(len(group.names) for group in groups)
        slots = [tuple(group.names[i] for group in groups if i < len(group.names)) for i in range(longest)]
    else:
        slots = [tuple(names) for names in shared_by]
    _check_sets("shared_by", slots, pages)
    for slot in slots:
        members = [pages[name] for name in slot]
        for one in members[1:]:
            first = members[0]
            if one.num_segments != first.num_segments:
                raise ValueError(
                    f"layers {first.name!r} and {one.name!r} share a buffer but disagree: layout {first.order!r} cuts "
                    f"it into {first.num_segments} segments, {one.order!r} into {one.num_segments}; give both groups a "
                    "layout with B in front of T, such as 'LBTNHD'"
                )
            for other in members[: members.index(one)]:
                same = (one.spec, one.order, one.block_size) == (other.spec, other.order, other.block_size)
                if one.group is other.group and not same:
                    raise ValueError(
                        f"layers {other.name!r} and {one.name!r} of group {one.group.name!r} share a buffer, so every "
                        "block of theirs holds both, but their specs differ: they would overwrite each other. Put them "
                        "into groups of their own"
                    )
    return slots


def _packed_blocks(
    packed: bool | Iterable[Iterable[str]], slots: Sequence[tuple[str, ...]], pages: Mapping[str, _Page]
) -> list[list[tuple[str, ...]]]:
    """The blocks that several slots lie in side by side, and those of one shared slot."""
    sets = [tuple(pages)] if packed is True else [tuple(names) for names in (packed or ())]
    _check_sets("packed", sets, pages)
    slot_of = {name: slot for slot in slots for name in slot}
    blocks = []
    for names in sets:
        block = list(dict.fromkeys(slot_of.get(name, (name,)) for name in names))
        outside = sorted({name for slot in block for name in slot} - set(names))
        if outside:
            raise ValueError(f"layers {', '.join(outside)} share a slot with packed layers; name them in packed= too")
        for name in names:
            if pages[name].num_segments != 1:
                raise ValueError(
                    f"layer {name!r} has {pages[name].num_segments} segments in layout {pages[name].order!r}, and a "
                    "packed block is one piece; give its group a layout with B in front of T, such as 'LBTNHD'"
                )
        blocks.append(block)
    done = {slot for block in blocks for slot in block}
    return blocks + [[slot] for slot in slots if slot not in done]


def _check_sets(argument: str, sets: Sequence[tuple[str, ...]], pages: Mapping[str, _Page]) -> None:
    named = [name for names in sets for name in names]
    unknown = sorted(set(named) - set(pages))
    if unknown:
        raise ValueError(f"{argument} names layers that no group has: {', '.join(unknown)}")
    twice = sorted({name for name in named if named.count(name) > 1})
    if twice:
        raise ValueError(f"{argument} names layers twice: {', '.join(twice)}; a layer has one place")
    if any(not names for names in sets):
        raise ValueError(f"{argument} has an empty set; name the layers of each")


def _check_block_sizes(
    groups: Sequence[LayerGroup], slots: Sequence[tuple[str, ...]], pages: Mapping[str, _Page], block_size: int
) -> None:
    """Block ids of groups with buffers of their own mean the same tokens: those of the cache's block size."""
    slotted = {name for slot in slots for name in slot}
    overlaid = {pages[name].group.name for slot in slots if _groups_in(slot, pages) > 1 for name in slot}
    owners = [group for group in groups if group.name not in overlaid or not set(group.names) <= slotted]
    sizes = {group.name: pages[group.names[0]].block_size for group in owners}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"mixed block numbering: groups count blocks of different sizes ({sizes} tokens) though they share no "
            "buffers, so one block id would mean different tokens; give them one block_size, or shared_by= so that "
            "each has block tables of its own"
        )
    for name, size in sizes.items():
        if size != block_size:
            raise ValueError(
                f"mixed block numbering: group {name!r} counts blocks of {size} tokens and shares no buffers, the "
                f"cache of {block_size}; give it the cache's block_size, or reserve the cache with block_size={size}"
            )


def _groups_in(slot: Sequence[str], pages: Mapping[str, _Page]) -> int:
    return len({pages[name].group.name for name in slot})


def _side_by_side(slots: Sequence[Sequence[_Page]]) -> tuple[list[tuple[int, int]], int]:
    """For each slot its offset in the block and its bytes, and the stride of the block."""
    places, end, largest = [], 0, 1
    for slot in slots:
        alignment = math.lcm(*(page.alignment_bytes for page in slot))
        size = round_up(max(page.segment_bytes for page in slot), alignment)
        start = round_up(end, alignment)
        places.append((start, size))
        end, largest = start + size, max(largest, alignment)
    return places, round_up(end, largest)


def _layout_of_one(page: _Page, capacity: int, granularity: int | None, stride: int) -> CacheLayout:
    assert isinstance(page.spec, AttentionSpec)
    return CacheLayout(
        "L" + page.order.replace("L", ""),
        page.spec,
        num_layers=1,
        block_size=page.block_size,
        capacity=capacity,
        granularity=granularity,
        block_stride_bytes=stride,
    )

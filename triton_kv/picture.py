"""A drawing of a cache's address space: segments, blocks, granules, and what is mapped. As text, or as SVG."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, NamedTuple

from triton_kv.memory.reservation import round_up
from triton_kv.spec import AttentionSpec

if TYPE_CHECKING:
    from triton_kv.geometry import BufferGeometry, CacheGeometry, PlacedLayer

MAX_BLOCKS, MAX_SEGMENTS = 64, 64  # more than that is no picture
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
# Tints that stay apart in grey and for colour-blind readers (Okabe and Ito); the rest of a buffer stays white.
COLOURS = ("#56B4E9", "#E69F00", "#009E73", "#F0E442", "#CC79A7", "#D55E00", "#0072B2", "#999999")


class Piece(NamedTuple):
    """Bytes of one block in one segment: what a layer (or several that overlay each other) keeps there."""

    segment: int
    block: int
    offset: int  # from the start of the segment
    num_bytes: int
    label: str  # such as "layers.0 K", "layers.0", or "full.0 = window.0"
    layer: int  # index of the first layer it belongs to


def pieces_of(geometry: CacheGeometry, buffer: int) -> list[Piece]:
    """What lies in each block of a buffer, by segment and offset.

    K and V, and heads, are pieces where no token lies between them; where they alternate with tokens or channels the
    page is one piece, and a block is one where layers do.
    """
    part = geometry.buffers[buffer]
    layers = [layer for layer in geometry.layers if layer.buffer == buffer]
    found: dict[tuple[int, int], tuple[int, str, int]] = {}  # segment, offset in a block -> bytes, label, layer
    for layer in layers:
        overlaid = [other for other in layers if other.base_bytes == layer.base_bytes]
        if len(overlaid) == 1:
            for segment, offset, size, label in _pieces_of_layer(layer, part):
                found.setdefault((segment, offset), (size, label, layer.index))
            continue
        label = " = ".join(other.name for other in overlaid)
        first, offset = divmod(layer.base_bytes, part.segment_stride_bytes)
        for segment in range(first, first + layer.num_segments):
            size = max(other.page_bytes // other.num_segments for other in overlaid)
            found.setdefault((segment, offset), (size, label, layer.index))
    return [
        Piece(segment, block, block * part.block_bytes + offset, size, label, index)
        for (segment, offset), (size, label, index) in sorted(found.items())
        for block in range(part.capacity)
    ]


def _pieces_of_layer(layer: PlacedLayer, part: BufferGeometry) -> list[tuple[int, int, int, str]]:
    """(segment, offset in a block, bytes, label) of one layer."""
    base, offset = divmod(layer.base_bytes, part.segment_stride_bytes)
    if not isinstance(layer.spec, AttentionSpec) or layer.layout is None:
        if len(layer.tensors) == 1:
            return [(base, offset, layer.page_bytes, layer.name)]
        return [
            (base, offset + tensor.offset_bytes, tensor.num_bytes, f"{layer.name} {tensor.name}")
            for tensor in layer.tensors
        ]
    spec, layout = layer.spec, layer.layout
    outer, inner = layout.order.split("B")
    # What stands in front of N and D cuts the block into pieces; the rest of the letters are inside each of them.
    cuts = outer + inner[: min(at for at, letter in enumerate(inner + "N") if letter in "ND")]
    if set(outer) - set("LTH") or "L" not in cuts:
        # Layers (or tokens, channels) alternate inside the page: all of it is everybody's.
        return [(segment, 0, part.block_bytes, "all layers") for segment in range(part.num_segments)]
    pieces = []
    apart = "T" in cuts
    heads = spec.num_kv_heads if "H" in cuts else 1
    dims = (spec.head_dim, spec.value_dim) if apart else (spec.head_dim + spec.value_dim,)
    for kv, dim in enumerate(dims):
        size = layer.block_size * spec.num_kv_heads // heads * dim * spec.itemsize_bytes
        for head in range(heads):
            at = kv * layout.v_offset + head * (layout.k_strides, layout.v_strides)[kv][2]
            segment, start = divmod(layer.base_bytes + at * spec.itemsize_bytes, part.segment_stride_bytes)
            name = layer.name + (f" {'KV'[kv]}" if apart else " K+V") + (f" head {head}" if heads > 1 else "")
            pieces.append((segment, start, size, name))
    return pieces


def check_drawable(geometry: CacheGeometry, num_blocks: int) -> None:
    """Raises `ValueError` for more than a page can show."""
    segments = sum(buffer.num_segments for buffer in geometry.buffers)
    if geometry.capacity > MAX_BLOCKS or segments > MAX_SEGMENTS:
        raise ValueError(
            f"a picture of {geometry.capacity} blocks in {segments} segments shows nothing; draw a small example of "
            f"the same layout, of at most {MAX_BLOCKS} blocks and {MAX_SEGMENTS} segments: tkv.arrange(groups, ...)"
        )
    if not 0 <= num_blocks <= geometry.capacity:
        raise ValueError(f"num_blocks must lie in 0..{geometry.capacity} (the capacity), got {num_blocks}")


def picture_as_text(geometry: CacheGeometry, num_blocks: int, *, width: int = 72) -> str:
    """Three lines a segment, in proportion to its bytes: blocks, what they hold, and the granules that are mapped.

    Digits are blocks (modulo 10) and letters the pieces named behind them, `.` is padding; `#` is a granule that
    `num_blocks` blocks map, `-` one that is only addresses.
    """
    check_drawable(geometry, num_blocks)
    lines = [f"{num_blocks} of {geometry.capacity} blocks committed, granules of {geometry.granularity} bytes"]
    for index, part in enumerate(geometry.buffers):
        span = max(part.segment_stride_bytes, 1)
        pieces = pieces_of(geometry, index)
        lines += ["", _heading(index, part)]
        for segment in range(part.num_segments):
            mine = [piece for piece in pieces if piece.segment == segment]
            labels = list(dict.fromkeys(piece.label for piece in mine))
            granules = _granules(geometry, part, segment, num_blocks)
            blocks, letters, marks = "", "", ""
            for cell in range(width):
                at = (2 * cell + 1) * span // (2 * width)  # the middle of the cell
                inside = [piece for piece in mine if piece.offset <= at < piece.offset + piece.num_bytes]
                past = at >= part.segment_capacity_bytes
                blocks += " " if past else str(at // part.block_bytes % 10)
                letters += LETTERS[labels.index(inside[0].label) % 26] if inside else " " if past else "."
                at += segment * part.segment_stride_bytes
                marks += "#" if at // geometry.granularity in granules else "-"
            legend = ", ".join(f"{LETTERS[number % 26]} {label}" for number, label in enumerate(labels))
            lines += [
                f"  |{blocks}|",
                f"  |{letters}| {legend}",
                f"  |{marks}| mapped: {len(granules)} granule{'s' * (len(granules) != 1)}",
            ]
    return "\n".join(lines)


def _heading(index: int, part: BufferGeometry) -> str:
    if part.num_segments == 1:
        return f"buffer {index}: 1 segment, {part.block_bytes} bytes a block"
    return f"buffer {index}: {part.num_segments} segments, {part.block_bytes} bytes a block in each"


def _granules(geometry: CacheGeometry, part: BufferGeometry, segment: int, num_blocks: int) -> set[int]:
    """Numbers of the granules, from the buffer's start, that this segment's blocks need."""
    start, size = segment * part.segment_stride_bytes, num_blocks * part.block_bytes
    if size == 0:
        return set()
    granularity = geometry.granularity
    return set(range(start // granularity, round_up(start + size, granularity) // granularity))


def picture_as_svg(geometry: CacheGeometry, num_blocks: int, *, width: int = 960) -> str:
    """The same drawing as SVG text: a row a segment, blocks filled by layer, mapped granules underlined."""
    check_drawable(geometry, num_blocks)
    left, row_height, bar_height = 12, 58, 26
    body: list[str] = []
    y = 30
    longest = max(part.segment_stride_bytes for part in geometry.buffers)
    scale = (width - 2 * left) / longest
    title = f"{num_blocks} of {geometry.capacity} blocks committed; granules of {geometry.granularity} bytes"
    body.append(_text(left, 18, title, size=13))
    for index, part in enumerate(geometry.buffers):
        pieces = pieces_of(geometry, index)
        heading = _heading(index, part)
        body.append(_text(left, y + 14, heading, size=12))
        y += 22
        for segment in range(part.num_segments):
            mine = [piece for piece in pieces if piece.segment == segment]
            labels = ", ".join(dict.fromkeys(piece.label for piece in mine))
            body.append(_text(left, y + 10, f"segment {segment}: {labels}", size=11))
            top = y + 14
            body.append(
                f'<rect x="{left}" y="{top}" width="{part.segment_stride_bytes * scale:.1f}" height="{bar_height}" '
                'fill="#ffffff" stroke="#999999" stroke-dasharray="3 2"/>'
            )
            for piece in mine:
                solid = piece.block < num_blocks
                body.append(
                    f'<rect x="{left + piece.offset * scale:.1f}" y="{top}" width="{piece.num_bytes * scale:.1f}" '
                    f'height="{bar_height}" fill="{COLOURS[piece.layer % len(COLOURS)]}" '
                    f'fill-opacity="{0.9 if solid else 0.25}" stroke="#ffffff" stroke-width="0.5">'
                    f"<title>{escape(f'block {piece.block}: {piece.label}, {piece.num_bytes} bytes')}</title></rect>"
                )
            for block in range(part.capacity):
                x = left + block * part.block_bytes * scale
                body.append(f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{top + bar_height}" stroke="#333333"/>')
                if part.block_bytes * scale > 14:
                    body.append(_text(x + 3, top + 17, str(block), size=11))
            start = segment * part.segment_stride_bytes
            for granule in sorted(_granules(geometry, part, segment, num_blocks)):
                # A granule may begin in the segment before or end in the next one: it is drawn where it meets this one.
                begin = max(granule * geometry.granularity, start) - start
                end = min((granule + 1) * geometry.granularity, start + part.segment_stride_bytes) - start
                body.append(
                    f'<rect x="{left + begin * scale + 1:.1f}" y="{top + bar_height + 2}" '
                    f'width="{max((end - begin) * scale - 2, 1):.1f}" height="5" fill="#333333"/>'
                )
            y += row_height
        y += 8
    height = y + 26
    body.append(
        _text(left, height - 12, "colours: layers; pale: reserved only; black bars: granules that are mapped", 11)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif">\n'
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _text(x: float, y: float, text: str, size: int) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="#111111">{escape(text)}</text>'

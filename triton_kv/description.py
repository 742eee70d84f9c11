"""A cache's groups as a table for people: what each keeps, what it wastes, and its bytes at some number of blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from triton_kv.spec import AttentionSpec, keeps_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from triton_kv.geometry import CacheGeometry

COLUMNS = ("group", "layers", "layout", "page bytes", "segments", "padding bytes", "bytes at {}")


def group_rows(geometry: CacheGeometry, num_blocks: int) -> list[dict[str, Any]]:
    """One entry a group: sizes in bytes, of one block where they say `page` or `padding`.

    `mapped_bytes` counts whole granules of every buffer that holds layers of the group; a buffer that several groups
    share counts in each, and `shared` says so.
    """
    rows = []
    for group in geometry.groups:
        layers = geometry.layers_of(group.name)
        mine = sorted({layer.buffer for layer in layers})
        others = {layer.buffer for layer in geometry.layers if layer.group != group.name}
        rows.append(
            {
                "group": group.name,
                "layers": [layer.name for layer in layers],
                "layouts": sorted({layer.order for layer in layers}),
                "block_size": layers[0].block_size,
                "page_bytes": sorted({layer.page_bytes for layer in layers}),
                "segments": sum(geometry.buffers[buffer].num_segments for buffer in mine),
                "padding_bytes": geometry.padding_bytes[group.name],
                "mapped_bytes": sum(
                    geometry.buffers[buffer].mapped_bytes_at(num_blocks, geometry.granularity) for buffer in mine
                ),
                "shared": bool(others & set(mine)),
            }
        )
    return rows


def describe(geometry: CacheGeometry, num_blocks: int) -> str:
    """The table of `KVCache.describe`."""
    mapped = geometry.mapped_bytes_at(num_blocks)  # checks num_blocks
    rows = group_rows(geometry, num_blocks)
    cells = [[column.format(f"{num_blocks} blocks") for column in COLUMNS]]
    for row in rows:
        names = row["layers"]
        cells.append(
            [
                row["group"],
                names[0] if len(names) == 1 else f"{len(names)}: {names[0]} to {names[-1]}",
                ", ".join(row["layouts"]),
                ", ".join(f"{size}" for size in row["page_bytes"]),
                f"{row['segments']}",
                f"{row['padding_bytes']}",
                f"{row['mapped_bytes']}" + (" *" if row["shared"] else ""),
            ]
        )
    padding = sum(geometry.padding_bytes.values())
    segments = sum(buffer.num_segments for buffer in geometry.buffers)
    cells.append(["total", f"{len(geometry.layers)}", "", f"{geometry.block_bytes}", f"{segments}", f"{padding}"])
    cells[-1].append(f"{mapped}")
    lines = _aligned(cells)
    lines.insert(len(lines) - 1, "-" * max(map(len, lines)))
    if any(row["shared"] for row in rows):
        lines.append("* in buffers that several groups share; the total counts them once")
    return "\n".join(lines)


class BlockTaker(NamedTuple):
    """What one sequence takes of the blocks for one group: one for every `block_size` tokens, at most `most_blocks`."""

    block_size: int  # tokens
    most_blocks: int | None = None  # None: no limit

    def blocks_for(self, num_tokens: int) -> int:
        blocks = -(-num_tokens // self.block_size)
        return blocks if self.most_blocks is None else min(blocks, self.most_blocks)


def block_takers(geometry: CacheGeometry) -> tuple[BlockTaker, ...]:
    """How a sequence takes blocks.

    Where groups share buffers each takes blocks of its own: a group that keeps tokens one for every `block_size` of
    them, a window no more than reach into it, a state one. Else one block holds all layers of `block_size` tokens, or
    a whole sequence where no layer keeps tokens.
    """
    shared = {row["group"] for row in group_rows(geometry, 1) if row["shared"]}
    overlaid = [layer for layer in geometry.layers if layer.group in shared and _overlaid(geometry, layer.buffer)]
    if not overlaid:
        tokens = any(keeps_tokens(layer.spec) for layer in geometry.layers)
        return (BlockTaker(geometry.block_size, None if tokens else 1),)
    takers = []
    for layer in {layer.group: layer for layer in geometry.layers}.values():
        if isinstance(layer.spec, AttentionSpec) and layer.spec.window is not None:
            takers.append(BlockTaker(layer.block_size, -(-(layer.spec.window - 1) // layer.block_size) + 1))
        elif keeps_tokens(layer.spec):
            takers.append(BlockTaker(layer.block_size))
        else:
            takers.append(BlockTaker(layer.block_size, 1))
    return tuple(takers)


def blocks_for_tokens(takers: Sequence[BlockTaker], num_tokens: int) -> int:
    """Blocks that one sequence of `num_tokens` tokens takes."""
    return sum(taker.blocks_for(num_tokens) for taker in takers)


def blocks_of_any_length(takers: Sequence[BlockTaker]) -> int | None:
    """Blocks that one sequence takes at most, however long it gets; `None` if it takes ever more."""
    limits = [taker.most_blocks for taker in takers]
    return None if None in limits else sum(limit or 0 for limit in limits)


def tokens_of_one_sequence(takers: Sequence[BlockTaker], num_blocks: int) -> int | None:
    """The longest sequence that `num_blocks` blocks hold; `None` if it may have any length."""
    most_blocks = blocks_of_any_length(takers)
    if most_blocks is not None and num_blocks >= most_blocks:
        return None
    low, high = 0, num_blocks * max(taker.block_size for taker in takers)
    while low < high:
        middle = (low + high + 1) // 2
        if blocks_for_tokens(takers, middle) <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return low


def _overlaid(geometry: CacheGeometry, buffer: int) -> bool:
    """Whether layers of several groups have one slot in this buffer (packed ones lie side by side)."""
    places = [(layer.offset_bytes, layer.group) for layer in geometry.layers if layer.buffer == buffer]
    return len({offset for offset, _ in places}) < len(set(places))


def _aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    """Columns of one width each; all but the first three hold numbers and go to the right."""
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return [
        "  ".join(
            text.ljust(width) if column < 3 else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in cells
    ]

"""From what attention backends state about their layers' caches to groups of layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from triton_kv.groups import LayerGroup, kind_of
from triton_kv.layout import CacheLayout
from triton_kv.spec import AttentionSpec, LayerSpec, StateSpec


@dataclass(frozen=True)
class BackendStatement:
    """One attention layer's cache as its backend states it: the arguments of `CacheLayout.from_backend`.

    page_bytes: of one block as the backend wants it; more than the shape holds is padding. `None` is the shape's.
    window: tokens that a query may look back on.
    """

    shape_for_one_block: tuple[int, ...]
    block_dim: int
    dtype: torch.dtype
    stride_order: tuple[int, ...] | None = None
    names: str | None = None
    page_bytes: int | None = None
    window: int | None = None


def groups_from_backends(statements: Mapping[str, BackendStatement | StateSpec]) -> tuple[LayerGroup, ...]:
    """Groups of the layers that a backend (or a state's spec) describes alike, for `KVCache.reserve` and `arrange`.

    A `(2, blocks, ...)` shape gives a layer two segments and `(blocks, 2, ...)` one, and so does a stride order that
    puts the blocks first; a state has one. Where attention layers stand beside states (a hybrid model) `arrange` and
    `reserve` put the blocks first, whatever was stated, so that all have one.

    Groups count blocks of as many tokens as their backends state; `reserve` takes that number as its `block_size`, and
    refuses others where groups share no buffers. Pass the same names in `shared_by=` for layers that share a buffer: if
    their segments disagree, that is an error that names them. Raises `ValueError` for statements that contradict
    themselves, naming the layer.
    """
    alike: dict[tuple[LayerSpec, str | None, int | None, int | None], dict[str, LayerSpec]] = {}
    for name, statement in statements.items():
        if not isinstance(statement, BackendStatement):
            alike.setdefault((statement, None, None, None), {})[name] = statement
            continue
        try:
            layout = CacheLayout.from_backend(
                statement.shape_for_one_block,
                statement.block_dim,
                statement.stride_order,
                dtype=statement.dtype,
                num_layers=1,
                capacity=1,
                names=statement.names,
            )
        except ValueError as error:
            raise ValueError(f"layer {name!r}: {error}") from None
        page = statement.page_bytes
        if page is not None and page < layout.block_bytes:
            raise ValueError(
                f"layer {name!r}: a page of {page} bytes does not hold the {layout.block_bytes} bytes of shape "
                f"{statement.shape_for_one_block}"
            )
        spec = AttentionSpec(
            layout.spec.num_kv_heads, layout.spec.head_dim, statement.dtype, layout.spec.v_head_dim, statement.window
        )
        key = (spec, layout.order, layout.block_size, None if page == layout.block_bytes else page)
        alike.setdefault(key, {})[name] = spec
    kinds = [kind_of(spec) for spec, *_ in alike]
    return tuple(
        LayerGroup(
            kind if kinds.count(kind) == 1 else f"{kind}.{kinds[:index].count(kind)}",
            layers,
            order,
            block_size=block_size,
            page_bytes=page_bytes,
        )
        for index, (kind, ((_, order, block_size, page_bytes), layers)) in enumerate(zip(kinds, alike.items()))
    )


__all__ = ["BackendStatement", "groups_from_backends"]

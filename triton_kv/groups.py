"""Layers by name, in groups that share a layout: what a cache is asked to hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from triton_kv.layout import LETTERS, expand_order
from triton_kv.spec import AttentionSpec, LayerSpec, StateSpec, keeps_tokens, positive_int

DEFAULT_ORDER = "LTBNHD"
Layers = Mapping[str, LayerSpec] | Sequence[tuple[str, LayerSpec]]


@dataclass(frozen=True)
class LayerGroup:
    """Layers that are laid out together and follow one block table.

    name: of the group. layers: name -> spec, in order (a sequence of pairs does as well).
    layout: the order of the dimensions, outermost first; `None` is the cache's. Of layers that keep no K and V, only
        whether L or B comes first matters: "LB" gives each layer a segment, "BL" packs the layers of a block together.
    block_size: tokens a block; `None` is the cache's. Groups that do not share buffers have one block numbering, and
        so the cache's block size.
    page_bytes: what one block of each layer takes over the layer's segments, where it is to be padded; `None` is what
        the spec needs.
    separate: a reservation a layer, instead of one for all layers of equal pages.

    Raises `ValueError` for no layers, layers named twice and layouts that cannot be, `TypeError` for what is no spec,
    for specs that have no hash and for names that are no strings.
    """

    name: str
    layers: Layers
    layout: str | None = None
    block_size: int | None = field(default=None, kw_only=True)
    page_bytes: int | None = field(default=None, kw_only=True)
    separate: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"a group's name is a string, got {self.name!r}")
        layers = self.layers.items() if isinstance(self.layers, Mapping) else self.layers
        pairs = [(name, spec) for name, spec in layers]
        if not pairs:
            raise ValueError(f"group {self.name!r} has no layers")
        check_names([name for name, _ in pairs])
        for name, spec in pairs:
            if not isinstance(spec, (AttentionSpec, StateSpec)):
                raise TypeError(
                    f"layer {name!r} needs a spec (AttentionSpec, MLASpec, MambaSpec, another StateSpec), got {spec!r}"
                )
            try:
                hash(spec)
            except TypeError:
                raise TypeError(
                    f"layer {name!r}: a spec must be hashable and compare by value, as a frozen dataclass does, got "
                    f"{spec!r}"
                ) from None
        object.__setattr__(self, "layers", dict(pairs))
        for name in ("block_size", "page_bytes"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, positive_int(name, getattr(self, name)))
        if self.layout is not None:
            object.__setattr__(self, "layout", checked_order(self.layout, self.specs))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict(self.layers))

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        return tuple(dict(self.layers).values())


def checked_order(order: str, specs: Sequence[LayerSpec]) -> str:
    """The order in six letters, or "LB" or "BL" for layers that keep no K and V."""
    if order in ("LB", "BL"):
        if any(isinstance(spec, AttentionSpec) for spec in specs):
            raise ValueError(
                f"layout {order!r} places layers and blocks only; K and V need all six letters {LETTERS}, such as "
                f"{'LBTNHD' if order == 'LB' else 'BLTNHD'!r}"
            )
        return order
    return expand_order(order)


def check_names(names: Sequence[str]) -> None:
    """Raises `ValueError` if a layer is named twice, `TypeError` for names that are no strings."""
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"a layer's name is a string, got {name!r}")
    twice = sorted({name for name in names if list(names).count(name) > 1})
    if twice:
        raise ValueError(f"layers named twice: {', '.join(twice)}; give each layer a name of its own")


def block_major(order: str) -> str:
    """The order with B in front of all but L, so that each layer has one segment: `LTBNHD` becomes `LBTNHD`."""
    letters = expand_order(order)
    outer, inner = letters.split("B")
    return ("LB" if "L" in outer else "B") + outer.replace("L", "") + inner


def groups_of(layers: object, num_layers: int | None = None) -> tuple[tuple[LayerGroup, ...], tuple[str, ...]]:
    """What `KVCache.reserve` takes, as groups, and the names of all layers in the caller's order.

    One spec and a number of layers are `layers.0` and so on. Of a mapping from name to spec, layers with equal specs
    are a group; a mapping of group name to such mappings names the groups. Raises `ValueError` or `TypeError` for
    anything else, and for layers or groups named twice.
    """
    if isinstance(layers, (AttentionSpec, StateSpec)) and not isinstance(layers, type):
        if num_layers is None:
            raise ValueError("one spec needs num_layers=; or pass a mapping of layer name to spec")
        count = positive_int("num_layers", num_layers)
        group = LayerGroup(kind_of(layers), {f"layers.{index}": layers for index in range(count)})
        return (group,), group.names
    if num_layers is not None and isinstance(layers, (LayerGroup, Mapping, list, tuple)):
        raise ValueError(f"num_layers {num_layers} goes with one spec only: a mapping or groups name their layers")
    if isinstance(layers, LayerGroup):
        layers = (layers,)
    if isinstance(layers, Mapping) and layers and all(isinstance(group, Mapping) for group in layers.values()):
        layers = [LayerGroup(name, members) for name, members in layers.items()]
    if isinstance(layers, Mapping):
        # LayerGroup checks names and specs before anything is compared.
        named = LayerGroup("all", layers)
        alike: dict[LayerSpec, dict[str, LayerSpec]] = {}
        for name, spec in zip(named.names, named.specs):
            alike.setdefault(spec, {})[name] = spec
        kinds = [kind_of(spec) for spec in alike]
        groups = tuple(
            LayerGroup(kind if kinds.count(kind) == 1 else f"{kind}.{kinds[:index].count(kind)}", members)
            for index, (kind, members) in enumerate(zip(kinds, alike.values()))
        )
        return groups, named.names
    if isinstance(layers, Sequence) and layers and all(isinstance(group, LayerGroup) for group in layers):
        groups = tuple(layers)
        titles = [group.name for group in groups]
        if len(set(titles)) < len(titles):
            raise ValueError(f"groups named twice in {titles}; give each a name of its own")
        names = tuple(name for group in groups for name in group.names)
        check_names(names)
        return groups, names
    raise TypeError(
        "a cache is reserved for a mapping of layer name to spec, for LayerGroups, or (with num_layers=) for an "
        f"AttentionSpec, not {type(layers).__name__}"
    )


def equal_groups(groups: Sequence[LayerGroup]) -> tuple[LayerGroup, ...]:
    """The groups cut into groups of at most as many layers as the smallest has, so that sharing buffers wastes little.

    Of 36 state layers and 12 attention layers 4 groups of 12 are made: each buffer then serves one layer of each, and
    a block of any group fills all of them. A group that does not divide leaves its last one short. Raises `ValueError`
    for no groups.
    """
    if not groups:
        raise ValueError("equal_groups needs at least one group")
    size = min(len(group.names) for group in groups)
    cut = []
    for group in groups:
        pairs = list(dict(group.layers).items())
        for number, first in enumerate(range(0, len(pairs), size)):
            name = group.name if len(pairs) <= size else f"{group.name}.{number}"
            cut.append(replace(group, name=name, layers=dict(pairs[first : first + size])))
    return tuple(cut)


def kind_of(spec: LayerSpec) -> str:
    """A word for a group of such layers: "attention", "window1024", "mla", "mamba", ..."""
    if isinstance(spec, AttentionSpec) and spec.window is not None:
        return f"window{spec.window}"
    return type(spec).__name__.removesuffix("Spec").lower() or "state"


def is_hybrid(specs: Sequence[LayerSpec]) -> bool:
    """Whether attention layers share the cache with layers that keep a state instead of tokens."""
    return not all(map(keeps_tokens, specs)) and any(isinstance(spec, AttentionSpec) for spec in specs)

"""Writes docs/layouts.md and the drawings beside it: every named layout, and buffers that are shared, packed, padded.

    python docs/draw_layouts.py

A test compares what is there with what this makes, so that the page cannot grow stale.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

import triton_kv as tkv

HERE = Path(__file__).parent
GRANULE = 4096
# 2 KiB a block for K and as much for V: 4 tokens of 2 heads of 64 channels, float32. Small, so that a page shows it.
ATTENTION = tkv.AttentionSpec(num_kv_heads=2, head_dim=64, dtype=torch.float32)
WINDOW = tkv.AttentionSpec(num_kv_heads=2, head_dim=64, dtype=torch.float32, window=8)
MLA = tkv.MLASpec(kv_lora_rank=512, qk_rope_head_dim=64, dtype=torch.bfloat16)
MAMBA = tkv.MambaSpec([("conv", (3, 128), torch.bfloat16), ("ssm", (4, 8, 16), torch.float32)])
OPTIONS = {"block_size": 4, "capacity": 5, "granularity": GRANULE}


class Example(NamedTuple):
    """A section of the page."""

    name: str  # of its drawing
    title: str
    text: str
    geometry: tkv.CacheGeometry


def uniform(order: str, **options: object) -> tkv.CacheGeometry:
    group = tkv.LayerGroup("attention", {"layers.0": ATTENTION, "layers.1": ATTENTION})
    return tkv.arrange([group], layout=order, **OPTIONS, **options)  # type: ignore[arg-type]


def examples() -> list[Example]:
    """All sections, in order."""
    two = [
        tkv.LayerGroup("full", {"full.0": ATTENTION, "full.1": ATTENTION}),
        tkv.LayerGroup("window", {"window.0": WINDOW, "window.1": WINDOW}),
    ]
    hybrid = [
        tkv.LayerGroup("attention", {"attention.0": ATTENTION}),
        tkv.LayerGroup("mamba", {"mamba.0": MAMBA, "mamba.1": MAMBA}),
    ]
    return [
        Example("LTBNHD", "`LTBNHD`", "A K and a V tensor a layer, as FlashAttention takes them.", uniform("LTBNHD")),
        Example(
            "LBTNHD",
            "`LBTNHD`",
            "K and V of a block side by side, as FlashInfer takes them (NHD).",
            uniform("LBTNHD"),
        ),
        Example(
            "LBTHND",
            "`LBTHND`",
            "The same pages with heads in front of tokens, FlashInfer's HND: each head's tokens lie together.",
            uniform("LBTHND"),
        ),
        Example("TLBNHD", "`TLBNHD`", "One `[2, layers, blocks, ...]` tensor: all K, then all V.", uniform("TLBNHD")),
        Example(
            "BLTNHD",
            "`BLTNHD`",
            "Cross-layer uniform: all layers of a block in one piece, which a transfer sends at once. Each layer's "
            "block stride is the whole block.",
            uniform("BLTNHD"),
        ),
        Example(
            "LBNHTD",
            "`LBNHTD`",
            "vLLM's LBNHC: key and value of a head share one row.",
            uniform("LBNHTD"),
        ),
        Example(
            "LBHNTD",
            "`LBHNTD`",
            "vLLM's LBHNC: the same rows, those of a head together.",
            uniform("LBHNTD"),
        ),
        Example("LHBNTD", "`LHBNTD`", "vLLM's LHBNC: a segment for each head of each layer.", uniform("LHBNTD")),
        Example("BLNHTD", "`BLNHTD`", "vLLM's BLNHC: cross-layer, a row for each head.", uniform("BLNHTD")),
        Example("BLHNTD", "`BLHNTD`", "vLLM's BLHNC: cross-layer, the rows of a head together.", uniform("BLHNTD")),
        Example(
            "BHLNTD",
            "`BHLNTD`",
            "vLLM's BHLNC: heads before layers, so that a rank with fewer heads has a prefix of each block.",
            uniform("BHLNTD"),
        ),
        Example(
            "dense",
            "`LTBNHD`, dense",
            "`dense=True` leaves out the padding between segments; a granule may then serve two of them.",
            uniform("LTBNHD", dense=True),
        ),
        Example(
            "mla",
            "MLA",
            "One latent vector a token and no K and V apart; `.latent` is `[capacity, block_size, dim]`.",
            tkv.arrange([tkv.LayerGroup("mla", {"layers.0": MLA, "layers.1": MLA})], **OPTIONS),  # type: ignore[arg-type]
        ),
        Example(
            "hybrid",
            "Hybrid",
            "Attention beside states: each layer has one segment and a page of its own size, so nothing is wasted. The "
            "states of a block lie in one page, each on the border that its dtype needs.",
            tkv.arrange(hybrid, **OPTIONS),  # type: ignore[arg-type]
        ),
        Example(
            "padded",
            "Padded pages",
            "`LayerGroup(page_bytes=)` makes the block stride larger than the page: here both kinds take 4608 bytes.",
            tkv.arrange(
                [tkv.LayerGroup(group.name, group.layers, page_bytes=4608) for group in hybrid],
                **OPTIONS,  # type: ignore[arg-type]
            ),
        ),
        Example(
            "shared",
            "Shared buffers",
            '`shared_by="groups"`: layer i of every group overlays buffer i. A block belongs to one group at a time, '
            "and each group has block tables of its own, so that sliding-window layers need not hold all.",
            tkv.arrange(two, layout="LBTNHD", shared_by="groups", **OPTIONS),  # type: ignore[arg-type]
        ),
        Example(
            "shared-hybrid",
            "Shared buffers of unequal pages",
            "The page is the least that holds each layer's; `padding_bytes` says what the smaller one leaves unused.",
            tkv.arrange(hybrid, shared_by="groups", **OPTIONS),  # type: ignore[arg-type]
        ),
        Example(
            "packed",
            "Packed",
            "`packed=True`: the pages of all layers, of any kind, side by side in each block of one buffer. Each "
            "layer's block stride exceeds its page.",
            tkv.arrange(hybrid, packed=True, **OPTIONS),  # type: ignore[arg-type]
        ),
        Example(
            "separate",
            "One reservation a layer",
            "`LayerGroup(separate=True)`: the same bytes, in a buffer for each layer.",
            tkv.arrange(
                [tkv.LayerGroup("attention", {"layers.0": ATTENTION, "layers.1": ATTENTION}, separate=True)],
                **OPTIONS,  # type: ignore[arg-type]
            ),
        ),
    ]


def files() -> dict[str, str]:
    """Path below docs/ -> text."""
    lines = [
        "# Layouts",
        "",
        "Written by `python docs/draw_layouts.py` from `CacheGeometry.layout_picture`. Each example has five blocks of "
        "four tokens",
        "and granules of 4 KiB (2 MiB on a GPU), with three blocks committed. Digits are blocks, letters what a block "
        "holds, `.` is",
        "padding; `#` is a granule that is mapped, `-` one that is only addresses. Letters of layouts are those of "
        "[design.md](design.md).",
        "",
    ]
    found = {}
    for example in examples():
        found[f"layouts/{example.name}.svg"] = example.geometry.layout_picture(3)
        lines += [
            f"## {example.title}",
            example.text,
            "",
            f"![{example.name}](layouts/{example.name}.svg)",
            "",
            "```text",
            example.geometry.layout_picture(3, form="text"),
            "",
            example.geometry.describe(3),
            "```",
            "",
        ]
    found["layouts.md"] = "\n".join(lines)
    return found


if __name__ == "__main__":
    (HERE / "layouts").mkdir(exist_ok=True)
    for path, text in files().items():
        (HERE / path).write_text(text)

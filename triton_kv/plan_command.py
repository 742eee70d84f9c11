"""`python -m triton_kv plan CONFIG`: how many blocks and tokens of a model fit a device, without having either."""

from __future__ import annotations

import argparse
import json
import re
import sys
from typing import Any

from triton_kv.configs import parse_dtype, specs_from_config
from triton_kv.description import block_takers, blocks_of_any_length, describe, group_rows, tokens_of_one_sequence
from triton_kv.errors import OutOfMemory
from triton_kv.geometry import CacheGeometry, arrange
from triton_kv.groups import DEFAULT_ORDER, equal_groups, groups_of
from triton_kv.sizing import Plan, fit_blocks

_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_UNITS |= {"kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_bytes(text: str) -> int:
    """`141GiB`, `80 GB`, `1.5TiB` or plain bytes. Raises `ValueError` for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{text!r} is no size: write a number and one of {', '.join(unit for unit in _UNITS if unit)}")
    return int(float(match[1]) * _UNITS[match[2]])


def add_plan_command(commands: Any) -> argparse.ArgumentParser:
    """Adds the command and its options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "plan", help="how many blocks and tokens fit, from a model's config.json; needs no GPU"
    )
    parser.add_argument("config", help="a config.json, or the folder that holds it")
    parser.add_argument("--memory", type=_size, required=True, help="of one device, such as 141GiB")
    parser.add_argument("--utilization", type=float, default=0.92, help="share of it that may be in use (0.92)")
    parser.add_argument("--used", type=_size, default=0, help="taken before the cache: weights, activations, graphs")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks (1)")
    parser.add_argument("--block-size", type=int, default=16, help="tokens a block (16)")
    parser.add_argument("--dtype", type=_dtype, help="of the cache; by default the model's")
    parser.add_argument("--state-dtype", type=_dtype, help="of recurrent states; by default the config's, or float32")
    parser.add_argument("--layout", default=DEFAULT_ORDER, help=f"order of the dimensions ({DEFAULT_ORDER})")
    parser.add_argument("--share", action="store_true", help="groups of equal size: layer i of each overlays buffer i")
    parser.add_argument("--pack", action="store_true", help="all layers side by side in each block of one buffer")
    parser.add_argument("--granule", type=_size, default=2 << 20, help="of the device (2MiB)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def run_plan(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Prints the plan; returns 0, or 1 where not even one block fits. Exits with 2 for what cannot be."""
    if options.used > options.memory:
        parser.error(f"--used {options.used} bytes is more than --memory {options.memory} bytes: nothing is left")
    try:
        geometry = _geometry(options)
        fitted = fit_blocks(
            geometry.mapped_bytes_at,
            capacity=geometry.capacity,
            mapped_bytes=0,
            total_bytes=options.memory,
            free_bytes=options.memory - options.used,
            utilization=options.utilization,
        )
    except OutOfMemory as error:
        print(f"OutOfMemory: {error}", file=sys.stderr)
        return 1
    except (ValueError, TypeError, NotImplementedError, OSError) as error:
        parser.error(str(error))
    report = _report(options, geometry, fitted)
    if options.json:
        print(json.dumps(report, indent=2))
        return 0
    print(describe(geometry, fitted.num_blocks))
    print(
        f"\n{fitted.num_blocks} blocks of {geometry.block_size} tokens: {fitted.mapped_bytes / 2**30:.2f} GiB of at "
        f"most {fitted.limit_bytes / 2**30:.2f} GiB a rank ({options.utilization} of {options.memory / 2**30:.2f} GiB, "
        f"{options.used / 2**30:.2f} GiB used before), {options.tp} rank{'s' if options.tp > 1 else ''}"
    )
    if report["tokens_of_one_sequence"] is None:
        count = report["sequences_of_any_length"]
        print(f"{count} sequence{'s' if count > 1 else ''} of any length")
    else:
        print(f"one sequence of up to {report['tokens_of_one_sequence']} tokens")
    return 0


def _geometry(options: argparse.Namespace) -> CacheGeometry:
    specs = specs_from_config(
        options.config, tp_size=options.tp, cache_dtype=options.dtype, state_dtype=options.state_dtype
    )
    groups, names = groups_of(specs)
    if options.share:
        groups = equal_groups(groups)

    def arranged(capacity: int) -> CacheGeometry:
        return arrange(
            groups,
            block_size=options.block_size,
            capacity=capacity,
            granularity=options.granule,
            layout=options.layout,
            names=names,
            shared_by="groups" if options.share else (),
            packed=options.pack,
        )

    return arranged(max(options.memory // arranged(1).block_bytes, 1))


def _report(options: argparse.Namespace, geometry: CacheGeometry, fitted: Plan) -> dict[str, Any]:
    takers = block_takers(geometry)
    most_blocks = blocks_of_any_length(takers)
    return {
        "num_blocks": fitted.num_blocks,
        "block_size": geometry.block_size,
        "tokens_of_one_sequence": tokens_of_one_sequence(takers, fitted.num_blocks),  # None: any length
        "sequences_of_any_length": None if most_blocks is None else fitted.num_blocks // most_blocks,
        "block_bytes": geometry.block_bytes,
        "mapped_bytes": fitted.mapped_bytes,
        "limit_bytes": fitted.limit_bytes,
        "memory_bytes": options.memory,
        "used_bytes": options.used,
        "utilization": options.utilization,
        "tp_size": options.tp,
        "granule_bytes": geometry.granularity,
        "padding_bytes": geometry.padding_bytes,
        "groups": group_rows(geometry, fitted.num_blocks),
    }


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _dtype(text: str) -> Any:
    try:
        return parse_dtype(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None

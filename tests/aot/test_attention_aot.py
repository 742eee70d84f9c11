"""Attention kernels compiled for every target: no spills, no stack, shared memory within limits, matrix instructions.

By default every configuration that the choosers return over the shape table is compiled once for each target; scan
lengths and the two ways to read block ids take turns. `AOT=all` compiles every launch of every shape instead: 2200,
half an hour on two cores.
"""

import os
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.aot.compiling import SM_90, TARGETS, Job, Target, assert_fits
from tests.attention_cases import SHAPES, shape_launches
from triton_kv.launch import Launch

EVERYTHING = os.environ.get("AOT") == "all"
QUICK_SHAPES = 3  # of the table's first ones, on sm_90
# What makes two launches different configurations: how the choosers cut and launch, and how wide a head is.
CONFIGURATION = ("ROWS", "TILE", "K_LANES", "V_LANES", "STAGES", "PARTS")


def configuration(launch: Launch) -> tuple:
    constants = tuple(launch.arguments.get(name) for name in CONFIGURATION)
    itemsize_bytes = launch.arguments["out_ptr"].element_size()
    has_tree = launch.arguments.get("tree_mask_ptr") is not None
    return (launch.kernel.__name__, launch.num_warps, launch.num_stages, itemsize_bytes, has_tree, *constants)


def launches(target: Target) -> Iterator[tuple[str, Launch]]:
    """What to compile for a target: everything, or one launch of each configuration."""
    candidates: dict[tuple, list[tuple[str, Launch]]] = {}
    for shape in SHAPES:
        for name, launch in shape_launches(shape, target.hardware).items():
            key = (f"{shape}-{name}",) if EVERYTHING else configuration(launch)
            candidates.setdefault(key, []).append((f"{shape}-{name}", launch))
    turns: Counter = Counter()

    def turn(found: tuple[str, Launch]) -> tuple:
        launch = found[1]
        return launch.kernel.__name__, launch.arguments["SCAN"], launch.arguments.get("SCALAR_IDS")

    for found in candidates.values():
        chosen = min(found, key=lambda item: turns[turn(item)])
        turns[turn(chosen)] += 1
        yield chosen


def jobs() -> list:
    parameters = []
    quick_shapes = [f"{shape}-" for shape in SHAPES[:QUICK_SHAPES]]
    for target in TARGETS:
        for name, launch in launches(target):
            quick = target is SM_90 and any(name.startswith(shape) for shape in quick_shapes)
            job = Job(name, target, lambda launch=launch: launch)
            parameters.append(pytest.param(job, marks=pytest.mark.quick if quick else ()))
    return parameters


@pytest.mark.parametrize("job", jobs(), ids=str)
def test_attention(job):
    compiled = job.compile()
    assert_fits(compiled)
    launch = job.build()
    if launch.kernel.__name__ != "join_kernel" and launch.arguments["out_ptr"].element_size() == 2:
        assert compiled.matrix_instructions > 0

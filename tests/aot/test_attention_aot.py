"""Attention kernels compiled for every target: no spills, no stack, shared memory within limits, matrix instructions.

By default one launch is compiled of each configuration that the choosers return over the shape table. On sm_90, which
is tuned, and on sm_100 it takes in how lengths are scanned, whether a sequence has several query tokens, and whether
scores are more than causal: on sm_90 each combination of window, soft cap, sinks, ALiBi and no mask that the table has,
on sm_100 any one. Elsewhere those take turns at best. Tree masks are compiled on sm_90. What else is in a launch, such
as the group, strides and the log-sum-exp, takes turns everywhere: `AOT=all` (`make test-aot-all`) compiles every launch
of every shape, 5600.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import triton

from tests.aot.compiling import SM_90, TARGETS, Job, Target, assert_fits
from tests.attention_cases import SHAPES, AttentionShape, shape_launches
from triton_kv.launch import Launch

EVERYTHING = os.environ.get("AOT") == "all"
QUICK_SHAPES = 3  # of the table's first ones, on sm_90
# What makes two launches different configurations: how the choosers cut and launch, and how wide a head is.
CONFIGURATION = ("ROWS", "TILE", "EDGE_TILE", "BOX", "K_LANES", "V_LANES", "STAGES", "PARTS", "SPLIT")
THOROUGH = ("sm_90", "sm_100")  # targets where a configuration is more than that

# Bytes of stack that ptxas leaves to a launch with a Triton release. With 3.6, which the H200 runs, there are none, so
# the choice stays: limits of 224 to 248 registers leave 8 or more to one of the three with 3.8 and with 3.9.
STACKS = {
    "sm_90-8x4-d128-128-b16-bfloat16-prefill-4-16": {"3.9": 16},
    "sm_90-8x4-d128-128-b64-bfloat16-prefill-4-16": {"3.7": 8},
    "sm_90-8x4-d128-128-b12-bfloat16-prefill-4-16": {"3.7": 8, "3.9": 24},
}


def scores_of(launch: Launch) -> tuple[bool, ...]:
    """Window, soft cap, sinks, ALiBi, no causal mask: what there is of them."""
    arguments = launch.arguments
    pointers = (arguments.get(name) is not None for name in ("sinks_ptr", "alibi_slopes_ptr"))
    is_causal = arguments.get("IS_CAUSAL", True)
    return arguments.get("WINDOW", 0) > 0, arguments.get("SOFTCAP_LOG2", 0) > 0, *pointers, not is_causal


def cut_of(launch: Launch) -> tuple:
    """How a launch is cut."""
    arguments = launch.arguments
    itemsize_bytes = arguments["out_ptr"].element_size()
    has_tree = arguments.get("tree_mask_ptr") is not None
    constants = (arguments.get(name) for name in CONFIGURATION)
    return (launch.kernel.__name__, launch.num_warps, launch.num_stages, itemsize_bytes, has_tree, *constants)


def configuration(launch: Launch, target: Target) -> tuple:
    """What a launch stands for."""
    arguments, key = launch.arguments, cut_of(launch)
    if target.name in THOROUGH:
        key += (launch.max_registers, arguments.get("BY_SEQUENCE"), arguments.get("CHANNELS"))
    if target.name in THOROUGH and launch.kernel.__name__ != "join_kernel":
        scores = scores_of(launch)
        key += (arguments["ONE_SCAN"], arguments.get("QUERIES", 1) > 1, scores if target is SM_90 else any(scores))
    if target is SM_90:
        key += (arguments.get("STEP", 1) > 1,)
    return key


def launches(target: Target) -> Iterator[tuple[str, Launch]]:
    """What to compile for a target: everything, or one launch of each configuration."""
    candidates: dict[tuple, list[tuple[str, Launch]]] = {}
    for shape in SHAPES:
        for name, launch in shape_launches(shape, target.hardware).items():
            full_name = f"{shape}-{name}"
            alone = EVERYTHING or f"{target}-{full_name}" in STACKS
            key = (full_name,) if alone else configuration(launch, target)
            candidates.setdefault(key, []).append((full_name, launch))
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
            if "tree" in name and target is not SM_90 and not EVERYTHING:
                continue  # a tree mask adds a load and a comparison to a launch that is compiled without it
            quick = target is SM_90 and any(name.startswith(shape) for shape in quick_shapes)
            job = Job(name, target, lambda launch=launch: launch)
            parameters.append(pytest.param(job, marks=pytest.mark.quick if quick else ()))
    return parameters


def box_jobs() -> list:
    """Launches of which the copy engine brings the tiles: one of each configuration, with and without a window.

    Their registers depend on scores, group and blocks too: `AOT=all` compiles every one.
    """
    parameters = []
    seen = set()
    for target in TARGETS:
        for shape in SHAPES:
            for name, launch in shape_launches(shape, target.hardware).items():
                if launch.arguments.get("BOX"):
                    arguments = launch.arguments
                    key = (target, cut_of(launch), arguments["BOX"], arguments["WINDOW"] > 0)
                    if key in seen and not EVERYTHING:
                        continue
                    seen.add(key)
                    quick = target is SM_90 and name.endswith("-512") and shape.head_dim == 128
                    job = Job(f"{shape}-{name}", target, lambda launch=launch: launch)
                    parameters.append(pytest.param(job, marks=pytest.mark.quick if quick else ()))
    return parameters


@pytest.mark.parametrize("job", box_jobs(), ids=str)
def test_the_copy_engine_brings_tiles_into_a_ring(job):
    compiled = job.compile()
    assert_fits(compiled)
    constants = {name: value for name, value in job.build().arguments.items() if name.isupper()}
    instruction = "wgmma.mma_async" if job.target is SM_90 else "tcgen05.mma"
    assert instruction in compiled.text
    assert "mma.sync" not in compiled.text
    # Of K and V, in one box or two a tile: stages - 1 tiles in front of the loop and one in it, or more on sm_100.
    messages = len(re.findall(r"cp\.async\.bulk\.tensor", compiled.text))
    expected = constants["STAGES"] * 2 * constants["TILE"] // constants["BOX"]
    assert messages == expected if job.target is SM_90 else messages >= expected
    tile_bytes = 2 * constants["TILE"] * (constants["K_LANES"] + constants["V_LANES"])
    assert compiled.shared_bytes >= constants["STAGES"] * tile_bytes
    assert compiled.kernel.metadata.global_scratch_size == 0  # descriptors made on the device would take some


@pytest.mark.parametrize("job", jobs(), ids=str)
def test_attention(job):
    compiled = job.compile()
    stack_bytes = STACKS.get(str(job), {}).get(triton.__version__.rpartition(".")[0], 0)
    assert_fits(compiled, stack_bytes=stack_bytes)
    launch = job.build()
    if launch.kernel.__name__ != "join_kernel" and launch.arguments["out_ptr"].element_size() == 2:
        assert compiled.matrix_instructions > 0


@pytest.mark.quick
@pytest.mark.parametrize("num_seqs", [1, 64])
def test_one_kv_head_is_read_like_eight(num_seqs):
    """In pieces of 16 bytes, past the registers: the compiler has to know what V's offset is a multiple of."""

    def copies(num_kv_heads: int) -> int:
        shape = AttentionShape(num_kv_heads, 8, 128, 128, 16, torch.bfloat16)
        launch = shape_launches(shape, SM_90.hardware, every=False)[f"decode-{num_seqs}"]
        launch = replace(launch, arguments={**launch.arguments, "TILE": 32}, num_warps=2)
        return len(re.findall(r"cp\.async\.cg\.shared\.global .*0x10", Job("", SM_90, lambda: launch).compile().text))

    assert copies(1) == copies(8) > 0

"""The fused norm, rotation and write: compiled for every target, full-width, one variant for steps of any size."""

import os

import pytest
import torch

from tests.aot.compiling import SM_90, TARGETS, Target, assert_fits, compiling_for, num_specialisations, per_target
from tests.aot.test_memory_kernels_aot import vector_stores
from tests.rope_cases import CASES, RopeCase, make_rope
from triton_kv.kernels.rope import rope_write_kernel
from triton_kv.launch import Launch, count_compilations
from triton_kv.layer import operands_of
from triton_kv.rope import rope_launch

NAMED = {str(case): case for case in CASES}
QUICK = ("llama", "qwen3", "gpt_j", "partial_norm", "far_everything", "head_dim_512")


def build_rope(case: RopeCase, target: Target) -> Launch:
    tensors = make_rope(case, "meta")
    return rope_launch(tensors.call(), operands_of(tensors.write.layer), target.hardware)


def distinct_cases() -> dict[str, RopeCase]:
    """One case of each compiled variant: some cases differ in their data only."""
    distinct = {}
    for case in CASES:
        arguments = build_rope(case, SM_90).arguments
        constants = tuple(value for name, value in arguments.items() if name.isupper())
        dtypes = tuple(value.dtype for value in arguments.values() if isinstance(value, torch.Tensor))
        distinct.setdefault((dtypes, constants), case)
    return {str(case): case for case in distinct.values()}


def jobs() -> list:
    """The main variants for every target; others for sm_90, and another target each in turn. `AOT=all`: all for all."""
    found = []
    for number, (name, case) in enumerate(distinct_cases().items()):
        on_all = per_target(name, lambda target, case=case: build_rope(case, target), quick=name in QUICK)
        if name in QUICK or os.environ.get("AOT") == "all":
            found += on_all
        else:
            found += [on_all[index] for index in sorted({TARGETS.index(SM_90), number % len(TARGETS)})]
    return found


@pytest.mark.parametrize("job", jobs(), ids=str)
def test_rope(job):
    compiled = job.compile()
    assert_fits(compiled)
    launch = job.build()
    arguments = launch.arguments
    if job.target.is_cuda and arguments["ROTARY_DIM"] // 2 % arguments["VECTOR"] == 0:
        # Full-width stores for Q, K and V; what else is stored are words of the control block.
        vector_bytes = arguments["VECTOR"] * arguments["k_ptr"].element_size()
        row_bytes = (2 * arguments["ROTARY_DIM"] + arguments["V_HEAD_DIM"]) * arguments["k_ptr"].element_size()
        threads = launch.num_warps * job.target.gpu.warp_size
        wanted = max(arguments["ROWS"] * row_bytes // (vector_bytes * threads), 3)
        assert vector_stores(job.target, compiled.text).count(vector_bytes) >= wanted


@pytest.mark.quick
def test_rope_has_one_variant():
    """Steps of any size, more blocks, a longer table, and slots and positions at any alignment compile nothing new."""
    tensors = make_rope(NAMED["qwen3"], "meta")
    operands = operands_of(tensors.write.layer)

    def compile_step(num_tokens: int, num_blocks: int, max_position: int) -> None:
        def values(heads: int) -> torch.Tensor:
            return torch.empty(num_tokens, heads, 128, dtype=torch.bfloat16, device="meta")

        ids = torch.empty(num_tokens + 1, dtype=torch.int64, device="meta")[1:]
        call = tensors.call()._replace(
            q_out=values(4),
            k=values(2),
            v=values(2),
            slot_mapping=ids,
            positions=ids,
            cos_sin_cache=torch.empty(max_position, 128, dtype=torch.bfloat16, device="meta"),
        )
        rope_launch(call, operands._replace(num_blocks=num_blocks), SM_90.hardware).compile(load=False)

    with compiling_for(SM_90):
        compile_step(2, 1, 2)
        before = num_specialisations(rope_write_kernel, SM_90)
        with count_compilations() as compiled:
            for num_tokens, num_blocks in [(1, 1), (16, 16), (17, 1000), (65536, 1 << 20), (1 << 28, 2**31 - 1)]:
                compile_step(num_tokens, num_blocks, num_blocks)
    assert compiled == []
    assert num_specialisations(rope_write_kernel, SM_90) == before

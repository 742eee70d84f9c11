"""The kernels that only move bytes, zero and write: compiled for every target, full-width, one variant each."""

import re

import pytest
import torch

from tests.aot.compiling import SM_90, Target, assert_fits, compiling_for, num_specialisations, per_target
from tests.write_cases import CASES, WriteCase, make_tensors
from triton_kv.blocks import copy_launch, zero_launches
from triton_kv.kernels.write import write_kernel
from triton_kv.kernels.zero import zero_kernel
from triton_kv.launch import Launch, count_compilations
from triton_kv.layer import operands_of
from triton_kv.writing import write_launch


def vector_stores(target: Target, text: str) -> list[int]:
    """Bytes a thread stores to global memory at once, one entry an instruction."""
    if target.is_cuda:
        found = re.findall(r"\bst\.global(?:\.v(\d))?\.b(\d+)", text)
        return [int(count or 1) * int(bits) // 8 for count, bits in found]
    widths = {"byte": 1, "short": 2, "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}
    return [widths[name] for name in re.findall(r"\b(?:global|buffer)_store_(\w+?)(?:_d16_hi)?\b", text)]


def build_zero(target: Target) -> Launch:
    (launch,) = zero_launches(1 << 40, 1 << 30, stride=1 << 31, count=64)
    return launch


@pytest.mark.parametrize("job", per_target("zero", build_zero, quick=True), ids=str)
def test_zero(job):
    compiled = job.compile()
    assert_fits(compiled)
    assert compiled.shared_bytes == 0
    stores = vector_stores(job.target, compiled.text)
    # The middle goes 16 bytes at a time whatever the alignment, the two ragged ends byte by byte.
    threads = job.build().num_warps * job.target.gpu.warp_size
    assert stores.count(16) == 4096 // (16 * threads)
    assert stores.count(1) == 2
    assert set(stores) == {1, 16}


def build_copy(target: Target, alignment: int) -> Launch:
    addresses = torch.empty(64, 3, dtype=torch.int64, device="meta")
    pairs = torch.empty(16, 2, dtype=torch.int32, device="meta")
    control = torch.empty(8, dtype=torch.int32, device="meta")
    return copy_launch(addresses, pairs, control, alignment=alignment, largest_block_bytes=32 << 10)


@pytest.mark.parametrize("job", per_target("copy", lambda target: build_copy(target, 16), quick=True), ids=str)
def test_copy(job):
    compiled = job.compile()
    assert_fits(compiled)
    assert compiled.shared_bytes <= 16  # the atomic's answer, for all threads to see
    stores = vector_stores(job.target, compiled.text)
    threads = job.build().num_warps * job.target.gpu.warp_size
    assert stores.count(16) >= 8192 // (16 * threads), "blocks go 16 bytes at a time"


def build_write(case: WriteCase) -> Launch:
    tensors = make_tensors(case, "meta")
    return write_launch(tensors.k, tensors.v, operands_of(tensors.layer), tensors.slot_mapping)


def distinct_writes() -> dict[str, WriteCase]:
    """One case of each compiled variant: some cases differ in their data only."""
    distinct = {}
    for case in CASES:
        arguments = build_write(case).arguments
        constants = tuple(value for name, value in arguments.items() if name.isupper())
        distinct.setdefault((case.dtype, case.slot_dtype, arguments["control_ptr"] is None, constants), case)
    return {case.name: case for case in distinct.values()}


WRITE_JOBS = [
    job
    for name, case in distinct_writes().items()
    for job in per_target(name, lambda _, case=case: build_write(case), quick=True)
]


@pytest.mark.parametrize("job", WRITE_JOBS, ids=str)
def test_write(job):
    compiled = job.compile()
    assert_fits(compiled)
    # So many full-width stores move all of K and V; what else is stored are words of the control block.
    launch = job.build()
    vector_bytes = launch.arguments["VECTOR"] * launch.arguments["k_ptr"].element_size()
    full_width = 2 * launch.arguments["NUM_VECTORS"] // (launch.num_warps * job.target.gpu.warp_size)
    assert vector_stores(job.target, compiled.text).count(vector_bytes) >= full_width


@pytest.mark.quick
def test_zero_has_one_variant():
    sizes = [(1, 0, 1), (16, 16, 5), (1 << 20, 1 << 21, 64), (5 << 30, 6 << 30, 2), (12345, 54321, 70000)]
    with compiling_for(SM_90):
        build_zero(SM_90).compile(load=False)
        with count_compilations() as compiled:
            for num_bytes, stride, count in sizes:
                for launch in zero_launches((1 << 40) + num_bytes, num_bytes, stride=stride, count=count):
                    launch.compile(load=False)
    assert compiled == []
    assert num_specialisations(zero_kernel, SM_90) == 1


@pytest.mark.quick
def test_write_has_one_variant():
    """Steps of any size, more blocks, and slots at any alignment compile nothing new."""
    case = next(case for case in CASES if case.name == "two_segments")
    operands = operands_of(make_tensors(case, "meta").layer)

    def compile_step(num_tokens: int, num_blocks: int) -> None:
        k = torch.empty(num_tokens, case.num_kv_heads, case.head_dim, dtype=case.dtype, device="meta")
        slots = torch.empty(num_tokens + 1, dtype=torch.int64, device="meta")[1:]
        write_launch(k, k, operands._replace(num_blocks=num_blocks), slots).compile(load=False)

    with compiling_for(SM_90):
        compile_step(2, 1)
        before = num_specialisations(write_kernel, SM_90)
        with count_compilations() as compiled:
            for num_tokens, num_blocks in [(1, 1), (16, 16), (17, 1000), (65536, 1 << 20), (1 << 30, 2**31 - 1)]:
                compile_step(num_tokens, num_blocks)
    assert compiled == []
    assert num_specialisations(write_kernel, SM_90) == before

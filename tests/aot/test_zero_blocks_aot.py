"""The kernels that zero over a table of segments: compiled for every target, full-width stores, no stack."""

import pytest
import torch

from tests.aot.compiling import Target, assert_fits, per_target
from tests.aot.test_memory_kernels_aot import vector_stores
from triton_kv.kernels.zero import zero_blocks_kernel, zero_table_kernel
from triton_kv.launch import Launch

HEADER = torch.empty(1, dtype=torch.int64, device="meta")
CONTROL = torch.empty(8, dtype=torch.int32, device="meta")


def build_range(target: Target) -> Launch:
    arguments = {"header_ptr": HEADER, "first_block": 0, "num_blocks": 1 << 20, "limit_bytes": 8 << 20}
    return Launch(zero_table_kernel, (8, 64), {**arguments, "BLOCK_WORDS": 1024}, num_warps=4, num_stages=1)


def build_blocks(dtype: torch.dtype, target: Target) -> Launch:
    arguments = {
        "header_ptr": HEADER,
        "ids_ptr": torch.empty(64, dtype=dtype, device="meta"),
        "control_ptr": CONTROL,
        "KIND": 4,
        "BLOCK_WORDS": 1024,
    }
    return Launch(zero_blocks_kernel, (64, 64), arguments, num_warps=4, num_stages=1)


JOBS = [
    *per_target("range", build_range, quick=True),
    *per_target("blocks_int32", lambda target: build_blocks(torch.int32, target), quick=True),
    *per_target("blocks_int64", lambda target: build_blocks(torch.int64, target)),
]


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_zeroing_over_a_table(job):
    compiled = job.compile()
    assert_fits(compiled)
    assert compiled.shared_bytes <= 4  # the result of a compare-and-swap, for all threads
    if job.target.is_cuda:  # AMD's compiler unrolls as it sees fit
        stores = vector_stores(job.target, compiled.text)
        threads = job.build().num_warps * job.target.gpu.warp_size
        assert stores.count(16) == 4096 // (16 * threads)
        assert stores.count(1) == 2

"""The kernel that gathers blocks: compiled for every target, full-width stores, no stack, one variant a page size."""

from functools import partial

import pytest

from tests.aot.compiling import SM_90, Target, assert_fits, compiling_for, per_target
from tests.aot.test_memory_kernels_aot import vector_stores
from triton_kv.gathering import BlockPlaces, gather_launch
from triton_kv.launch import Launch, count_compilations


def build(scatter: bool, target: Target, block_bytes: int = 32 << 10) -> Launch:
    places = BlockPlaces(1 << 40, 64, 1 << 36, block_bytes)
    return gather_launch(places, 1 << 41, 500, 1 << 42, scatter=scatter)


JOBS = [
    *per_target("gather", partial(build, False), quick=True),
    *per_target("scatter", partial(build, True), quick=True),
    *per_target("bytes", partial(build, False, block_bytes=4099)),
]


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_gather(job):
    compiled = job.compile()
    assert_fits(compiled)
    assert compiled.shared_bytes == 0
    if job.build().arguments["ALIGNMENT"] == 16:
        threads = job.build().num_warps * job.target.gpu.warp_size
        assert vector_stores(job.target, compiled.text) == [16] * (8192 // (16 * threads))


@pytest.mark.quick
def test_gather_has_one_variant():
    with compiling_for(SM_90):
        build(False, SM_90).compile(load=False)
        with count_compilations() as compiled:
            for num_ids, segments, at in [(1, 1, 16), (16, 16, 48), (1 << 20, 640, 1 << 30), (17, 3, 1 << 45)]:
                places = BlockPlaces(at, segments, 1 << 36, 32 << 10)
                gather_launch(places, at + 4, num_ids, at).compile(load=False)
    assert compiled == []

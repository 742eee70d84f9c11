"""The kernel that joins two attention results: compiled for every target, reads and writes 16 bytes at a time."""

import pytest
import torch

from tests.aot.compiling import Target, assert_fits, per_target
from tests.aot.test_memory_kernels_aot import vector_stores
from triton_kv.launch import Launch
from triton_kv.merging import merge_launch


def build_merge(dtype: torch.dtype, head_dim: int, target: Target) -> Launch:
    out = torch.empty(7, 32, head_dim, dtype=dtype, device="meta")
    lse = torch.empty(7, 32, device="meta")
    return merge_launch(out, lse, out, lse, out, lse)


def jobs() -> list:
    return [
        job
        for dtype in (torch.bfloat16, torch.float32)
        for head_dim in (16, 80, 128, 512)
        for job in per_target(
            f"merge-d{head_dim}-{dtype}".replace("torch.", ""),
            lambda target, dtype=dtype, head_dim=head_dim: build_merge(dtype, head_dim, target),
            quick=head_dim == 128,
        )
    ]


@pytest.mark.parametrize("job", jobs(), ids=str)
def test_merge(job):
    compiled = job.compile()
    assert_fits(compiled)
    assert max(vector_stores(job.target, compiled.text)) == 16

"""The kernel that unpacks a step's metadata: compiled for every target over small and large static tensors."""

import pytest
import torch

from tests.aot.compiling import assert_fits, per_target
from triton_kv.launch import Launch
from triton_kv.metadata import unpack_launch

# max_tokens, max_seqs, max_blocks_per_seq
SIZES = {"one_of_all": (1, 1, 1), "small": (64, 8, 33), "serving": (8192, 256, 2048), "long": (65536, 1024, 1 << 16)}


def build(max_tokens: int, max_seqs: int, max_blocks: int) -> Launch:
    def int32(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.int32, device="meta")

    slots = torch.empty(max_tokens, dtype=torch.int64, device="meta")
    packed = int32(32 + 2 * max_tokens + 4 * max_seqs + 1 + max_seqs * max_blocks)
    return unpack_launch(packed, int32(max_seqs, max_blocks), int32(max_seqs), int32(max_seqs + 1), slots)


JOBS = [job for name, size in SIZES.items() for job in per_target(name, lambda _, size=size: build(*size), quick=True)]


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_unpack(job):
    assert_fits(job.compile())

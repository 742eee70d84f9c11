"""Zeroing on a GPU: every alignment, many and large ranges, one compilation, on the current stream."""

import pytest
import torch

from tests import zero_cases
from triton_kv.blocks import zero_ranges
from triton_kv.launch import count_compilations

CUDA = torch.device("cuda")
GIB = 1 << 30


@pytest.mark.parametrize("case", zero_cases.CASES, ids=str)
def test_only_the_ranges_become_zero(case):
    zero_cases.check(case, CUDA)


@pytest.mark.parametrize("num_bytes", [1, 2, 4, 8, 15, 16, 17, 31, 32, 33, 63, 4095, 4097, 12345])
def test_every_alignment(num_bytes):
    zero_cases.check_every_alignment(num_bytes, CUDA)


def test_more_ranges_than_a_grid_has_rows():
    zero_cases.check(zero_cases.ZeroCase("", 3, 17, 48, 70_000), CUDA)


def test_beyond_4_gib():
    memory = torch.full((5 * GIB,), zero_cases.POISON, dtype=torch.uint8, device=CUDA)
    zero_ranges(memory.data_ptr() + 7, 5 * GIB - 12, stride=0, count=1, device=memory.device)
    assert memory[:7].tolist() == [zero_cases.POISON] * 7
    assert memory[-5:].tolist() == [zero_cases.POISON] * 5
    assert not memory[7:-5].any()


def test_sizes_compile_nothing_new():
    memory = torch.full((1 << 22,), zero_cases.POISON, dtype=torch.uint8, device=CUDA)
    zero_ranges(memory.data_ptr(), 16, stride=0, count=1, device=memory.device)
    with count_compilations() as compiled:
        for offset, num_bytes, stride, count in [
            (0, 1, 0, 1),
            (5, 1 << 20, 1 << 21, 2),
            (16, 16, 16, 16),
            (1, 7, 3, 999),
        ]:
            zero_ranges(memory.data_ptr() + offset, num_bytes, stride=stride, count=count, device=memory.device)
    assert compiled == []


def test_it_runs_on_the_current_stream():
    """In order with work queued there before: a fill behind a long wait must not overtake the zeroing."""
    memory = torch.empty(1 << 20, dtype=torch.uint8, device=CUDA)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        memory.fill_(zero_cases.POISON)
        zero_ranges(memory.data_ptr(), 1 << 20, stride=0, count=1, device=memory.device)
    stream.synchronize()
    assert not memory.any()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current_one():
    zero_cases.check(zero_cases.CASES[6], torch.device("cuda", 1))
    assert torch.cuda.current_device() == 0

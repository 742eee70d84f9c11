"""The unpack kernel in the interpreter: every step, and nothing outside of the static tensors."""

import pytest
import torch

from tests.metadata_cases import (
    BLOCK_SIZE,
    STEPS,
    check_step,
    large_step,
    make_buffers,
    make_large_buffers,
    static_tensors,
)
from triton_kv.kernels.unpack import unpack_kernel
from triton_kv.launch import interpreted
from triton_kv.metadata import unpack_launch, unpack_reference

pytestmark = pytest.mark.quick

IDS = [step[0] for step in STEPS]


@pytest.mark.parametrize("step", [step[1:] for step in STEPS], ids=IDS)
def test_fill(step):
    assert interpreted(unpack_kernel)
    buffers = make_buffers()
    buffers.fill(*step)
    check_step(buffers, *step)


@pytest.mark.parametrize("step", [step[1:] for step in STEPS], ids=IDS)
def test_padding_after_a_full_step(step):
    buffers = make_buffers()
    buffers.fill(*STEPS[IDS.index("full")][1:])
    buffers.fill(*step)
    check_step(buffers, *step)


def test_a_large_step():
    buffers, (table, lens, slots, query_lens) = make_large_buffers(), large_step()
    buffers.fill(table, lens, slots, query_lens)
    check_step(buffers, table, lens, slots, query_lens, BLOCK_SIZE)


def test_dummy():
    buffers = make_buffers(BLOCK_SIZE)
    buffers.dummy(20, 3)
    check_step(buffers, [[0, 0]] * 3, [7, 7, 6], [0] * 20, [7, 7, 6])


@pytest.mark.parametrize("step", [step[1:] for step in STEPS], ids=IDS)
def test_kernel_and_reference_agree_and_keep_to_their_tensors(step):
    """Each tensor is a slice out of a larger one whose rest must stay."""
    buffers = make_buffers()
    buffers.fill(*step)
    packed = buffers.launch.arguments["packed_ptr"]
    table, lens, slots, starts = static_tensors(buffers)
    results = []
    for run in ("kernel", "reference"):
        rooms = [torch.full((x.numel() + 64,), -777, dtype=x.dtype) for x in (table, lens, starts, slots)]
        inner = [room[32:-32] for room in rooms]
        tensors = (packed, inner[0].view_as(table), *inner[1:])
        unpack_launch(*tensors).run() if run == "kernel" else unpack_reference(*tensors)
        results.append(rooms)
    for ours, wanted in zip(*results, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=0, atol=0)
        assert ours[:32].eq(-777).all()
        assert ours[-32:].eq(-777).all()

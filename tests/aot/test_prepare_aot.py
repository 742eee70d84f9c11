"""The kernel that finds every chunk's place once a step: compiled for every target, however lengths are scanned."""

import pytest
import torch

from tests.aot.compiling import Target, assert_fits, per_target
from tests.attention_cases import SHAPES, shape_operands
from triton_kv.batch import Batch
from triton_kv.decode import CHUNK_WORDS, choice_of, prepare_launch
from triton_kv.launch import Launch


def build_prepare(num_seqs: int, queries: int, window: int, batch_invariant: bool, target: Target) -> Launch:
    def words(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.int32, device="meta")

    shape = SHAPES[0]
    operands = shape_operands(shape)
    starts = None if queries == 1 else words(num_seqs + 1)
    batch = Batch(words(num_seqs, 512), words(num_seqs), starts, None, queries)
    choice = choice_of(batch, shape.num_kv_heads * shape.group, operands, target.hardware, batch_invariant)
    return prepare_launch(operands, batch, window, choice, words(choice.num_chunks, CHUNK_WORDS.value))


def jobs() -> list:
    cases = {
        "1": (1, 1, 0, False),
        "64": (64, 1, 0, False),
        "2000": (2000, 1, 0, False),
        "2000-4-window": (2000, 4, 1000, False),
        "invariant": (16, 1, 0, True),
    }
    return [
        job
        for name, case in cases.items()
        for job in per_target(f"prepare-{name}", lambda target, case=case: build_prepare(*case, target), quick=True)
    ]


@pytest.mark.parametrize("job", jobs(), ids=str)
def test_prepare(job):
    assert_fits(job.compile())

"""The attention kernels in the interpreter: shapes, strides, groups, block sizes, and all that must not be read."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.attention_cases import (
    BOX_CASES,
    DECODE_CASES,
    FORCED_CASES,
    VARLEN_CASES,
    assert_attention,
    chain_words,
    make_tensors,
)
from triton_kv import attention, prefill
from triton_kv.attention import paged_attention
from triton_kv.choices import Hardware
from triton_kv.copy_engine import boxes
from triton_kv.kernels.decode import decode_kernel
from triton_kv.launch import interpreted
from triton_kv.metadata import AttentionMetadata
from triton_kv.prefill_hopper import use_prefill_kernel

QUICK = {"skew", "f16", "group_3", "block_12", "over_watermark", "dim_80", "mixed", "padding_tokens", "many_seqs"}
QUICK |= {"tree_few_window", "tree_window"}
QUICK_BOXES = {"block_64", "block_128", "window", "bad_ids", "layout_LBTHND"}


def cases(kind, table, quick=QUICK):
    return [pytest.param(case, id=f"{kind}-{case}", marks=[pytest.mark.quick] * (case.name in quick)) for case in table]


def attend(case, monkeypatch, architecture=80, **changes):
    monkeypatch.setattr(attention, "hardware_of", lambda device: Hardware(case.num_sms, architecture))
    tensors = make_tensors(case)
    arguments = {**tensors.arguments, **changes}
    out = tensors.out()
    returned, lse = paged_attention(tensors.q, tensors.layer, tensors.metadata, out=out, return_lse=True, **arguments)
    assert returned is out
    return tensors, out, lse


@pytest.mark.parametrize("case", [*cases("decode", DECODE_CASES), *cases("varlen", VARLEN_CASES)])
def test_kernels_equal_the_naive_loop(case, monkeypatch):
    assert interpreted(decode_kernel)
    assert_attention(*attend(case, monkeypatch))


@pytest.mark.parametrize("case", cases("forced", FORCED_CASES))
def test_the_prefill_kernel_takes_few_query_tokens(case, monkeypatch):
    with use_prefill_kernel("portable"):
        assert_attention(*attend(case, monkeypatch))


@pytest.mark.parametrize("case", cases("boxes", BOX_CASES, QUICK_BOXES))
def test_tiles_come_in_boxes_of_one_block(case, monkeypatch):
    """As on a GPU with a copy engine: a box out of bounds is zeros, and what it would have read is poison."""
    loaded = []
    monkeypatch.setattr(prefill, "boxes", lambda *arguments: loaded.append(arguments) or boxes(*arguments))
    with use_prefill_kernel("portable"):
        assert_attention(*attend(case, monkeypatch, architecture=90))
    assert len(loaded) == (0 if case.tree and case.window else 2)


CHAINS = {"context", "window", "window_1", "speculative_window"}


@pytest.mark.parametrize("case", [case for case in VARLEN_CASES if case.name in CHAINS], ids=str)
def test_a_chain_is_the_causal_mask(case, monkeypatch):
    _, out, lse = attend(case, monkeypatch)
    _, chain_out, chain_lse = attend(case, monkeypatch, tree_mask=chain_words(case))
    torch.testing.assert_close(chain_out, out, rtol=0, atol=1e-6)
    torch.testing.assert_close(chain_lse, lse, rtol=0, atol=1e-6)


@pytest.mark.parametrize("max_query_len", [8, 30], ids=["decode", "prefill"])
def test_invariant_bits_for_one_max_query_len(max_query_len, monkeypatch):
    """One query token of 150, alone in padding, in front of a longer neighbour, and behind it."""
    monkeypatch.setattr(attention, "hardware_of", lambda device: Hardware(4, 80))
    generator = torch.Generator().manual_seed(1)
    k, v = (torch.randn(20, 16, 1, 64, generator=generator).half() for _ in range(2))
    q = torch.randn(1, 4, 64, generator=generator).half()
    others = torch.randn(max_query_len, 4, 64, generator=generator).half()
    tables = torch.arange(20, dtype=torch.int32).view(2, 10)

    def attend_to(q, tables, seq_lens, starts):
        metadata = AttentionMetadata(
            block_table=tables,
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            slot_mapping=torch.full((len(q),), -1),
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            num_tokens=len(q),
            num_seqs=len(seq_lens),
            max_query_len=max_query_len,
        )
        return paged_attention(q, (k, v), metadata, batch_invariant=True)

    rows = torch.cat((q, others))
    alone = attend_to(rows[:-1], tables[:1], [150], [0, 1])[0]
    in_front = attend_to(rows, tables, [150, 100], [0, 1, 1 + max_query_len])[0]
    behind = attend_to(rows.roll(-1, 0), tables.flip(0), [100, 150], [0, max_query_len, 1 + max_query_len])[-1]
    assert torch.equal(alone, in_front)
    assert torch.equal(alone, behind)


AT_THE_EDGE = """
import sys
import torch
from triton_kv import AttentionSpec, HostMemory, KVCache
from triton_kv.attention import paged_attention
from triton_kv.kernels.decode import decode_kernel
from triton_kv.launch import interpreted
from triton_kv.metadata import AttentionMetadata

assert interpreted(decode_kernel)
kind, length = sys.argv[1], int(sys.argv[2])
memory = HostMemory(granularity=4096)
spec = AttentionSpec(num_kv_heads=1, head_dim=16, dtype=torch.float32)
cache = KVCache.reserve(spec, num_layers=1, block_size=16, capacity=64, memory=memory).extend(4)
address = memory.reserve(8192)
handle = memory.create(4096)
memory.map(address, 4096, handle)
memory.set_access(address, 4096)
table = memory.view(address + 4096 - 12, 16, cache).view(torch.int32)  # only its first three entries are mapped
table[:3] = torch.tensor([3, 63, 2])  # block 63 is not committed
queries = 1 if kind == "decode" else 5
metadata = AttentionMetadata(
    block_table=table[None],
    seq_lens=torch.tensor([length], dtype=torch.int32),
    slot_mapping=torch.full((queries,), -1),
    query_start_loc=None if kind == "decode" else torch.tensor([0, queries], dtype=torch.int32),
    num_tokens=queries,
    num_seqs=1,
    max_query_len=queries,
)
out = paged_attention(torch.ones(queries, 2, 16), cache[0], metadata)
assert not out.isnan().any()
assert cache.check().num_errors == 1
"""


@pytest.mark.parametrize(
    ("length", "code"),
    [pytest.param(47, 0, id="part"), pytest.param(48, 0, id="whole"), pytest.param(49, -11, id="one_token_too_many")],
)
@pytest.mark.parametrize("kind", ["decode", "varlen"])
def test_nothing_outside_mapped_memory_is_read(kind, length, code):
    """The last row of a table ends where mapped memory ends; so does the cache. SIGSEGV if a kernel reads one more."""
    command = [sys.executable, "-c", AT_THE_EDGE, kind, str(length)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == code, done.stderr

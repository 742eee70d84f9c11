"""Over HostMemory an interpreted kernel that goes one byte too far dies, as it would on a GPU.

Every other test in this folder rests on it: what does not fault stayed inside committed memory.
"""

import signal
import subprocess
import sys

import pytest

ZERO = """
import torch
from triton_kv.blocks import zero_ranges
from triton_kv.memory import HostMemory

memory = HostMemory()
granule = memory.granularity
base = memory.reserve(3 * granule)
handle = memory.create(granule)
memory.map(base + granule, granule, handle)  # nothing in front of it, nothing behind
memory.set_access(base + granule, granule)
zero_ranges(base + granule + {offset}, granule + {more}, stride=0, count=1, device=torch.device("cpu"))
"""

WRITE = """
import torch
from triton_kv import AttentionSpec, HostMemory, KVCache, write_kv

spec = AttentionSpec(num_kv_heads=1, head_dim=64, dtype=torch.float32)
memory = HostMemory(granularity=4096)  # 16 tokens, one block, of K or V
cache = KVCache.reserve(spec, block_size=16, num_layers=1, capacity=8, memory=memory).extend(3)
cache.control[0] += {watermark_error}
k = torch.ones(1, 1, 64)
write_kv(k, k, cache[0], torch.tensor([3 * 16 + {offset}]))
"""


def exit_code(program: str) -> int:
    return subprocess.run([sys.executable, "-c", program], timeout=120).returncode


@pytest.mark.quick
@pytest.mark.parametrize(
    ("offset", "more", "code"),
    [(0, 0, 0), (0, 1, -signal.SIGSEGV), (-1, 0, -signal.SIGSEGV)],
    ids=["exactly_a_granule", "one_byte_more", "one_byte_earlier"],
)
def test_zero_at_the_edge_of_a_granule(offset, more, code):
    assert exit_code(ZERO.format(offset=offset, more=more)) == code


@pytest.mark.parametrize(
    ("watermark_error", "offset", "code"),
    [(0, 0, 0), (1, -1, 0), (1, 0, -signal.SIGSEGV)],
    ids=["dropped", "last_slot", "watermark_too_high"],
)
def test_write_at_the_watermark(watermark_error, offset, code):
    """The watermark alone keeps a write away from memory that is not there."""
    assert exit_code(WRITE.format(watermark_error=watermark_error, offset=offset)) == code

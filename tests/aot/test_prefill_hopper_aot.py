"""The Hopper prefill kernel compiled for sm_90: what its speed rests on, counted in the machine code."""

import re
import subprocess
from pathlib import Path

import pytest
import triton

from tests.aot.compiling import SM_90, Job, assert_fits
from tests.prefill_cases import HOPPER_VARIANTS, hopper_pair
from triton_kv.choices import HOPPER_TRITONS
from triton_kv.prefill_hopper import TRITON_VERSION

pytestmark = pytest.mark.skipif(
    TRITON_VERSION not in HOPPER_TRITONS, reason=f"the Hopper kernel is not chosen with Triton {triton.__version__}"
)


def jobs(part):
    for variant in HOPPER_VARIANTS:
        shape, num_seqs, query_len, causal = variant
        name = f"{shape}-{num_seqs}x{query_len}" + ("" if causal else "-non_causal")
        job = Job(name, SM_90, lambda variant=variant: hopper_pair(*variant, SM_90.hardware)[part])
        yield pytest.param(job, id=name, marks=pytest.mark.quick)


def machine_code(compiled, folder):
    cubin = Path(folder, "kernel.cubin")
    cubin.write_bytes(compiled.kernel.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    return subprocess.run([tool, "-c", cubin], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("job", list(jobs(1)))
def test_matrix_instructions_overlap_and_nothing_spills(job, tmp_path):
    compiled = job.compile()
    launch = job.build()
    arguments = launch.arguments
    consumers, head_dim = arguments["CONSUMERS"], arguments["HEAD_DIM"]
    # A thread's at the start: what the consumers and the producers then trade.
    assert compiled.resources["REG"] == launch.max_registers == {2: 168, 3: 128}[consumers]
    code = machine_code(compiled, tmp_path)
    overlaps = arguments["Q_BUFFERS"] == 2
    # Each consumer has the first scores, the loop, and the last values; beside these the first scores of the next item,
    # where its queries are there already, else those behind them.
    values = 3 if overlaps else 2
    assert len(re.findall(r"\bHGMMA\b", code)) == consumers * (3 * head_dim + values * arguments["KEYS"]) // 16
    # Where ptxas must serialise, it waits behind every instruction.
    assert len(re.findall(r"\bWARPGROUP\.DEPBAR\b", code)) == consumers * (6 if overlaps else 5)
    assert compiled.shared_bytes <= SM_90.shared_limit_bytes
    if consumers == 3:
        # 160 registers are some twelve too few. With them three consumers are still the faster ones over long prompts.
        assert compiled.resources["STACK"] <= 96
    elif head_dim == 256:
        assert compiled.resources["STACK"] <= 8  # two numbers, once an item
    else:
        assert_fits(compiled)
        assert not re.findall(r"\b(?:STL|LDL)\b", code)
    assert "UTMALDG" in code
    # A box may hold more heads than the group has: then its rows are stored one by one.
    assert ("UTMASTG" in code) == (arguments["GROUP"] % arguments["PACKED"] == 0)


@pytest.mark.parametrize("job", list(jobs(0)))
def test_the_work_list_compiles_without_spills(job):
    compiled = job.compile()
    assert_fits(compiled)
    assert compiled.resources["REG"] <= 96

"""What the hardware can do, measured at the start of a run: read, write, copy and matrix product."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from bench.record import ROOFLINES
from bench.replay import cuda_group_us, eager_replay
from bench.timing import Samples

if TYPE_CHECKING:
    from collections.abc import Callable

BUFFER_BYTES = 8 << 30
READ_SHAPES = ((1024, 16, 4), (2048, 8, 4), (4096, 8, 8), (2048, 16, 8))  # words a step, steps, warps


@triton.jit
def sum_kernel(  # type: ignore[no-untyped-def]
    source_ptr,  # int32 [num_programs * STEPS * WORDS]
    out_ptr,  # int32 [num_programs]
    WORDS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Program p reads its STEPS * WORDS words and stores their sum."""
    program = tl.program_id(0).to(tl.int64)
    word = tl.arange(0, WORDS)
    total = tl.zeros([WORDS], tl.int32)
    for step in tl.static_range(STEPS):
        total += tl.load(source_ptr + (program * STEPS + step) * WORDS + word)
    tl.store(out_ptr + program, tl.sum(total, 0))


@triton.jit
def fill_kernel(  # type: ignore[no-untyped-def]
    out_ptr,  # int32 [num_programs * WORDS]
    value,
    WORDS: tl.constexpr,
):
    """Program p stores its WORDS words."""
    word = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    tl.store(out_ptr + word, tl.zeros([WORDS], tl.int32) + value)


def measure_rooflines(device: torch.device, *, quick: bool = False) -> dict[str, Any]:
    """GB/s of reading, writing and copying (both directions counted) 8 GiB, TFLOP/s of a bf16 8192^3 product.

    Each is the best of its variants' medians, with idle in front. On a CPU all are None: nothing there is compared.
    """
    if device.type != "cuda":
        return dict.fromkeys(ROOFLINES)
    rounds = 2 if quick else 4
    return {**_bandwidths(device, rounds), "matmul_tflops": _matmul_tflops(device, rounds)}


def _bandwidths(device: torch.device, rounds: int) -> dict[str, float]:
    words = torch.empty(BUFFER_BYTES // 4, dtype=torch.int32, device=device)
    totals = torch.empty(words.numel() // min(w * s for w, s, _ in READ_SHAPES), dtype=torch.int32, device=device)
    half = words.numel() // 2
    words.random_()

    def read(step: int, steps: int, warps: int) -> Callable[[int], Any]:
        grid = (words.numel() // (step * steps),)
        return lambda _: sum_kernel[grid](words, totals, WORDS=step, STEPS=steps, num_warps=warps)

    def write(_: int) -> None:
        fill_kernel[(words.numel() // 1024,)](words, 7, WORDS=1024, num_warps=4)

    reading = min(_best_us(read(*shape), rounds) for shape in READ_SHAPES)
    copying = _best_us(lambda _: words[half:].copy_(words[:half]), rounds)
    writing = min(_best_us(write, rounds), _best_us(lambda _: words.zero_(), rounds))
    return {
        "read_gbps": round(BUFFER_BYTES / reading / 1e3, 1),
        "write_gbps": round(BUFFER_BYTES / writing / 1e3, 1),
        "copy_gbps": round(BUFFER_BYTES / copying / 1e3, 1),  # half of it read, half written
    }


def _matmul_tflops(device: torch.device, rounds: int) -> float:
    left = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    right = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    product = torch.empty_like(left)
    return round(2 * 8192**3 / _best_us(lambda _: torch.mm(left, right, out=product), rounds) / 1e6, 1)


def _best_us(run: Callable[[int], Any], rounds: int) -> float:
    samples = Samples()
    replay = eager_replay(run, launches=1, sets=1)
    replay.start()
    torch.cuda.synchronize()
    for _ in range(rounds):
        time.sleep(0.03)
        for duration in cuda_group_us(replay, samples=3, hide_us=300.0):
            samples.add(duration)
    return samples.median_us

"""Cases of `merge_attention` that the tests share: rows with keys on both sides, on one, and on none."""

from __future__ import annotations

import torch

SHAPES = {"1x1x16": (1, 1, 16), "7x3x80": (7, 3, 80), "40x4x128": (40, 4, 128), "5x2x192": (5, 2, 192)}
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def make(shape: tuple[int, int, int], dtype: torch.dtype, device: str = "cpu"):
    """(out_a, lse_a, out_b, lse_b); where a side has no keys its output is NaN."""
    random = torch.Generator().manual_seed(3)
    tensors = []
    for index in range(2):
        out = torch.randn(shape, generator=random)
        lse = 3 * torch.randn(shape[:2], generator=random)
        empty = (torch.arange(lse.numel()).view(lse.shape) // (index + 1)) % 3 == 1
        lse[empty] = torch.inf if index else -torch.inf
        out[empty] = torch.nan
        tensors += [out.to(dtype).to(device), lse.to(device)]
    return tuple(tensors)


def expected(out_a, lse_a, out_b, lse_b):
    """(out, lse) in float64, row by row."""
    out = torch.zeros(out_a.shape, dtype=torch.float64)
    lse = torch.full(lse_a.shape, -torch.inf, dtype=torch.float64)
    for row in range(lse.shape[0]):
        for head in range(lse.shape[1]):
            sides = [(o[row, head].cpu().double(), float(s[row, head])) for o, s in ((out_a, lse_a), (out_b, lse_b))]
            sides = [(o, s) for o, s in sides if abs(s) != float("inf")]
            if sides:
                logs = torch.tensor([s for _, s in sides], dtype=torch.float64)
                lse[row, head] = torch.logsumexp(logs, 0)
                out[row, head] = sum(w * o for (o, _), w in zip(sides, torch.softmax(logs, 0)))
    return out, lse


def assert_merged(tensors, merged) -> None:
    out, lse = merged
    expected_out, expected_lse = expected(*tensors)
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.cpu().double(), expected_out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.cpu().double(), expected_lse, rtol=1e-5, atol=1e-5)

"""Two attention results over different keys of the same queries, joined into one."""

import triton
import triton.language as tl

from .scores import LN_2, LOG2_E, LOWEST


@triton.jit
def _weight_of(lse, highest):
    """A result's share of the sum, relative to `highest` (log2); infinite log-sum-exps stand for no keys."""
    return tl.where(tl.abs(lse) == float("inf"), 0.0, tl.exp2(lse * LOG2_E - highest))


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["a_lse_ptr", "b_lse_ptr", "lse_ptr"],
)
def merge_kernel(
    a_ptr,  # [num_rows, DIM]
    a_lse_ptr,  # [num_rows] f32
    b_ptr,  # [num_rows, DIM]
    b_lse_ptr,  # [num_rows] f32
    out_ptr,  # [num_rows, DIM]
    lse_ptr,  # [num_rows] f32
    num_rows: tl.int64,
    DIM: tl.constexpr,
    LANES: tl.constexpr,  # DIM padded to a power of two
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, LANES)
    is_row = row < num_rows
    mask = is_row[:, None] & (channel < DIM)[None, :]
    offset = row[:, None] * DIM + channel[None, :]
    a_lse = tl.load(a_lse_ptr + row, mask=is_row, other=float("-inf"))
    b_lse = tl.load(b_lse_ptr + row, mask=is_row, other=float("-inf"))
    a_finite = tl.where(tl.abs(a_lse) == float("inf"), LOWEST, a_lse * LOG2_E)
    b_finite = tl.where(tl.abs(b_lse) == float("inf"), LOWEST, b_lse * LOG2_E)
    highest = tl.maximum(a_finite, b_finite)
    a_weight = _weight_of(a_lse, highest)
    b_weight = _weight_of(b_lse, highest)
    total = a_weight + b_weight
    safe = tl.where(total > 0, total, 1.0)
    a = tl.load(a_ptr + offset, mask=mask & (a_weight > 0)[:, None], other=0.0).to(tl.float32)
    b = tl.load(b_ptr + offset, mask=mask & (b_weight > 0)[:, None], other=0.0).to(tl.float32)
    merged = (a * a_weight[:, None] + b * b_weight[:, None]) / safe[:, None]
    tl.store(out_ptr + offset, merged.to(out_ptr.dtype.element_ty), mask=mask)
    log_sum = tl.where(total > 0, (highest + tl.log2(safe)) * LN_2, float("-inf"))
    tl.store(lse_ptr + row, log_sum, mask=is_row)

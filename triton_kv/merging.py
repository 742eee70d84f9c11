"""`merge_attention`: attention over two sets of keys, from the results over each of them."""

from __future__ import annotations

import torch
import triton

from triton_kv.kernels.merge import merge_kernel
from triton_kv.launch import Launch, eager, interpreted, register

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_PROGRAM_ELEMENTS = 2048


def merge_attention(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of attention over the keys of a and b together, which must not overlap.

    Args:
        out_a, out_b: `[num_tokens, num_query_heads, head_dim]`, contiguous, of one dtype (float16, bfloat16, float32).
        lse_a, lse_b: float32 `[num_tokens, num_query_heads]`, contiguous; the natural log of each softmax denominator,
            as `paged_attention(return_lse=True)` gives it. Minus and plus infinity both stand for no keys at all (other
            libraries use either), and `out` may then hold anything, NaN included.

    A row without keys on both sides is zeros and -inf. Computed in float32; deterministic; one kernel on the current
    stream, does not synchronise. With sinks, give them to one of the two calls only. On a CPU it is
    `merge_attention_reference`.

    Raises `ValueError` or `TypeError` for shapes, dtypes, strides or devices that do not fit. The scheme is that of
    FlashInfer's cascade inference and of ring attention.
    """
    _check(out_a, lse_a, out_b, lse_b)
    out, lse = torch.empty_like(out_a), torch.empty_like(lse_a)
    merge = _merge if eager(out_a, lse_a, out_b, lse_b) else _OP
    merge(out_a, lse_a, out_b, lse_b, out, lse)
    return out, lse


@torch.no_grad()
def merge_attention_reference(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge_attention` in plain torch, any device. Does not synchronise."""
    _check(out_a, lse_a, out_b, lse_b)
    parts = []
    for out, lse in ((out_a, lse_a), (out_b, lse_b)):
        empty = lse.isinf()
        parts.append((out.float().masked_fill(empty[..., None], 0.0), lse.masked_fill(empty, -torch.inf)))
    (a, log_a), (b, log_b) = parts
    lse = torch.logaddexp(log_a, log_b)
    finite = lse.masked_fill(lse == -torch.inf, 0.0)
    merged = a * (log_a - finite).exp()[..., None] + b * (log_b - finite).exp()[..., None]
    return merged.to(out_a.dtype), lse


def merge_launch(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> Launch:
    """The launch of `merge_attention` for at least one row. Looks at shapes only, so meta tensors will do."""
    dim = out.shape[-1]
    lanes = triton.next_power_of_2(dim)
    rows = max(1, _PROGRAM_ELEMENTS // lanes)
    return Launch(
        kernel=merge_kernel,
        grid=(-(-lse.numel() // rows),),
        arguments={
            "a_ptr": out_a,
            "a_lse_ptr": lse_a,
            "b_ptr": out_b,
            "b_lse_ptr": lse_b,
            "out_ptr": out,
            "lse_ptr": lse,
            "num_rows": lse.numel(),
            "DIM": dim,
            "LANES": lanes,
            "ROWS": rows,
        },
        num_warps=4,
        num_stages=1,
    )


def _check(out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor) -> None:
    for name, tensor in (("out_a", out_a), ("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
        if tensor.device != out_a.device:
            raise ValueError(f"{name} is on {tensor.device}, but out_a is on {out_a.device}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}: call .contiguous() on it")
    if out_a.dim() != 3:
        raise ValueError(f"out_a must be 3-D [num_tokens, num_query_heads, head_dim], got {tuple(out_a.shape)}")
    if out_b.shape != out_a.shape:
        raise ValueError(f"out_b must be {list(out_a.shape)} like out_a, got {list(out_b.shape)}")
    if out_a.dtype not in _DTYPES or out_b.dtype != out_a.dtype:
        raise TypeError(
            f"out_a and out_b must both be float16, bfloat16 or float32, got {out_a.dtype} and {out_b.dtype}"
        )
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        if lse.shape != out_a.shape[:2]:
            raise ValueError(f"{name} must be {list(out_a.shape[:2])}, got {list(lse.shape)}")
        if lse.dtype != torch.float32:
            raise TypeError(f"{name} must be float32, got {lse.dtype}")


def _merge(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    if out.numel() == 0:
        return
    if out.device.type == "cpu" and (not interpreted(merge_kernel) or out.dtype == torch.bfloat16):
        merged, log_sum = merge_attention_reference(out_a, lse_a, out_b, lse_b)
        out.copy_(merged)
        lse.copy_(log_sum)
        return
    merge_launch(out_a, lse_a, out_b, lse_b, out, lse).run(out.device)


_OP = register(
    "merge_attention",
    "(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, Tensor(a!) out, Tensor(b!) lse) -> ()",
    _merge,
)

__all__ = ["merge_attention", "merge_attention_reference", "merge_launch"]

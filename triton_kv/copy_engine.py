"""K and V as the GPU's copy engine (TMA) sees them: which caches it can read, and descriptors of them in boxes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from triton.tools.tensor_descriptor import TensorDescriptor

if TYPE_CHECKING:
    import torch

    from triton_kv.layer import LayerOperands

_STEP_BYTES = 16  # that addresses and strides are multiples of
_MAX_STRIDE_BYTES = 1 << 40


def refuse_cache(operands: LayerOperands) -> str | None:
    """Why the copy engine cannot read these K and V, or None. Looks at addresses and strides only."""
    itemsize = operands.dtype.itemsize
    base = operands.k_cache.data_ptr() if operands.v_cache is None else operands.v_cache.data_ptr()
    if operands.k_cache.data_ptr() % _STEP_BYTES or (base + operands.v_offset * itemsize) % _STEP_BYTES:
        return "K and V must start at multiples of 16 bytes"
    for name, strides in (("K", operands.k_strides), ("V", operands.v_strides)):
        for stride in strides:
            if stride * itemsize % _STEP_BYTES or not 0 < stride * itemsize < _MAX_STRIDE_BYTES:
                return f"{name}'s strides must be multiples of 16 bytes, below a TiB, got {tuple(strides)} elements"
    return None


def boxes(cache: torch.Tensor, tokens: int, lanes: int) -> TensorDescriptor:
    """K or V `[num_blocks, block_size, num_heads, head_dim]` in whatever strides, with the tokens of a head together.

    A message brings `tokens` of one block and head, `lanes` channels each: zeros past head_dim, and for a block id out
    of bounds. The tensor map is encoded on the host at each launch and passed by value: nothing is allocated.
    """
    by_head = cache.transpose(1, 2)
    return TensorDescriptor(by_head, list(by_head.shape), list(by_head.stride()), [1, 1, tokens, lanes])


__all__ = ["boxes", "refuse_cache"]

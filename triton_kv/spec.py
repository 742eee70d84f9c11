"""What one layer keeps: the numbers from which a layout derives bytes, with no tensor and no device in them."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch

_CACHE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def positive_int(name: str, value: int) -> int:
    """`value` as a plain int of at least 1; `ValueError` for smaller ones, `TypeError` for floats and bools."""
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}; round it before passing it") from None
    if number < 1:
        raise ValueError(f"{name} must be at least 1, got {number}")
    return number


@dataclass(frozen=True)
class AttentionSpec:
    """Keys and values of one attention layer: what is kept for every token.

    num_kv_heads: KV heads on this rank (after tensor parallelism).
    head_dim: channels of a key.
    v_head_dim: channels of a value; `None` for as many as a key, and the field then holds that number.
    dtype: float32, float16 or bfloat16.

    Raises `ValueError` for sizes below 1 and for dtypes that are no cache dtype, `TypeError` for sizes that are no
    integers, `NotImplementedError` for the 8-bit floats, whose scales need a home first.
    """

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    v_head_dim: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_kv_heads", positive_int("num_kv_heads", self.num_kv_heads))
        object.__setattr__(self, "head_dim", positive_int("head_dim", self.head_dim))
        object.__setattr__(self, "v_head_dim", positive_int("v_head_dim", self.value_dim))
        if not isinstance(self.dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype such as torch.bfloat16, got {self.dtype!r}")
        if self.dtype.is_floating_point and self.dtype.itemsize == 1:
            raise NotImplementedError(f"a cache of {self.dtype} is not supported yet; use float32, float16 or bfloat16")
        if self.dtype not in _CACHE_DTYPES:
            raise ValueError(f"a cache of {self.dtype} is not possible; use float32, float16 or bfloat16")

    @property
    def itemsize_bytes(self) -> int:
        """Bytes of one element."""
        return self.dtype.itemsize

    @property
    def value_dim(self) -> int:
        """Channels of a value."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def token_bytes(self) -> int:
        """Bytes that one layer keeps for one token: all heads, key and value."""
        return self.num_kv_heads * (self.head_dim + self.value_dim) * self.dtype.itemsize

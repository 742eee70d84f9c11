"""`write_kv`: put the keys and values of this step's tokens into their slots of a cache."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from triton_kv.kernels.write import write_kernel
from triton_kv.launch import Launch, eager, interpreted, register
from triton_kv.launch_cache import LaunchCache, described, run_prepared
from triton_kv.layer import WRITTEN_OPERANDS_SCHEMA, LayerCache, LayerOperands, operands_of

# The control block's kinds: a slot at or past the bound, and a position outside the cos/sin cache.
_SLOT_WRITTEN, _POSITION = 2, 5
_INT32_MAX = 2**31 - 1


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    layer: LayerCache | tuple[torch.Tensor, torch.Tensor],
    slot_mapping: torch.Tensor,
) -> None:
    """Write token i's key and value into slot `slot_mapping[i]` of a layer.

    Args:
        k: `[num_tokens, num_kv_heads, head_dim]`, the cache's dtype and device. Any token and head stride (a slice of a
            fused qkv tensor), channels contiguous.
        v: `[num_tokens, num_kv_heads, v_head_dim]`, likewise.
        layer: a `LayerCache`, or a pair of plain tensors `[num_blocks, block_size, num_kv_heads, head_dim]`.
        slot_mapping: `[num_tokens]` int32 or int64, block * block_size + position; negative slots are padding and are
            skipped, whatever their k and v hold.

    A slot at or past the bound (the cache's watermark, read on the device when the kernel runs; of a plain pair its
    first dimension) is dropped, and counted in the control block of a cache. Where two tokens name one slot, either may
    win. Runs on the current stream and does not synchronise; a captured call stays right when the cache grows.

    It has no gradient. Under `torch.compile` use the default backend, and read the cache through ops of this package
    alone: a backend that cannot write in place (`aot_eager`), or a graph that reads a layer's views before and after
    the write, copies the layer, and so touches addresses that nothing backs.

    Raises `ValueError` or `TypeError` for shapes, dtypes, or devices that do not fit, `Closed`, and `NothingCommitted`.
    The scatter follows vLLM's reshape_and_cache, bounds and error counting aside.
    """
    operands = operands_of(layer)
    if isinstance(k, torch.Tensor) and k.is_cuda and eager(k, v, slot_mapping, operands.k_cache):
        _write_known(k, v, operands, slot_mapping)
        return
    check_rows(k, v, operands, slot_mapping)
    write = _write if eager(k, v, slot_mapping, operands.k_cache) else _OP
    write(k, v, slot_mapping, *operands)


_CALLS = LaunchCache(("k_ptr", "v_ptr", "k_cache_ptr", "v_cache_ptr", "slot_mapping_ptr", "control_ptr"))


def _write_known(k: torch.Tensor, v: torch.Tensor, operands: LayerOperands, slot_mapping: torch.Tensor) -> None:
    """An eager call on a GPU: what launches of one geometry have in common is made once."""
    key = (
        described(k),
        described(v),
        described(slot_mapping),
        described(operands.v_cache),
        operands.k_cache.data_ptr() % 16,
        operands.v_offset,
        operands.control is None,
        operands.dtype,
        operands.device,
        operands[4:],
    )
    prepared = _CALLS.find(key)
    v_cache = operands.k_cache if operands.v_cache is None else operands.v_cache
    tensors = (k, v, operands.k_cache, v_cache, slot_mapping, operands.control)
    if prepared is not None:
        run_prepared(prepared, k.device, tensors)
        return
    check_rows(k, v, operands, slot_mapping)
    if k.shape[0] == 0:
        return
    _CALLS.run(key, k.device, tensors, lambda: (write_launch(k, v, operands, slot_mapping),))


def write_kv_reference(
    k: torch.Tensor,
    v: torch.Tensor,
    layer: LayerCache | tuple[torch.Tensor, torch.Tensor],
    slot_mapping: torch.Tensor,
) -> None:
    """`write_kv` in plain torch, any device. It reads the bound and the slots on the host, so it synchronises."""
    operands = operands_of(layer)
    check_rows(k, v, operands, slot_mapping)
    scatter(k, v, operands, slot_mapping)


@dataclass(frozen=True, slots=True)
class WriteChoice:
    """How the write kernel is cut into programs."""

    vector: int  # elements a thread moves at once: at most 16 bytes
    num_vectors: int  # of K, and as many of V, in one program
    num_warps: int


@lru_cache(maxsize=1024)
def choose_write(
    itemsize_bytes: int, head_dim: int, v_head_dim: int, v_offset: int, strides: tuple[int, ...]
) -> WriteChoice:
    """The choice for elements of `itemsize_bytes`; `strides` are those of k, v, and both caches, in elements.

    A program moves 4 KiB of K and 4 KiB of V: 32 bytes of each a thread, all loads in flight before the first store.
    """
    vector = math.gcd(head_dim, v_head_dim, v_offset, *strides, 16 // itemsize_bytes)
    num_vectors = min(4096 // (vector * itemsize_bytes), 512)
    return WriteChoice(vector=vector, num_vectors=num_vectors, num_warps=4)


def write_launch(k: torch.Tensor, v: torch.Tensor, operands: LayerOperands, slot_mapping: torch.Tensor) -> Launch:
    """The launch of `write_kv` for at least one token. Looks at shapes and strides only, so meta tensors will do."""
    num_tokens, num_heads, head_dim = k.shape
    v_head_dim = v.shape[2]
    # The stride of a dimension of one is never used, and may be anything: it must not choose the vector.
    k_stride_token, v_stride_token = (k.stride(0), v.stride(0)) if num_tokens > 1 else (0, 0)
    k_stride_head, v_stride_head = (k.stride(1), v.stride(1)) if num_heads > 1 else (0, 0)
    itemsize = k.element_size()
    choice = choose_write(
        itemsize,
        head_dim,
        v_head_dim,
        operands.v_offset,
        (k_stride_token, k_stride_head, v_stride_token, v_stride_head, *operands.k_strides, *operands.v_strides),
    )
    num_vectors = num_tokens * num_heads * max(head_dim, v_head_dim) // choice.vector
    return Launch(
        kernel=write_kernel,
        grid=(-(-num_vectors // choice.num_vectors),),
        arguments={
            "k_ptr": k,
            "v_ptr": v,
            "k_cache_ptr": operands.k_cache,
            "v_cache_ptr": operands.k_cache if operands.v_cache is None else operands.v_cache,
            "slot_mapping_ptr": slot_mapping,
            "control_ptr": operands.control,
            "v_offset": operands.v_offset,
            "num_tokens": num_tokens,
            "num_blocks": operands.num_blocks,
            "k_stride_token": k_stride_token,
            "k_stride_head": k_stride_head,
            "v_stride_token": v_stride_token,
            "v_stride_head": v_stride_head,
            "NUM_HEADS": num_heads,
            "HEAD_DIM": head_dim,
            "V_HEAD_DIM": v_head_dim,
            "BLOCK_SIZE": operands.block_size,
            "K_CACHE_STRIDE_BLOCK": operands.k_strides[0],
            "K_CACHE_STRIDE_TOKEN": operands.k_strides[1],
            "K_CACHE_STRIDE_HEAD": operands.k_strides[2],
            "V_CACHE_STRIDE_BLOCK": operands.v_strides[0],
            "V_CACHE_STRIDE_TOKEN": operands.v_strides[1],
            "V_CACHE_STRIDE_HEAD": operands.v_strides[2],
            "VECTOR": choice.vector,
            "NUM_VECTORS": choice.num_vectors,
        },
        num_warps=choice.num_warps,
        num_stages=1,
    )


def check_rows(k: torch.Tensor, v: torch.Tensor, operands: LayerOperands, slot_mapping: torch.Tensor) -> None:
    """Raises `ValueError` or `TypeError` unless rows of K and V fit the cache, and their slots the rows."""
    heads = operands.num_kv_heads
    for name, tensor in (("k", k), ("v", v), ("slot_mapping", slot_mapping)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
    for name, tensor, dim in (("k", k, operands.head_dim), ("v", v, operands.v_head_dim)):
        if tensor.dim() != 3:
            raise ValueError(f"{name} must be 3-D [num_tokens, num_kv_heads, head_dim], got {tuple(tensor.shape)}")
        if tensor.shape[1] != heads or tensor.shape[2] != dim:
            raise ValueError(
                f"{name} has {tensor.shape[1]} heads of {tensor.shape[2]} channels, "
                f"but the cache holds {heads} heads of {dim}"
            )
        if tensor.dtype != operands.dtype:
            raise TypeError(
                f"{name} is {tensor.dtype}, but the cache holds {operands.dtype}: cast it first, a write casts nothing"
            )
        if tensor.device != operands.device:
            raise ValueError(f"{name} is on {tensor.device}, but the cache is on {operands.device}")
        if tensor.stride(2) != 1 and dim > 1:
            raise ValueError(
                f"{name}'s channels must be contiguous, got strides {tensor.stride()}: call .contiguous() on it"
            )
    if slot_mapping.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"slot_mapping must be int32 or int64, got {slot_mapping.dtype}")
    if slot_mapping.dim() != 1:
        raise ValueError(f"slot_mapping must be 1-D [num_tokens], got {tuple(slot_mapping.shape)}")
    if not k.shape[0] == v.shape[0] == slot_mapping.shape[0]:
        raise ValueError(
            f"k, v and slot_mapping must agree in the number of tokens, "
            f"got {k.shape[0]}, {v.shape[0]} and {slot_mapping.shape[0]}"
        )
    if slot_mapping.device != operands.device:
        raise ValueError(f"slot_mapping is on {slot_mapping.device}, but the cache is on {operands.device}")
    if slot_mapping.stride(0) != 1 and slot_mapping.shape[0] > 1:
        raise ValueError(f"slot_mapping must be contiguous, got stride {slot_mapping.stride(0)}")


def _write(k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor, *layer: Any) -> None:
    if k.shape[0] == 0:
        return
    operands = LayerOperands(*layer)
    if k.device.type == "cpu" and not interpreted(write_kernel):
        scatter(k, v, operands, slot_mapping)
    else:
        write_launch(k, v, operands, slot_mapping).run(k.device)


@torch.no_grad()
def scatter(
    k: torch.Tensor,
    v: torch.Tensor,
    operands: LayerOperands,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor | None = None,
    max_position: int = 0,
) -> None:
    """Rows of K and V into their slots, in plain torch. With `positions`, those outside `max_position` drop theirs."""
    control = operands.control
    bound = operands.num_blocks if control is None else int(control[0])
    slots = slot_mapping.long()
    past = slots >= bound * operands.block_size
    bad = past
    if positions is not None:
        bad = past | ((slots >= 0) & ((positions < 0) | (positions >= max_position)))
    kept = (slots >= 0) & ~bad
    if not bool(kept.all()):
        if control is not None and bool(bad.any()):
            rows = bad.nonzero()[:, 0]
            control[1] += rows.numel()
            if int(control[2]) == 0:
                row = int(rows[0])
                if bool(past[row]) or positions is None:
                    kind, value = _SLOT_WRITTEN, int(slots[row])
                else:
                    kind, value = _POSITION, int(positions[row])
                first = [kind, row, max(min(value, _INT32_MAX), -_INT32_MAX - 1)]
                control[2:5] = torch.tensor(first, dtype=torch.int32, device=control.device)
        slots, k, v = slots[kept], k[kept], v[kept]
    block, position = slots // operands.block_size, slots % operands.block_size
    k_view, v_view = operands.views()
    k_view[block, position] = k
    v_view[block, position] = v


_OP = register(
    "write_kv",
    f"(Tensor k, Tensor v, Tensor slot_mapping, {WRITTEN_OPERANDS_SCHEMA}) -> ()",
    _write,
)

__all__ = [
    "WriteChoice",
    "check_rows",
    "choose_write",
    "scatter",
    "write_kv",
    "write_kv_reference",
    "write_launch",
]

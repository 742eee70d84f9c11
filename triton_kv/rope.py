"""`rope_and_write_kv`: norm and rotate this step's queries and keys, and put keys and values into their slots."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton

from triton_kv.choices import Hardware, hardware_of
from triton_kv.kernels.rope import rope_write_kernel
from triton_kv.launch import Launch, eager, interpreted, register
from triton_kv.launch_cache import LaunchCache, described, run_prepared
from triton_kv.layer import WRITTEN_OPERANDS_SCHEMA, LayerCache, LayerOperands, operands_of
from triton_kv.writing import check_rows, scatter

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def rope_and_write_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: LayerCache | tuple[torch.Tensor, torch.Tensor],
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    *,
    is_neox: bool = True,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    norm_offset: float = 0.0,
    q_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotary embedding of q and k, after an RMS norm of each head if there are weights, and `write_kv`: one launch.

    Args:
        q: `[num_tokens, num_query_heads, head_dim]`, the cache's dtype (float16, bfloat16 or float32) and device. Any
            token and head stride (a slice of a fused qkv tensor), channels contiguous.
        k: `[num_tokens, num_kv_heads, head_dim]`, likewise. It is not changed: its rotated form goes into the cache.
        v: `[num_tokens, num_kv_heads, v_head_dim]`, likewise; its bits are copied.
        layer: a `LayerCache`, or a pair of plain tensors `[num_blocks, block_size, num_kv_heads, head_dim]`.
        slot_mapping: `[num_tokens]` int32 or int64, as `write_kv` takes it. Queries are rotated whatever it says.
        positions: `[num_tokens]` int32 or int64, each token's row of `cos_sin_cache`.
        cos_sin_cache: `[max_position, rotary_dim]` float16, bfloat16 or float32: rotary_dim / 2 cosines, then as many
            sines (as vLLM and FlashInfer keep it). rotary_dim is even and at most head_dim; channels behind it are
            normed but not rotated.
        is_neox: channel i is rotated with i + rotary_dim / 2 (GPT-NeoX, Llama); else 2i with 2i + 1 (GPT-J, GLM).
        q_norm, k_norm: `[head_dim]` weights of the RMS norm over each head of q and k (Qwen3, Gemma 3), any of the
            three dtypes; None leaves the norm out.
        eps: added to the mean of squares in both norms.
        norm_offset: added to the weights of both norms; 1.0 for Gemma's form.
        q_out: like q, for the result; None, q or a view of just its elements (under `torch.compile` q itself) rotates q
            in place. It must not overlap q otherwise, nor k or v.

    Returns `q_out`, or q. All arithmetic is float32, with one rounding at the end.

    Slots are handled as in `write_kv`: negative ones are skipped, those at or past the bound dropped and counted.
    Nothing is written of a token whose position is outside `[0, max_position)`, neither its query nor its key and
    value; unless its slot is negative it is counted in the cache's control block too. Runs on the current stream and
    does not synchronise; a captured call stays right when the cache grows. It has no gradient; what `write_kv` says of
    `torch.compile` holds here.

    Raises `ValueError` or `TypeError` for shapes, dtypes, or devices that do not fit, `Closed`, and `NothingCommitted`.
    """
    operands = operands_of(layer)
    tokens = (k, v, slot_mapping, positions, cos_sin_cache)
    call = RopeCall.of(q, q_out, *tokens, q_norm, k_norm, float(eps), float(norm_offset), is_neox)
    if isinstance(q, torch.Tensor) and q.is_cuda and eager(*call.tensors, operands.k_cache):
        _write_known(call, operands)
        return call.q_out
    _check(call, operands)
    write = _write if eager(*call.tensors, operands.k_cache) else _OP
    write(*call, *operands)
    return call.q_out


@torch.no_grad()
def rope_and_write_kv_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: LayerCache | tuple[torch.Tensor, torch.Tensor],
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    *,
    is_neox: bool = True,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    norm_offset: float = 0.0,
    q_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`rope_and_write_kv` in plain torch, any device. It reads positions and slots on the host, so it synchronises."""
    operands = operands_of(layer)
    tokens = (k, v, slot_mapping, positions, cos_sin_cache)
    call = RopeCall.of(q, q_out, *tokens, q_norm, k_norm, float(eps), float(norm_offset), is_neox)
    _check(call, operands)
    _rotate_and_scatter(call, operands)
    return call.q_out


class RopeCall(NamedTuple):
    """The operands of one call beside the layer's, as the op takes them."""

    q_out: torch.Tensor  # [num_tokens, num_query_heads, head_dim]
    q: torch.Tensor | None  # None: q_out holds the queries and is rotated in place
    k: torch.Tensor
    v: torch.Tensor
    slot_mapping: torch.Tensor
    positions: torch.Tensor
    cos_sin_cache: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    eps: float
    norm_offset: float
    is_neox: bool

    @classmethod
    def of(cls, q: torch.Tensor, q_out: torch.Tensor | None, *others: Any) -> RopeCall:
        """The call that rotates q in place if `q_out` is None, q, or another name for the same elements."""
        if q_out is None:
            return cls(q, None, *others)
        return cls(q_out, None if q_out is q or _is_same(q_out, q) else q, *others)

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self[:9]

    @property
    def source(self) -> torch.Tensor:
        return self.q_out if self.q is None else self.q


def _is_same(q_out: object, q: object) -> bool:
    """Whether two tensors are the same elements in the same order. A tracer does not know addresses: False there."""
    return (
        not torch.compiler.is_compiling()
        and type(q_out) is torch.Tensor
        and type(q) is torch.Tensor
        and q_out.data_ptr() == q.data_ptr()
        and (q_out.shape, q_out.stride(), q_out.dtype) == (q.shape, q.stride(), q.dtype)
    )


@dataclass(frozen=True, slots=True)
class RopeChoice:
    """How the kernel is cut into programs."""

    vector: int  # elements a thread moves at once: at most 16 bytes
    rows: int  # heads of tokens in one program: of Q, or of K and V each
    num_warps: int
    max_registers: int | None  # a thread, None: as the compiler sees fit


@lru_cache(maxsize=1024)
def choose_rope(
    itemsize_bytes: int,
    head_dim: int,
    v_head_dim: int,
    v_offset: int,
    strides: tuple[int, ...],
    is_neox: bool,
    hardware: Hardware,
) -> RopeChoice:
    """The choice for elements of `itemsize_bytes`; `strides` are those of q, its output, k, v, and both caches.

    A program moves 4 KiB of Q, or of K and V each: 32 bytes a thread, beside as many cosines and sines in float32.
    """
    vector = math.gcd(head_dim, v_head_dim, v_offset, *strides, 16 // itemsize_bytes)
    row_bytes = triton.next_power_of_2(max(head_dim, v_head_dim)) * itemsize_bytes
    return RopeChoice(
        vector=vector,
        rows=max(1, min(4096 // row_bytes, 64)),
        num_warps=4,
        # Else ptxas spills 8 bytes of normed f32 rows (sm_90, Triton 3.7.1) and of interleaved f16 (sm_89, 3.6.0).
        max_registers=None if is_neox and itemsize_bytes == 2 else hardware.all_registers,
    )


def rope_launch(call: RopeCall, operands: LayerOperands, hardware: Hardware) -> Launch:
    """The launch for at least one token. Looks at shapes and strides only, so meta tensors will do."""
    q_out, cos_sin_cache = call.q_out, call.cos_sin_cache
    num_tokens, num_query_heads, head_dim = q_out.shape
    num_kv_heads, v_head_dim = call.v.shape[1:]
    max_position, rotary_dim = cos_sin_cache.shape
    strides = tuple(x for tensor in (call.source, q_out, call.k, call.v) for x in _row_strides(tensor))
    cos_sin_stride = cos_sin_cache.stride(0) if max_position > 1 else 0
    choice = choose_rope(
        q_out.element_size(),
        head_dim,
        v_head_dim,
        operands.v_offset,
        (*strides, *operands.k_strides, *operands.v_strides),
        call.is_neox,
        hardware,
    )
    return Launch(
        kernel=rope_write_kernel,
        grid=(-(-num_tokens * num_kv_heads // choice.rows) + -(-num_tokens * num_query_heads // choice.rows),),
        arguments={
            "q_ptr": call.source,
            "q_out_ptr": q_out,
            "k_ptr": call.k,
            "v_ptr": call.v,
            "q_norm_ptr": call.q_norm,
            "k_norm_ptr": call.k_norm,
            "cos_sin_ptr": cos_sin_cache,
            "positions_ptr": call.positions,
            "slot_mapping_ptr": call.slot_mapping,
            "k_cache_ptr": operands.k_cache,
            "v_cache_ptr": operands.k_cache if operands.v_cache is None else operands.v_cache,
            "control_ptr": operands.control,
            "v_offset": operands.v_offset,
            "num_tokens": num_tokens,
            "num_blocks": operands.num_blocks,
            "max_position": max_position,
            "q_stride_token": strides[0],
            "q_stride_head": strides[1],
            "q_out_stride_token": strides[2],
            "q_out_stride_head": strides[3],
            "k_stride_token": strides[4],
            "k_stride_head": strides[5],
            "v_stride_token": strides[6],
            "v_stride_head": strides[7],
            "cos_sin_stride_position": cos_sin_stride,
            "eps": call.eps,
            "norm_offset": call.norm_offset,
            "NUM_QUERY_HEADS": num_query_heads,
            "NUM_KV_HEADS": num_kv_heads,
            "HEAD_DIM": head_dim,
            "V_HEAD_DIM": v_head_dim,
            "ROTARY_DIM": rotary_dim,
            "BLOCK_SIZE": operands.block_size,
            "K_CACHE_STRIDE_BLOCK": operands.k_strides[0],
            "K_CACHE_STRIDE_TOKEN": operands.k_strides[1],
            "K_CACHE_STRIDE_HEAD": operands.k_strides[2],
            "V_CACHE_STRIDE_BLOCK": operands.v_strides[0],
            "V_CACHE_STRIDE_TOKEN": operands.v_strides[1],
            "V_CACHE_STRIDE_HEAD": operands.v_strides[2],
            "IS_NEOX": call.is_neox,
            "IS_IN_PLACE": call.q is None,
            "VECTOR": choice.vector,
            "COS_VECTOR": math.gcd(cos_sin_stride, 16 // cos_sin_cache.element_size()),
            "HALF_LANES": triton.next_power_of_2(rotary_dim // 2),
            "REST_LANES": triton.next_power_of_2(max(head_dim - rotary_dim, 1)),
            "V_LANES": triton.next_power_of_2(v_head_dim),
            "ROWS": choice.rows,
        },
        num_warps=choice.num_warps,
        num_stages=1,
        max_registers=choice.max_registers,
    )


def _row_strides(tensor: torch.Tensor) -> tuple[int, int]:
    """Token and head stride. That of a dimension of one is never used, and may be anything: it must not choose."""
    return (
        tensor.stride(0) if tensor.shape[0] > 1 else 0,
        tensor.stride(1) if tensor.shape[1] > 1 else 0,
    )


_CALLS = LaunchCache(
    (
        "q_out_ptr",
        "q_ptr",
        "k_ptr",
        "v_ptr",
        "slot_mapping_ptr",
        "positions_ptr",
        "cos_sin_ptr",
        "q_norm_ptr",
        "k_norm_ptr",
        "k_cache_ptr",
        "v_cache_ptr",
        "control_ptr",
    )
)


def _write_known(call: RopeCall, operands: LayerOperands) -> None:
    """An eager call on a GPU: what launches of one geometry have in common is made once."""
    key = (
        *map(described, call.tensors),
        described(operands.v_cache),
        call[9:],
        operands.k_cache.data_ptr() % 16,
        operands.v_offset,
        operands.control is None,
        operands.dtype,
        operands.device,
        operands[4:],
    )
    prepared = _CALLS.find(key)
    v_cache = operands.k_cache if operands.v_cache is None else operands.v_cache
    tensors = (call.q_out, call.source, *call.tensors[2:], operands.k_cache, v_cache, operands.control)
    if prepared is not None:
        run_prepared(prepared, call.k.device, tensors)
        return
    _check(call, operands)
    if call.k.shape[0] == 0:
        return
    _CALLS.run(key, call.k.device, tensors, lambda: (rope_launch(call, operands, hardware_of(operands.device)),))


def _write(*flat: Any) -> None:
    num_fields = len(RopeCall._fields)
    call, operands = RopeCall(*flat[:num_fields]), LayerOperands(*flat[num_fields:])
    if call.k.shape[0] == 0:
        return
    if call.k.device.type == "cpu" and not interpreted(rope_write_kernel):
        _rotate_and_scatter(call, operands)
    else:
        rope_launch(call, operands, hardware_of(operands.device)).run(call.k.device)


@torch.no_grad()
def _rotate_and_scatter(call: RopeCall, operands: LayerOperands) -> None:
    positions, max_position = call.positions, call.cos_sin_cache.shape[0]
    cos_sin = call.cos_sin_cache[positions.long().clamp(0, max_position - 1)].float()
    style = (call.eps, call.norm_offset, call.is_neox)
    known = (positions >= 0) & (positions < max_position)
    call.q_out[known] = _rotated(call.source, cos_sin, call.q_norm, *style)[known]
    keys = _rotated(call.k, cos_sin, call.k_norm, *style)
    scatter(keys, call.v, operands, call.slot_mapping, positions, max_position)


def _rotated(
    x: torch.Tensor,  # [num_tokens, heads, head_dim]
    cos_sin: torch.Tensor,  # f32 [num_tokens, rotary_dim]
    norm: torch.Tensor | None,
    eps: float,
    norm_offset: float,
    is_neox: bool,
) -> torch.Tensor:
    rows = x.float()
    if norm is not None:
        rows = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps) * (norm.float() + norm_offset)
    rotary_dim = cos_sin.shape[1]
    cos, sin = cos_sin[:, None].chunk(2, dim=-1)
    turning, rest = rows[..., :rotary_dim], rows[..., rotary_dim:]
    first, second = turning.chunk(2, dim=-1) if is_neox else (turning[..., ::2], turning[..., 1::2])
    pair = (first * cos - second * sin, second * cos + first * sin)
    turned = torch.cat(pair, dim=-1) if is_neox else torch.stack(pair, dim=-1).flatten(-2)
    return torch.cat((turned, rest), dim=-1).to(x.dtype)


def _check(call: RopeCall, operands: LayerOperands) -> None:
    k, positions = call.k, call.positions
    if operands.dtype not in _DTYPES:
        raise TypeError(f"the cache holds {operands.dtype}: rotate float16, bfloat16 or float32, then use write_kv")
    check_rows(k, call.v, operands, call.slot_mapping)
    _check_queries("q", call.source, k, operands)
    if call.q is not None:
        _check_queries("q_out", call.q_out, k, operands)
        if call.q.shape != call.q_out.shape:
            raise ValueError(f"q_out must have q's shape {tuple(call.q.shape)}, got {tuple(call.q_out.shape)}")
    _check_is_tensor("positions", positions, operands)
    if positions.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"positions must be int32 or int64, got {positions.dtype}")
    if positions.shape != (k.shape[0],):
        raise ValueError(f"positions must be [num_tokens] = ({k.shape[0]},), got {tuple(positions.shape)}")
    if positions.stride(0) != 1 and positions.shape[0] > 1:
        raise ValueError(f"positions must be contiguous, got stride {positions.stride(0)}")
    check_rotation(call.cos_sin_cache, call.q_norm, call.k_norm, operands)
    if not call.eps >= 0:
        raise ValueError(f"eps must be at least 0, got {call.eps}")


def check_rotation(
    cos_sin_cache: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None, operands: LayerOperands
) -> None:
    """Raises `ValueError` or `TypeError` unless what all tokens share fits the cache."""
    _check_is_tensor("cos_sin_cache", cos_sin_cache, operands)
    _check_dtype("cos_sin_cache", cos_sin_cache)
    if cos_sin_cache.dim() != 2:
        raise ValueError(f"cos_sin_cache must be 2-D [max_position, rotary_dim], got {tuple(cos_sin_cache.shape)}")
    max_position, rotary_dim = cos_sin_cache.shape
    if rotary_dim % 2 or not 2 <= rotary_dim <= operands.head_dim:
        raise ValueError(
            f"cos_sin_cache has rotary_dim {rotary_dim}, which must be even, at least 2 and at most head_dim "
            f"{operands.head_dim}: a row is rotary_dim / 2 cosines, then as many sines"
        )
    if not 1 <= max_position < 2**31:
        raise ValueError(f"cos_sin_cache must have 1 to 2^31 - 1 rows, got {max_position}")
    if cos_sin_cache.stride(1) != 1:
        raise ValueError(
            f"cos_sin_cache's rows must be contiguous, got strides {cos_sin_cache.stride()}: call .contiguous() once"
        )
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is None:
            continue
        _check_is_tensor(name, norm, operands)
        _check_dtype(name, norm)
        if norm.shape != (operands.head_dim,):
            raise ValueError(f"{name} must be [head_dim] = ({operands.head_dim},), got {tuple(norm.shape)}")
        if norm.stride(0) != 1 and operands.head_dim > 1:
            raise ValueError(f"{name} must be contiguous, got stride {norm.stride(0)}")


def _check_queries(name: str, q: torch.Tensor, k: torch.Tensor, operands: LayerOperands) -> None:
    _check_is_tensor(name, q, operands)
    if q.dim() != 3:
        raise ValueError(f"{name} must be 3-D [num_tokens, num_query_heads, head_dim], got {tuple(q.shape)}")
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"{name} and k must agree in the number of tokens, got {q.shape[0]} and {k.shape[0]}")
    if q.shape[1] == 0 or q.shape[2] != operands.head_dim:
        raise ValueError(
            f"{name} has {q.shape[1]} heads of {q.shape[2]} channels, but the cache's head_dim is {operands.head_dim}"
        )
    if q.dtype != operands.dtype:
        raise TypeError(f"{name} is {q.dtype}, but the cache holds {operands.dtype}: cast it first")
    if q.stride(2) != 1 and q.shape[2] > 1:
        raise ValueError(f"{name}'s channels must be contiguous, got strides {q.stride()}: call .contiguous() on it")


def _check_is_tensor(name: str, tensor: torch.Tensor, operands: LayerOperands) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
    if tensor.device != operands.device:
        raise ValueError(f"{name} is on {tensor.device}, but the cache is on {operands.device}")


def _check_dtype(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in _DTYPES:
        raise TypeError(f"{name} must be float16, bfloat16 or float32, got {tensor.dtype}")


_OP = register(
    "rope_and_write_kv",
    "(Tensor(d!) q_out, Tensor? q, Tensor k, Tensor v, Tensor slot_mapping, Tensor positions, Tensor cos_sin_cache, "
    "Tensor? q_norm, Tensor? k_norm, float eps, float norm_offset, bool is_neox, "
    f"{WRITTEN_OPERANDS_SCHEMA}) -> ()",
    _write,
)

__all__ = [
    "RopeCall",
    "RopeChoice",
    "check_rotation",
    "choose_rope",
    "rope_and_write_kv",
    "rope_and_write_kv_reference",
    "rope_launch",
]

"""The Hopper prefill kernel's launches: a list of the step's work made on the device, and the kernel that walks it.

`hopper_launches` says whether a call can have them. Gluon, in which the kernel is written, is an experimental part of
Triton; where it is missing or refuses, the portable kernel runs, and a warning says so once.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import triton

from triton_kv.batch import Batch, stride_token
from triton_kv.choices import (
    HOPPER_CONSUMER_ROWS,
    PORTABLE_ROWS,
    Hardware,
    HopperChoice,
    choose_hopper,
    refuse_hopper,
)
from triton_kv.copy_engine import refuse_cache
from triton_kv.decode import decodes
from triton_kv.kernels.prefill_work import CHECKERS, work_kernel
from triton_kv.launch import Launch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from triton_kv.layer import LayerOperands
    from triton_kv.scoring import Scoring

_major, _minor = (int(part) for part in triton.__version__.split(".")[:2])
TRITON_VERSION = (_major, _minor)
PREFILL_KERNELS = ("portable", "hopper")
_LOG2_E = 1.4426950408889634
_CHANNELS = 64  # 16-bit channels a box: the 128 bytes that shared memory is swizzled over
_MAX_ROWS = 1 << 29  # that a kernel counts without overflow, and can tell from rows below zero
_LEAST_SCALE = 2.0**-30  # hidden scores must stay far below any other after scaling
_ENTRIES = 512  # block ids that a program checks at a time

_forced: ContextVar[str | None] = ContextVar("triton_kv_prefill_kernel", default=None)


@contextmanager
def use_prefill_kernel(name: str | None) -> Iterator[None]:
    """Attention with `query_start_loc` runs on one kernel inside the block: "portable" or "hopper"; None chooses.

    Batches of a few query tokens a sequence, which would go to the decode kernels, are no exception. A captured graph
    keeps the kernel it was captured with. "hopper" makes `paged_attention` raise `ValueError`, with the reason, for a
    call that this kernel cannot take.
    """
    if name is not None and name not in PREFILL_KERNELS:
        raise ValueError(f"there is no prefill kernel {name!r}; choose from {', '.join(PREFILL_KERNELS)}")
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def forced_prefill_kernel() -> str | None:
    """What `use_prefill_kernel` says here."""
    return _forced.get()


def goes_to_decode(batch: Batch, group: int) -> bool:
    """Whether a batch runs on the decode kernels: few query tokens a sequence, and no prefill kernel forced."""
    if batch.query_start_loc is not None and _forced.get() is not None:
        return False
    return decodes(batch, group)


def _stays_portable(batch: Batch, group: int) -> bool:
    """Whether the portable kernel is asked for, or faster than half-empty tiles."""
    forced = _forced.get()
    return forced == "portable" or (forced is None and batch.max_query_len * group <= PORTABLE_ROWS)


def hopper_launches(
    q: torch.Tensor,
    operands: LayerOperands,
    batch: Batch,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scoring: Scoring,
    *,
    hardware: Hardware,
    work: torch.Tensor | None = None,
) -> tuple[Launch, ...] | None:
    """The launches of attention on the Hopper kernel, or None where the portable kernel runs.

    `work` is the step's list where `AttentionPlan.prepare` made it; otherwise the first launch makes it. Looks at
    shapes, strides, alignments and dtypes only, so meta tensors will do; allocates the list on q's device.
    """
    forced = _forced.get()
    group = q.shape[1] // operands.num_kv_heads
    if _stays_portable(batch, group):
        return None
    reason = _refuse_geometry(operands, hardware) or _refuse_scoring(scoring) or _refuse_tensors(q, operands, out)
    if reason is None:
        reason = _gluon_refusal()
        if reason is None:
            num_tokens = q.shape[0]
            choice = choose_hopper(batch.num_seqs, batch.max_query_len, group, operands.head_dim, hardware)
            launches = []
            if work is None:
                words = choice.work_words(num_tokens, batch.num_seqs, operands.num_kv_heads)
                work = torch.empty(words, dtype=torch.int32, device=q.device)
                launches.append(work_launch(operands, batch, scoring.causal, choice, work, num_tokens=num_tokens))
            attention = attention_launch(q, operands, batch, work, out, lse, scoring, choice, hardware=hardware)
            if operands.device.type == "cuda":
                reason = _compile_refusal(attention)
            if reason is None:
                return (*launches, attention)
        _warn(reason)
    if forced == "hopper":
        raise ValueError(f"the Hopper prefill kernel cannot take this call: {reason}")
    return None


def could_take_lists(operands: LayerOperands, window: int, hardware: Hardware) -> bool:
    """Whether causal calls over such layers could run on the Hopper kernel."""
    return not window and _refuse_geometry(operands, hardware) is None and _gluon_refusal() is None


def takes_list(operands: LayerOperands, batch: Batch, group: int, window: int, hardware: Hardware) -> bool:
    """Whether causal calls over a batch that goes to prefill need a work list, as far as batch and geometry tell."""
    return not _stays_portable(batch, group) and could_take_lists(operands, window, hardware)


def prepare_work_launch(
    operands: LayerOperands, batch: Batch, group: int, work: torch.Tensor, *, num_tokens: int, hardware: Hardware
) -> Launch:
    """The launch that lists a step's work for every causal layer."""
    choice = choose_hopper(batch.num_seqs, batch.max_query_len, group, operands.head_dim, hardware)
    return work_launch(operands, batch, True, choice, work, num_tokens=num_tokens)


def work_launch(
    operands: LayerOperands,
    batch: Batch,
    causal: bool,
    choice: HopperChoice,
    work: torch.Tensor,
    *,
    num_tokens: int,
) -> Launch:
    """The launch that fills `work`, int32 `[choice.work_words(...)]` or more, with a step's list."""
    num_seqs, heads = batch.num_seqs, operands.num_kv_heads
    num_groups = choice.most_groups(num_tokens, num_seqs)
    return Launch(
        kernel=work_kernel,
        grid=(num_groups * heads + num_seqs * CHECKERS.value,),
        arguments={
            "block_table_ptr": batch.block_table,
            "seq_lens_ptr": batch.seq_lens,
            "query_start_loc_ptr": batch.query_start_loc,
            "table_rows_ptr": batch.table_rows,
            "control_ptr": operands.control,
            "work_ptr": work,
            "marks_ptr": work[choice.suspects_start(num_tokens, num_seqs, heads) :].view(torch.int8),
            "num_tokens": num_tokens,
            "num_seqs": num_seqs,
            "num_groups": num_groups,
            "table_width": batch.block_table.shape[1],
            "num_blocks": operands.num_blocks,
            "table_stride_row": batch.block_table.stride(0),
            "NUM_KV_HEADS": heads,
            "BLOCK_SIZE": operands.block_size,
            "IS_CAUSAL": causal,
            "TOKENS": choice.tokens,
            "KEYS": choice.keys,
            "SPAN": choice.span,
            "ITEMS": choice.items,
            "SCAN": choice.scan,
            "ENTRIES": _ENTRIES,
        },
        num_warps=1,
        num_stages=1,
    )


def attention_launch(
    q: torch.Tensor,
    operands: LayerOperands,
    batch: Batch,
    work: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scoring: Scoring,
    choice: HopperChoice,
    *,
    hardware: Hardware,
) -> Launch:
    """The launch of attention over the list that `work` holds."""
    from triton_kv.kernels.prefill_hopper import hopper_kernel

    num_tokens, num_query_heads, head_dim = q.shape
    group = num_query_heads // operands.num_kv_heads
    num_items = choice.most_items(num_tokens, batch.num_seqs, operands.num_kv_heads) * -(-group // choice.packed)
    max_registers, consumer_registers, producer_registers = choice.registers
    steps = _row_steps(operands)
    k_desc, v_desc = (_pages(cache, choice, steps) for cache in operands.views())
    return Launch(
        kernel=hopper_kernel,
        grid=(min(hardware.num_sms, num_items),),
        arguments={
            "q_desc": _rows(q, choice),
            "k_desc": k_desc,
            "v_desc": v_desc,
            "out_desc": _rows(out, choice),
            "out_ptr": out,
            "lse_ptr": lse,
            "block_table_ptr": batch.block_table,
            "control_ptr": operands.control,
            "work_ptr": work,
            "suspects_ptr": work[choice.suspects_start(num_tokens, batch.num_seqs, operands.num_kv_heads) :],
            "table_width": batch.block_table.shape[1],
            "num_blocks": operands.num_blocks,
            "table_stride_row": batch.block_table.stride(0),
            "out_stride_token": stride_token(out),
            "scale_log2": scoring.scale_log2,
            "GROUP": group,
            "NUM_KV_HEADS": operands.num_kv_heads,
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": operands.block_size,
            "BLOCK_ROWS": steps.block if steps else 0,
            "HEAD_ROWS": steps.head if steps else 0,
            "HEAD_CHANNELS": steps.head_channels if steps else 0,
            "OUT_STRIDE_HEAD": out.stride(1),
            "IS_CAUSAL": scoring.causal,
            "PACKED": choice.packed,
            "KEYS": choice.keys,
            "STAGES": choice.stages,
            "CONSUMERS": choice.consumers,
            "Q_BUFFERS": choice.q_buffers,
            "CONSUMER_REGISTERS": consumer_registers,
            "PRODUCER_REGISTERS": producer_registers,
        },
        num_warps=4,
        num_stages=1,
        max_registers=max_registers,
    )


def _rows(tensor: torch.Tensor, choice: HopperChoice) -> Any:
    """A descriptor of q or out, whose boxes hold the rows of one consumer."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    strides = [stride_token(tensor), tensor.stride(1), 1]
    box = [HOPPER_CONSUMER_ROWS // choice.packed, choice.packed, _CHANNELS]
    return TensorDescriptor(tensor, list(tensor.shape), strides, box, NVMMASharedLayout(128, 16, 3))


@dataclass(frozen=True, slots=True)
class _RowSteps:
    """A cache as a matrix with a row a token stride: how many rows, and channels in a row, its steps take."""

    block: int
    head: int
    head_channels: int


def _row_steps(operands: LayerOperands) -> _RowSteps | None:
    """K and V as matrices of rows, or None where their strides have none in common, or the rows are too many to count.

    Two coordinates a message instead of four: blocks of 16 tokens take so many that computing them would be felt.
    """
    found = []
    for block, token, head in (operands.k_strides, operands.v_strides):
        inside = head * (operands.num_kv_heads - 1) + operands.head_dim <= token
        if block % token or not (inside or head % token == 0):
            return None
        steps = _RowSteps(block // token, 0 if inside else head // token, head if inside else 0)
        rows = steps.block * operands.num_blocks + steps.head * operands.num_kv_heads
        if rows > _MAX_ROWS:
            return None
        found.append(steps)
    return found[0] if found[0] == found[1] else None


def _pages(cache: torch.Tensor, choice: HopperChoice, steps: _RowSteps | None) -> Any:
    """A descriptor of K or V, in whatever strides, whose boxes hold a block of one head, or as much as a tile takes."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    num_blocks, block_size, num_heads, head_dim = cache.shape
    tokens = min(block_size, choice.keys)
    if steps is not None:
        rows = steps.block * (num_blocks - 1) + steps.head * (num_heads - 1) + block_size
        shape = [rows, steps.head_channels * (num_heads - 1) + head_dim]
        box = [tokens, _CHANNELS]
        return TensorDescriptor(cache, shape, [cache.stride(1), 1], box, NVMMASharedLayout(128, 16, 2))
    box = [1, tokens, 1, _CHANNELS]
    return TensorDescriptor(cache, list(cache.shape), list(cache.stride()), box, NVMMASharedLayout(128, 16, 4))


def _refuse_geometry(operands: LayerOperands, hardware: Hardware) -> str | None:
    """Why the kernel does not run on this GPU or over such a cache, or None."""
    return refuse_hopper(
        hardware.architecture,
        TRITON_VERSION,
        operands.dtype,
        operands.head_dim,
        operands.v_head_dim,
        operands.block_size,
    )


def _refuse_scoring(scoring: Scoring) -> str | None:
    """Why the kernel has no such scores, or None."""
    if scoring.scale < _LEAST_SCALE:
        return f"it needs a scale of at least {_LEAST_SCALE}, got {scoring.scale}"
    for name in ("window", "softcap", "sinks", "alibi_slopes", "tree_mask"):
        value = getattr(scoring, name)
        if isinstance(value, torch.Tensor) or value:
            return f"it has no {name}"
    return None


def _refuse_tensors(q: torch.Tensor, operands: LayerOperands, out: torch.Tensor) -> str | None:
    """Why these tensors do not suit the copy engine, or None."""
    for name, tensor in (("q", q), ("out", out)):
        if tensor.data_ptr() % 16 or tensor.stride(1) % 8 or stride_token(tensor) % 8:
            return f"{name} must start, and its rows must lie, at multiples of 16 bytes; strides {tensor.stride()}"
    return refuse_cache(operands)


@cache
def _gluon_refusal() -> str | None:
    """Why Gluon cannot be had, or None."""
    try:
        import triton_kv.kernels.prefill_hopper  # noqa: F401
    except (ImportError, AttributeError) as error:
        return f"Gluon is missing: {type(error).__name__}: {error}"
    return None


_refusals: dict[tuple[Any, ...], str | None] = {}


def _compile_refusal(launch: Launch) -> str | None:
    """Why the kernel does not compile or load, or None. Asked once for each variant."""
    arguments = launch.arguments
    constants = tuple(value for name, value in arguments.items() if name.isupper())
    key = (arguments["out_ptr"].dtype, arguments["lse_ptr"] is None, arguments["control_ptr"] is None, constants)
    if key not in _refusals:
        try:
            launch.compile()
            _refusals[key] = None
        except Exception as error:  # whatever an experimental compiler raises
            text = " ".join(str(error).split())
            _refusals[key] = f"it does not compile: {type(error).__name__}: {text}"[:400]
    return _refusals[key]


@cache
def _warn(reason: str) -> None:
    warnings.warn(
        f"triton_kv: the Hopper prefill kernel cannot run ({reason}); attention uses the portable one, about half as "
        "fast",
        RuntimeWarning,
        stacklevel=2,
    )


__all__ = [
    "PREFILL_KERNELS",
    "TRITON_VERSION",
    "attention_launch",
    "could_take_lists",
    "goes_to_decode",
    "hopper_launches",
    "prepare_work_launch",
    "takes_list",
    "use_prefill_kernel",
    "work_launch",
]

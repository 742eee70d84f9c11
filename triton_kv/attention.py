"""`paged_attention`: attention of this step's queries over the keys and values that a paged cache holds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from triton_kv.choices import Hardware, choose_decode, choose_prefill, hardware_of, lanes_of, reads_scalar_ids
from triton_kv.kernels.decode import decode_kernel, join_kernel
from triton_kv.kernels.prefill import prefill_kernel
from triton_kv.launch import Launch, eager, interpreted, register
from triton_kv.layer import OPERANDS_SCHEMA, LayerCache, LayerOperands, operands_of

if TYPE_CHECKING:
    from triton_kv.metadata import AttentionMetadata

MAX_HEAD_DIM = 256
MAX_GROUP = 128  # query heads a KV head
_LOG2_E = 1.4426950408889634
_BLOCK_READ = 1  # the control block's kind of a block id at or past the bound, read by attention
_KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def paged_attention(
    q: torch.Tensor,
    layer: LayerCache | tuple[torch.Tensor, torch.Tensor],
    metadata: AttentionMetadata,
    *,
    plan: Any = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of each query token over the cached tokens of its sequence, which include this step's own.

    Args:
        q: `[num_tokens, num_query_heads, head_dim]`, the cache's dtype (float16, bfloat16 or float32) and device, any
            token and head stride, channels contiguous. Query head h reads KV head h // (num_query_heads //
            num_kv_heads).
        layer: a `LayerCache`, or a pair of plain tensors K `[num_blocks, block_size, num_kv_heads, head_dim]` and V
            `[..., v_head_dim]`. Write this step's keys and values before (`write_kv`).
        metadata: the batch. With `query_start_loc` sequences have any number of query tokens, which are the last ones
            of their context; without it each has one.
        scale: factor of the scores; `None` is head_dim ** -0.5.
        causal: a query token sees the keys up to its own position; else all keys of its sequence.
        out: `[num_tokens, num_query_heads, v_head_dim]` of q's dtype, channels contiguous; `None` allocates it.
        return_lse: also return the natural log of the softmax denominator.
        plan, window, softcap, sinks, alibi_slopes, batch_invariant: not supported yet.

    Returns:
        out, or (out, lse) with lse float32 `[num_tokens, num_query_heads]`.

    Rows that see no key (length 0, padding tokens past the last query start) are zeros, with lse -inf. Negative block
    ids are padding: their tokens are left out of the softmax. So are tokens of block ids at or past the bound (the
    cache's watermark, read on the device when the kernel runs; of a plain pair the first dimension), and each such
    table entry is counted in the control block of a cache. Table entries past a row's need are not read, and unread
    slots may hold anything, NaN included. Deterministic. Runs on the current stream and does not synchronise; grids
    depend on shapes only, so a captured call stays right for other lengths and after the cache grew. On a CPU it is
    `paged_attention_reference`, or the interpreted kernels under `TRITON_INTERPRET=1` (bfloat16 excepted).

    Raises `ValueError` or `TypeError` for shapes, dtypes or devices that do not fit, `NotImplementedError` for
    arguments not supported yet, `Closed` and `NothingCommitted`.

    Decode cuts the batch into equal chunks of tiles on the device (the idea of FlashInfer's and FlashAttention-3's
    schedulers, without their plan step); prefill is FlashAttention-2 with the heads of a group packed into rows.
    """
    if (
        plan is not None
        or window is not None
        or softcap
        or sinks is not None
        or alibi_slopes is not None
        or batch_invariant
    ):
        _refuse(plan, window, softcap, sinks, alibi_slopes, batch_invariant)
    operands = operands_of(layer)
    _check(q, operands, metadata, out)
    if out is None:
        out = q.new_empty((q.shape[0], q.shape[1], operands.v_head_dim))
    lse = q.new_empty(q.shape[:2], dtype=torch.float32) if return_lse else None
    attend = _attend if eager(q, out, operands.k_cache, metadata.block_table) else _OP
    attend(
        q,
        metadata.block_table,
        metadata.seq_lens,
        metadata.query_start_loc,
        metadata.table_rows,
        out,
        lse,
        q.shape[2] ** -0.5 if scale is None else scale,
        causal,
        metadata.max_query_len,
        *operands,
    )
    return out if lse is None else (out, lse)


def paged_attention_reference(
    q: torch.Tensor,
    layer: LayerCache | tuple[torch.Tensor, torch.Tensor],
    metadata: AttentionMetadata,
    *,
    plan: Any = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`paged_attention` in plain torch, any device, computed in float32 (float64 for float64 tensors).

    It reads lengths and tables on the host, so it synchronises.
    """
    _refuse(plan, window, softcap, sinks, alibi_slopes, batch_invariant)
    operands = operands_of(layer)
    _check(q, operands, metadata, out, reference=True)
    if out is None:
        out = q.new_empty((q.shape[0], q.shape[1], operands.v_head_dim))
    lse = q.new_empty(q.shape[:2], dtype=torch.float32) if return_lse else None
    _attend_plainly(
        q,
        operands,
        metadata.block_table,
        metadata.seq_lens,
        metadata.query_start_loc,
        metadata.table_rows,
        out,
        lse,
        q.shape[2] ** -0.5 if scale is None else scale,
        causal,
    )
    return out if lse is None else (out, lse)


def decode_launches(
    q: torch.Tensor,
    operands: LayerOperands,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    table_rows: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    scale: float,
    hardware: Hardware,
) -> tuple[Launch, Launch]:
    """The two launches of attention with one query token a sequence (at least one sequence).

    Looks at shapes, strides and dtypes only, so meta tensors will do; allocates the workspace on q's device.
    """
    num_seqs, num_query_heads, head_dim = q.shape
    num_kv_heads, v_head_dim = operands.num_kv_heads, operands.v_head_dim
    group = num_query_heads // num_kv_heads
    choice = choose_decode(
        num_seqs, num_kv_heads, group, head_dim, v_head_dim, operands.block_size, q.element_size(), hardware
    )
    partials = torch.empty(choice.workspace_elements(num_query_heads, v_head_dim), dtype=torch.float32, device=q.device)
    out_stride_token = _stride_token(out)
    num_parts = -(-group // choice.rows)
    decode = Launch(
        kernel=decode_kernel,
        grid=(choice.num_chunks * num_kv_heads * num_parts,),
        arguments={
            "q_ptr": q,
            "k_cache_ptr": operands.k_cache,
            "v_cache_ptr": operands.k_cache if operands.v_cache is None else operands.v_cache,
            "block_table_ptr": block_table,
            "seq_lens_ptr": seq_lens,
            "table_rows_ptr": table_rows,
            "control_ptr": operands.control,
            "out_ptr": out,
            "lse_ptr": lse,
            "partials_ptr": partials,
            "v_offset": operands.v_offset,
            "num_seqs": num_seqs,
            "table_width": block_table.shape[1],
            "num_blocks": operands.num_blocks,
            "table_stride_row": block_table.stride(0),
            "q_stride_token": _stride_token(q),
            "out_stride_token": out_stride_token,
            "scale_log2": scale * _LOG2_E,
            "GROUP": group,
            **_geometry(q, operands, out),
            "ROWS": choice.rows,
            "TILE": choice.tile,
            "K_LANES": lanes_of(head_dim),
            "V_LANES": lanes_of(v_head_dim),
            "NUM_CHUNKS": choice.num_chunks,
            "SCAN": choice.scan,
            "ONE_SCAN": choice.one_scan,
            "SCALAR_IDS": reads_scalar_ids(operands.block_size),
            "STAGES": choice.num_stages,
            "USE_PDL": choice.use_pdl,
        },
        num_warps=choice.num_warps,
        num_stages=choice.num_stages,
        launch_pdl=choice.use_pdl,
        max_registers=choice.max_registers,
    )
    join = Launch(
        kernel=join_kernel,
        grid=(choice.num_chunks * num_query_heads,),
        arguments={
            "seq_lens_ptr": seq_lens,
            "out_ptr": out,
            "lse_ptr": lse,
            "partials_ptr": partials,
            "num_seqs": num_seqs,
            "out_stride_token": out_stride_token,
            "HEADS": num_query_heads,
            "V_HEAD_DIM": v_head_dim,
            "OUT_STRIDE_HEAD": out.stride(1),
            "TILE": choice.tile,
            "V_LANES": lanes_of(v_head_dim),
            "NUM_CHUNKS": choice.num_chunks,
            "SCAN": choice.scan,
            "ONE_SCAN": choice.one_scan,
            "PARTS": choice.join_parts,
            "USE_PDL": choice.use_pdl,
        },
        num_warps=1,  # more would stay resident under the decode kernel: +1 to 4 us (H200)
        num_stages=1,
        launch_pdl=choice.use_pdl,
    )
    return decode, join


def prefill_launches(
    q: torch.Tensor,
    operands: LayerOperands,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    table_rows: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    scale: float,
    causal: bool,
    max_query_len: int,
    hardware: Hardware,
) -> tuple[Launch]:
    """The launch of attention with any number of query tokens a sequence (at least one token).

    Looks at shapes, strides and dtypes only, so meta tensors will do.
    """
    num_tokens, num_query_heads, head_dim = q.shape
    num_seqs = seq_lens.shape[0]
    num_kv_heads, v_head_dim = operands.num_kv_heads, operands.v_head_dim
    group = num_query_heads // num_kv_heads
    choice = choose_prefill(
        num_seqs, max_query_len, group, head_dim, v_head_dim, operands.block_size, q.element_size(), hardware
    )
    launch = Launch(
        kernel=prefill_kernel,
        # Enough however the tokens are shared out; one more sequence stands for padding tokens.
        grid=(num_tokens * group // choice.rows + num_seqs + 1, num_kv_heads),
        arguments={
            "q_ptr": q,
            "k_cache_ptr": operands.k_cache,
            "v_cache_ptr": operands.k_cache if operands.v_cache is None else operands.v_cache,
            "block_table_ptr": block_table,
            "seq_lens_ptr": seq_lens,
            "query_start_loc_ptr": query_start_loc,
            "table_rows_ptr": table_rows,
            "control_ptr": operands.control,
            "out_ptr": out,
            "lse_ptr": lse,
            "v_offset": operands.v_offset,
            "num_tokens": num_tokens,
            "num_seqs": num_seqs,
            "table_width": block_table.shape[1],
            "num_blocks": operands.num_blocks,
            "table_stride_row": block_table.stride(0),
            "q_stride_token": _stride_token(q),
            "out_stride_token": _stride_token(out),
            "scale_log2": scale * _LOG2_E,
            "GROUP": group,
            **_geometry(q, operands, out),
            "IS_CAUSAL": causal,
            "ROWS": choice.rows,
            "TILE": choice.tile,
            "K_LANES": lanes_of(head_dim),
            "V_LANES": lanes_of(v_head_dim),
            "SCAN": choice.scan,
            "ONE_SCAN": choice.one_scan,
            "SCALAR_IDS": reads_scalar_ids(operands.block_size),
            "STAGES": choice.num_stages,
        },
        num_warps=choice.num_warps,
        num_stages=choice.num_stages,
        max_registers=choice.max_registers,
    )
    return (launch,)


def _stride_token(tensor: torch.Tensor) -> int:
    """A single token's stride is never used and may be anything: no variant of the kernel for it."""
    return tensor.stride(0) if tensor.shape[0] > 1 else tensor.shape[1] * tensor.shape[2]


def _geometry(q: torch.Tensor, operands: LayerOperands, out: torch.Tensor) -> dict[str, int]:
    """The constexprs that a cache and a model never change."""
    vector = 16 // q.element_size()
    return {
        "NUM_KV_HEADS": operands.num_kv_heads,
        "HEAD_DIM": operands.head_dim,
        "V_HEAD_DIM": operands.v_head_dim,
        "BLOCK_SIZE": operands.block_size,
        "K_STRIDE_BLOCK": operands.k_strides[0],
        "K_STRIDE_TOKEN": operands.k_strides[1],
        "K_STRIDE_HEAD": operands.k_strides[2],
        "V_STRIDE_BLOCK": operands.v_strides[0],
        "V_STRIDE_TOKEN": operands.v_strides[1],
        "V_STRIDE_HEAD": operands.v_strides[2],
        "V_DIVISOR": math.gcd(operands.v_offset, operands.v_strides[2], vector),
        "Q_STRIDE_HEAD": q.stride(1),
        "OUT_STRIDE_HEAD": out.stride(1),
    }


def _refuse(
    plan: Any,
    window: int | None,
    softcap: float,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    batch_invariant: bool,
) -> None:
    asked = {
        "plan": plan is not None,
        "window": window is not None,
        "softcap": bool(softcap),
        "sinks": sinks is not None,
        "alibi_slopes": alibi_slopes is not None,
        "batch_invariant": bool(batch_invariant),
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise NotImplementedError(f"{name} is not supported yet")


def _check(
    q: torch.Tensor,
    operands: LayerOperands,
    metadata: AttentionMetadata,
    out: torch.Tensor | None,
    reference: bool = False,
) -> None:
    if q.dim() != 3:
        raise ValueError(f"q must be 3-D [num_tokens, num_query_heads, head_dim], got {tuple(q.shape)}")
    num_tokens, num_query_heads, head_dim = q.shape
    if head_dim != operands.head_dim:
        raise ValueError(f"q has head_dim {head_dim}, but the cache holds keys of {operands.head_dim}")
    if num_query_heads == 0 or num_query_heads % operands.num_kv_heads:
        raise ValueError(
            f"q has {num_query_heads} heads, which must be a multiple of the cache's {operands.num_kv_heads} KV heads"
        )
    if q.dtype != operands.dtype:
        raise TypeError(f"q is {q.dtype}, but the cache holds {operands.dtype}: cast q first")
    if q.device != operands.device:
        raise ValueError(f"q is on {q.device}, but the cache is on {operands.device}")
    if metadata.seq_lens.device != q.device:
        raise ValueError(f"q is on {q.device}, but the metadata is on {metadata.seq_lens.device}")
    if metadata.num_tokens != num_tokens:
        raise ValueError(f"q has {num_tokens} tokens, but the metadata describes {metadata.num_tokens}")
    if head_dim > 1 and q.stride(2) != 1:
        raise ValueError(f"q's channels must be contiguous, got strides {q.stride()}")
    if not reference:
        if q.dtype not in _KERNEL_DTYPES:
            raise TypeError(f"q must be float16, bfloat16 or float32, got {q.dtype}")
        if head_dim > MAX_HEAD_DIM or operands.v_head_dim > MAX_HEAD_DIM:
            raise ValueError(f"head_dim {head_dim} and v_head_dim {operands.v_head_dim} may be at most {MAX_HEAD_DIM}")
        if num_query_heads > MAX_GROUP * operands.num_kv_heads:
            raise ValueError(
                f"{num_query_heads} query heads on {operands.num_kv_heads} KV heads: "
                f"at most {MAX_GROUP} query heads may share a KV head"
            )
    if out is not None:
        shape = (num_tokens, num_query_heads, operands.v_head_dim)
        if out.shape != shape:
            raise ValueError(f"out must be {list(shape)}, got {list(out.shape)}")
        if out.dtype != q.dtype or out.device != q.device:
            raise ValueError(f"out must be {q.dtype} on {q.device} like q, got {out.dtype} on {out.device}")
        if out.stride(2) != 1 and shape[2] > 1:
            raise ValueError(f"out's channels must be contiguous, got strides {out.stride()}")


def _attend(
    q: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    table_rows: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scale: float,
    causal: bool,
    max_query_len: int,
    *layer: Any,
) -> None:
    if q.shape[0] == 0:
        return
    operands = LayerOperands(*layer)
    # The interpreter's bfloat16 arithmetic is wrong.
    if q.device.type == "cpu" and (not interpreted(decode_kernel) or q.dtype == torch.bfloat16):
        _attend_plainly(q, operands, block_table, seq_lens, query_start_loc, table_rows, out, lse, scale, causal)
        return
    hardware = hardware_of(q.device)
    launches: tuple[Launch, ...]
    if query_start_loc is None:
        launches = decode_launches(
            q, operands, block_table, seq_lens, table_rows, out, lse, scale=scale, hardware=hardware
        )
    else:
        launches = prefill_launches(
            q,
            operands,
            block_table,
            seq_lens,
            query_start_loc,
            table_rows,
            out,
            lse,
            scale=scale,
            causal=causal,
            max_query_len=max_query_len,
            hardware=hardware,
        )
    for launch in launches:
        launch.run(q.device)


def _attend_plainly(
    q: torch.Tensor,
    operands: LayerOperands,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    table_rows: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scale: float,
    causal: bool,
) -> None:
    """One sequence after another; of the cache only blocks below the bound that a length asks for are read."""
    control, block_size, num_kv_heads = operands.control, operands.block_size, operands.num_kv_heads
    num_tokens, num_query_heads, head_dim = q.shape
    group = num_query_heads // num_kv_heads
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    k_view, v_view = operands.views()
    bound = operands.num_blocks if control is None else int(control[0])
    lengths = seq_lens.tolist()
    starts = list(range(num_tokens + 1)) if query_start_loc is None else query_start_loc.tolist()
    rows = range(len(lengths)) if table_rows is None else table_rows.tolist()

    written = 0
    for row, length, start, end in zip(rows, lengths, starts, starts[1:], strict=False):
        end = min(end, num_tokens)
        num_queries = end - start
        if num_queries <= 0:
            continue
        written = end
        num_entries = min(-(-length // block_size), block_table.shape[1])
        if num_entries <= 0:
            _write_nothing(out[start:end], None if lse is None else lse[start:end])
            continue
        blocks = block_table[row, :num_entries].long()
        keys = torch.arange(min(num_entries * block_size, length), device=q.device)  # positions
        usable = (blocks >= 0) & (blocks < bound)
        if not bool(usable.all()):
            if control is not None:
                _count_bad_blocks(control, blocks, row, bound)
            keys = keys[usable[keys // block_size]]
            # Unusable blocks drop out; of what is left only the last may be part-filled.
            blocks = blocks[usable]
        k = k_view[blocks].flatten(0, 1)[: len(keys)].to(compute)  # [keys, num_kv_heads, head_dim]
        v = v_view[blocks].flatten(0, 1)[: len(keys)].to(compute)
        queries = q[start:end].to(compute).view(num_queries, num_kv_heads, group, head_dim)
        # [num_kv_heads, group * num_queries, keys]
        scores = queries.permute(1, 2, 0, 3).reshape(num_kv_heads, -1, head_dim) @ k.permute(1, 2, 0) * scale
        if causal and num_queries > 1:
            positions = torch.arange(length - num_queries, length, device=q.device)
            hidden = keys > positions[:, None]  # [num_queries, keys]
            scores = scores.masked_fill(hidden.repeat(group, 1), -torch.inf)
        log_sum = scores.logsumexp(dim=-1, keepdim=True)
        weights = (scores - log_sum.masked_fill(log_sum == -torch.inf, 0.0)).exp()
        result = (weights @ v.transpose(0, 1)).view(num_kv_heads, group, num_queries, -1)
        out[start:end] = result.permute(2, 0, 1, 3).flatten(1, 2).to(out.dtype)
        if lse is not None:
            lse[start:end] = log_sum.view(num_query_heads, num_queries).T
    _write_nothing(out[written:], None if lse is None else lse[written:])


def _write_nothing(out: torch.Tensor, lse: torch.Tensor | None) -> None:
    out.zero_()
    if lse is not None:
        lse.fill_(-torch.inf)


def _count_bad_blocks(control: torch.Tensor, blocks: torch.Tensor, row: int, bound: int) -> None:
    bad = blocks[blocks >= bound]
    if len(bad) == 0:
        return
    control[1] += len(bad)
    if int(control[2]) == 0:
        control[2:5] = torch.tensor([_BLOCK_READ, row, int(bad[0])], dtype=torch.int32)


_OP = register(
    "paged_attention",
    "(Tensor q, Tensor block_table, Tensor seq_lens, Tensor? query_start_loc, Tensor? table_rows, Tensor(a!) out, "
    f"Tensor(b!)? lse, float scale, bool causal, SymInt max_query_len, {OPERANDS_SCHEMA}) -> ()",
    _attend,
)

__all__ = [
    "MAX_GROUP",
    "MAX_HEAD_DIM",
    "decode_launches",
    "paged_attention",
    "paged_attention_reference",
    "prefill_launches",
]

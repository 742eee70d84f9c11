"""`paged_attention`: attention of this step's queries over the keys and values that a paged cache holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from triton_kv.batch import Batch
from triton_kv.choices import hardware_of
from triton_kv.decode import Workspace, decode_launches
from triton_kv.kernels.decode import decode_kernel
from triton_kv.launch import Launch, eager, interpreted, register
from triton_kv.launch_cache import LaunchCache, described, run_prepared
from triton_kv.layer import OPERANDS_SCHEMA, LayerCache, LayerOperands, operands_of
from triton_kv.metadata import AttentionMetadata
from triton_kv.prefill import prefill_launches
from triton_kv.prefill_hopper import forced_prefill_kernel, goes_to_decode
from triton_kv.scoring import MAX_TREE_TOKENS, SCORING_SCHEMA, Scoring, make_scoring

if TYPE_CHECKING:
    from collections.abc import Hashable

    from triton_kv.plan import AttentionPlan

MAX_HEAD_DIM = 512
MAX_GROUP = 128  # query heads a KV head
_BLOCK_READ = 1  # the control block's kind of a block id at or past the bound, read by attention
_KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def paged_attention(
    q: torch.Tensor,
    layer: LayerCache | tuple[torch.Tensor, torch.Tensor],
    metadata: AttentionMetadata,
    *,
    plan: AttentionPlan | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
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
        plan: owns the workspace, and what `prepare` found once a step for all layers; `None` allocates and finds it in
            every call. It must have been prepared for this metadata. For prefill it has something to share only if it
            was made with `max_tokens`.
        causal: a query token sees the keys up to its own position; else all keys of its sequence.
        window: query i sees keys i - window + 1 and later; blocks before the window are not read. `None` is all.
        softcap: scores become softcap * tanh(score / softcap); 0 is none. Before `alibi_slopes`.
        sinks: `[num_query_heads]` floating point: a further score in each row's softmax that has no value.
        alibi_slopes: `[num_query_heads]` floating point: slope * (key position - query position) is added to a score.
        tree_mask: int64 `[num_tokens]`, in place of the causal mask: bit j of a token's word says whether it sees the
            j-th query token of its sequence (itself included). The context before them is seen by all. At most 64
            query tokens a sequence, all with keys and values that are numbers, seen or not; bits past them mean
            nothing. It is read when the kernels run, so a captured call follows what is written there later. With
            `window` a token's position is its depth: context + the number of query tokens that it sees - 1. Not with
            `alibi_slopes`.
        out: `[num_tokens, num_query_heads, v_head_dim]` of q's dtype, channels contiguous; `None` allocates it.
        return_lse: also return the natural log of the softmax denominator, the sink's share in it.
        batch_invariant: a row's bits do not depend on its neighbours, the batch size, padding or block ids. They do on
            the metadata's `max_query_len`, which chooses kernel and tiles: keep to one.

    Returns:
        out, or (out, lse) with lse float32 `[num_tokens, num_query_heads]`.

    Rows that see no key (length 0, padding tokens past the last query start) are zeros, with lse -inf. Negative block
    ids are padding: their tokens are left out of the softmax. So are tokens of block ids at or past the bound (the
    cache's watermark, read on the device when the kernel runs; of a plain pair the first dimension), and each such
    table entry is counted in the control block of a cache. Table entries past a row's need are not read, and unread
    slots may hold anything, NaN included. Deterministic. Runs on the current stream and does not synchronise; grids
    depend on shapes only, so a captured call stays right for other lengths and after the cache grew. On a CPU it is
    `paged_attention_reference`, or the interpreted kernels under `TRITON_INTERPRET=1` (bfloat16 excepted). It has no
    gradient. head_dim may be at most 512, and at most 128 query heads may share a KV head.

    Raises `ValueError` or `TypeError` for shapes, dtypes or devices that do not fit, `Closed` and `NothingCommitted`
    (not under `torch.compile`, which would compile again after each extend).

    Decode cuts the batch into equal chunks of tiles on the device (the idea of FlashInfer's and FlashAttention-3's
    schedulers, without their plan step); prefill is FlashAttention-2 with the heads of a group packed into rows.
    """
    operands = operands_of(layer)
    scale, causal, softcap = None if scale is None else float(scale), bool(causal), float(softcap)
    key = prepared = None
    is_step = isinstance(q, torch.Tensor) and isinstance(metadata, AttentionMetadata)  # else `_check` says what it is
    if is_step and q.is_cuda and eager(q, out, operands.k_cache, metadata.block_table):
        key = (
            *_call_key(q, operands, metadata, out),
            *map(described, (sinks, alibi_slopes, tree_mask)),
            return_lse,
            scale,
            causal,
            window,
            type(window),  # True is 1, and no window
            softcap,
            plan is None,
            plan is not None and plan.has_list,
            batch_invariant,
            forced_prefill_kernel(),
        )
        prepared = _CALLS.find(key)
    if prepared is None:
        _check(q, operands, metadata, out)
    if out is None:
        out = q.new_empty((q.shape[0], q.shape[1], operands.v_head_dim))
    lse = q.new_empty(q.shape[:2], dtype=torch.float32) if return_lse else None
    workspace = None
    if plan is not None:
        workspace = plan.workspace_for(q, operands, metadata, window or 0, causal, batch_invariant)
    partials, chunks = (None, None) if workspace is None else workspace
    tensors = (
        q,
        operands.k_cache,
        operands.k_cache if operands.v_cache is None else operands.v_cache,
        metadata.block_table,
        metadata.seq_lens,
        metadata.query_start_loc,
        metadata.table_rows,
        sinks,
        alibi_slopes,
        tree_mask,
        operands.control,
        chunks,
        chunks,  # for prefill the plan's work list
        out,
        lse,
        partials,
    )
    if prepared is not None:
        run_prepared(prepared, q.device, tensors)
        return out if lse is None else (out, lse)

    batch = Batch.of(metadata)
    scoring = make_scoring(
        q.shape[2],
        q.shape[1],
        q.device,
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        tree_mask=tree_mask,
        num_tokens=metadata.num_tokens,
        max_query_len=metadata.max_query_len,
    )
    if key is not None and q.shape[0] and metadata.num_seqs:

        def build() -> tuple[Launch, ...]:
            return _launches(q, operands, batch, out, lse, scoring, batch_invariant, workspace)

        _CALLS.run(key, q.device, tensors, build)
    else:
        attend = _attend if eager(q, out, operands.k_cache, metadata.block_table) else _OP
        attend(q, *batch, out, lse, partials, chunks, batch_invariant, *scoring, *operands)
    return out if lse is None else (out, lse)


# Parameters of attention kernels that take tensors, in the order in which `paged_attention` passes them.
_CALLS = LaunchCache(
    names=(
        "q_ptr",
        "k_cache_ptr",
        "v_cache_ptr",
        "block_table_ptr",
        "seq_lens_ptr",
        "query_start_loc_ptr",
        "table_rows_ptr",
        "sinks_ptr",
        "alibi_slopes_ptr",
        "tree_mask_ptr",
        "control_ptr",
        "chunks_ptr",
        "work_ptr",
        "out_ptr",
        "lse_ptr",
        "partials_ptr",
    ),
    derived={
        "marks_ptr": "work_ptr",
        "suspects_ptr": "work_ptr",
        "q_desc": "q_ptr",
        "k_desc": "k_cache_ptr",
        "v_desc": "v_cache_ptr",
        "out_desc": "out_ptr",
    },
)


def _call_key(
    q: torch.Tensor, operands: LayerOperands, metadata: AttentionMetadata, out: torch.Tensor | None
) -> tuple[Hashable, ...]:
    """What a call's checks and launches depend on besides its options, except which tensors of those shapes it gets.

    The descriptors of q and out follow from their shapes, strides and alignment, those of K and V from `operands`; so
    do their distances from the tensors that they lie in.
    """
    table = metadata.block_table
    return (
        q.shape,
        q.stride(),
        q.dtype,
        q.device,
        q.data_ptr() % 16,
        described(out),
        metadata.num_tokens,
        metadata.num_seqs,
        metadata.max_query_len,
        metadata.device,
        table.shape,
        table.stride(0),
        metadata.query_start_loc is None,
        metadata.table_rows is None,
        operands.k_cache.data_ptr() % 16,
        described(operands.v_cache),
        operands.v_offset,
        operands.control is None,
        operands.dtype,
        operands.device,
        operands[4:],
    )


def paged_attention_reference(
    q: torch.Tensor,
    layer: LayerCache | tuple[torch.Tensor, torch.Tensor],
    metadata: AttentionMetadata,
    *,
    plan: AttentionPlan | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`paged_attention` in plain torch, any device, computed in float32 (float64 for float64 tensors).

    It reads lengths and tables on the host, so it synchronises. `plan` and `batch_invariant` change nothing here.
    """
    operands = operands_of(layer)
    _check(q, operands, metadata, out, reference=True)
    scoring = make_scoring(
        q.shape[2],
        q.shape[1],
        q.device,
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        tree_mask=tree_mask,
        num_tokens=metadata.num_tokens,
        max_query_len=metadata.max_query_len,
    )
    if out is None:
        out = q.new_empty((q.shape[0], q.shape[1], operands.v_head_dim))
    lse = q.new_empty(q.shape[:2], dtype=torch.float32) if return_lse else None
    _attend_plainly(q, operands, Batch.of(metadata), out, lse, scoring)
    return out if lse is None else (out, lse)


def _check(
    q: torch.Tensor,
    operands: LayerOperands,
    metadata: AttentionMetadata,
    out: torch.Tensor | None,
    reference: bool = False,
) -> None:
    for name, tensor in (("q", q), ("out", out)):
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
    if not isinstance(metadata, AttentionMetadata):
        raise TypeError(f"metadata must be an AttentionMetadata, not {type(metadata).__name__}")
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
        raise ValueError(
            f"q has {num_tokens} tokens, but the metadata describes {metadata.num_tokens}: "
            "pass the metadata of this step (AttentionBuffers.view for padded batches)"
        )
    if head_dim > 1 and q.stride(2) != 1:
        raise ValueError(f"q's channels must be contiguous, got strides {q.stride()}: call .contiguous() on it")
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
    max_query_len: int,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    partials: torch.Tensor | None,
    chunks: torch.Tensor | None,
    batch_invariant: bool,
    *scoring_and_layer: Any,
) -> None:
    if q.shape[0] == 0:
        return
    batch = Batch(block_table, seq_lens, query_start_loc, table_rows, max_query_len)
    if batch.num_seqs == 0:  # padding tokens alone
        _write_nothing(out, lse)
        return
    scoring = Scoring(*scoring_and_layer[: len(Scoring._fields)])
    operands = LayerOperands(*scoring_and_layer[len(Scoring._fields) :])
    # The interpreter's bfloat16 arithmetic is wrong.
    if q.device.type == "cpu" and (not interpreted(decode_kernel) or q.dtype == torch.bfloat16):
        _attend_plainly(q, operands, batch, out, lse, scoring)
        return
    workspace = None if partials is None else Workspace(partials, chunks)
    for launch in _launches(q, operands, batch, out, lse, scoring, batch_invariant, workspace):
        launch.run(q.device)


def _launches(
    q: torch.Tensor,
    operands: LayerOperands,
    batch: Batch,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scoring: Scoring,
    batch_invariant: bool,
    workspace: Workspace | None,
) -> tuple[Launch, ...]:
    hardware = hardware_of(q.device)
    if not goes_to_decode(batch, q.shape[1] // operands.num_kv_heads):
        work = None if workspace is None else workspace.chunks
        return prefill_launches(q, operands, batch, out, lse, scoring, hardware=hardware, work=work)
    return decode_launches(
        q,
        operands,
        batch,
        out,
        lse,
        scoring,
        hardware=hardware,
        batch_invariant=batch_invariant,
        workspace=workspace,
    )


@torch.no_grad()
def _attend_plainly(
    q: torch.Tensor,
    operands: LayerOperands,
    batch: Batch,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scoring: Scoring,
) -> None:
    """One sequence after another; of the cache only blocks below the bound that a length asks for are read."""
    block_table, seq_lens, query_start_loc, table_rows, _ = batch
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
        # Entries in front of the first query's window may name blocks that are gone.
        first_entry = max(length - num_queries - scoring.window + 1, 0) // block_size if scoring.window else 0
        if num_entries <= first_entry:
            _write_nothing(out[start:end], None if lse is None else lse[start:end])
            continue
        blocks = block_table[row, first_entry:num_entries].long()
        keys = torch.arange(first_entry * block_size, min(num_entries * block_size, length), device=q.device)
        usable = (blocks >= 0) & (blocks < bound)
        if not bool(usable.all()):
            if control is not None:
                _count_bad_blocks(control, blocks, row, bound)
            keys = keys[usable[keys // block_size - first_entry]]
            # Unusable blocks drop out; of what is left only the last may be part-filled.
            blocks = blocks[usable]
        k = k_view[blocks].flatten(0, 1)[: len(keys)].to(compute)  # [keys, num_kv_heads, head_dim]
        v = v_view[blocks].flatten(0, 1)[: len(keys)].to(compute)
        queries = q[start:end].to(compute).view(num_queries, num_kv_heads, group, head_dim)
        positions = torch.arange(length - num_queries, length, device=q.device)
        if scoring.tree_mask is not None:
            sees = _bits_of(scoring.tree_mask[start:end])  # [num_queries, MAX_TREE_TOKENS]
            depths = sees[:, :num_queries].sum(1) - 1
            positions = length - num_queries + depths.clamp(min=0)
        distance = keys - positions[:, None]  # [num_queries, keys]
        if scoring.tree_mask is not None:
            ordinals = keys - (length - num_queries)
            hidden = (ordinals >= 0) & ~sees[:, ordinals.clamp(0, MAX_TREE_TOKENS - 1)]
        elif scoring.causal:
            hidden = distance > 0
        else:
            hidden = torch.zeros_like(distance, dtype=torch.bool)
        if scoring.window:
            hidden = hidden | (distance <= -scoring.window)
            v = v.masked_fill(hidden.all(0)[:, None, None], 0.0)  # what lies in a slot that nobody sees is not a number
        # [num_kv_heads, group, num_queries, keys]
        scores = queries.permute(1, 2, 0, 3) @ k.permute(1, 2, 0)[:, None] * scoring.scale
        if scoring.softcap:
            scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
        if scoring.alibi_slopes is not None:
            slopes = scoring.alibi_slopes.to(compute).view(num_kv_heads, group, 1, 1)
            scores = scores + slopes * distance.to(compute)
        scores = scores.masked_fill(hidden, -torch.inf)
        log_sum = scores.logsumexp(dim=-1, keepdim=True)
        if scoring.sinks is not None:
            sinks = scoring.sinks.to(compute).view(num_kv_heads, group, 1, 1)
            log_sum = torch.where(log_sum == -torch.inf, log_sum, torch.logaddexp(log_sum, sinks))
        weights = (scores - log_sum.masked_fill(log_sum == -torch.inf, 0.0)).exp()
        result = weights @ v.transpose(0, 1)[:, None]
        out[start:end] = result.permute(2, 0, 1, 3).flatten(1, 2).to(out.dtype)
        if lse is not None:
            lse[start:end] = log_sum.view(num_query_heads, num_queries).T
    _write_nothing(out[written:], None if lse is None else lse[written:])


def _bits_of(words: torch.Tensor) -> torch.Tensor:
    """bool `[len(words), MAX_TREE_TOKENS]`: bit j of each word."""
    return (words[:, None] >> torch.arange(MAX_TREE_TOKENS, device=words.device)) & 1 == 1


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
        control[2:5] = torch.tensor([_BLOCK_READ, row, int(bad[0])], dtype=torch.int32, device=control.device)


_OP = register(
    "paged_attention",
    "(Tensor q, Tensor block_table, Tensor seq_lens, Tensor? query_start_loc, Tensor? table_rows, "
    "SymInt max_query_len, Tensor(a!) out, Tensor(b!)? lse, Tensor(d!)? partials, Tensor? chunks, "
    f"bool batch_invariant, {SCORING_SCHEMA}, {OPERANDS_SCHEMA}) -> ()",
    _attend,
)

__all__ = [
    "MAX_GROUP",
    "MAX_HEAD_DIM",
    "paged_attention",
    "paged_attention_reference",
]

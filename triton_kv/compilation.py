"""`compile_kernels`: everything that serving can reach is compiled and loaded before the cache is sized."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import torch

from triton_kv.batch import QUERY_STEPS, Batch
from triton_kv.choices import DecodeChoice, choose_hopper, choose_prefill, hardware_of, most_work_words
from triton_kv.decode import CHUNK_WORDS, Workspace, choice_of, decode_launches, decodes, prepare_launch
from triton_kv.launch import Launch
from triton_kv.layer import operands_of
from triton_kv.merging import merge_launch
from triton_kv.prefill import prefill_launches
from triton_kv.prefill_hopper import prepare_work_launch, takes_list
from triton_kv.rope import RopeCall, check_rotation, rope_launch
from triton_kv.scoring import MAX_TREE_TOKENS, Scoring
from triton_kv.spec import AttentionSpec, positive_int
from triton_kv.writing import write_launch

if TYPE_CHECKING:
    from triton_kv.cache import KVCache
    from triton_kv.layer import LayerOperands


def compile_kernels(
    cache: KVCache,
    num_query_heads: int,
    *,
    max_seqs: int,
    max_tokens: int,
    return_lse: bool = False,
    table_rows: bool = False,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: bool = False,
    alibi: bool = False,
    tree_mask: bool = False,
    batch_invariant: bool = False,
    plan: bool = False,
    cascade: bool = False,
    layer: int | str | None = None,
    cos_sin_cache: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    is_neox: bool = True,
) -> int:
    """Compiles and loads the kernels that batches of up to `max_seqs` sequences and `max_tokens` tokens reach.

    Call it before capture and before the plan: a module that loads later takes device memory that the plan gave away.
    Covers `write_kv` (rows of their own, and slices of one fused qkv tensor; int32 and int64 slots) and causal
    `paged_attention` with and without `query_start_loc`, over 16-byte aligned tensors in rows of whole heads. The
    keywords say what the calls will have: a table with `table_rows`, a plan (`AttentionPlan.prepare` is then compiled
    too), and `paged_attention`'s own. Layers that differ in them (alternating windows) need a call each, and so do
    steps with and without a `tree_mask`; `layer` is one of those that a call is for, by default the first that keeps K
    and V. With `cascade`, what a shared prefix asks for is covered beside it: attention without the causal mask, and
    `merge_attention`. With a `cos_sin_cache`, `rope_and_write_kv` over that tensor and those weights is covered too, in
    place and not, with int32 and int64 positions. Zeroing by `extend` and `zero_blocks`, and `copy_blocks`, are covered
    too. The kernel behind `AttentionBuffers.fill` compiles at its first fill (or `dummy`). Launches nothing
    and does not synchronise. Returns how many launches were compiled; on a CPU there is nothing to do and it returns 0.

    Raises `ValueError` for a cache without K and V, sizes below 1 or heads that are no multiple of the KV heads, what
    `rope_and_write_kv` raises for such a `cos_sin_cache` and weights, and what an op raises on a cache that is closed
    or has no block.
    """
    max_seqs, max_tokens = positive_int("max_seqs", max_seqs), positive_int("max_tokens", max_tokens)
    if layer is None:
        kept = [place.index for place in cache.geometry.layers if isinstance(place.spec, AttentionSpec)]
        if not kept:
            raise ValueError("no layer of this cache keeps K and V: there are no attention kernels to compile for it")
        layer = kept[0]
    operands = operands_of(cache[layer])
    if positive_int("num_query_heads", num_query_heads) % operands.num_kv_heads:
        raise ValueError(
            f"num_query_heads {num_query_heads} must be a multiple of the cache's {operands.num_kv_heads} KV heads"
        )
    if cascade and tree_mask:
        raise ValueError("a tree_mask stands in place of the causal mask: compile the cascade in a call of its own")
    if cos_sin_cache is not None:
        check_rotation(cos_sin_cache, q_norm, k_norm, operands)
    elif q_norm is not None or k_norm is not None:
        raise ValueError("q_norm and k_norm belong to rope_and_write_kv: pass its cos_sin_cache too")
    if cache.device.type != "cuda":
        return 0
    said = (return_lse, table_rows, window or 0, softcap, sinks, alibi, tree_mask)
    masks = (True, False) if cascade else (True,)
    calls = [_Calls(operands, num_query_heads, *said, causal) for causal in masks]
    with torch.cuda.device(cache.device):
        launches = [
            *(launch for each in calls for launch in each.decodes(max_seqs, max_tokens, batch_invariant, plan)),
            *(launch for each in calls for launch in each.prefills(max_seqs, max_tokens, plan)),
            *(calls[0].merges(max_tokens) if cascade else ()),
            *_writes(operands, num_query_heads, max_tokens),
            *_ropes(operands, num_query_heads, max_tokens, cos_sin_cache, q_norm, k_norm, is_neox),
            *cache.zero_launches(),
            *cache.copy_launches(),
        ]
        for launch in launches:
            launch.compile()
    return len(launches)


@dataclass(frozen=True)
class _Calls:
    """What the attention calls of a model have in common, and their launches over meta tensors."""

    operands: LayerOperands
    num_query_heads: int
    return_lse: bool
    table_rows: bool
    window: int
    softcap: float
    sinks: bool
    alibi: bool
    tree_mask: bool = False
    causal: bool = True

    def decodes(self, max_seqs: int, max_tokens: int, batch_invariant: bool, plan: bool) -> list[Launch]:
        operands, hardware = self.operands, hardware_of(self.operands.device)
        launches: list[Launch] = []
        steps = [step for step in QUERY_STEPS if step < 2 * max_tokens]
        for queries in (1, *steps):
            representative: dict[DecodeChoice, Batch] = {}  # one batch for each choice
            for num_seqs in range(1, max_seqs + 1):
                batch = self._batch(num_seqs, queries, has_starts=queries > 1)
                if decodes(batch, self.num_query_heads // operands.num_kv_heads):
                    choice = choice_of(batch, self.num_query_heads, operands, hardware, batch_invariant)
                    representative[choice] = batch
            for choice, batch in representative.items():
                workspace = None
                if plan:
                    chunks = _meta(choice.num_chunks, CHUNK_WORDS.value, dtype=torch.int32)
                    workspace = Workspace(_meta(1 << 20), chunks)
                    launches.append(prepare_launch(operands, batch, self.window, choice, chunks))
                q, out, lse = self._tokens(batch.num_seqs * queries)
                launches += decode_launches(
                    q,
                    operands,
                    batch,
                    out,
                    lse,
                    self._scoring(),
                    hardware=hardware,
                    batch_invariant=batch_invariant,
                    workspace=workspace,
                )
        return launches

    def prefills(self, max_seqs: int, max_tokens: int, plan: bool) -> list[Launch]:
        operands, hardware = self.operands, hardware_of(self.operands.device)
        group = self.num_query_heads // operands.num_kv_heads
        representative: dict[object, Batch] = {}
        # From 128 on every portable choice is the same; beyond 128 * group those of the Hopper kernel change rarely.
        long = (1 << bits for bits in range(max_tokens.bit_length()))
        tilings = {
            choose_hopper(1, n, group, operands.head_dim, hardware): n
            for n in (*range(1, min(max_tokens, 128 * group + 1) + 1), *long, max_tokens)
        }
        query_lens = {*range(1, min(max_tokens, 128) + 1), *tilings.values()}
        if self.tree_mask:
            query_lens = {query_len for query_len in query_lens if query_len <= MAX_TREE_TOKENS}
        edges = (1, 15, 16, 31, 32, 63, 64, 127, 255, 256, 1023, 1024)
        for num_seqs in {*(n for n in edges if n <= max_seqs), max_seqs}:
            for query_len in query_lens:
                on_hopper = choose_hopper(num_seqs, query_len, group, operands.head_dim, hardware)
                portable = choose_prefill(
                    num_seqs,
                    query_len,
                    group,
                    operands.head_dim,
                    operands.v_head_dim,
                    operands.block_size,
                    operands.dtype.itemsize,
                    hardware,
                )
                representative[portable, on_hopper] = self._batch(num_seqs, query_len, has_starts=True)
        launches: dict[object, Launch] = {}
        q, out, lse = self._tokens(max_tokens)
        for batch in representative.values():
            called = prefill_launches(q, operands, batch, out, lse, self._scoring(), hardware=hardware)
            if plan and takes_list(operands, batch, group, self.window, hardware):
                work = _meta(most_work_words(max_tokens, max_seqs, group, operands.num_kv_heads), dtype=torch.int32)
                called += (prepare_work_launch(operands, batch, group, work, num_tokens=max_tokens, hardware=hardware),)
            for launch in called:
                constants = tuple(value for name, value in launch.arguments.items() if name.isupper())
                launches[launch.kernel, constants, launch.num_warps, launch.num_stages] = launch
        return list(launches.values())

    def merges(self, max_tokens: int) -> list[Launch]:
        out, lse = self._tokens(max_tokens)[1], _meta(max_tokens, self.num_query_heads)
        return [merge_launch(out, lse, out, lse, out, lse)]

    def _batch(self, num_seqs: int, queries: int, *, has_starts: bool) -> Batch:
        def words(*shape: int) -> torch.Tensor:
            return _meta(*shape, dtype=torch.int32)

        return Batch(
            words(num_seqs, 8),
            words(num_seqs),
            words(num_seqs + 1) if has_starts else None,
            words(num_seqs) if self.table_rows else None,
            queries,
        )

    def _tokens(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """q, out and lse."""
        operands, heads = self.operands, self.num_query_heads
        return (
            _meta(num_tokens, heads, operands.head_dim, dtype=operands.dtype),
            _meta(num_tokens, heads, operands.v_head_dim, dtype=operands.dtype),
            _meta(num_tokens, heads) if self.return_lse else None,
        )

    def _scoring(self) -> Scoring:
        return Scoring(
            scale=self.operands.head_dim**-0.5,
            causal=self.causal,
            window=self.window,
            softcap=self.softcap,
            sinks=_meta(self.num_query_heads, dtype=self.operands.dtype) if self.sinks else None,
            alibi_slopes=_meta(self.num_query_heads) if self.alibi else None,
            tree_mask=_meta(self.num_query_heads, dtype=torch.int64) if self.tree_mask else None,
        )


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _writes(operands: LayerOperands, num_query_heads: int, max_tokens: int) -> list[Launch]:
    launches = []
    for num_tokens, slot_dtype in product({1, max_tokens}, (torch.int32, torch.int64)):
        slots = _meta(num_tokens, dtype=slot_dtype)
        for is_fused in (False, True):
            _, k, v = _rows(operands, num_query_heads, num_tokens, is_fused)
            launches.append(write_launch(k, v, operands, slots))
    return launches


def _ropes(
    operands: LayerOperands,
    num_query_heads: int,
    max_tokens: int,
    cos_sin_cache: torch.Tensor | None,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    is_neox: bool,
) -> list[Launch]:
    if cos_sin_cache is None:
        return []
    launches = []
    dtypes = (torch.int32, torch.int64)
    for num_tokens, is_fused, in_place in product({1, max_tokens}, (False, True), (False, True)):
        q, k, v = _rows(operands, num_query_heads, num_tokens, is_fused)
        out = q if in_place else _rows(operands, num_query_heads, num_tokens, False)[0]
        for slot_dtype, position_dtype in product(dtypes, dtypes):
            slots, positions = _meta(num_tokens, dtype=slot_dtype), _meta(num_tokens, dtype=position_dtype)
            call = RopeCall(
                q_out=out,
                q=None if in_place else q,
                k=k,
                v=v,
                slot_mapping=slots,
                positions=positions,
                cos_sin_cache=cos_sin_cache,
                q_norm=q_norm,
                k_norm=k_norm,
                eps=1e-6,
                norm_offset=0.0,
                is_neox=is_neox,
            )
            launches.append(rope_launch(call, operands, hardware_of(operands.device)))
    return launches


def _rows(
    operands: LayerOperands, num_query_heads: int, num_tokens: int, is_fused: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v: rows of their own, or slices of one fused qkv tensor."""
    kv_heads = operands.num_kv_heads
    shapes = [
        (num_tokens, num_query_heads, operands.head_dim),
        (num_tokens, kv_heads, operands.head_dim),
        (num_tokens, kv_heads, operands.v_head_dim),
    ]
    fused = sum(heads * dim for _, heads, dim in shapes)
    q, k, v = (
        torch.empty_strided(
            (tokens, heads, dim), (fused if is_fused else heads * dim, dim, 1), dtype=operands.dtype, device="meta"
        )
        for tokens, heads, dim in shapes
    )
    return q, k, v

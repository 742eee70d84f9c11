"""`AttentionPlan`: attention's device memory, and what all layers of a step would otherwise find again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from triton_kv.batch import QUERY_STEPS, Batch
from triton_kv.choices import hardware_of, most_work_words
from triton_kv.decode import CHUNK_WORDS, Workspace, choice_of, decodes, partial_elements, prepare_launch
from triton_kv.kernels.decode import prepare_kernel
from triton_kv.launch import interpreted
from triton_kv.layer import LayerCache, LayerOperands, operands_of
from triton_kv.prefill_hopper import could_take_lists, goes_to_decode, prepare_work_launch, takes_list
from triton_kv.scoring import make_scoring
from triton_kv.spec import positive_int

if TYPE_CHECKING:
    from triton_kv.metadata import AttentionMetadata


class AttentionPlan:
    """Owns the workspace of attention for layers of one geometry, and prepares each step once for all of them.

    ```python
    plan = AttentionPlan(cache[0], num_query_heads, max_seqs=256, max_tokens=8192)
    plan.prepare(metadata)                                    # one small kernel a step, captured with the rest
    for layer in cache:
        out = paged_attention(q, layer, metadata, plan=plan)
    ```

    All memory is allocated here, at addresses that stay, so neither a capture nor a replay allocates. A plan serves one
    batch at a time, on one stream: batches in flight at once need a plan each. Launches depend on shapes only, so what
    is captured stays right for other lengths. The scheme follows the plan and run of FlashInfer, without its host step.

    Args:
        layer: a `LayerCache` or a pair of plain tensors; layers of one cache (pairs: of as many blocks) with the same
            heads, dims, block size and dtype share it.
        num_query_heads: of the whole layer.
        max_seqs: sequences of a batch, at most.
        max_query_len: query tokens of a sequence, at most, in batches that go to the decode kernels.
        max_tokens: query tokens of a batch, at most: the plan then also makes the work list of prefill, once a step,
            where the Hopper kernel runs. `None` leaves prefill to find its work in every call.
        max_blocks_per_seq: width of the block table; needed with `batch_invariant` alone.
        window, batch_invariant: as `paged_attention` will get them. Layers of another window need a plan of their own.

    Raises `ValueError` or `TypeError` for sizes that cannot be, and what an op raises on a cache without blocks.
    """

    def __init__(
        self,
        layer: LayerCache | tuple[torch.Tensor, torch.Tensor],
        num_query_heads: int,
        *,
        max_seqs: int,
        max_query_len: int = 1,
        max_tokens: int | None = None,
        max_blocks_per_seq: int | None = None,
        window: int | None = None,
        batch_invariant: bool = False,
    ) -> None:
        operands = operands_of(layer)
        self.max_seqs = positive_int("max_seqs", max_seqs)
        self.max_query_len = positive_int("max_query_len", max_query_len)
        self.max_tokens = None if max_tokens is None else positive_int("max_tokens", max_tokens)
        if positive_int("num_query_heads", num_query_heads) % operands.num_kv_heads:
            raise ValueError(
                f"num_query_heads {num_query_heads} must be a multiple of the layer's {operands.num_kv_heads} KV heads"
            )
        if batch_invariant and max_blocks_per_seq is None:
            raise ValueError("batch_invariant keeps partials for every part of a sequence: pass max_blocks_per_seq")
        checked = make_scoring(
            operands.head_dim,
            num_query_heads,
            operands.device,
            scale=None,
            causal=True,
            window=window,
            softcap=0.0,
            sinks=None,
            alibi_slopes=None,
        )
        self.window = checked.window
        self.batch_invariant = bool(batch_invariant)
        self._num_query_heads = num_query_heads
        self._geometry = _geometry_of(operands)
        self._operands = operands
        self._hardware = hardware_of(operands.device)
        self._max_seq_len = (max_blocks_per_seq or 0) * operands.block_size
        self._runs_kernels = operands.device.type != "cpu" or (
            interpreted(prepare_kernel) and operands.dtype != torch.bfloat16
        )
        self._prepared: tuple[int, int] | None = None  # sequences and query tokens of the step
        self._has_chunks = False
        self._workspace: Workspace | None = None  # of the step on the decode kernels, shared by its layers
        self._listed: tuple[int, int, int] | None = None  # sequences, tokens, most of a sequence in the work list
        elements, num_chunks = self._sizes() if self._runs_kernels else (0, 0)
        self._partials = torch.empty(elements, dtype=torch.float32, device=operands.device)
        self._chunks = torch.zeros(num_chunks, CHUNK_WORDS.value, dtype=torch.int32, device=operands.device)
        words = 0
        if self.max_tokens is not None and could_take_lists(operands, self.window, self._hardware):
            words = most_work_words(self.max_tokens, self.max_seqs, self._group, operands.num_kv_heads)
        self._work = torch.zeros(words, dtype=torch.int32, device=operands.device)

    @property
    def num_bytes(self) -> int:
        """Device memory that the plan holds."""
        return self._partials.nbytes + self._chunks.nbytes + self._work.nbytes

    @property
    def _group(self) -> int:
        return self._num_query_heads // self._operands.num_kv_heads

    @property
    def has_list(self) -> bool:
        """Whether the prepared step has a work list, for causal layers."""
        return self._listed is not None

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Finds where each chunk of this step's batch begins, and counts table entries outside the watermark.

        One kernel on the current stream; it reads lengths and table when it runs, so capture it in front of the layers.
        Does not synchronise. For a batch that goes to prefill it makes the work list of causal layers, with
        `max_tokens` and where the Hopper kernel runs, and otherwise does nothing. Raises `ValueError` for more
        sequences or query tokens than the plan was made for.
        """
        batch = Batch.of(metadata)
        self._prepared = self._listed = self._workspace = None  # what is refused is not prepared
        self._has_chunks = goes_to_decode(batch, self._group)
        self._prepare(batch, metadata.num_tokens)
        self._prepared = (batch.num_seqs, batch.queries)

    def _prepare(self, batch: Batch, num_tokens: int) -> None:
        if batch.num_seqs > self.max_seqs:
            raise ValueError(f"a batch of {batch.num_seqs} sequences, but the plan was made for {self.max_seqs}")
        if not self._has_chunks:
            self._list_work(batch, num_tokens)
            return
        if batch.query_start_loc is not None and batch.max_query_len > self.max_query_len:
            raise ValueError(
                f"a batch with {batch.max_query_len} query tokens a sequence, but the plan was made for "
                f"{self.max_query_len}"
            )
        if self.batch_invariant and batch.block_table.shape[1] * self._operands.block_size > self._max_seq_len:
            raise ValueError(
                f"a block table of {batch.block_table.shape[1]} entries a row, but the plan was made for "
                f"{self._max_seq_len // self._operands.block_size}"
            )
        if not self._runs_kernels or batch.num_seqs == 0:
            return
        choice = choice_of(batch, self._num_query_heads, self._operands, self._hardware, self.batch_invariant)
        chunks = self._chunks[: choice.num_chunks]
        self._workspace = Workspace(self._partials, chunks)
        prepare_launch(self._operands, batch, self.window, choice, chunks).run(self._operands.device)

    def _list_work(self, batch: Batch, num_tokens: int) -> None:
        operands = self._operands
        if self.max_tokens is None:
            return
        if num_tokens > self.max_tokens:
            raise ValueError(f"a batch of {num_tokens} tokens, but the plan was made for max_tokens {self.max_tokens}")
        if not self._runs_kernels or not takes_list(operands, batch, self._group, self.window, self._hardware):
            return
        prepare_work_launch(
            operands, batch, self._group, self._work, num_tokens=num_tokens, hardware=self._hardware
        ).run(operands.device)
        self._listed = (batch.num_seqs, num_tokens, batch.max_query_len)

    def workspace_for(
        self,
        q: torch.Tensor,
        operands: LayerOperands,
        metadata: AttentionMetadata,
        window: int,
        causal: bool,
        batch_invariant: bool,
    ) -> Workspace | None:
        """The workspace for one call; None where the call needs none. Raises `ValueError` where the two do not fit."""
        batch = Batch.of(metadata)
        asked = (_geometry_of(operands), q.shape[1], window, batch_invariant)
        made_for = (self._geometry, self._num_query_heads, self.window, self.batch_invariant)
        if asked != made_for:
            names = ("the layer's geometry", "num_query_heads", "window", "batch_invariant")
            for name, found, planned in zip(names, asked, made_for, strict=True):
                if found != planned:
                    raise ValueError(f"{name} is {found}, but the plan was made for {planned}: make another one")
        step = (batch.num_seqs, batch.queries)
        if self._prepared != step:
            raise ValueError(
                f"the plan was prepared for (sequences, query tokens) {self._prepared}, but the metadata has {step}: "
                "call plan.prepare(metadata) first in each step"
            )
        if not self._runs_kernels:
            return None
        if not goes_to_decode(batch, self._group):
            if self._listed is None or not causal:
                return None
            if self._listed != (batch.num_seqs, metadata.num_tokens, batch.max_query_len):
                raise ValueError(
                    f"the plan lists work of (sequences, tokens, most of a sequence) {self._listed}, but the metadata "
                    f"has {(batch.num_seqs, metadata.num_tokens, batch.max_query_len)}: call plan.prepare(metadata) "
                    "first in each step"
                )
            return Workspace(self._partials, self._work)
        if not self._has_chunks:
            raise ValueError(
                "the plan was prepared for the kernel of use_prefill_kernel: call plan.prepare(metadata) under "
                "the same choice as the layers"
            )
        if self._workspace is not None:
            return self._workspace
        choice = choice_of(batch, self._num_query_heads, operands, self._hardware, self.batch_invariant)
        return Workspace(self._partials, self._chunks[: choice.num_chunks])

    def _sizes(self) -> tuple[int, int]:
        """f32 elements of the partials and the number of chunks, for the largest of the batches that may come."""
        operands, meta = self._operands, torch.device("meta")
        elements = num_chunks = 0
        for queries in {1, QUERY_STEPS[0], *(step for step in QUERY_STEPS if step < 2 * self.max_query_len)}:
            for num_seqs in sorted({1, *(n for n in (63, 64) if n <= self.max_seqs), self.max_seqs}):
                batch = Batch(
                    torch.empty(num_seqs, 1, dtype=torch.int32, device=meta),
                    torch.empty(num_seqs, dtype=torch.int32, device=meta),
                    torch.empty(num_seqs + 1, dtype=torch.int32, device=meta) if queries > 1 else None,
                    None,
                    queries,
                )
                if not decodes(batch, self._group):
                    continue
                choice = choice_of(batch, self._num_query_heads, operands, self._hardware, self.batch_invariant)
                needed = partial_elements(
                    choice, num_seqs, self._max_seq_len, self._num_query_heads, queries, operands.v_head_dim
                )
                elements, num_chunks = max(elements, needed), max(num_chunks, choice.num_chunks)
        return elements, num_chunks

    def __repr__(self) -> str:
        return (
            f"AttentionPlan(max_seqs={self.max_seqs}, max_query_len={self.max_query_len}, "
            f"max_tokens={self.max_tokens}, "
            f"num_query_heads={self._num_query_heads}, window={self.window or None}, {self.num_bytes} bytes)"
        )


def _geometry_of(operands: LayerOperands) -> tuple[object, ...]:
    return (
        operands.num_kv_heads,
        operands.head_dim,
        operands.v_head_dim,
        operands.block_size,
        operands.dtype,
        operands.device,
        operands.num_blocks,  # and the control block: what counts as a bad block id
        None if operands.control is None else operands.control.data_ptr(),
    )

"""The tensors of an attention case: a real cache of random content, a shuffled block table, queries, and the answer."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import triton_kv as tkv
from bench.attention_case import LAYOUTS
from bench.candidate import WrongResultError

if TYPE_CHECKING:
    from bench.attention_case import AttentionCase
    from bench.session import Session

ROTATED_BYTES = 1 << 30  # touched between two uses of one input set; the H200's L2 holds 60 MB
MAX_SETS = 128
COMPUTE_BOUND = 200  # operations a byte from which the L2 cannot matter
# The largest error of one row of one head, relative to its norm. A key left out of 8192 moves a row by 1%.
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1.5e-3, torch.float32: 1e-4}
MOST_TORCH_ERRORS = 2.0  # in 16 bits: the error of ours over that of torch's own attention of the same rows


class AttentionInputs:
    """One layer of a `KVCache` per input set, all over one block table whose blocks are handed out in random order.

    With `short` every sequence keeps at most two blocks: shapes, strides and launch choices stay those of the case,
    which is what compiling ahead needs. A context manager: leaving it closes the cache.
    """

    def __init__(self, session: Session, case: AttentionCase, *, short: bool = False) -> None:
        self.session, self.device, self.dtype = session, session.device, case.torch_dtype
        self.table_width = max(case.blocks_per_seq) + 1  # vLLM's kernel reads one entry past a row
        if short:
            longest = 2 * case.block_size
            query_lens = tuple(min(n, longest) for n in case.query_lens) if case.is_decode else case.query_lens
            lengths = tuple(max(min(n, longest), q) for n, q in zip(case.seq_lens, query_lens))
            shared = min(case.shared_tokens, case.block_size)
            case = replace(case, query_lens=query_lens, seq_lens=lengths, shared_tokens=shared)
        self.case = case
        self.scale = 1.0 / math.sqrt(case.head_dim)
        self.sets = 1 if case.warm or short else 2
        if self.sets == 2 and not session.smoke and case.flops < COMPUTE_BOUND * case.bytes_moved:
            self.sets = min(1 + -(-ROTATED_BYTES // case.bytes_moved), MAX_SETS)
        generator = torch.Generator(device=self.device).manual_seed(1)
        spec = tkv.AttentionSpec(num_kv_heads=case.num_kv_heads, head_dim=case.head_dim, dtype=self.dtype)
        self.cache = tkv.KVCache.reserve(
            spec,
            num_layers=self.sets,
            block_size=case.block_size,
            capacity=case.num_blocks,
            layout=LAYOUTS[case.layout],
            memory=tkv.HostMemory() if session.smoke else None,
            device=None if session.smoke else self.device,
            commit="all",
        )
        try:
            self.layers = [self.cache[index] for index in range(self.sets)]
            for layer in self.layers:
                layer.k.normal_(generator=generator)
                layer.v.normal_(generator=generator)
            self._fill_tables(random.Random(2))
            shape = (case.num_tokens, case.num_query_heads, case.head_dim)
            self.q = [
                torch.randn(shape, dtype=self.dtype, device=self.device, generator=generator) for _ in range(self.sets)
            ]
            self.out = torch.empty(shape, dtype=self.dtype, device=self.device)
        except BaseException:
            self.cache.close()
            raise
        self._references: dict[int, list[tuple[int, torch.Tensor]]] = {}
        self._torch_errors: dict[int, float] = {}  # by input set
        self._chosen = self._choose_rows(random.Random(3))

    def _fill_tables(self, chooser: random.Random) -> None:
        case = self.case
        blocks = list(range(1, case.num_blocks))
        chooser.shuffle(blocks)
        shared, own = blocks[: case.shared_blocks], blocks[case.shared_blocks :]
        starts = [0]
        for count in case.blocks_per_seq:
            starts.append(starts[-1] + count - len(shared))
        self.block_rows = [shared + own[begin:end] for begin, end in itertools.pairwise(starts)]
        table = torch.zeros(case.num_seqs, self.table_width, dtype=torch.int32)
        for row, ids in zip(table, self.block_rows):
            row[: len(ids)] = torch.tensor(ids, dtype=torch.int32)
        self.block_table = table.to(self.device)
        self.seq_lens = torch.tensor(case.seq_lens, dtype=torch.int32, device=self.device)
        starts = [0]
        for count in case.query_lens:
            starts.append(starts[-1] + count)
        self.query_starts = starts
        self.query_start_loc = torch.tensor(starts, dtype=torch.int32, device=self.device)
        self.metadata = tkv.AttentionMetadata(
            block_table=self.block_table,
            seq_lens=self.seq_lens,
            slot_mapping=torch.full((case.num_tokens,), -1, dtype=torch.int64, device=self.device),
            query_start_loc=None if case.is_decode else self.query_start_loc,
            num_tokens=case.num_tokens,
            num_seqs=case.num_seqs,
            max_query_len=max(case.query_lens),
        )

    @cached_property
    def paged_indices(self) -> dict[str, torch.Tensor]:
        """The block table as FlashInfer takes it: `indptr` and `last_page_len` on the host, `indices` on the device."""
        case = self.case
        indptr = [0]
        for count in case.blocks_per_seq:
            indptr.append(indptr[-1] + count)
        last = [(length - 1) % case.block_size + 1 for length in case.seq_lens]
        ids = [block for row in self.block_rows for block in row]
        return {
            "indptr": torch.tensor(indptr, dtype=torch.int32),
            "last_page_len": torch.tensor(last, dtype=torch.int32),
            "indices": torch.tensor(ids, dtype=torch.int32, device=self.device),
            "query_indptr": torch.tensor(self.query_starts, dtype=torch.int32),
        }

    def poison(self, index: int) -> None:
        """Spoils the output, so that a row nobody writes is seen."""
        self.out.fill_(float("nan"))

    def dense(self, index: int, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one sequence, gathered: `[seq_len, num_kv_heads, head_dim]` each."""
        layer, length = self.layers[index], self.case.seq_lens[sequence]
        ids = torch.tensor(self.block_rows[sequence], device=self.device)
        shape = (-1, self.case.num_kv_heads, self.case.head_dim)
        return layer.k[ids].reshape(shape)[:length], layer.v[ids].reshape(shape)[:length]

    def _choose_rows(self, chooser: random.Random) -> dict[int, list[int]]:
        """Sequence -> queries that are checked: the first, last and longest sequence and a random one; edges within."""
        case = self.case
        longest = max(range(case.num_seqs), key=case.seq_lens.__getitem__)
        sequences = {0, case.num_seqs - 1, longest, chooser.randrange(case.num_seqs)}
        return {
            sequence: sorted(
                {0, case.query_lens[sequence] - 1, *(chooser.randrange(case.query_lens[sequence]) for _ in range(3))}
            )
            for sequence in sorted(sequences)
        }

    def reference(self, index: int) -> list[tuple[int, torch.Tensor]]:
        """Token and its right output `[num_query_heads, head_dim]` in f64, for the chosen rows of one input set."""
        if index not in self._references:
            pairs: list[tuple[int, torch.Tensor]] = []
            theirs = []
            for sequence, rows in self._chosen.items():
                k, v = self.dense(index, sequence)
                pairs += self._rows(index, sequence, rows, k, v)
                theirs += self._rows_of_torch(index, sequence, rows, k, v)
            self._references[index] = pairs
            self._torch_errors[index] = _error(torch.stack(theirs), torch.stack([row for _, row in pairs]))
        return self._references[index]

    def _rows(
        self, index: int, sequence: int, rows: list[int], k: torch.Tensor, v: torch.Tensor
    ) -> list[tuple[int, torch.Tensor]]:
        case = self.case
        tokens = [self.query_starts[sequence] + row for row in rows]
        group = case.num_query_heads // case.num_kv_heads
        q = self.q[index][tokens].double().view(len(rows), case.num_kv_heads, group, case.head_dim)
        scores = torch.einsum("rhgd,lhd->rhgl", q, k.double()) * self.scale
        length = case.seq_lens[sequence]
        last = torch.tensor([length - case.query_lens[sequence] + row for row in rows], device=self.device)
        positions = torch.arange(length, device=self.device)
        hidden = positions > last[:, None]
        if case.window is not None:
            hidden |= positions <= last[:, None] - case.window
        scores.masked_fill_(hidden[:, None, None, :], float("-inf"))
        out = torch.einsum("rhgl,lhd->rhgd", scores.softmax(-1), v.double())
        return list(zip(tokens, out.reshape(len(rows), case.num_query_heads, case.head_dim)))

    def _rows_of_torch(
        self, index: int, sequence: int, rows: list[int], k: torch.Tensor, v: torch.Tensor
    ) -> list[torch.Tensor]:
        """The same rows by `scaled_dot_product_attention` in the case's dtype, as its flash backend computes it.

        Row by row over the keys that the row sees: a mask would lead torch to its math backend, which computes in f32.
        """
        case, found = self.case, []
        for row in rows:
            last = case.seq_lens[sequence] - case.query_lens[sequence] + row
            first = 0 if case.window is None else max(0, last + 1 - case.window)
            keys, values = (x[first : last + 1].transpose(0, 1)[None] for x in (k, v))
            q = self.q[index][self.query_starts[sequence] + row][None, :, None]
            with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
                out = torch.nn.functional.scaled_dot_product_attention(
                    q, keys, values, scale=self.scale, enable_gqa=True
                )
            found.append(out[0, :, 0])
        return found

    def torch_error(self) -> float:
        """The largest relative error of torch's own attention over the rows and input sets that were checked."""
        if not self._torch_errors:
            self.reference(0)
        return max(self._torch_errors.values())

    def judge(self, result: dict[str, Any]) -> None:
        """Puts torch's error beside that of a result of ours, which fails if it is more than twice as large.

        Not in f32, where both are a few units in the last place of numbers near one.
        """
        if not result.get("ok"):
            return
        theirs = self.torch_error()
        result["torch_error_norm"] = float(f"{theirs:.3g}")
        if self.dtype != torch.float32 and result["error_norm"] > MOST_TORCH_ERRORS * theirs:
            result["ok"] = False
            result["error"] = (
                f"WrongResultError: relative error {result['error_norm']:.2e} of a row against float64, that of "
                f"torch's own {self.case.dtype} attention is {theirs:.2e}: at most {MOST_TORCH_ERRORS:g} times allowed"
            )

    def verify(self, output: Any, index: int) -> float:
        """The largest relative error of a checked row of one head. Raises `WrongResultError`.

        A dense peer's `[num_seqs, num_query_heads, length, head_dim]` is taken too.
        """
        if output.dim() == 4:
            output = output.transpose(1, 2).reshape(-1, *output.shape[1::2])
        if tuple(output.shape) != tuple(self.out.shape):
            raise WrongResultError(f"shape {tuple(output.shape)} instead of {tuple(self.out.shape)}")
        if not bool(torch.isfinite(output).all()):
            bad = int((~torch.isfinite(output)).any(-1).any(-1).sum())
            raise WrongResultError(f"{bad} of {output.shape[0]} rows are not finite, or were not written")
        tokens = [token for token, _ in self.reference(index)]
        right = torch.stack([row for _, row in self.reference(index)])
        error = _error(output[tokens], right)
        if not error <= TOLERANCE[self.dtype]:
            raise WrongResultError(f"relative error {error:.2e} of a row, at most {TOLERANCE[self.dtype]:.0e} allowed")
        return error

    def close(self) -> None:
        self.cache.close()

    def __enter__(self) -> AttentionInputs:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _error(output: torch.Tensor, right: torch.Tensor) -> float:
    """The largest error of one row of one head, relative to its norm."""
    difference = (output.double() - right).norm(dim=-1) / right.norm(dim=-1)
    return float(difference.max())

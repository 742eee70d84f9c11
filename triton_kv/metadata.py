"""What one step of a batch tells the ops: block tables, lengths, query starts and slots, on the device."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from triton_kv.errors import Unavailable
from triton_kv.kernels.unpack import unpack_kernel
from triton_kv.launch import Launch, interpreted
from triton_kv.launch_cache import SameLaunch
from triton_kv.spec import positive_int
from triton_kv.upload import Upload

# Words in front of the slots: num_tokens, num_seqs, then room that keeps the 8-byte slots aligned to a cache line.
_HEADER_WORDS = 32
# A step may be packed while the copies of the two before it are in flight; the fourth waits for the first.
_NUM_UPLOADS = 3
_MAX_VIEWS = 1024
_INT32_MAX = 2**31 - 1

Integers = Sequence[int] | npt.NDArray[np.integer[Any]] | torch.Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class AttentionMetadata:
    """The batch of one step, as plain tensors of one device. No method synchronises.

    block_table: int32 `[num_seqs, max_blocks]`, any row stride; row i lists the blocks of sequence i in order. Entries
        past a row's need are never read, negative ids are padding. With `table_rows` it may have any number of rows.
    seq_lens: int32 `[num_seqs]`; context lengths in tokens, this step's tokens included. 0 is padding.
    slot_mapping: int32 or int64 `[num_tokens]`; where each token's key and value go (block * block_size + position).
        Negative slots are padding.
    query_start_loc: int32 `[num_seqs + 1]`; sequence i has tokens `query_start_loc[i]` up to `query_start_loc[i + 1]`.
        The first is 0, none is smaller than the one before. `None` when every sequence has one token.
    table_rows: int32 `[num_seqs]`; the row of each sequence in a larger, persistent block table. `None` is row i.
    num_tokens, num_seqs, max_query_len: host ints, padding included; they choose grids.

    Raises `TypeError` for what is no tensor and for wrong dtypes, `ValueError` for wrong ranks, sizes, strides or
    devices. Only shapes are looked at, never contents.
    """

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    slot_mapping: torch.Tensor
    num_tokens: int
    num_seqs: int
    max_query_len: int
    query_start_loc: torch.Tensor | None = None
    table_rows: torch.Tensor | None = None

    def __post_init__(self) -> None:
        num_tokens, num_seqs, max_query_len = self.num_tokens, self.num_seqs, self.max_query_len
        for name in ("num_tokens", "num_seqs", "max_query_len"):
            if isinstance(getattr(self, name), (float, torch.Tensor)):
                raise TypeError(f"{name} must be an int on the host, got {type(getattr(self, name)).__name__}")
        if num_tokens < 0 or num_seqs < 0:
            raise ValueError(f"num_tokens {num_tokens} and num_seqs {num_seqs} must not be negative")
        if not 1 <= max_query_len <= max(num_tokens, 1):
            raise ValueError(f"max_query_len {max_query_len} is outside of 1..{max(num_tokens, 1)} (num_tokens)")
        device = self.seq_lens.device if isinstance(self.seq_lens, torch.Tensor) else None
        _check("seq_lens", self.seq_lens, _INT32, 1, device)
        _check("block_table", self.block_table, _INT32, 2, device)
        _check("slot_mapping", self.slot_mapping, _INT32_OR_INT64, 1, device)
        _check_size("seq_lens", self.seq_lens, num_seqs, "num_seqs")
        _check_size("slot_mapping", self.slot_mapping, num_tokens, "num_tokens")
        if self.table_rows is not None:
            _check("table_rows", self.table_rows, _INT32, 1, device)
            _check_size("table_rows", self.table_rows, num_seqs, "num_seqs")
        else:
            _check_size("block_table", self.block_table, num_seqs, "num_seqs")
        if self.query_start_loc is not None:
            _check("query_start_loc", self.query_start_loc, _INT32, 1, device)
            _check_size("query_start_loc", self.query_start_loc, num_seqs + 1, "num_seqs + 1")
        elif num_tokens != num_seqs or max_query_len != 1:
            raise ValueError(
                f"without query_start_loc every sequence has one token, but num_tokens is {num_tokens}, num_seqs "
                f"{num_seqs} and max_query_len {max_query_len}; pass query_start_loc"
            )

    @property
    def device(self) -> torch.device:
        """Where the tensors live."""
        return self.seq_lens.device


_INT32 = (torch.int32,)
_INT32_OR_INT64 = (torch.int32, torch.int64)


def _check(
    name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], rank: int, device: torch.device | None
) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor on the cache's device, got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name} must be {wanted}, got {tensor.dtype}; convert it with .to(torch.{wanted.split()[-1]})")
    if tensor.dim() != rank:
        raise ValueError(f"{name} must have {rank} dimension{'s' * (rank > 1)}, got shape {tuple(tensor.shape)}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device} and seq_lens on {device}; all of them must share one device")
    if tensor.stride(rank - 1) != 1 and tensor.shape[rank - 1] > 1:
        raise ValueError(f"{name} must be contiguous in its last dimension, got strides {tensor.stride()}")


def _check_size(name: str, tensor: torch.Tensor, size: int, what: str) -> None:
    if tensor.shape[0] != size:
        raise ValueError(f"{name} has {tensor.shape[0]} entries in dimension 0, but {what} is {size}; slice it")


class AttentionBuffers:
    """The static tensors that graphs are captured over, filled from the host once a step.

    `fill` packs a step into one pinned host buffer, queues one host-to-device copy and one kernel that scatters it into
    the static tensors and pads the rest, and returns without waiting for the device. It runs before the replay, outside
    of captures; the tensors keep their addresses, so what was captured over `view(...)` reads the new step.

    max_tokens, max_seqs: the largest step. max_blocks_per_seq: width of the block table.
    block_size: tokens a block. With it `fill` sends only the entries that lengths ask for and refuses rows too short
        for their length; without it whole rows are sent and a short row goes unnoticed.

    Memory: 4 * max_seqs * max_blocks_per_seq bytes and a little, twice on the device and, on CUDA, three times in
    pinned host memory. All of it is allocated here, none by `fill`.

    Fills go to the current stream, which must be the one where the steps run: a step that still runs on another stream
    would see its tensors change. The object is not thread-safe.
    """

    def __init__(
        self,
        max_tokens: int,
        max_seqs: int,
        max_blocks_per_seq: int,
        device: torch.device | str,
        *,
        block_size: int | None = None,
    ) -> None:
        self.max_tokens = positive_int("max_tokens", max_tokens)
        self.max_seqs = positive_int("max_seqs", max_seqs)
        self.max_blocks_per_seq = positive_int("max_blocks_per_seq", max_blocks_per_seq)
        self.block_size = None if block_size is None else positive_int("block_size", block_size)
        device = torch.device(device)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise Unavailable("AttentionBuffers on 'cuda', but torch finds no GPU here: pass device='cpu'")
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        with torch.inference_mode(False):  # else `fill` could not write them outside of inference mode
            self._allocate()

    def _allocate(self) -> None:
        device = self.device
        int32 = partial(torch.zeros, dtype=torch.int32, device=device)
        self._block_table = int32((self.max_seqs, self.max_blocks_per_seq))
        self._seq_lens = int32(self.max_seqs)
        self._query_start_loc = int32(self.max_seqs + 1)
        self._slot_mapping = torch.full((self.max_tokens,), -1, dtype=torch.int64, device=device)
        num_words = _HEADER_WORDS + 2 * self.max_tokens + self.max_seqs * (4 + self.max_blocks_per_seq) + 1
        num_words += num_words % 2  # so that the words can be seen in pairs, as slots
        self._packed = int32(num_words)
        self._uploads = [Upload(self._packed) for _ in range(_NUM_UPLOADS if device.type == "cuda" else 1)]
        self._turn = 0
        self._one_token_starts = np.arange(self.max_seqs + 1, dtype=np.int32)
        self._views: dict[tuple[int, int, int | None], AttentionMetadata] = {}
        #: The unpack kernel's one launch. `compile()` it before capture where no fill runs before.
        self.launch = unpack_launch(
            self._packed, self._block_table, self._seq_lens, self._query_start_loc, self._slot_mapping
        )
        self._unpack = SameLaunch(self.launch)

    def fill(
        self,
        block_tables: Sequence[Integers] | npt.NDArray[np.integer[Any]] | torch.Tensor,
        seq_lens: Integers,
        slot_mapping: Integers,
        query_lens: Integers | None = None,
    ) -> AttentionMetadata:
        """Put one step into the static tensors, pad the rest, and return the view of exactly this step.

        block_tables: one row of block ids a sequence, or a 2-D array `[num_seqs, width]` (int32 is fastest; any
            strides). Negative ids are padding.
        seq_lens: `[num_seqs]`, context in tokens with this step's included.
        slot_mapping: `[num_tokens]`, the sequences' tokens one after another; negative slots are padding.
        query_lens: `[num_seqs]`, this step's tokens of each sequence; `None` is one each.

        All of them are host lists, NumPy arrays or CPU tensors, and are free to change once it returns. Slots past the
        step become -1, lengths 0, query starts repeat the last one; table entries past a row's need keep their value.

        Waits for the device only where the copy of three fills ago has not run yet. Raises `ValueError` for what does
        not fit (both numbers) or contradicts itself, `TypeError` for values that are no integers or live on a GPU,
        `CaptureError` while the current stream captures; nothing reaches the static tensors then.
        """
        lens = _integers("seq_lens", seq_lens)
        slots = _integers("slot_mapping", slot_mapping)
        num_seqs, num_tokens = len(lens), len(slots)
        if num_seqs > self.max_seqs:
            raise ValueError(f"{num_seqs} sequences do not fit into buffers of max_seqs {self.max_seqs}")
        if num_tokens > self.max_tokens:
            raise ValueError(f"{num_tokens} tokens do not fit into buffers of max_tokens {self.max_tokens}")
        if num_seqs and (shortest := int(lens.min())) < 0:
            raise ValueError(f"seq_lens must not be negative, got {shortest}; a padding sequence has length 0")
        max_query_len = 1
        if query_lens is None:
            if num_tokens != num_seqs:
                raise ValueError(
                    f"without query_lens every sequence has one token, but there are {num_seqs} sequences and "
                    f"{num_tokens} slots; pass query_lens"
                )
        else:
            queries = _integers("query_lens", query_lens)
            self._check_queries(queries, lens, num_tokens)
            max_query_len = max(int(queries.max(initial=0)), 1)

        upload = self._uploads[self._turn]
        upload.wait("AttentionBuffers.fill")
        words = upload.words
        words[0] = num_tokens
        words[1] = num_seqs
        upload.pairs[_HEADER_WORDS // 2 : _HEADER_WORDS // 2 + num_tokens] = slots
        at = _HEADER_WORDS + 2 * num_tokens
        words[at : at + num_seqs] = _int32("seq_lens", lens)
        at += num_seqs
        if query_lens is None:
            words[at : at + num_seqs + 1] = self._one_token_starts[: num_seqs + 1]
        else:
            words[at] = 0
            np.cumsum(queries, out=words[at + 1 : at + 1 + num_seqs])
        at += num_seqs + 1
        starts, counts = words[at : at + num_seqs], words[at + num_seqs : at + 2 * num_seqs]
        at += 2 * num_seqs
        at += self._pack_tables(block_tables, lens, starts, counts, words[at:])
        self._send(upload, at)
        return self.view(num_tokens, num_seqs, max_query_len)

    def view(self, num_tokens: int, num_seqs: int, max_query_len: int | None = None) -> AttentionMetadata:
        """The first `num_seqs` sequences and `num_tokens` tokens of the static tensors, same addresses every time.

        max_query_len: the most tokens that one sequence has in any step that the view stands for; `None` is 1 where
        there are as many tokens as sequences, else `num_tokens`. Where it is 1 and the counts agree, sequence i is
        token i and query_start_loc is `None`. Raises `ValueError` for more than the buffers hold (both numbers).
        """
        key = (num_tokens, num_seqs, max_query_len)
        metadata = self._views.get(key)
        if metadata is not None:
            return metadata
        if not 0 <= num_tokens <= self.max_tokens:
            raise ValueError(f"num_tokens {num_tokens} is outside of 0..{self.max_tokens} (max_tokens)")
        if not 0 <= num_seqs <= self.max_seqs:
            raise ValueError(f"num_seqs {num_seqs} is outside of 0..{self.max_seqs} (max_seqs)")
        if max_query_len is None:
            max_query_len = 1 if num_tokens == num_seqs else max(num_tokens, 1)
        one_each = max_query_len == 1 and num_tokens == num_seqs
        metadata = AttentionMetadata(
            block_table=self._block_table[:num_seqs],
            seq_lens=self._seq_lens[:num_seqs],
            slot_mapping=self._slot_mapping[:num_tokens],
            query_start_loc=None if one_each else self._query_start_loc[: num_seqs + 1],
            num_tokens=num_tokens,
            num_seqs=num_seqs,
            max_query_len=max_query_len,
        )
        if len(self._views) == _MAX_VIEWS:  # mixed batches rarely repeat their sizes
            self._views.clear()
        self._views[key] = metadata
        return metadata

    def dummy(self, num_tokens: int, num_seqs: int) -> AttentionMetadata:
        """Fill a step for a profile or warm-up run and return its view.

        The tokens are dealt evenly to the sequences and nothing came before them (contexts of one token where the
        counts agree); every table entry is block 0 and every slot is slot 0, so nothing but the first block is touched.
        Raises `ValueError` for more than the buffers hold, and for sequences without a token.
        """
        if not 0 < num_seqs <= num_tokens:
            raise ValueError(
                f"a dummy step needs sequences with a token each, got {num_seqs} sequences and {num_tokens} tokens"
            )
        lens = np.full(num_seqs, num_tokens // num_seqs, dtype=np.int32)
        lens[: num_tokens % num_seqs] += 1
        # One row for all of them: broadcasting keeps a wide table from being built on the host first.
        tables = np.broadcast_to(np.zeros(self.max_blocks_per_seq, dtype=np.int32), (num_seqs, self.max_blocks_per_seq))
        slots = np.zeros(num_tokens, dtype=np.int64)
        return self.fill(tables, lens, slots, None if num_tokens == num_seqs else lens)

    def _check_queries(
        self, queries: npt.NDArray[np.integer[Any]], lens: npt.NDArray[np.integer[Any]], num_tokens: int
    ) -> None:
        if len(queries) != len(lens):
            raise ValueError(f"query_lens has {len(queries)} entries and seq_lens {len(lens)}; each sequence needs one")
        if (total := int(queries.sum())) != num_tokens:
            raise ValueError(f"query_lens add up to {total} tokens, but slot_mapping has {num_tokens}")
        bad = (queries < 0) | (queries > lens)
        if bad.any():
            row = int(bad.argmax())
            raise ValueError(
                f"sequence {row} has query_len {queries[row]} and seq_len {lens[row]}; "
                "a context includes this step's tokens"
            )

    def _pack_tables(
        self,
        tables: Any,
        lens: npt.NDArray[np.integer[Any]],
        starts: npt.NDArray[np.int32],
        counts: npt.NDArray[np.int32],
        entries: npt.NDArray[np.int32],
    ) -> int:
        """Write the used entries of all rows, and where each row starts and how long it is; the number of entries."""
        num_seqs = len(lens)
        if not isinstance(tables, (Sequence, np.ndarray, torch.Tensor)):
            raise TypeError(f"block_tables must be rows of block ids, one a sequence, not {type(tables).__name__}")
        if len(tables) != num_seqs:
            raise ValueError(
                f"block_tables has {len(tables)} rows and seq_lens {num_seqs} entries; each sequence needs one"
            )
        if not num_seqs:
            return 0
        needed = None if self.block_size is None else -(lens // -self.block_size)  # rounds up, overflows nowhere
        if isinstance(tables, torch.Tensor) or (isinstance(tables, np.ndarray) and tables.dtype != object):
            table = _integers("block_tables", tables, rank=2)
            width = table.shape[1]
            if needed is not None:
                if (most := int(needed.max())) > width:
                    self._raise_short_row(lens, np.full(num_seqs, width), needed)
                width = most
            self._check_width(width)
            counts[:] = width if needed is None else needed
            if needed is None or num_seqs * width <= 2 * int(counts.sum()) + 4096:
                entries[: num_seqs * width].reshape(num_seqs, width)[...] = _int32("block_tables", table[:, :width])
                np.multiply(self._one_token_starts[:num_seqs], width, out=starts)
                return num_seqs * width
            # A few long rows among short ones: the rectangle would be mostly padding.
            rows: Any = [table[i, :count] for i, count in enumerate(counts.tolist())]
        else:
            rows = tables
            try:
                counts[:] = np.fromiter(map(len, rows), np.int64, num_seqs)
            except TypeError:
                raise TypeError("block_tables must hold a row of block ids for each sequence, not single ids") from None
            self._check_width(int(counts.max()))
            if needed is not None and (counts < needed).any():
                self._raise_short_row(lens, counts, needed)
        starts[0] = 0
        np.cumsum(counts[:-1], out=starts[1:])
        total = int(starts[-1]) + int(counts[-1])
        entries[:total] = _flatten(rows, total)
        return total

    def _check_width(self, width: int) -> None:
        if width > self.max_blocks_per_seq:
            raise ValueError(
                f"a row of {width} blocks does not fit into buffers of max_blocks_per_seq {self.max_blocks_per_seq}"
            )

    def _raise_short_row(self, lens: npt.NDArray[Any], counts: npt.NDArray[Any], needed: npt.NDArray[Any]) -> None:
        row = int((counts < needed).argmax())
        raise ValueError(
            f"sequence {row} of {lens[row]} tokens needs {needed[row]} blocks of {self.block_size}, "
            f"but its block table row has {counts[row]}"
        )

    def _send(self, upload: Upload, num_words: int) -> None:
        """Queue the copy and the unpack kernel; on the CPU the static tensors are written before it returns."""
        if self.device.type == "cuda":
            upload.send(num_words)
            self._unpack.run(self.device)
            self._turn = (self._turn + 1) % len(self._uploads)
        elif interpreted(unpack_kernel):
            self.launch.run()
        else:
            unpack_reference(self._packed, self._block_table, self._seq_lens, self._query_start_loc, self._slot_mapping)


def unpack_launch(
    packed: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> Launch:
    """The launch that scatters `packed`; it looks at shapes only, so meta tensors do."""
    max_tokens, (max_seqs, max_blocks) = slot_mapping.shape[0], block_table.shape
    block = 1024 if interpreted(unpack_kernel) else 512
    # The interpreter takes about a millisecond a program. On a GPU a row each, until they would queue.
    programs = 1 if interpreted(unpack_kernel) else min(max(max_seqs, -(-max_tokens // block)), 512)
    return Launch(
        kernel=unpack_kernel,
        grid=(programs, 2),
        arguments={
            "packed_ptr": packed,
            "block_table_ptr": block_table,
            "seq_lens_ptr": seq_lens,
            "query_start_loc_ptr": query_start_loc,
            "slot_mapping_ptr": slot_mapping,
            "MAX_TOKENS": max_tokens,
            "MAX_SEQS": max_seqs,
            "MAX_BLOCKS": max_blocks,
            "HEADER_WORDS": _HEADER_WORDS,
            "BLOCK": block,
        },
        num_warps=4,
        num_stages=1,
    )


def unpack_reference(
    packed: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """What the unpack kernel does, in plain torch: scatter `packed` into the static tensors and pad the rest.

    packed: int32 `[words]`: num_tokens, num_seqs, the header's rest, slots (int64, two words each), lengths, query
    starts, first entry of each row, number of entries of each row, entries. The others are the tensors of
    `AttentionBuffers`, whole.
    """
    num_tokens, num_seqs = packed[:2].tolist()
    sizes = [_HEADER_WORDS, 2 * num_tokens, num_seqs, num_seqs + 1, num_seqs, num_seqs]
    _, slots, lens, starts, row_starts, row_counts = packed[: sum(sizes)].split(sizes)
    entries = packed[sum(sizes) :]
    slot_mapping[:num_tokens] = slots.view(torch.int64)
    slot_mapping[num_tokens:] = -1
    seq_lens[:num_seqs] = lens
    seq_lens[num_seqs:] = 0
    query_start_loc[: num_seqs + 1] = starts
    query_start_loc[num_seqs + 1 :] = num_tokens
    for row, (start, count) in enumerate(zip(row_starts.tolist(), row_counts.tolist(), strict=True)):
        block_table[row, :count] = entries[start : start + count]


def _integers(name: str, values: Any, rank: int = 1) -> npt.NDArray[np.integer[Any]]:
    """`values` as an integer array of `rank` dimensions, without a copy where it is one already."""
    if isinstance(values, torch.Tensor) and values.device.type != "cpu":
        raise TypeError(
            f"{name} is on {values.device}; pass a host list or array, copying it would wait for the device"
        )
    try:
        found = np.asarray(values)
    except ValueError:
        raise ValueError(
            f"{name} must have {rank} dimension{'s' * (rank > 1)}, got rows of different lengths"
        ) from None
    if found.ndim != rank:
        raise ValueError(f"{name} must have {rank} dimension{'s' * (rank > 1)}, got shape {found.shape}")
    if found.dtype.kind not in "iu":
        if found.size == 0:
            return found.astype(np.int32)
        raise TypeError(f"{name} must hold integers, got {found.dtype}")
    if found.dtype == np.uint64 and found.size and int(found.max()) >= 2**63:
        raise ValueError(f"{name} must fit into int64, got {int(found.max())}")
    # So that differences have a sign, and no product overflows a byte.
    return found if found.dtype in (np.int32, np.int64) else found.astype(np.int64)


def _int32(name: str, found: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """`found`, once all of its values are known to fit into 32 bits."""
    if found.dtype != np.int32 and found.size:
        low, high = int(found.min()), int(found.max())
        if low < -_INT32_MAX - 1 or high > _INT32_MAX:
            raise ValueError(f"{name} must fit into int32, got {high if high > _INT32_MAX else low}")
    return found


def _flatten(rows: Sequence[Any], total: int) -> npt.NDArray[np.integer[Any]]:
    """All rows' entries one after another."""
    if not total:
        return np.empty(0, dtype=np.int32)
    if isinstance(rows[0], (np.ndarray, torch.Tensor)):
        found = np.concatenate(rows)
        if found.dtype.kind in "iu":  # one float among them, or an empty list, makes all of them float: one by one then
            return _int32("block_tables", _integers("a row of block_tables", found))
    entries = array("i")
    try:
        for row in rows:  # fromlist and extend refuse floats, which NumPy would cut; fromlist takes half the time
            if type(row) is list:
                entries.fromlist(row)
            else:
                entries.extend(row)
    except OverflowError:
        raise ValueError("block_tables must fit into int32") from None
    except TypeError as error:
        raise TypeError(f"block_tables must hold integers: {error}") from None
    return np.frombuffer(entries, dtype=np.int32)

"""The tables of `paged_attention` cases that the tests share (CPU, interpreter, compile, GPU), and a case's tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from tests.write_cases import layer_by_hand
from triton_kv.batch import Batch
from triton_kv.decode import decode_launches, decodes
from triton_kv.layer import LayerCache, LayerOperands
from triton_kv.metadata import AttentionMetadata
from triton_kv.prefill import prefill_launches
from triton_kv.prefill_hopper import use_prefill_kernel
from triton_kv.scoring import Scoring

if TYPE_CHECKING:
    from triton_kv.choices import Hardware
    from triton_kv.launch import Launch

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
GARBAGE = 2147480000  # table entries that nothing may read
NEGATIVE, OVER = "negative", "over"  # kinds of a bad table entry

# Attention of unit-variance values: absolute errors, a few roundings of the dtype.
TOLERANCE = {torch.float64: 1e-9, F32: 2e-5, F16: 3e-3, BF16: 2e-2}


@dataclass(frozen=True)
class AttentionCase:
    """One batch: `lengths[i]` is the context of sequence i, of which the last `queries[i]` tokens ask."""

    name: str
    lengths: tuple[int, ...]
    queries: tuple[int, ...] | None = None  # None: decode, one each
    num_kv_heads: int = 2
    group: int = 2
    head_dim: int = 32
    v_head_dim: int = 32
    block_size: int = 16
    dtype: torch.dtype = F32
    layout: str = "LTBNHD"  # or "pair", "pair_interleaved", "pair_head_major", "pair_padded": two plain tensors
    causal: bool = True
    padding_tokens: int = 0  # query tokens past the last sequence
    bad_entries: tuple[tuple[int, int, str], ...] = ()  # (sequence, entry, NEGATIVE or OVER)
    table_rows: bool = False  # the table has more rows than sequences, in another order
    num_sms: int = 4  # of the interpreter's hardware
    scale: float | None = None
    window: int | None = None
    softcap: float = 0.0
    sinks: bool = False
    alibi: bool = False
    tree: str = ""  # "branches": a random tree; "bits": any bits, of later tokens too, or none
    batch_invariant: bool = False
    poison: float = float("nan")  # in every slot that nobody may read

    def __str__(self) -> str:
        return self.name

    @property
    def query_lens(self) -> tuple[int, ...]:
        return (1,) * len(self.lengths) if self.queries is None else self.queries

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens) + self.padding_tokens

    def first_seen(self, sequence: int) -> int:
        """The first key that any query of a sequence sees."""
        if self.window is None:
            return 0
        return max(self.lengths[sequence] - self.query_lens[sequence] - self.window + 1, 0)

    @property
    def decodes(self) -> bool:
        """Whether its batch goes to the decode kernels unless another is forced."""
        nothing = torch.empty(0)
        starts = None if self.queries is None else nothing
        return decodes(Batch(nothing, nothing, starts, None, max((1, *self.query_lens))), self.group)

    @property
    def num_query_heads(self) -> int:
        return self.num_kv_heads * self.group

    @property
    def num_blocks(self) -> int:
        """Committed blocks: what the sequences need, and some that nobody uses."""
        return sum(-(-length // self.block_size) for length in self.lengths) + 3

    @property
    def capacity(self) -> int:
        return self.num_blocks + 2


def decode(name: str, *lengths: int, **fields) -> AttentionCase:
    return AttentionCase(name, lengths, **fields)


def varlen(name: str, *pairs: tuple[int, int], **fields) -> AttentionCase:
    """A case from (query tokens, context) pairs."""
    return AttentionCase(name, tuple(length for _, length in pairs), tuple(query for query, _ in pairs), **fields)


DECODE_CASES = (
    decode("one", 1),
    decode("one_long", 300, num_kv_heads=1),
    decode("skew", 400, 3, 17, 1, 64, num_kv_heads=1),
    decode("empty_rows", 0, 33, 0, 0, 70, 0),
    decode("all_empty", 0, 0, 0),
    decode("f16", 90, 5, 64, dtype=F16),
    decode("group_1", 50, 20, group=1),
    decode("group_3", 50, 20, 0, group=3, num_kv_heads=3, head_dim=16, v_head_dim=16),
    decode("group_7", 50, 20, group=7, num_kv_heads=1),
    decode("group_8", 50, 20, group=8, num_kv_heads=1, dtype=F16),
    decode("group_16", 50, 20, group=16, num_kv_heads=1),
    decode("group_40", 50, 20, group=40, num_kv_heads=1, head_dim=16, v_head_dim=16),
    decode("group_71_f16", 80, 20, group=71, num_kv_heads=1, head_dim=16, v_head_dim=16, dtype=F16),
    decode("block_1", 40, 3, block_size=1),
    decode("block_2", 41, 3, block_size=2, num_kv_heads=1),
    decode("block_4", 41, 3, block_size=4),
    decode("block_8", 100, 24, 25, block_size=8),
    decode("block_12", 100, 24, 25, block_size=12),
    decode("block_24", 100, 24, 25, block_size=24),
    decode("block_32_f16", 100, 32, 33, block_size=32, dtype=F16),
    decode("block_48", 100, 48, 49, block_size=48),
    decode("block_64", 200, 64, 65, block_size=64),
    decode("block_256", 300, 7, block_size=256, num_kv_heads=1),
    decode("block_544", 600, 7, block_size=544, num_kv_heads=1),
    decode("dim_64_f16", 70, 9, head_dim=64, v_head_dim=64, group=3, num_kv_heads=3, dtype=F16),
    decode("dim_128", 40, 9, head_dim=128, v_head_dim=128, num_kv_heads=1, group=4),
    decode("dim_80", 70, 9, head_dim=80, v_head_dim=80),
    decode("dim_96_f16", 70, 9, head_dim=96, v_head_dim=96, dtype=F16),
    decode("dim_112", 70, 9, head_dim=112, v_head_dim=112, num_kv_heads=1),
    decode("dim_120", 40, 9, head_dim=120, v_head_dim=120, num_kv_heads=1),
    decode("dim_192", 40, 9, head_dim=192, v_head_dim=192, num_kv_heads=1),
    decode("dim_256", 40, 9, head_dim=256, v_head_dim=256, num_kv_heads=1),
    decode("dim_192_128", 40, 9, head_dim=192, v_head_dim=128, num_kv_heads=1, layout="LBTNHD"),
    decode("v_dim_differs", 70, 9, head_dim=48, v_head_dim=16, layout="LBTNHD"),
    decode("kv_in_block", 70, 9, layout="LBTNHD"),
    decode("head_before_token", 70, 9, layout="LBTHND"),
    decode("kv_outermost", 70, 9, layout="TLBNHD"),
    decode("block_outermost", 70, 9, layout="BLTNHD"),
    decode("kv_interleaved", 70, 9, layout="LBNHTD"),
    decode("head_segments", 70, 9, layout="LHBNTD"),
    decode("head_outermost_in_block", 70, 9, layout="BHLNTD"),
    decode("tokens_outside_blocks", 70, 9, layout="LNTBHD"),
    decode("pair", 70, 9, layout="pair"),
    decode("pair_interleaved", 70, 9, layout="pair_interleaved"),
    decode("pair_head_major", 70, 9, layout="pair_head_major"),
    decode("pair_padded", 70, 9, layout="pair_padded", block_size=12),
    decode("negative_ids", 70, 33, 16, bad_entries=((0, 0, NEGATIVE), (0, 3, NEGATIVE), (2, 0, NEGATIVE))),
    decode("over_watermark", 70, 33, 16, bad_entries=((0, 1, OVER), (0, 4, OVER), (2, 0, OVER), (1, 0, NEGATIVE))),
    decode("over_watermark_block_12", 70, 33, 12, block_size=12, bad_entries=((0, 1, OVER), (2, 0, OVER))),
    decode("over_watermark_block_64", 300, 33, block_size=64, bad_entries=((0, 1, OVER), (0, 4, OVER), (1, 0, OVER))),
    decode("pair_past_end", 70, 16, layout="pair", bad_entries=((0, 1, OVER), (1, 0, OVER))),
    decode("infinite_poison", 70, 33, 17, 300, bad_entries=((0, 1, OVER), (1, 0, NEGATIVE)), poison=float("inf")),
    decode("infinite_poison_pair", 70, 9, layout="pair", window=40, poison=float("-inf")),
    decode("table_rows", 70, 0, 33, 20, table_rows=True),
    decode("table_rows_bad", 70, 0, 33, table_rows=True, bad_entries=((2, 1, OVER),)),
    decode("many_chunks", 500, 100, 0, 64, num_kv_heads=1, num_sms=16, head_dim=16, v_head_dim=16),
    decode("many_seqs", *(i * 7 % 40 for i in range(70)), num_kv_heads=1, head_dim=16, v_head_dim=16),
    # 16 tiles in 7 chunks of 3: the last one has nothing to do, and its programs lie between the others.
    decode("idle_chunk", *[16] * 16, num_sms=7),
    decode("idle_chunk_group_40", *[16] * 16, num_sms=21, group=40, head_dim=16, v_head_dim=16),
    decode("scale", 70, 9, scale=0.7),
    decode("dim_512", 40, 9, head_dim=512, v_head_dim=512, num_kv_heads=1),
    decode("window", 300, 40, 39, 7, 0, 64, window=40),
    decode("window_1", 50, 1, window=1),
    decode("window_block_12", 300, 90, window=50, block_size=12),
    decode("window_block_64", 500, 90, 129, window=70, block_size=64),
    decode("window_past", 30, 5, window=1000),
    decode("window_over_watermark", 300, 90, window=50, bad_entries=((0, 16, OVER), (0, 2, OVER), (1, 5, OVER))),
    decode("window_many_chunks", 500, 100, 0, 64, window=90, num_kv_heads=1, num_sms=16, head_dim=16, v_head_dim=16),
    decode("softcap", 70, 9, softcap=3.0),
    decode("softcap_f16", 70, 9, softcap=30.0, dtype=F16, scale=200.0),
    decode("sinks", 300, 33, 0, 1, sinks=True),
    decode("sinks_one_long", 500, num_kv_heads=1, sinks=True),
    decode("alibi", 300, 33, 0, alibi=True),
    decode("everything", 300, 33, 0, window=100, softcap=5.0, sinks=True, alibi=True),
    decode("tree", 70, 1, 0, 33, tree="bits"),
    decode("invariant", 5000, 33, 0, 2048, 2049, batch_invariant=True, num_kv_heads=1, head_dim=16, v_head_dim=16),
    decode("invariant_sinks", 4500, 70, batch_invariant=True, sinks=True, num_kv_heads=1, head_dim=16, v_head_dim=16),
    decode(
        "invariant_window",
        *(5000, 2500, 20),
        batch_invariant=True,
        window=2100,
        num_kv_heads=1,
        head_dim=16,
        v_head_dim=16,
    ),
)

VARLEN_CASES = (
    varlen("one_token", (1, 1)),
    varlen("fresh", (40, 40), (7, 7)),
    varlen("context", (5, 70), (20, 90)),
    varlen("mixed", (1, 70), (33, 33), (1, 5), (9, 60)),
    varlen("mixed_speculative", (1, 70), (4, 90), (40, 77), (1, 16), (4, 4), (18, 18), (3, 50)),
    varlen("chunks_at_any_offset", (20, 37), (17, 33), (18, 34), (30, 31), (33, 96), (64, 65), (19, 31)),
    varlen("empty_sequences", (0, 0), (9, 20), (0, 50), (3, 0), (2, 1), (0, 0)),
    varlen("padding_tokens", (9, 20), (3, 3), padding_tokens=5),
    varlen("padding_only", (0, 0), padding_tokens=4),
    varlen("non_causal", (9, 40), (33, 33), causal=False),
    varlen("f16", (40, 90), (3, 3), dtype=F16),
    varlen("group_1", (40, 50), group=1),
    varlen("group_3", (25, 50), (1, 9), group=3, num_kv_heads=3, head_dim=16, v_head_dim=16),
    varlen("group_7", (25, 50), (1, 9), group=7, num_kv_heads=1),
    varlen("group_8", (25, 50), group=8, num_kv_heads=1, dtype=F16),
    varlen("group_16", (5, 50), group=16, num_kv_heads=1),
    varlen("group_71", (3, 50), group=71, num_kv_heads=1, head_dim=16, v_head_dim=16, dtype=F16),
    varlen("few_queries", (4, 50), (2, 2), (1, 30), group=4, num_kv_heads=1),
    varlen("block_1", (9, 20), block_size=1),
    varlen("block_2", (30, 41), (3, 3), block_size=2, num_kv_heads=1),
    varlen("block_12", (9, 100), (3, 12), block_size=12),
    varlen("block_48", (9, 100), (3, 12), block_size=48),
    varlen("block_64", (9, 200), (3, 64), block_size=64),
    varlen("block_256", (20, 300), (3, 7), block_size=256, num_kv_heads=1),
    varlen("block_544", (20, 600), (3, 7), block_size=544, num_kv_heads=1),
    varlen("dim_80", (9, 70), head_dim=80, v_head_dim=80, num_kv_heads=1),
    varlen("dim_96_f16", (9, 70), head_dim=96, v_head_dim=96, num_kv_heads=1, dtype=F16),
    varlen("dim_112", (20, 70), head_dim=112, v_head_dim=112, num_kv_heads=1),
    varlen("dim_120", (9, 40), head_dim=120, v_head_dim=120, num_kv_heads=1),
    varlen("dim_192", (20, 40), head_dim=192, v_head_dim=192, num_kv_heads=1),
    varlen("dim_192_128", (20, 40), (3, 9), head_dim=192, v_head_dim=128, num_kv_heads=1, layout="LBTNHD"),
    varlen("dim_256", (9, 40), head_dim=256, v_head_dim=256, num_kv_heads=1),
    varlen("v_dim_differs", (9, 70), head_dim=48, v_head_dim=16, layout="LBTNHD"),
    varlen("kv_interleaved", (9, 70), layout="LBNHTD"),
    varlen("head_segments", (9, 70), layout="LHBNTD"),
    varlen("pair_padded", (9, 70), layout="pair_padded"),
    varlen("negative_ids", (9, 70), (5, 33), bad_entries=((0, 0, NEGATIVE), (0, 3, NEGATIVE), (1, 1, NEGATIVE))),
    varlen("over_watermark", (40, 70), (5, 33), (0, 20), bad_entries=((0, 1, OVER), (0, 4, OVER), (1, 0, OVER))),
    varlen("over_unasked", (0, 20), (5, 33), bad_entries=((0, 1, OVER),)),
    varlen("over_watermark_block_12", (9, 70), block_size=12, bad_entries=((0, 5, OVER),)),
    varlen("pair_past_end", (9, 70), layout="pair", bad_entries=((0, 1, OVER),)),
    varlen("infinite_poison", (40, 70), (5, 33), (0, 20), bad_entries=((0, 1, OVER),), poison=float("inf")),
    varlen("table_rows", (9, 70), (0, 0), (5, 33), table_rows=True),
    varlen("many_seqs", *((i % 3, 5 + i * 7 % 40) for i in range(70)), num_kv_heads=1, head_dim=16, v_head_dim=16),
    # A few query tokens a sequence go to the decode kernels.
    varlen("speculative", (4, 300), (4, 50), (1, 33), (0, 20), (3, 3), (4, 2), num_sms=16, padding_tokens=2),
    varlen("speculative_16", (16, 200), (2, 16), (9, 30)),
    varlen("speculative_group_7", (4, 200), (2, 16), (3, 30), group=7, num_kv_heads=1),
    varlen("speculative_group_32", (2, 90), (1, 16), (2, 30), group=32, num_kv_heads=1, head_dim=16, v_head_dim=16),
    varlen("speculative_window", (4, 300), (4, 50), (1, 33), (2, 60), window=40, num_sms=16),
    varlen("speculative_everything", (4, 300), (3, 50), window=90, softcap=5.0, sinks=True, alibi=True, num_sms=16),
    varlen("speculative_non_causal", (4, 300), (4, 50), (1, 33), causal=False),
    varlen("speculative_over", (4, 70), (2, 33), bad_entries=((0, 1, OVER), (0, 4, OVER), (1, 0, OVER))),
    varlen("speculative_table_rows", (4, 70), (0, 0), (2, 33), table_rows=True),
    varlen(
        "speculative_invariant", (4, 4200), (2, 60), batch_invariant=True, num_kv_heads=1, head_dim=16, v_head_dim=16
    ),
    varlen("window", (40, 300), (33, 33), (3, 90), (0, 5), window=40),
    varlen("window_1", (40, 70), window=1),
    varlen("window_block_12", (30, 200), (20, 20), window=25, block_size=12),
    varlen("window_non_causal", (30, 100), (20, 20), window=25, causal=False),
    varlen("window_shorter_than_queries", (40, 30), (33, 33), window=20),
    varlen("window_over_watermark", (40, 300), window=50, bad_entries=((0, 1, OVER), (0, 14, OVER), (0, 18, OVER))),
    varlen("softcap", (40, 70), (3, 9), softcap=3.0),
    varlen("softcap_f16", (40, 70), softcap=30.0, dtype=F16, scale=200.0),
    varlen("sinks", (40, 70), (33, 33), (3, 0), sinks=True),
    varlen("alibi", (40, 70), (33, 33), alibi=True, group=3),
    varlen("everything", (40, 300), (33, 33), window=100, softcap=5.0, sinks=True, alibi=True),
    varlen("dim_512", (20, 40), head_dim=512, v_head_dim=512, num_kv_heads=1),
    # Tree masks: on the decode kernels, on the prefill kernel, and mixed with sequences of one token.
    varlen("tree_few", (7, 300), (4, 50), (1, 33), (0, 20), (3, 3), (7, 2), tree="branches", num_sms=8),
    varlen("tree_16", (16, 200), (2, 16), (9, 30), tree="branches", padding_tokens=3),
    varlen("tree_bits_few", (5, 70), (16, 40), (1, 9), tree="bits"),
    varlen("tree_few_group_7", (4, 200), (2, 16), (3, 30), group=7, num_kv_heads=1, tree="bits"),
    varlen("tree_few_window", (7, 300), (4, 50), (1, 33), window=40, tree="branches", num_sms=8),
    varlen("tree_few_window_3", (16, 90), (9, 30), window=3, tree="bits"),
    varlen("tree_few_everything", (7, 300), (3, 50), window=90, softcap=5.0, sinks=True, tree="bits", num_sms=8),
    varlen("tree_few_over", (4, 70), (2, 33), bad_entries=((0, 1, OVER), (0, 4, OVER), (1, 0, OVER)), tree="bits"),
    varlen(
        *("tree_few_invariant", (4, 4200), (2, 60)),
        batch_invariant=True,
        num_kv_heads=1,
        head_dim=16,
        v_head_dim=16,
        tree="branches",
    ),
    varlen("tree", (26, 90), (33, 33), (1, 70), (17, 5), (0, 9), tree="branches", padding_tokens=5),
    varlen("tree_64", (64, 150), (40, 40), tree="branches", dtype=F16),
    varlen("tree_bits", (64, 70), (63, 200), (32, 40), (0, 0), tree="bits", group=3),
    varlen("tree_block_12", (40, 100), (3, 12), block_size=12, tree="bits"),
    varlen("tree_window", (40, 300), (33, 33), (3, 90), (20, 5), window=40, tree="branches"),
    varlen("tree_window_5", (64, 100), (20, 30), window=5, tree="bits"),
    varlen("tree_over_watermark", (40, 70), (5, 33), (0, 20), bad_entries=((0, 1, OVER), (0, 4, OVER)), tree="bits"),
    varlen("tree_everything", (40, 300), (33, 33), window=100, softcap=5.0, sinks=True, tree="bits"),
)

# Of which the copy engine brings tiles into the portable kernel, on GPUs that have one: more than 64 rows over blocks
# of 64 tokens and more, in 16 bits, with whole tiles in front of tiles that end in poison.
_BOXES = {"group": 4, "head_dim": 64, "v_head_dim": 64, "dtype": F16}
_BOXES_128 = {"group": 4, "head_dim": 128, "v_head_dim": 128, "dtype": F16, "num_kv_heads": 1}
_BOXES_256 = {"group": 4, "head_dim": 256, "v_head_dim": 256, "dtype": F16, "num_kv_heads": 1}
BOX_CASES = (
    varlen("block_64", (40, 300), (3, 64), (20, 128), (1, 191), (0, 70), (17, 449), **_BOXES, block_size=64),
    varlen("block_128", (40, 300), (3, 64), (20, 128), (33, 257), **_BOXES, block_size=128),
    varlen("block_256", (40, 300), (3, 64), (20, 512), (5, 700), **_BOXES, block_size=256),
    varlen("fresh", (140, 140), (257, 257), **_BOXES, block_size=64, padding_tokens=5),
    varlen("dim_128", (40, 300), (3, 64), (20, 129), **_BOXES_128, block_size=64),
    varlen("dim_128_block_128", (40, 300), (3, 64), **_BOXES_128, block_size=128),
    varlen("dim_256", (30, 200), (3, 64), **_BOXES_256, block_size=64),
    varlen("dim_256_block_128", (30, 300), (3, 64), **_BOXES_256, block_size=128),
    varlen("dim_256_window", (30, 300), (3, 64), **_BOXES_256, block_size=64, window=130, softcap=5.0),
    varlen(
        "dim_192_128", (30, 200), **{**_BOXES_256, "head_dim": 192, "v_head_dim": 128}, block_size=64, layout="LBTNHD"
    ),
    varlen("dim_120", (30, 300), **{**_BOXES, "head_dim": 120, "v_head_dim": 120}, block_size=64),
    varlen("group_7", (25, 300), (1, 150), **{**_BOXES, "group": 7, "num_kv_heads": 1}, block_size=64),
    varlen("group_1", (140, 400), (3, 33), **{**_BOXES, "group": 1}, block_size=128),
    varlen("non_causal", (40, 300), (20, 128), (1, 63), **_BOXES, block_size=64, causal=False),
    varlen("window", (40, 500), (33, 200), (3, 90), **_BOXES, block_size=64, window=200),
    varlen("window_block_256", (40, 700), (33, 200), **_BOXES, block_size=256, window=300),
    varlen("softcap", (40, 300), **_BOXES, block_size=64, softcap=3.0),
    varlen("softcap_of_large_scores", (40, 300), **_BOXES, block_size=128, softcap=30.0, scale=-200.0),
    varlen("sinks", (40, 300), (33, 33), **_BOXES, block_size=64, sinks=True),
    varlen("alibi", (40, 300), (33, 33), **_BOXES, block_size=64, alibi=True),
    varlen("everything", (40, 500), (33, 33), **_BOXES, block_size=64, window=300, softcap=5.0, sinks=True, alibi=True),
    varlen("tree", (26, 300), (33, 200), (0, 9), **_BOXES, block_size=64, tree="branches"),
    varlen("tree_window", (40, 300), (33, 33), **_BOXES, block_size=64, tree="branches", window=200),
    varlen(
        *("bad_ids", (40, 700), (20, 300), (5, 100)),
        **_BOXES,
        block_size=64,
        bad_entries=((0, 0, OVER), (0, 3, OVER), (0, 4, NEGATIVE), (0, 5, NEGATIVE), (1, 1, OVER), (2, 1, NEGATIVE)),
    ),
    varlen(
        *("bad_ids_block_128", (40, 700), (20, 300)),
        **_BOXES,
        block_size=128,
        bad_entries=((0, 0, OVER), (0, 3, NEGATIVE), (1, 1, OVER)),
    ),
    varlen(
        *("bad_ids_alibi", (40, 700), (20, 300)),
        **_BOXES,
        block_size=128,
        alibi=True,
        bad_entries=((0, 0, OVER), (0, 3, NEGATIVE), (1, 1, OVER)),
    ),
    # What is usable scores far below the zeros that come for all the blocks behind it.
    varlen(
        *("bad_ids_near", (40, 1500)),
        **_BOXES,
        block_size=256,
        alibi=True,
        bad_entries=tuple((0, entry, NEGATIVE if entry % 2 else OVER) for entry in range(1, 6)),
    ),
    varlen(
        *("bad_ids_window", (40, 700), (20, 300)),
        **_BOXES,
        block_size=64,
        window=400,
        bad_entries=((0, 0, OVER), (0, 6, OVER), (0, 7, OVER), (0, 9, NEGATIVE), (1, 1, OVER)),
    ),
    varlen("table_rows", (40, 300), (0, 0), (33, 200), **_BOXES, block_size=64, table_rows=True),
    varlen("pair_past_end", (40, 300), **_BOXES, block_size=64, layout="pair", bad_entries=((0, 0, OVER),)),
    *(
        varlen(f"layout_{layout}", (40, 300), (33, 33), **_BOXES, block_size=64, layout=layout)
        for layout in ("LBTHND", "TLBNHD", "BLTNHD", "LBNHTD", "LHBNTD", "LNTBHD", "pair_interleaved", "pair_padded")
    ),
)

# What few query tokens keep away from the prefill kernel, for tests that force it.
FORCED_CASES = tuple(case for case in VARLEN_CASES if case.decodes)


@dataclass(frozen=True, eq=False)
class AttentionTensors:
    """A case's tensors. Slots that nobody may read hold its poison, table entries that nobody may read garbage."""

    case: AttentionCase
    q: torch.Tensor
    layer: LayerCache | tuple[torch.Tensor, torch.Tensor]
    metadata: AttentionMetadata
    arguments: dict[str, object]  # keywords of `paged_attention`
    keys: list[torch.Tensor]  # of each sequence: [length, num_kv_heads, head_dim]
    values: list[torch.Tensor]
    bad: list[tuple[int, int]]  # (row of the table, id) of each entry past the bound that a query needs

    @property
    def sinks(self) -> torch.Tensor:
        return self.arguments["sinks"].cpu().double()

    @property
    def slopes(self) -> torch.Tensor:
        return self.arguments["alibi_slopes"].cpu().double()

    def out(self) -> torch.Tensor:
        """Poisoned, so that a row left out is found."""
        shape = (*self.q.shape[:2], self.case.v_head_dim)
        return torch.full(shape, torch.nan, dtype=self.q.dtype, device=self.q.device)

    def usable(self, sequence: int) -> list[int]:
        """Positions of the tokens whose table entries are good."""
        skipped = {entry for index, entry, _ in self.case.bad_entries if index == sequence}
        return [i for i in range(self.case.lengths[sequence]) if i // self.case.block_size not in skipped]

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) in float64 on the CPU, token by token and head by head."""
        case = self.case
        out = torch.zeros(case.num_tokens, case.num_query_heads, case.v_head_dim, dtype=torch.float64)
        lse = torch.full((case.num_tokens, case.num_query_heads), -torch.inf, dtype=torch.float64)
        q = self.q.cpu().double()
        scale = case.head_dim**-0.5 if case.scale is None else case.scale
        token = 0
        for sequence, (length, num_queries) in enumerate(zip(case.lengths, case.query_lens)):
            usable = self.usable(sequence)
            keys, values = self.keys[sequence].cpu().double(), self.values[sequence].cpu().double()
            for i in range(num_queries):
                position = length - num_queries + i
                seen = [j for j in usable if not case.causal or j <= position]
                if case.tree:
                    context, word = length - num_queries, int(self.arguments["tree_mask"][token])
                    chosen = [context + j for j in range(num_queries) if word >> j & 1]
                    seen = [j for j in usable if j < context or j in chosen]
                    position = context + max(len(chosen) - 1, 0)
                seen = [j for j in seen if case.window is None or j > position - case.window]
                if seen:
                    for head in range(case.num_query_heads):
                        scores = keys[seen, head // case.group] @ q[token, head] * scale
                        if case.softcap:
                            scores = case.softcap * torch.tanh(scores / case.softcap)
                        if case.alibi:
                            scores = scores + self.slopes[head] * (torch.tensor(seen) - position)
                        if case.sinks:
                            scores = torch.cat([scores, self.sinks[head : head + 1]])
                        lse[token, head] = torch.logsumexp(scores, 0)
                        weights = torch.softmax(scores, 0)[: len(seen)]
                        out[token, head] = weights @ values[seen, head // case.group]
                token += 1
        return out, lse


def make_tensors(case: AttentionCase, device: torch.device | str = "cpu", seed: int = 0) -> AttentionTensors:
    """Random queries, keys and values in blocks in random order, among poison."""
    random = torch.Generator().manual_seed(seed)
    k_view, v_view, layer = _poisoned_cache(case, device)
    bound = case.num_blocks if isinstance(layer, LayerCache) else case.capacity
    num_seqs = len(case.lengths)
    needs = [-(-length // case.block_size) for length in case.lengths]
    # Table entries past the need, and the columns between rows, are never read.
    num_rows = num_seqs + 4 if case.table_rows else num_seqs
    rows = (torch.randperm(num_rows, generator=random) if case.table_rows else torch.arange(num_rows))[:num_seqs]
    table = torch.full((num_rows, max(needs, default=0) + 3), GARBAGE, dtype=torch.int32)
    order = torch.randperm(case.num_blocks, generator=random).tolist()
    unusable = {(sequence, entry): kind for sequence, entry, kind in case.bad_entries}
    keys, values, bad = [], [], []
    for sequence, (length, need) in enumerate(zip(case.lengths, needs)):
        k = torch.randn(length, case.num_kv_heads, case.head_dim, generator=random).to(case.dtype)
        v = torch.randn(length, case.num_kv_heads, case.v_head_dim, generator=random).to(case.dtype)
        keys.append(k)
        values.append(v)
        for entry in range(need):
            block = order.pop()
            tokens = slice(entry * case.block_size, min((entry + 1) * case.block_size, length))
            kind = unusable.get((sequence, entry))
            if kind is None and tokens.stop <= case.first_seen(sequence):
                block = GARBAGE  # a block that the window left behind, and that may be gone
            elif kind is None:
                k_view[block, : tokens.stop - tokens.start] = k[tokens].to(device)
                v_view[block, : tokens.stop - tokens.start] = v[tokens].to(device)
            else:
                block = -1 - 1000 * entry if kind == NEGATIVE else bound + entry % 2 * 1_000_000_000
                if kind == OVER and case.query_lens[sequence] and tokens.stop > case.first_seen(sequence):
                    bad.append((int(rows[sequence]), block))
            table[rows[sequence], entry] = block
    starts = torch.tensor([0, *case.query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    metadata = AttentionMetadata(
        block_table=table.to(device)[:, : max(needs, default=0) + 1],
        seq_lens=torch.tensor(case.lengths, dtype=torch.int32, device=device),
        slot_mapping=torch.full((case.num_tokens,), -1, dtype=torch.int64, device=device),
        num_tokens=case.num_tokens,
        num_seqs=num_seqs,
        max_query_len=max((1, *case.query_lens)),
        query_start_loc=None if case.queries is None else starts.to(device),
        table_rows=rows.to(torch.int32).to(device) if case.table_rows else None,
    )
    # Queries are a slice of a fused qkv tensor.
    qkv = torch.randn(case.num_tokens, case.num_query_heads + 2, case.head_dim, generator=random).to(case.dtype)
    arguments: dict[str, object] = {name: getattr(case, name) for name in ("causal", "scale", "window", "softcap")}
    arguments["batch_invariant"] = case.batch_invariant
    heads = case.num_query_heads
    arguments["sinks"] = torch.randn(heads, generator=random).to(device) if case.sinks else None
    arguments["alibi_slopes"] = torch.rand(heads, generator=random).to(device) * 0.2 if case.alibi else None
    arguments["tree_mask"] = tree_words(case, random).to(device) if case.tree else None
    return AttentionTensors(case, qkv.to(device)[:, :heads], layer, metadata, arguments, keys, values, bad)


def tree_words(case: AttentionCase, random: torch.Generator) -> torch.Tensor:
    """int64 [num_tokens]: a word a query token, with any bits past its sequence's tokens, and any words of padding."""
    words = torch.randint(-(2**63), 2**63 - 1, (case.num_tokens,), generator=random)
    token = 0
    for num_queries in case.query_lens:
        present = (1 << num_queries) - 1
        branches: list[int] = []  # of each token: its own bit and its ancestors'
        for i in range(num_queries):
            parent = int(torch.randint(-1, i, (), generator=random)) if i else -1
            branches.append((branches[parent] if parent >= 0 else 0) | 1 << i)
            word = int(words[token + i]) % (1 << 64)
            if case.tree == "branches":
                word = (word & ~present) | branches[i]
            elif i % 5 == 3:
                word &= ~present  # sees the context alone
            words[token + i] = word - (1 << 64) if word >> 63 else word
        token += num_queries
    return words


def chain_words(case: AttentionCase) -> torch.Tensor:
    """The causal mask as a tree mask: each token sees the query tokens before it, and itself."""
    words = [(2 << i) - 1 for num_queries in case.query_lens for i in range(num_queries)] + [0] * case.padding_tokens
    return torch.tensor([word - (1 << 64) if word >> 63 else word for word in words], dtype=torch.int64)


def _poisoned_cache(
    case: AttentionCase, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor, LayerCache | tuple[torch.Tensor, torch.Tensor]]:
    if not case.layout.startswith("pair"):
        layer = layer_by_hand(case, device)  # type: ignore[arg-type]
        layer.flat.fill_(case.poison)
        return layer.k, layer.v, layer
    blocks, size, heads, dim = case.capacity, case.block_size, case.num_kv_heads, case.head_dim

    def poison(*shape: int) -> torch.Tensor:
        return torch.full(shape, case.poison, dtype=case.dtype, device=device)

    if case.layout == "pair_interleaved":  # the block stride is twice a block
        both = poison(blocks, 2, size, heads, dim)
        k, v = both[:, 0], both[:, 1]
    elif case.layout == "pair_head_major":
        k, v = (poison(blocks, heads, size, dim).transpose(1, 2) for _ in range(2))
    elif case.layout == "pair_padded":  # pages, tokens and heads stand apart, differently in K and V
        k = poison(blocks, size + 1, heads + 1, dim + 8)[:, :size, :heads, :dim]
        v = poison(blocks, size + 2, heads + 2, case.v_head_dim + 16)[:, :size, :heads, : case.v_head_dim]
    else:
        k, v = poison(blocks, size, heads, dim), poison(blocks, size, heads, case.v_head_dim)
    return k, v, (k, v)


def assert_attention(tensors: AttentionTensors, out: torch.Tensor, lse: torch.Tensor) -> None:
    """out and lse equal the naive float64 loop's, and bad table entries were counted, each once."""
    expected_out, expected_lse = tensors.expected()
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.cpu().double(), expected_out, rtol=tolerance, atol=tolerance)
    lse_tolerance = tolerance if out.dtype in (torch.float64, F32) else 1e-3  # the LSE is never rounded to 16 bits
    torch.testing.assert_close(lse.cpu().double(), expected_lse, rtol=max(lse_tolerance, 1e-6), atol=lse_tolerance)
    if isinstance(tensors.layer, LayerCache):
        control = tensors.layer.control.tolist()
        assert control[:2] == [tensors.case.num_blocks, len(tensors.bad)]
        if tensors.bad:
            assert control[2] == 1
            assert (control[3], control[4]) in tensors.bad
        else:
            assert control[2:] == [0] * 6


@dataclass(frozen=True)
class AttentionShape:
    """Shapes over which the choosers are exercised and every launch is compiled ahead of time."""

    num_kv_heads: int
    group: int
    head_dim: int
    v_head_dim: int
    block_size: int
    dtype: torch.dtype
    has_control: bool = True
    has_lse: bool = False
    has_variants: bool = False  # also with window, soft cap, sinks, ALiBi, tree masks and batch invariance

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        extras = "" if self.has_control else "-plain"
        extras += "-lse" if self.has_lse else ""
        return f"{self.num_kv_heads}x{self.group}-d{self.head_dim}-{self.v_head_dim}-b{self.block_size}-{dtype}{extras}"


SHAPES = (
    AttentionShape(8, 4, 128, 128, 16, BF16, has_variants=True),
    AttentionShape(8, 4, 128, 128, 16, BF16, has_control=False),
    AttentionShape(8, 4, 128, 128, 16, F16, has_lse=True),
    AttentionShape(8, 4, 128, 128, 16, F32),
    AttentionShape(8, 4, 128, 128, 64, BF16, has_variants=True),
    AttentionShape(8, 4, 128, 128, 256, BF16, has_lse=True),
    AttentionShape(8, 4, 128, 128, 128, BF16, has_lse=True, has_variants=True),
    AttentionShape(4, 7, 128, 128, 64, F16, has_lse=True, has_variants=True),
    AttentionShape(4, 4, 64, 64, 64, BF16, has_variants=True),
    AttentionShape(4, 4, 64, 64, 128, F16, has_control=False),
    AttentionShape(8, 8, 120, 120, 64, BF16),
    AttentionShape(8, 4, 192, 128, 64, BF16, has_variants=True),
    AttentionShape(4, 4, 256, 256, 128, BF16, has_lse=True, has_variants=True),
    AttentionShape(4, 7, 256, 256, 64, F16, has_lse=True),
    AttentionShape(8, 4, 128, 128, 12, BF16),
    AttentionShape(8, 4, 128, 128, 1, F16),
    AttentionShape(8, 4, 128, 128, 544, BF16),
    AttentionShape(3, 3, 64, 64, 16, F32),
    AttentionShape(3, 3, 64, 64, 16, BF16),
    AttentionShape(4, 7, 128, 128, 16, BF16),
    AttentionShape(32, 1, 128, 128, 16, F16),
    AttentionShape(32, 1, 80, 80, 16, BF16),
    AttentionShape(8, 8, 96, 96, 16, BF16, has_variants=True),
    AttentionShape(8, 8, 112, 112, 32, F16),
    AttentionShape(8, 8, 120, 120, 16, BF16),
    AttentionShape(2, 16, 64, 64, 16, BF16),
    AttentionShape(8, 4, 192, 128, 16, BF16),
    AttentionShape(4, 4, 256, 256, 16, BF16, has_lse=True),
    AttentionShape(4, 4, 256, 256, 12, F16),
    AttentionShape(4, 4, 256, 256, 16, F32, has_lse=True),
    AttentionShape(8, 4, 32, 32, 16, F16),
    AttentionShape(8, 4, 16, 16, 16, BF16),
    AttentionShape(1, 32, 128, 128, 16, BF16),
    AttentionShape(1, 71, 64, 64, 16, BF16),
    AttentionShape(1, 128, 128, 128, 16, BF16),
    AttentionShape(1, 128, 256, 256, 48, BF16),
    AttentionShape(1, 128, 128, 128, 12, F32),
    AttentionShape(2, 8, 512, 512, 16, BF16),
)

PLAIN_SCORING = {"scale": 0.1, "causal": True, "window": 0, "softcap": 0.0, "sinks": None, "alibi_slopes": None}
NUM_SEQS = (1, 16, 64, 256, 2000)
QUERY_LENS = (1, 4, 16, 512)


def shape_operands(shape: AttentionShape, num_blocks: int = 1000) -> LayerOperands:
    """A K/V split layer on the meta device."""
    size, heads, dim, v_dim = shape.block_size, shape.num_kv_heads, shape.head_dim, shape.v_head_dim
    meta = {"dtype": shape.dtype, "device": "meta"}
    flat = torch.empty(num_blocks * size * heads * (dim + v_dim), **meta)
    return LayerOperands(
        k_cache=flat,
        v_cache=None,
        v_offset=num_blocks * size * heads * dim,
        control=torch.empty(8, dtype=torch.int32, device="meta") if shape.has_control else None,
        num_blocks=num_blocks,
        block_size=size,
        num_kv_heads=heads,
        head_dim=dim,
        v_head_dim=v_dim,
        k_strides=(size * heads * dim, heads * dim, dim),
        v_strides=(size * heads * v_dim, heads * v_dim, v_dim),
    )


def shape_launches(shape: AttentionShape, hardware: Hardware, *, every: bool = True) -> dict[str, Launch]:
    """Every launch that differs in more than its grid, by name; `every=False`: only for the most common batches."""
    operands = shape_operands(shape)
    meta = {"device": "meta"}
    num_heads = shape.num_kv_heads * shape.group
    launches: dict[str, Launch] = {}
    seen = set()

    def keep(name: str, launch: Launch) -> None:
        constants = tuple(sorted((k, v) for k, v in launch.arguments.items() if k.isupper()))
        has_tree = launch.arguments.get("tree_mask_ptr") is not None
        key = (launch.kernel.__name__, constants, launch.num_warps, launch.num_stages, has_tree)
        if key not in seen:
            seen.add(key)
            launches[name] = replace(launch)

    def words(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.int32, **meta)

    def add(name: str, num_seqs: int, queries: int | None, **fields) -> None:
        num_tokens = num_seqs * (queries or 1)
        q = torch.empty(num_tokens, num_heads, shape.head_dim, dtype=shape.dtype, **meta)
        out = torch.empty(num_tokens, num_heads, shape.v_head_dim, dtype=shape.dtype, **meta)
        lse = torch.empty(num_tokens, num_heads, **meta) if shape.has_lse else None
        starts = None if queries is None else words(num_seqs + 1)
        batch = Batch(words(num_seqs, 512), words(num_seqs), starts, None, queries or 1)
        invariant = fields.pop("batch_invariant", False)
        if fields.pop("tree", False):
            fields["tree_mask"] = torch.empty(num_tokens, dtype=torch.int64, **meta)
        scoring = Scoring(**{**PLAIN_SCORING, **fields})
        if decodes(batch, shape.group):
            pair = decode_launches(q, operands, batch, out, lse, scoring, hardware=hardware, batch_invariant=invariant)
            for part, launch in zip(("decode", "join"), pair):
                keep(f"{part}-{name}", launch)
        else:
            with use_prefill_kernel("portable"):  # it runs wherever the other one cannot
                (launch,) = prefill_launches(q, operands, batch, out, lse, scoring, hardware=hardware)
            keep(f"prefill-{name}", launch)

    for num_seqs in NUM_SEQS if every else (1, 64):
        add(str(num_seqs), num_seqs, None)
    for num_seqs in (4, 2000) if every else (4,):
        for query_len in QUERY_LENS if every else (512,):
            add(f"{num_seqs}-{query_len}", num_seqs, query_len)
    if every and shape.has_variants:
        sinks, slopes = torch.empty(num_heads, dtype=BF16, **meta), torch.empty(num_heads, **meta)
        everything = {"window": 1000, "softcap": 30.0, "sinks": sinks, "alibi_slopes": slopes}
        for queries, suffix in ((None, ""), (4, "-4"), (512, "-512")):
            add(f"everything{suffix}", 16, queries, **everything)
            add(f"window{suffix}", 16, queries, window=1000)
            add(f"window_softcap{suffix}", 16, queries, window=1000, softcap=30.0)
            add(f"softcap_sinks{suffix}", 16, queries, softcap=30.0, sinks=sinks)
            add(f"alibi{suffix}", 16, queries, softcap=30.0, sinks=sinks, alibi_slopes=slopes)
            add(f"non_causal{suffix}", 16, queries, causal=False)
        for queries in (None, 4, 16, 64):
            suffix = "" if queries is None else f"-{queries}"
            add(f"tree{suffix}", 16, queries, tree=True)
            add(f"tree_window{suffix}", 16, queries, tree=True, window=1000, softcap=30.0, sinks=sinks)
        add("invariant", 16, None, batch_invariant=True)
        add("invariant-4", 16, 4, batch_invariant=True)
    return launches

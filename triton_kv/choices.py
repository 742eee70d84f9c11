"""How attention kernels are cut and launched: pure functions of shapes, dtype and hardware, never of lengths."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton

# A block table is read as one scalar a block where at most this many blocks make a tile.
_MAX_SCALAR_IDS = 8
_MAX_SCAN = 1024  # lengths that one program scans at a time; more would not fit into the registers of two warps
# Query tokens of the longest sequence times query heads a KV head: the row counts that have a kernel of their own.
PREFILL_ROWS = (16, 64, 128)


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a launch choice needs to know about a device."""

    num_sms: int
    architecture: int | str  # CUDA compute capability, 90 for 9.0, or "hip"

    @property
    def has_pdl(self) -> bool:
        """Whether a kernel may start before its predecessor on the stream ends (programmatic dependent launch)."""
        return isinstance(self.architecture, int) and self.architecture >= 90

    @property
    def all_registers(self) -> int | None:
        """The register limit to state where ptxas would otherwise spill a little to fit one more program in."""
        return 255 if isinstance(self.architecture, int) else None

    @property
    def has_wide_mma(self) -> bool:
        """Whether one matrix instruction takes 64 rows or more and leaves them where the softmax needs no exchange."""
        return self.architecture in (90, 100, 103)

    @property
    def shared_memory_bytes(self) -> int:
        """Shared memory that one multiprocessor has for programs, roughly."""
        if not isinstance(self.architecture, int):
            return 64 << 10
        return {80: 164 << 10, 87: 164 << 10, 90: 228 << 10, 100: 228 << 10, 103: 228 << 10}.get(
            self.architecture, 100 << 10
        )


# The interpreter runs one program after another, some 1500 a second: grids stay small, and PDL does not exist.
INTERPRETER = Hardware(num_sms=2, architecture=80)


@lru_cache(maxsize=64)
def hardware_of(device: torch.device) -> Hardware:
    """The hardware behind a device; for a CPU what suits the interpreter. Cached, and reads no device state."""
    if device.type != "cuda":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return Hardware(properties.multi_processor_count, "hip")
    return Hardware(properties.multi_processor_count, properties.major * 10 + properties.minor)


def lanes_of(head_dim: int) -> int:
    """Channels padded to a power of two, as a kernel holds them; the padding is masked and costs no bytes."""
    return max(16, triton.next_power_of_2(head_dim))


def reads_scalar_ids(block_size: int) -> bool:
    """Whether the ids of a tile's blocks are read one by one (fast), or as a vector with one id a token (any size)."""
    return block_size >= 16 and block_size & (block_size - 1) == 0


@dataclass(frozen=True, slots=True)
class DecodeChoice:
    """How decode attention is cut into programs."""

    tile: int  # tokens a step of the loop
    rows: int  # (query token, query head) pairs a program, padded
    num_warps: int
    num_stages: int
    num_chunks: int  # pieces the batch is cut into
    split_tokens: int  # a partial of its own for each so many tokens; 0: partials only where a chunk cuts a sequence
    scan: int  # lengths scanned at a time
    one_scan: bool  # one scan takes in all of them
    join_parts: int  # partials that the joining program reads at a time
    join_channels: int  # of V that it joins
    join_warps: int
    join_by_sequence: bool  # a joining program a sequence, not one a chunk; always right, and needed with splits
    use_pdl: bool
    spreads_idle: bool = False  # where the last chunks are empty, their programs do not lie on neighbouring SMs
    max_registers: int | None = None

    def __post_init__(self) -> None:
        for name in ("tile", "rows", "scan", "join_parts", "join_channels"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two, got {value}")
        if self.tile < 16 or self.rows < 16:
            raise ValueError(f"tile {self.tile} and rows {self.rows} must be at least 16, tl.dot's smallest")
        if self.num_chunks < 1:
            raise ValueError(f"num_chunks must be at least 1, got {self.num_chunks}")
        if self.split_tokens % self.tile:
            raise ValueError(f"split_tokens {self.split_tokens} must be a multiple of the tile {self.tile}")

    def num_slots(self, num_seqs: int, max_seq_len: int) -> int:
        """Partials of one row that the workspace holds: two a chunk, or one a split of every sequence."""
        if self.split_tokens:
            return num_seqs * -(-max_seq_len // self.split_tokens)
        return 2 * self.num_chunks


# Tokens that leave one partial where a row's bits must not depend on its neighbours.
INVARIANT_SPLIT_TOKENS = 2048
# Kind of call to (tile, warps, stages, programs an SM). "few" and "many" are as measured on an H200 with 128 lanes
# (`python -m bench tune`, which writes such rows); tiles of other heads hold as many bytes. The others are what fits.
DECODE_LOOPS = {
    "few": (64, 4, 3, 2),
    "many": (32, 2, 3, 4),
    "rows": (32, 4, 3, 2),
    "rows_wide": (16, 8, 3, 1),
    "widest": (16, 8, 2, 1),
    "float32": (16, 4, 1, 2),
}
_MANY_SEQS = 64  # from so many on better balance is worth more partials, if each reads several KV heads


def kind_of_decode(
    num_seqs: int, num_kv_heads: int, rows: int, lanes: int, itemsize_bytes: int, *, batch_invariant: bool = False
) -> str:
    """The row of `DECODE_LOOPS` that is for `rows` (query token, query head) pairs a program, heads of `lanes`."""
    if itemsize_bytes == 4:
        return "float32"  # no tensor cores: correct, not tuned
    if lanes > 256:
        return "widest"
    if rows > 16:
        return "rows" if lanes <= 128 else "rows_wide"
    return "many" if num_seqs >= _MANY_SEQS and num_kv_heads > 1 and not batch_invariant else "few"


@lru_cache(maxsize=1024)
def choose_decode(
    num_seqs: int,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    v_head_dim: int,
    block_size: int,
    itemsize_bytes: int,
    hardware: Hardware,
    *,
    queries: int = 1,
    batch_invariant: bool = False,
) -> DecodeChoice:
    """The choice for `num_seqs` sequences of at most `queries` query tokens, `group` query heads a KV head.

    The loop is that of `DECODE_LOOPS`, fitted to the hardware. The grid is a whole number of resident programs an SM,
    rounded down, and as many as fit into shared memory. With `batch_invariant` what shapes the arithmetic does not
    depend on `num_seqs`.
    """
    lanes = max(lanes_of(head_dim), lanes_of(v_head_dim))
    is_sm_100 = hardware.architecture in (100, 103)
    most_rows = 32 if is_sm_100 else 64  # 64 rows of a wide instruction would fill the registers there
    rows = min(max(16, triton.next_power_of_2(group * queries)), most_rows)
    max_registers = hardware.all_registers
    kind = kind_of_decode(num_seqs, num_kv_heads, rows, lanes, itemsize_bytes, batch_invariant=batch_invariant)
    if is_sm_100 and kind == "many" and queries > 1:
        kind = "few"  # two warps would have 8 bytes of stack (group 7, Triton 3.7.1)
    tile, num_warps, num_stages, per_sm = DECODE_LOOPS[kind]
    if kind in ("float32", "widest"):
        rows = 16
    if kind in ("few", "many"):
        if hardware.shared_memory_bytes < 128 << 10 and tile == 64:
            tile = 32
        # Scores of small heads fill the registers; on sm_100 those of 64 lanes too (8 bytes of stack, Triton 3.7.1).
        most = 64 if lanes < 64 or (is_sm_100 and lanes == 64) else 128
        tile = min(max(16, tile * 128 // lanes), most)
        if lanes >= 64 and hardware.architecture == 90:
            max_registers = None  # as measured
    if hardware.architecture == "hip":
        num_warps, num_stages = 4, min(num_stages, 2)
    while per_sm > 1 and per_sm * _decode_shared_bytes(tile, lanes, num_stages, itemsize_bytes) > (
        hardware.shared_memory_bytes
    ):
        per_sm //= 2
    if reads_scalar_ids(block_size):
        tile = min(tile, _MAX_SCALAR_IDS * block_size)
    num_parts = -(-group * queries // rows)
    num_chunks = max(1, hardware.num_sms * per_sm // (num_kv_heads * num_parts))
    v_lanes = lanes_of(v_head_dim)
    join_parts = max(2, min(16 if v_head_dim == v_lanes else 8, 2048 // v_lanes))
    join_channels, join_warps = v_lanes, 1  # more warps would stay resident under the decode kernel
    expected_parts = num_chunks // max(num_seqs, 1) + 1
    if expected_parts > 16 and not batch_invariant:  # few sequences in many pieces: the join is a chain of reads
        join_parts = min(triton.next_power_of_2(expected_parts), 128)
        join_channels, join_warps = min(v_lanes, 32), max(1, join_parts // 32)
    scan = min(max(16, triton.next_power_of_2(num_seqs)), _MAX_SCAN)
    return DecodeChoice(
        tile=tile,
        rows=rows,
        num_warps=num_warps,
        num_stages=num_stages,
        num_chunks=num_chunks,
        split_tokens=INVARIANT_SPLIT_TOKENS if batch_invariant else 0,
        scan=scan,
        one_scan=num_seqs <= scan,
        join_parts=join_parts,
        join_channels=join_channels,
        join_warps=join_warps,
        join_by_sequence=batch_invariant or num_seqs <= num_chunks,
        use_pdl=hardware.has_pdl,
        # Small batches, whose cache may lie in the L2, lose more than they gain.
        spreads_idle=num_seqs >= 16,
        max_registers=max_registers,
    )


def _decode_shared_bytes(tile: int, lanes: int, num_stages: int, itemsize_bytes: int) -> int:
    """Shared memory of one program: the ring of K and V tiles, and room for the query and the softmax."""
    return (max(num_stages - 1, 1) * 2 * tile * lanes + 16 * lanes) * itemsize_bytes + (4 << 10)


@dataclass(frozen=True, slots=True)
class PrefillChoice:
    """How attention of several query tokens a sequence is cut into programs."""

    rows: int  # (query token, query head) pairs a program
    tile: int  # keys a step of the loop
    num_warps: int
    num_stages: int
    scan: int  # query starts scanned at a time
    one_scan: bool
    edge_tile: int  # keys a step where not every row sees all of them
    box: int = 0  # keys of one block in a message of the copy engine; 0: tiles are gathered by pointers
    max_registers: int | None = None

    def __post_init__(self) -> None:
        for name in ("rows", "tile", "edge_tile", "scan"):
            value = getattr(self, name)
            if value < 16 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two, at least 16, got {value}")
        if self.edge_tile > self.tile:
            raise ValueError(f"edge_tile {self.edge_tile} must not be larger than the tile {self.tile}")
        if self.box and self.tile // self.box not in (1, 2):
            raise ValueError(f"a tile of {self.tile} keys must be one box or two, not boxes of {self.box}")


# Rows to (tile, warps, stages), for heads of up to 128 and of up to 256 channels: what fits into the registers.
_PREFILL_WIDE = {16: (64, 4, 3), 64: (64, 4, 3), 128: (64, 8, 3)}
_PREFILL_WIDE_256 = {16: (32, 4, 3), 64: (32, 8, 2), 128: (32, 8, 2)}
_PREFILL = {16: (64, 4, 3), 64: (64, 8, 3)}
_PREFILL_256 = {16: (32, 4, 2), 64: (32, 8, 2)}
# Tile, edge tile and stages of 128 rows and 8 warps where the copy engine brings the tiles: what fits into registers
# (Triton 3.6 to 3.9) and shared memory.
_PREFILL_BOXES = (128, 64, 3)
_PREFILL_BOXES_IN_TWO_WINDOWED = (128, 32, 3)
_PREFILL_BOXES_WIDE_K = (64, 32, 3)  # K of up to 256 channels, V of up to 128
_PREFILL_BOXES_256 = (64, 16, 2)
_PREFILL_BOXES_256_WINDOWED = (32, 16, 3)
_BOX_BLOCK_TOKENS = 64  # the smallest block that makes a message worth its barriers


@lru_cache(maxsize=1024)
def choose_prefill(
    num_seqs: int,
    max_query_len: int,
    group: int,
    head_dim: int,
    v_head_dim: int,
    block_size: int,
    itemsize_bytes: int,
    hardware: Hardware,
    *,
    tree_window: bool = False,
    windowed: bool = False,
    describable: bool = False,
) -> PrefillChoice:
    """The choice for sequences of at most `max_query_len` query tokens, of `group` query heads a KV head each.

    `tree_window`: with a tree mask and a window, which take registers: a word and a position a row. `windowed`: with a
    window, whose front is a loop of its own. `describable`: the copy engine can read the cache
    (`copy_engine.refuse_cache`). None of the three changes the rows.
    """
    lanes = max(lanes_of(head_dim), lanes_of(v_head_dim))
    longest = max_query_len * group
    rows = next((rows for rows in PREFILL_ROWS if longest <= rows), PREFILL_ROWS[-1])
    max_registers = None
    if itemsize_bytes == 4:  # no tensor cores: correct, not tuned
        rows, tile, num_warps, num_stages = 16, 16, 4, 1
        max_registers = hardware.all_registers
    elif lanes > 256:
        rows, tile, num_warps, num_stages = 16, 16, 8, 2
        max_registers = hardware.all_registers
    elif hardware.has_wide_mma:
        table = _PREFILL_WIDE if lanes <= 128 else _PREFILL_WIDE_256
        tile, num_warps, num_stages = table[rows]
        if hardware.architecture != 90 and rows > 16:  # the scores come through registers there
            num_warps, max_registers = 8, hardware.all_registers
    else:
        rows = min(rows, 64)
        max_registers = hardware.all_registers
        table = _PREFILL if lanes <= 128 else _PREFILL_256
        tile, num_warps, num_stages = table[rows]
    if hardware.architecture == "hip":
        num_stages = 1
    if hardware.architecture in (100, 103) and rows == 128:
        tile = min(tile, 32)
    if reads_scalar_ids(block_size):
        tile = min(tile, _MAX_SCALAR_IDS * block_size)
    if lanes > 128 and itemsize_bytes == 2 and (not reads_scalar_ids(block_size) or hardware.architecture != 90):
        tile = 16  # an id a token takes registers as well
    if tree_window:
        tile = max(16, tile // 2)
        num_warps = 8 if lanes > 128 else num_warps
        max_registers = hardware.all_registers
    edge_tile, box = tile, 0
    if describable and rows == 128 and not tree_window:
        boxes = _boxes_of_prefill(head_dim, v_head_dim, block_size, hardware, windowed=windowed)
        if boxes is not None:
            tile, edge_tile, num_stages = boxes
            box = min(tile, block_size)
    scan = 256 if num_seqs < 256 else _MAX_SCAN
    return PrefillChoice(
        rows=rows,
        tile=tile,
        num_warps=num_warps,
        num_stages=num_stages,
        scan=scan,
        one_scan=num_seqs < scan,
        edge_tile=edge_tile,
        box=box,
        max_registers=max_registers,
    )


def _boxes_of_prefill(
    head_dim: int, v_head_dim: int, block_size: int, hardware: Hardware, *, windowed: bool
) -> tuple[int, int, int] | None:
    """Tile, edge tile and stages of 128 rows of a 16-bit type whose keys come by the copy engine, or None.

    What compiles without spilled registers (tests/aot), on architectures whose matrix instructions read keys and
    values where the copy engine puts them. Elsewhere (12.0) 128 rows do not fit into the registers.
    """
    k_lanes, v_lanes = lanes_of(head_dim), lanes_of(v_head_dim)
    if not hardware.has_wide_mma or min(k_lanes, v_lanes) < 64:
        return None
    if block_size < _BOX_BLOCK_TOKENS or block_size & (block_size - 1):
        return None
    if hardware.architecture != 90:  # compiled, never run
        return (64, 32, 3) if max(k_lanes, v_lanes) <= 128 else None
    if max(k_lanes, v_lanes) <= 128:
        in_two = block_size < _PREFILL_BOXES[0]
        return _PREFILL_BOXES_IN_TWO_WINDOWED if windowed and in_two else _PREFILL_BOXES
    if v_lanes <= 128:
        return _PREFILL_BOXES_WIDE_K
    return _PREFILL_BOXES_256_WINDOWED if windowed else _PREFILL_BOXES_256


# Rows, (query token, query head) pairs, of a consumer of the Hopper kernel; heads a box of Q may take.
HOPPER_CONSUMER_ROWS = 64
_HOPPER_MANY_ROWS = 16384  # between 4096, where two consumers are faster on an H200, and 32768, where three are
_HOPPER_MAX_PACKED = 64
_HOPPER_L2_BYTES = 40_000_000  # of 50 (H100, H200: 60), which K and V of the tiles in flight may fill
_HOPPER_MAX_SCAN = 256
_HOPPER_COMPARISONS = 512  # items times sequences that a program of the work list, one warp, compares at a time
# Batches whose longest rows, query tokens times query heads a KV head, are at most so many go to the portable kernel:
# half of a tile of the Hopper kernel would be idle.
PORTABLE_ROWS = 64
# Triton releases whose compiler makes of the Hopper kernel what tests/aot asks for. With 3.8 and 3.9 the consumers'
# registers spill (head_dim 128: 48 and 88 bytes a thread).
HOPPER_TRITONS = ((3, 6), (3, 7))


@dataclass(frozen=True, slots=True)
class HopperChoice:
    """How the Hopper prefill kernel cuts a batch."""

    consumers: int  # warpgroups that share a tile, 64 rows each
    packed: int  # query heads of a group in the rows of a tile
    keys: int  # a tile
    stages: int  # tiles of K, and of V, in flight
    span: int  # tiles of keys, over heads, that share the L2
    items: int  # of the work list that one program places
    scan: int  # sequences that it looks at at a time

    def __post_init__(self) -> None:
        for name in ("packed", "keys", "items", "scan"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two, got {value}")

    @property
    def tokens(self) -> int:
        """Query tokens a tile."""
        return HOPPER_CONSUMER_ROWS // self.packed * self.consumers

    @property
    def q_buffers(self) -> int:
        """Items whose queries are there. With 2 one starts while the other ends; heads of 256 leave room for one."""
        return 1 if self.keys == 64 else 2

    @property
    def registers(self) -> tuple[int, int, int]:
        """A thread's, of the 64 Ki of an SM: at the launch, of a consumer, and of a producer."""
        return (168, 232, 40) if self.consumers == 2 else (128, 160, 32)

    def most_items(self, num_tokens: int, num_seqs: int, num_kv_heads: int) -> int:
        """Items of the longest work list, however the tokens are shared out."""
        return (num_tokens // self.tokens + num_seqs + 1) * num_kv_heads

    def most_groups(self, num_tokens: int, num_seqs: int) -> int:
        """Groups of `items` tiles of one sequence that one head of the longest work list has."""
        return num_tokens // (self.tokens * self.items) + num_seqs + 1

    def suspects_start(self, num_tokens: int, num_seqs: int, num_kv_heads: int) -> int:
        """Words of the work list in front of its marks, one a sequence."""
        return 8 + 8 * self.most_items(num_tokens, num_seqs, num_kv_heads)

    def work_words(self, num_tokens: int, num_seqs: int, num_kv_heads: int) -> int:
        """int32 words of the longest work list."""
        return self.suspects_start(num_tokens, num_seqs, num_kv_heads) + num_seqs


@lru_cache(maxsize=1024)
def refuse_hopper(
    architecture: int | str,
    triton_version: tuple[int, int],
    dtype: torch.dtype,
    head_dim: int,
    v_head_dim: int,
    block_size: int,
) -> str | None:
    """Why the Hopper prefill kernel cannot take such a call, or None."""
    if architecture != 90:
        return f"it needs a GPU of compute capability 9.0, not {architecture}"
    if triton_version not in HOPPER_TRITONS:
        known = ", ".join(f"{major}.{minor}" for major, minor in HOPPER_TRITONS)
        return f"it compiles without spilled registers with Triton {known}, not {triton_version[0]}.{triton_version[1]}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 and float16, not {dtype}"
    if head_dim not in (64, 128, 256) or v_head_dim != head_dim:
        return f"it takes head_dim 64, 128 and 256, the same for K and V, not {head_dim} and {v_head_dim}"
    if block_size not in (16, 32, 64, 128, 256):
        return f"it takes block sizes 16, 32, 64, 128 and 256, not {block_size}"
    return None


@lru_cache(maxsize=1024)
def choose_hopper(num_seqs: int, max_query_len: int, group: int, head_dim: int, hardware: Hardware) -> HopperChoice:
    """The choice for sequences of at most `max_query_len` query tokens, of `group` query heads a KV head each."""
    # A third consumer has more softmaxes beside the matrix instructions. Heads of 64 leave nearly the registers for it:
    # 80 bytes a thread are on the stack (sm_90, Triton 3.7.1).
    consumers = 3 if head_dim == 64 and max_query_len * group >= _HOPPER_MANY_ROWS else 2
    keys = 64 if head_dim == 256 else 128
    packed, fewest = 1, 0
    width = 1
    while width <= _HOPPER_MAX_PACKED:
        # Tiles of the longest sequence; wider boxes read K and V for more heads at once.
        tiles = -(-max_query_len * width // (HOPPER_CONSUMER_ROWS * consumers)) * -(-group // width)
        if fewest == 0 or tiles <= fewest:
            packed, fewest = width, tiles
        if width >= group:
            break
        width *= 2
    scan = min(max(16, triton.next_power_of_2(num_seqs + 1)), _HOPPER_MAX_SCAN)
    return HopperChoice(
        consumers=consumers,
        packed=packed,
        keys=keys,
        stages=3 if head_dim == 64 else 2,
        span=_HOPPER_L2_BYTES // (2 * keys * head_dim * 2),
        items=_HOPPER_COMPARISONS // scan,
        scan=scan,
    )


def most_work_words(max_tokens: int, max_seqs: int, group: int, num_kv_heads: int) -> int:
    """int32 words that hold the work list of any batch of so many tokens and sequences."""
    packed = min(triton.next_power_of_2(group), _HOPPER_MAX_PACKED)
    tokens = 2 * HOPPER_CONSUMER_ROWS // packed  # of the smallest tiles
    return 8 + 8 * (max_tokens // tokens + max_seqs + 1) * num_kv_heads + max_seqs


__all__ = [
    "DECODE_LOOPS",
    "HOPPER_CONSUMER_ROWS",
    "HOPPER_TRITONS",
    "INTERPRETER",
    "INVARIANT_SPLIT_TOKENS",
    "PORTABLE_ROWS",
    "PREFILL_ROWS",
    "DecodeChoice",
    "Hardware",
    "HopperChoice",
    "PrefillChoice",
    "choose_decode",
    "choose_hopper",
    "choose_prefill",
    "hardware_of",
    "kind_of_decode",
    "lanes_of",
    "most_work_words",
    "reads_scalar_ids",
    "refuse_hopper",
]

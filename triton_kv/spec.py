"""What one layer keeps: the numbers from which a layout derives bytes, with no tensor and no device in them."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import torch

_CACHE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def whole_number(name: str, value: int) -> int:
    """`value` as a plain int, NumPy's among them; `TypeError` for floats and bools."""
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}; round it before passing it") from None


def positive_int(name: str, value: int) -> int:
    """`value` as a plain int of at least 1; `ValueError` for smaller ones, `TypeError` for floats and bools."""
    number = whole_number(name, value)
    if number < 1:
        raise ValueError(f"{name} must be at least 1, got {number}")
    return number


@dataclass(frozen=True)
class AttentionSpec:
    """Keys and values of one attention layer: what is kept for every token.

    num_kv_heads: KV heads on this rank (after tensor parallelism).
    head_dim: channels of a key.
    v_head_dim: channels of a value; `None` for as many as a key, and the field then holds that number.
    dtype: float32, float16 or bfloat16.
    window: tokens that a query may look back on, itself included; `None` for all of them. It changes no byte of a
        block: a scheduler frees what fell out of the window, which needs block tables of its own for the group.

    Raises `ValueError` for sizes below 1 and for dtypes that are no cache dtype, `TypeError` for sizes that are no
    integers, `NotImplementedError` for the 8-bit floats, whose scales need a home first.
    """

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    v_head_dim: int | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_kv_heads", positive_int("num_kv_heads", self.num_kv_heads))
        object.__setattr__(self, "head_dim", positive_int("head_dim", self.head_dim))
        object.__setattr__(self, "v_head_dim", positive_int("v_head_dim", self.value_dim))
        if self.window is not None:
            object.__setattr__(self, "window", positive_int("window", self.window))
        _check_cache_dtype(self.dtype)

    @property
    def itemsize_bytes(self) -> int:
        """Bytes of one element."""
        return self.dtype.itemsize

    @property
    def value_dim(self) -> int:
        """Channels of a value."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def token_bytes(self) -> int:
        """Bytes that one layer keeps for one token: all heads, key and value."""
        return self.num_kv_heads * (self.head_dim + self.value_dim) * self.dtype.itemsize

    @property
    def alignment_bytes(self) -> int:
        """What the address of a page must be a multiple of: 16 bytes, which kernels load at once, where heads are."""
        return math.gcd(16, self.head_dim * self.dtype.itemsize, self.value_dim * self.dtype.itemsize)

    def page_bytes(self, block_size: int) -> int:
        """Bytes of one block of `block_size` tokens."""
        return self.token_bytes * block_size


class BlockTensor(NamedTuple):
    """One tensor of a block's page."""

    name: str
    shape: tuple[int, ...]  # of one block; contiguous in the page
    dtype: torch.dtype
    offset_bytes: int  # from the start of the page, a multiple of the dtype's size

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@runtime_checkable
class StateSpec(Protocol):
    """What a layer keeps a block, for every kind of state but K and V: a page of bytes, and the tensors in it.

    `MLASpec` and `MambaSpec` are two; a class of your own with these three members is a third, and the cache reserves,
    extends, zeroes and shows it like the others. It must be hashable and compare by value (a frozen dataclass does),
    and its `repr` must name everything that ranks have to agree on. Where the page holds something for each token of
    the block, as K and V do, the class also says `per_token = True`: a sequence then takes a block for every
    `block_size` tokens. Without it a block is one state, whatever the length.
    """

    @property
    def alignment_bytes(self) -> int:
        """What the address of a page must be a multiple of: a power of two, at least every dtype's size."""

    def page_bytes(self, block_size: int) -> int:
        """Bytes of one block of `block_size` tokens, at least 1. Its stride is rounded to the alignment."""

    def block_tensors(self, block_size: int) -> tuple[BlockTensor, ...]:
        """The tensors of the page: inside it, disjoint, at least one."""


LayerSpec = AttentionSpec | StateSpec


def keeps_tokens(spec: LayerSpec) -> bool:
    """Whether a layer keeps something for every token: K and V, a latent, or a state that says `per_token`."""
    return isinstance(spec, AttentionSpec) or bool(getattr(spec, "per_token", False))


@dataclass(frozen=True)
class MLASpec:
    """One latent vector a token (multi-head latent attention, DeepSeek-V2): no heads, and no K and V apart.

    kv_lora_rank: channels of the compressed key and value, 512 in DeepSeek-V2 and V3.
    qk_rope_head_dim: channels of the key that carries the position, 64 there; behind the compressed ones.
    dtype: float32, float16 or bfloat16.

    The latent is not split over tensor-parallel ranks: each of them keeps all of it. Raises `ValueError` for sizes
    below 1 (0 for the rope part is possible), dtypes that are no cache dtype, and any `window`.
    """

    kv_lora_rank: int
    qk_rope_head_dim: int
    dtype: torch.dtype
    window: int | None = None
    per_token: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_lora_rank", positive_int("kv_lora_rank", self.kv_lora_rank))
        object.__setattr__(self, "qk_rope_head_dim", whole_number("qk_rope_head_dim", self.qk_rope_head_dim))
        if self.qk_rope_head_dim < 0:
            raise ValueError(f"qk_rope_head_dim must not be negative, got {self.qk_rope_head_dim}")
        if self.window is not None:
            raise ValueError(
                f"a window of {self.window} on MLA is not possible: no latent attention layer slides; leave window "
                "out, or use an AttentionSpec for the layers that do"
            )
        _check_cache_dtype(self.dtype)

    @property
    def dim(self) -> int:
        """Channels of the latent vector."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def token_bytes(self) -> int:
        """Bytes that one layer keeps for one token."""
        return self.dim * self.dtype.itemsize

    @property
    def alignment_bytes(self) -> int:
        """What the address of a page must be a multiple of: 16 bytes where both parts of the vector are."""
        itemsize = self.dtype.itemsize
        return math.gcd(16, self.kv_lora_rank * itemsize, self.qk_rope_head_dim * itemsize)

    def page_bytes(self, block_size: int) -> int:
        return self.token_bytes * block_size

    def block_tensors(self, block_size: int) -> tuple[BlockTensor, ...]:
        return (BlockTensor("latent", (block_size, self.dim), self.dtype, 0),)


class StateTensor(NamedTuple):
    """One state tensor of a layer that keeps a state instead of tokens."""

    name: str
    shape: tuple[int, ...]  # of one block
    dtype: torch.dtype


@dataclass(frozen=True, init=False)
class MambaSpec:
    """State tensors of one block of a Mamba or linear-attention layer, packed in one page in the order given.

    states: `StateTensor(name, shape, dtype)`s, such as the convolution's and the state space's of Mamba-2, or those of
        a gated delta net; plain `(name, shape, dtype)` tuples do. Any dtype.
    alignment_bytes: what each tensor's first byte is a multiple of, a power of two; `None` is the largest dtype's size.

    A block holds one state whatever `block_size` is. Raises `ValueError` for shapes with an extent below 1, names that
    repeat and alignments that cannot be, `TypeError` for what is no dtype or no integer.
    """

    states: tuple[StateTensor, ...]
    alignment_bytes: int

    def __init__(
        self, states: Sequence[StateTensor | tuple[str, Sequence[int], torch.dtype]], alignment_bytes: int | None = None
    ) -> None:
        checked = []
        for state in states:
            if not isinstance(state, Sequence) or len(state) != 3 or not isinstance(state[1], Iterable):
                raise TypeError(
                    f"a state is (name, shape, dtype), such as ('ssm', (64, 128), torch.float32), got {state!r}"
                )
            name, shape, dtype = state
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"state {name!r}: dtype must be a torch.dtype, got {dtype!r}")
            extents = tuple(positive_int(f"state {name!r}: every extent of {tuple(shape)}", extent) for extent in shape)
            checked.append(StateTensor(str(name), extents, dtype))
        if not checked:
            raise ValueError("a MambaSpec needs at least one state, such as ('ssm', (64, 128), torch.float32)")
        names = [state.name for state in checked]
        if len(set(names)) < len(names):
            raise ValueError(f"states are named twice in {names}; give each a name of its own")
        largest = max(state.dtype.itemsize for state in checked)
        alignment = largest if alignment_bytes is None else positive_int("alignment_bytes", alignment_bytes)
        if alignment & (alignment - 1) or alignment < largest:
            raise ValueError(
                f"alignment_bytes {alignment} cannot be met: it must be a power of two of at least the {largest} bytes "
                "of the largest dtype"
            )
        object.__setattr__(self, "states", tuple(checked))
        object.__setattr__(self, "alignment_bytes", alignment)

    def page_bytes(self, block_size: int) -> int:
        last = self.block_tensors(block_size)[-1]
        return last.offset_bytes + last.num_bytes

    def block_tensors(self, block_size: int) -> tuple[BlockTensor, ...]:
        tensors, end = [], 0
        for name, shape, dtype in self.states:
            tensor = BlockTensor(name, shape, dtype, -(-end // self.alignment_bytes) * self.alignment_bytes)
            tensors.append(tensor)
            end = tensor.offset_bytes + tensor.num_bytes
        return tuple(tensors)


def _check_cache_dtype(dtype: torch.dtype) -> None:
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype such as torch.bfloat16, got {dtype!r}")
    if dtype.is_floating_point and dtype.itemsize == 1:
        raise NotImplementedError(f"a cache of {dtype} is not supported yet; use float32, float16 or bfloat16")
    if dtype not in _CACHE_DTYPES:
        raise ValueError(f"a cache of {dtype} is not possible; use float32, float16 or bfloat16")

"""KVCache: every layer's keys and values in one reservation, committed block by block; addresses never move."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

import torch

from triton_kv.errors import CaptureError
from triton_kv.extensible import ExtensibleTensor
from triton_kv.layer import LayerCache, LayerOperands
from triton_kv.layout import CacheLayout
from triton_kv.memory import names_device, open_memory
from triton_kv.ranks import change_together
from triton_kv.sizing import GIB, Plan
from triton_kv.spec import AttentionSpec
from triton_kv.store import BlockStore, CheckReport, StoredBuffer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from types import TracebackType

    import torch.distributed as dist

    from triton_kv.memory import VirtualMemory

logger = logging.getLogger(__name__)


class CommittedViews(NamedTuple):
    """Views of the committed blocks alone; their storages end with the committed bytes."""

    k: torch.Tensor  # [num_blocks, block_size, num_kv_heads, head_dim]
    v: torch.Tensor  # [num_blocks, block_size, num_kv_heads, v_head_dim]


class KVCache:
    """A paged KV cache: address space for `capacity` blocks, physical memory for the first `num_blocks` of them.

    Made by `KVCache.reserve`. `extend` commits more blocks under the same addresses, so graphs captured before stay
    valid; `cache[layer]` are the views that kernels read and write; `close` gives everything back. A context manager.
    Changing calls may come from any thread, one at a time; reading counters never waits. The scheme follows vAttention
    (Prabhu et al., 2024) and PyTorch's expandable segments, with one handle per segment and extend.
    """

    def __init__(self, spec: AttentionSpec, layout: CacheLayout, buffer: ExtensibleTensor) -> None:
        self.spec = spec
        self.layout = layout
        self._buffer = buffer
        self._store = BlockStore(
            buffer.memory, [StoredBuffer(buffer, layout.segment_block_bytes)], capacity=layout.capacity
        )
        self._layers: dict[int, LayerCache] = {}

    @classmethod
    def reserve(
        cls,
        spec: AttentionSpec,
        *,
        block_size: int,
        num_layers: int,
        capacity: int | None = None,
        layout: str = "LTBNHD",
        device: torch.device | str | None = None,
        memory: VirtualMemory | None = None,
        commit: str | None = None,
        dense: bool = False,
    ) -> KVCache:
        """Reserves address space for `capacity` blocks of `block_size` tokens; takes no physical memory.

        Args:
            spec: what one layer keeps per token.
            block_size: tokens a block.
            num_layers: layers that share the block numbering.
            capacity: blocks to reserve; by default what the device's total memory could hold.
            layout: the physical order of L, T, B, N, H and D, outermost first (docs/design.md has the table).
            device: "cuda", "cuda:1" or "cpu"; by default the current GPU if it is usable, else the CPU.
            memory: a driver of your own choice instead of the device's (`HostMemory`, `FakeMemory`, `FaultyMemory`).
            commit: "all" commits the whole capacity at once, for engines that allocate first.
            dense: pack segments without padding their stride to a granule (a granule may then serve two segments).

        Raises `ValueError` or `TypeError` for sizes and layouts that cannot be, `Unavailable` if the device has no
        virtual memory management, `AddressSpaceExhausted`, and with commit="all" what `extend` raises.
        Waits for the current stream, and with commit="all" as `extend` does.
        """
        if not isinstance(spec, AttentionSpec):
            raise TypeError(f"spec must be an AttentionSpec, not {type(spec).__name__}")
        if commit not in (None, "all"):
            raise ValueError(f'commit must be None or "all", got {commit!r}')
        if memory is None:
            memory = open_memory(device)
        elif not names_device(device, memory.device):
            raise ValueError(f"device {device!s} and the memory's device {memory.device!s} differ; name one of them")
        if memory.is_capturing():
            raise CaptureError("KVCache.reserve")
        granularity = None if dense else memory.granularity
        if capacity is None:
            one = CacheLayout(layout, spec, num_layers=num_layers, block_size=block_size, capacity=1)
            capacity = max(memory.memory_info()[1] // one.block_bytes, 1)
        geometry = CacheLayout(
            layout, spec, num_layers=num_layers, block_size=block_size, capacity=capacity, granularity=granularity
        )
        buffer = ExtensibleTensor(
            geometry.segment_capacity_bytes * geometry.num_segments,
            num_segments=geometry.num_segments,
            segment_stride_bytes=geometry.segment_stride_bytes,
            memory=memory,
        )
        try:
            cache = cls(spec, geometry, buffer)
            logger.debug(
                "reserved addresses for %d blocks (%.2f GiB of address space, no memory)",
                capacity,
                cache.reserved_bytes / GIB,
            )
            if commit == "all":
                cache.extend(capacity)
        except BaseException:
            buffer.free()
            raise
        return cache

    # What the cache is.

    @property
    def capacity(self) -> int:
        """Blocks reserved."""
        return self.layout.capacity

    @property
    def num_blocks(self) -> int:
        """Blocks committed."""
        return self._store.num_blocks

    @property
    def num_layers(self) -> int:
        return self.layout.num_layers

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self.layout.block_size

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, without padding."""
        return self._store.block_bytes

    @property
    def device(self) -> torch.device:
        return self._store.memory.device

    @property
    def reserved_bytes(self) -> int:
        """Address space, whole granules. It is not memory."""
        return self._store.reserved_bytes

    @property
    def committed_bytes(self) -> int:
        """Bytes of the committed blocks: `num_blocks * block_bytes`."""
        return self._store.committed_bytes

    @property
    def mapped_bytes(self) -> int:
        """Physical bytes held, whole granules; what the driver's free memory lost."""
        return self._store.mapped_bytes

    def mapped_bytes_at(self, num_blocks: int) -> int:
        """The physical bytes that `num_blocks` committed blocks hold, exact and without committing anything."""
        return self._store.mapped_bytes_at(num_blocks)

    @property
    def control(self) -> torch.Tensor:
        """The control block, int32 `[8]` on the device: watermark, error count, first error's kind, row and value."""
        return self._store.control

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes of the cache's device, after all queued work is done (synchronises)."""
        return self._store.memory_info()

    # Growing and closing.

    def extend(self, num_blocks: int | Plan, group: dist.ProcessGroup | None = None) -> KVCache:
        """Commits blocks until the cache holds `num_blocks`; every new one is zero. Returns the cache.

        A number at or below `num_blocks` changes nothing. Addresses, and the contents of blocks already there, stay.
        The host waits for the zeroing, so work launched afterwards on any stream sees it; work already queued goes on
        meanwhile. All or nothing: after an error the cache is as it was and the call may be repeated.

        With `group` every rank of it makes the call, and all of them extend or none does: each maps and zeroes, all
        vote, all publish and vote again. The host waits for the others, at most the group's timeout.

        Raises `ValueError` beyond the capacity or for a negative number, `TypeError` for anything but an int or a
        `Plan`, `OutOfMemory` (asked, free and what would fit), `CaptureError` while the current stream captures,
        `Closed`. With `group`, instead of these: `RankError` on every rank, caused by the rank's own error where it
        has one; `RankLost` or `InconsistentRanks` if a rank died.
        """
        if group is None:
            self._store.extend(self._extend_target(num_blocks))
        else:

            def begin() -> tuple[AbstractContextManager[Callable[[], None]], int]:
                target = self._extend_target(num_blocks)
                return self._store.growing(target), max(target, self.num_blocks)

            change_together("extend", group, begin)
        return self

    def _extend_target(self, num_blocks: int | Plan) -> int:
        target = num_blocks.num_blocks if isinstance(num_blocks, Plan) else num_blocks
        if isinstance(target, bool) or not isinstance(target, int):
            raise TypeError(f"extend takes a whole number of blocks or a Plan, not {target!r}")
        if target < 0:
            raise ValueError(f"extend takes a number of blocks that is not negative, got {target}")
        if target > self.capacity:
            raise ValueError(
                f"extend({target}) goes beyond the capacity of {self.capacity} blocks that was reserved; "
                "reserve a larger capacity (address space is free)"
            )
        return target

    def close(self) -> None:
        """Gives back memory and addresses; waits for the device. Closing twice does nothing.

        Views that are still alive keep their address range reserved and fault when touched. If the driver refuses
        something, the rest is freed, the failure is raised, and the next call tries it again. Raises `CaptureError`
        while the current stream captures, `Forked` in a forked child.
        """
        self._store.close(self._layers.clear)

    def __enter__(self) -> KVCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # Views.

    def __getitem__(self, layer: int | str) -> LayerCache:
        """The views of one layer, by index or by name (`"layers.3"`). Cached: the same object every time."""
        index = self._layer_index(layer)
        found = self._layers.get(index)
        if found is None:
            self._store.require_open()
            found = self._layers[index] = self._make_layer(index)
        return found

    def __iter__(self) -> Iterator[LayerCache]:
        return (self[index] for index in range(self.num_layers))

    def __len__(self) -> int:
        return self.num_layers

    def _layer_index(self, layer: int | str) -> int:
        if isinstance(layer, str):
            prefix, _, digits = layer.rpartition(".")
            if prefix != "layers" or not digits.isdecimal() or int(digits) >= self.num_layers:
                raise KeyError(f"no layer {layer!r}: this cache has layers.0 to layers.{self.num_layers - 1}")
            return int(digits)
        if not isinstance(layer, int) or isinstance(layer, bool):
            raise TypeError(f"a layer is named by its index or name, not by {type(layer).__name__}")
        if not -self.num_layers <= layer < self.num_layers:
            raise IndexError(f"no layer {layer}: this cache has {self.num_layers} layers")
        return layer % self.num_layers

    def _make_layer(self, index: int) -> LayerCache:
        layout = self.layout
        raw = self._buffer.view(layout.layer_base_bytes(index), layout.layer_span_bytes)
        flat = raw.view(self.spec.dtype)
        k, v = layout.views(flat)
        operands = None
        if layout.d_innermost:
            operands = LayerOperands(
                k_cache=flat,
                v_cache=None,
                v_offset=layout.v_offset,
                control=self._store.control,
                num_blocks=self.capacity,
                block_size=layout.block_size,
                num_kv_heads=self.spec.num_kv_heads,
                head_dim=self.spec.head_dim,
                v_head_dim=self.spec.value_dim,
                k_strides=layout.k_strides[:3],
                v_strides=layout.v_strides[:3],
            )
        return LayerCache(
            name=f"layers.{index}",
            index=index,
            k=k,
            v=v,
            pair=None if layout.kv_stride is None else layout.kv_view(flat),
            flat=flat,
            control=self._store.control,
            operands=operands,
            layout=layout.order,
            check_usable=self._store.require_committed,
        )

    def committed(self, layer: int | str) -> CommittedViews:
        """Views of a layer's committed blocks whose storages end with the committed bytes.

        Safe to print, copy, pickle or register with a transfer library, which all take the whole storage. They do not
        grow with the cache: ask again after `extend`. Raises `ValueError` for a layout that spreads one layer's K over
        several segments, which no single storage can hold, and `NothingCommitted`.
        """
        index = self._layer_index(layer)
        self._store.require_committed()
        return CommittedViews(self._committed_view(index, 0), self._committed_view(index, 1))

    def _committed_view(self, index: int, kv: int) -> torch.Tensor:
        layout = self.layout
        block = layout.order.index("B")
        if any(layout.order.index(letter) < block for letter in "NHD"):
            raise ValueError(
                f"layout {layout.order!r} spreads one layer's K over several segments, so no single storage ends with "
                "the committed bytes. Use cache[layer] and copy the blocks you need"
            )
        segment, offset = layout.locate(index, kv, 0, 0, 0)
        num_bytes = self.num_blocks * layout.segment_block_bytes - offset
        start = segment * layout.segment_stride_bytes + offset
        flat = self._buffer.view(start, num_bytes).view(self.spec.dtype)
        strides = layout.v_strides if kv else layout.k_strides
        dim = self.spec.value_dim if kv else self.spec.head_dim
        return flat.as_strided((self.num_blocks, layout.block_size, self.spec.num_kv_heads, dim), strides)

    # Watching.

    def check(self, *, reset: bool = False) -> CheckReport:
        """Reads what kernels counted outside the watermark (synchronises); `reset` clears the count afterwards."""
        return self._store.check(reset=reset)

    def __repr__(self) -> str:
        if self._store.closed:
            return "KVCache(closed)"
        return (
            f"KVCache({self.num_blocks} of {self.capacity} blocks of {self.block_size} tokens, "
            f"{self.num_layers} layers, layout={self.layout.order!r}, mapped={self.mapped_bytes / GIB:.2f} GiB of "
            f"{self.reserved_bytes / GIB:.2f} GiB of addresses, device={self.device})"
        )

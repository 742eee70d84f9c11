"""KVCache: every layer's state under one block numbering, committed block by block; addresses never move."""

from __future__ import annotations

import logging
import os
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from triton_kv.errors import CaptureError, TritonKVError
from triton_kv.extensible import ExtensibleTensor
from triton_kv.geometry import CacheGeometry, PlacedLayer, arrange, joined
from triton_kv.groups import DEFAULT_ORDER, LayerGroup, groups_of
from triton_kv.layer import LayerCache, LayerOperands, StateCache
from triton_kv.memory import HandlePolicy, names_device, open_or_allocate
from triton_kv.ranks import change_together
from triton_kv.sizing import GIB, Plan
from triton_kv.spec import AttentionSpec, whole_number
from triton_kv.store import BlockStore, CheckReport, StoredBuffer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from concurrent.futures import Future
    from contextlib import AbstractContextManager
    from types import TracebackType

    import torch.distributed as dist

    from triton_kv.compaction import CompactionPlan
    from triton_kv.extensible import Freed, Progress
    from triton_kv.launch import Launch
    from triton_kv.layout import CacheLayout
    from triton_kv.memory import VirtualMemory
    from triton_kv.memory.transaction import Transaction
    from triton_kv.spec import LayerSpec
    from triton_kv.stats import CacheStats
    from triton_kv.store import CoalesceReport, MemoryChange, Nap, SleepReport, Waitable, WakeReport

logger = logging.getLogger(__name__)

_MAX_BLOCKS = 2**31 - 1

Value = TypeVar("Value")


class CommittedViews(NamedTuple):
    """Views of the committed blocks alone; their storages end with the committed bytes."""

    k: torch.Tensor  # [num_blocks, block_size, num_kv_heads, head_dim]
    v: torch.Tensor  # [num_blocks, block_size, num_kv_heads, v_head_dim]


class KVCache:
    """A paged KV cache: address space for `capacity` blocks, physical memory for the first `num_blocks` of them.

    Made by `KVCache.reserve`. `extend` commits more blocks under the same addresses, so graphs captured before stay
    valid; `cache[layer]` are the views that kernels read and write; `close` gives everything back. A context manager.
    Changing calls may come from any thread, one at a time; reading counters never waits. The scheme follows vAttention
    (Prabhu et al., 2024) and PyTorch's expandable segments, with one handle per segment and extend. A cache that dies
    without `close` gives its memory back at the next reservation, growth, plan or close of any other.
    """

    def __init__(
        self,
        geometry: CacheGeometry,
        buffers: Sequence[ExtensibleTensor],
        *,
        layout: str = DEFAULT_ORDER,
        dense: bool = False,
        alias: bool = False,
        checked: bool = False,
        handles: HandlePolicy | None = None,
    ) -> None:
        self._geometry = geometry
        self._layout = layout  # of groups that state none
        self._buffers = list(buffers)
        self._dense = dense
        self._handles = handles
        self._indices = {layer.name: layer.index for layer in geometry.layers}
        self._store = BlockStore(
            buffers[0].memory,
            [StoredBuffer(buffer, part.block_bytes) for buffer, part in zip(buffers, geometry.buffers, strict=True)],
            capacity=geometry.capacity,
            alias=alias,
            checked=checked or os.environ.get("TRITON_KV_CHECKED", "0") not in ("", "0"),
        )
        self._layers: dict[int, LayerCache | StateCache] = {}
        self._layers_lock = threading.Lock()

    @classmethod
    def reserve(
        cls,
        layers: LayerSpec | Mapping[str, LayerSpec | Mapping[str, LayerSpec]] | LayerGroup | Sequence[LayerGroup],
        *,
        block_size: int,
        num_layers: int | None = None,
        capacity: int | None = None,
        layout: str = DEFAULT_ORDER,
        device: torch.device | str | None = None,
        memory: VirtualMemory | None = None,
        commit: str | None = None,
        dense: bool = False,
        shared_by: str | Iterable[Iterable[str]] = (),
        packed: bool | Iterable[Iterable[str]] = (),
        handles: HandlePolicy | None = None,
        alias: bool = False,
        checked: bool = False,
        fallback: str | None = None,
    ) -> KVCache:
        """Reserves address space for `capacity` blocks of `block_size` tokens; takes no physical memory.

        Args:
            layers: what each layer keeps: one spec (with `num_layers`), a mapping of layer name to spec, whose equal
                specs form a group, a mapping of group name to such mappings, or `LayerGroup`s. Layers of one cache
                share the block numbering.
            block_size: tokens a block.
            num_layers: layers of one spec, named `layers.0` and so on.
            capacity: blocks to reserve; by default what the device's total memory could hold.
            layout: the physical order of L, T, B, N, H and D, outermost first (docs/layouts.md draws them), of groups
                that state none. Where attention layers share the cache with layers that keep a state (a hybrid model),
                B is put in front of T, so that each layer has one segment with K and V of a block side by side.
            device: "cuda", "cuda:1" or "cpu"; by default the current GPU if it is usable, else the CPU.
            memory: a driver of your own choice instead of the device's (`HostMemory`, `FakeMemory`, `FaultyMemory`).
            commit: "all" commits the whole capacity at once, for engines that allocate first.
            dense: pack segments without padding their stride to a granule (a granule may then serve two segments).
            shared_by: sets of layer names that overlay each other in one buffer, or "groups": layer i of every group
                overlays buffer i. A block id then belongs to one group at a time, and each group has block tables of
                its own. The buffer's page is the least that holds each layer's.
            packed: sets of layer names (True: all) that lie side by side in each block of one buffer.
            handles: how memory is cut into handles; by default one for each segment and growth (docs/memory.md).
            alias: back all segments of a buffer by one granule until the first extend that needs more, so that
                capturing takes 2 MiB instead of 2 MiB a segment. What block 0 holds is lost then, and the epoch moves.
            checked: ops raise `BadAccess` after a kernel met a block or slot outside the watermark, and `shrink`
                poisons what stays mapped. So does TRITON_KV_CHECKED=1. Costs a small copy at each op.
            fallback: "allocate" takes plain torch memory, all of it at once, where the device has no virtual memory
                management; `fallback_reason` says why. Nothing is given back before `close` then.

        Raises `ValueError` or `TypeError` for sizes, names and layouts that cannot be, `Unavailable` if the device has
        no virtual memory management, `AddressSpaceExhausted`, and with commit="all" what `extend` raises.
        Waits for the current stream, and with commit="all" as `extend` does.
        """
        groups, names = groups_of(layers, num_layers)
        if commit not in (None, "all"):
            raise ValueError(f'commit must be None or "all", got {commit!r}')
        if fallback not in (None, "allocate"):
            raise ValueError(f'fallback must be None or "allocate", got {fallback!r}')
        if memory is None:
            memory = open_or_allocate(device, fallback)
        elif not names_device(device, memory.device):
            raise ValueError(f"device {device!s} and the memory's device {memory.device!s} differ; name one of them")
        if memory.is_capturing():
            raise CaptureError("KVCache.reserve")
        granularity = memory.granularity
        if not isinstance(shared_by, str):
            shared_by = [tuple(names_of_one) for names_of_one in shared_by]
        if not isinstance(packed, bool):
            packed = [tuple(names_of_one) for names_of_one in packed]

        def arranged(blocks: int) -> CacheGeometry:
            return arrange(
                groups,
                block_size=block_size,
                capacity=blocks,
                granularity=granularity,
                layout=layout,
                names=names,
                dense=dense,
                shared_by=shared_by,
                packed=packed,
            )

        if not getattr(memory, "elastic", True):
            commit = "all"
            if capacity is None:
                raise ValueError("plain memory is allocated at once: state the capacity to allocate")
        if capacity is None:
            capacity = min(max(memory.memory_info()[1] // arranged(1).block_bytes, 1), _MAX_BLOCKS)
        geometry = arranged(capacity)
        if geometry.capacity > _MAX_BLOCKS:
            raise ValueError(f"a capacity of {capacity} blocks, but block ids are int32: at most {_MAX_BLOCKS}")
        buffers: list[ExtensibleTensor] = []
        try:
            _reserve_buffers(geometry, memory, buffers, handles)
            cache = cls(geometry, buffers, layout=layout, dense=dense, alias=alias, checked=checked, handles=handles)
            logger.debug(
                "reserved addresses for %d blocks (%.2f GiB of address space, no memory)",
                capacity,
                cache.reserved_bytes / GIB,
            )
            if commit == "all":
                cache.extend(capacity)
        except BaseException:
            for buffer in buffers:
                buffer.free()
            raise
        return cache

    # What the cache is.

    @property
    def geometry(self) -> CacheGeometry:
        """Groups, layers and buffers: where every byte lies. It grows with `add_group` and by nothing else."""
        return self._geometry

    @property
    def spec(self) -> LayerSpec:
        """What every layer keeps. Raises `ValueError` where layers differ: see `geometry.layers` then."""
        return self._the_one("spec", [layer.spec for layer in self._geometry.layers])

    @property
    def layout(self) -> CacheLayout:
        """The layout of all layers. Raises `ValueError` where they have several: see `geometry.layers` then."""
        layouts = [layer.layout for layer in self._geometry.layers]
        layout = self._the_one("layout", layouts if len(self._geometry.buffers) == 1 else [*layouts, None])
        if layout is None:
            raise ValueError("this cache keeps no K and V in one layout; geometry.layers has each layer's place")
        return layout

    @staticmethod
    def _the_one(what: str, values: Sequence[Value]) -> Value:
        if any(value != values[0] for value in values):
            raise ValueError(f"the layers of this cache have no {what} in common; geometry.layers has each one's")
        return values[0]

    @property
    def capacity(self) -> int:
        """Blocks reserved."""
        return self._geometry.capacity

    @property
    def num_blocks(self) -> int:
        """Blocks committed."""
        return self._store.num_blocks

    @property
    def num_layers(self) -> int:
        return len(self._geometry.layers)

    @property
    def block_size(self) -> int:
        """Tokens a block, in groups that state no other number."""
        return self._geometry.block_size

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers; what a padded page leaves unused counts, rounding to granules not."""
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
        """The physical bytes that `num_blocks` committed blocks hold, exact and without committing anything.

        While segments share their first granules (`alias=True`) the cache holds less: `mapped_bytes` has that.
        """
        return self._store.mapped_bytes_at(whole_number("num_blocks", num_blocks))

    @property
    def padding_bytes(self) -> dict[str, int]:
        """By group: bytes of a block that its layers' padded or shared pages leave unused."""
        return self._geometry.padding_bytes

    def signature(self) -> str:
        """What ranks that share block ids must agree on, as JSON that compares as text: see `CacheGeometry`."""
        return self._geometry.signature()

    def describe(self, num_blocks: int | None = None) -> str:
        """A table for people: groups, layers, layouts, pages, segments, padding, and bytes at some number of blocks.

        `print` it. num_blocks: `None` is what is committed.
        """
        table = self._geometry.describe(self.num_blocks if num_blocks is None else num_blocks)
        return table if self.fallback_reason is None else f"{table}\nplain torch memory: {self.fallback_reason}"

    def layout_picture(self, num_blocks: int | None = None, *, form: str = "svg") -> str:
        """A drawing of segments, blocks and granules, as `form` "svg" or "text": what is mapped at some size.

        num_blocks: `None` is what is committed. Raises `ValueError` for caches too large to draw; `arrange` makes the
        geometry of a small example without a device.
        """
        return self._geometry.layout_picture(self.num_blocks if num_blocks is None else num_blocks, form=form)

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
        `Asleep`, `Broken`, `Forked`, `Closed`, and `DriverError` for what else the driver refused. With `group`,
        instead of these: `RankError` on every rank, caused by the rank's own error where it has one; `RankLost` or
        `InconsistentRanks` if a rank died.
        """
        if group is None:
            self._store.extend(self._checked_target(num_blocks))
            return self

        def begin(confirm: Callable[[], None]) -> tuple[AbstractContextManager[None], int]:
            target = self._checked_target(num_blocks)
            return self._store.growing(target, confirm=confirm), max(target, self.num_blocks)

        change_together("extend", group, begin)
        return self

    def _checked_target(self, num_blocks: int | Plan) -> int:
        target = num_blocks.num_blocks if isinstance(num_blocks, Plan) else whole_number("num_blocks", num_blocks)
        if target < 0:
            raise ValueError(f"extend takes a number of blocks that is not negative, got {target}")
        if target > self.capacity:
            raise ValueError(
                f"extend({target}) goes beyond the capacity of {self.capacity} blocks that was reserved; "
                "reserve a larger capacity (address space is free)"
            )
        return target

    def zero_blocks(self, ids: torch.Tensor | Sequence[int]) -> None:
        """Zeroes every state of every group in the blocks `ids`, in one launch.

        ids: int32 or int64 `[n]` on the cache's device, contiguous; a list of ints does outside of a capture. Negative
        ids are skipped; ids at or past the watermark are left alone and counted (see `check`). Queued on the current
        stream and not waited for; may be captured, and a replay then covers groups that were added since. In buffers
        that groups share it is the block that is zeroed, whichever group has it.

        Raises `NothingCommitted`, `Closed`, `TypeError` and `ValueError` for what are no ids.
        """
        self._store.require_committed()
        self._store.zeroing.zero_blocks(ids, self._store.control)

    def zero_launches(self) -> list[Launch]:
        """One launch of each kernel that `extend` and `zero_blocks` can reach, for compiling ahead: none is run."""
        return self._store.zeroing.launches(self._store.control)

    def add_group(self, group: LayerGroup) -> KVCache:
        """Adds layers, in buffers of their own, to a cache that may have blocks already. Returns the cache.

        The new buffers are brought to `num_blocks` zeroed blocks before anything shows the layers; from then on they
        grow with the others. All or nothing: after an error the cache is as it was. A capture keeps what it recorded,
        and `zero_blocks` inside it covers the new layers too. Waits for the zeroing, as `extend` does, and for the
        current stream.

        The group joins no shared or packed buffer. Attention layers that are there already keep their layout, so those
        of a hybrid model are block-major only if states were reserved with them.

        Raises `ValueError` for names that the cache has already, for another block size and for what `reserve` refuses,
        `TypeError` for what is no group, `OutOfMemory`, `AddressSpaceExhausted`, `CaptureError`, `Closed`.
        """
        self._store.require_usable()
        if not isinstance(group, LayerGroup):
            raise TypeError(f"add_group takes a LayerGroup, such as LayerGroup('draft', layers), got {group!r}")
        memory, before = self._store.memory, self._geometry
        if memory.is_capturing():
            raise CaptureError("add_group")
        added = arrange(
            [group],
            block_size=before.block_size,
            capacity=before.capacity,
            granularity=before.granularity,
            layout=self._layout,
            dense=self._dense,
            beside=[layer.spec for layer in before.layers],
        )
        after = joined(before, added)
        buffers: list[ExtensibleTensor] = []

        def publish(transaction: Transaction) -> None:
            if self._geometry is not before:
                raise TritonKVError("another thread added a group meanwhile; nothing was changed, try again")
            indices = {layer.name: layer.index for layer in after.layers}
            new = {"_buffers": [*self._buffers, *buffers], "_geometry": after, "_indices": indices}
            for name, value in new.items():
                transaction.undo(setattr, self, name, getattr(self, name))
                setattr(self, name, value)

        try:
            _reserve_buffers(added, memory, buffers, self._handles)
            stored = [StoredBuffer(buffer, part.block_bytes) for buffer, part in zip(buffers, added.buffers)]
            self._store.add_buffers(stored, publish)
        except BaseException:
            for buffer in buffers:
                buffer.free()
            raise
        return self

    def extend_async(self, num_blocks: int | Plan) -> Future[None]:
        """`extend` on a thread of its own, while serving goes on; the blocks become visible only when complete.

        The zeroing is slowed down so that other kernels keep most of the bandwidth. Returns a future: `result()` waits
        and raises what `extend` would. Other changes wait for it. Raises at once what needs no work to be known:
        `ValueError`, `TypeError`, `CaptureError` while the current stream captures, `Asleep`, `Closed`.
        """
        return self._store.extend_async(self._checked_target(num_blocks))

    def shrink(
        self, num_blocks: int, *, after: Waitable | None = None, group: dist.ProcessGroup | None = None
    ) -> Freed:
        """Keeps the first `num_blocks` blocks; returns the bytes that the driver's free memory gained.

        Kept blocks keep their contents. A handle that is cut in the middle is replaced by a smaller one with its kept
        part copied, so memory comes back to the granule; that takes one handle's memory for a moment, and nothing may
        touch the cache meanwhile. Where it is missing only whole handles go: the result's `kept_bytes` and `reasons`
        say so, and the same call tries again. The epoch moves if memory went or was replaced. All or nothing until the
        first handle is released.

        Args:
            num_blocks: 0 to the committed blocks.
            after: an event or stream that covers all work which may still touch the cache; by default the host waits
                for the device.
            group: every rank of it makes the call; all of them shrink or none does (errors as in `extend`).

        Raises `ValueError` for other numbers, `CaptureError`, `Asleep`, `Closed`.
        """
        if group is None:
            return self._store.shrink(self._checked_remainder(num_blocks), after=after)

        def begin(confirm: Callable[[], None]) -> tuple[AbstractContextManager[Progress], int]:
            remainder = self._checked_remainder(num_blocks)
            return self._store.shrinking(remainder, after=after), remainder

        return self._store.freed(change_together("shrink", group, begin, undoable=False))

    @staticmethod
    def _checked_remainder(num_blocks: int) -> int:
        num_blocks = whole_number("num_blocks", num_blocks)
        if num_blocks < 0:
            raise ValueError(f"shrink takes a number of blocks that is not negative, got {num_blocks}")
        return num_blocks

    def min_release_blocks(self) -> int:
        """How many blocks must go before a whole handle does, and memory comes back without copying."""
        return self._store.min_release_blocks()

    def coalesce(self) -> CoalesceReport:
        """Makes each segment one handle, contents kept, for transfer libraries that need it; the epoch moves.

        Takes `coalesce_bytes` of memory for a moment. Waits for the device, and nothing may touch the cache meanwhile.
        Raises `OutOfMemory` if that memory is missing: contents are as they were, segments done so far stay done.
        """
        return self._store.coalesce()

    def coalesce_bytes(self) -> int:
        """The memory that `coalesce` would take for a moment: the largest segment of several handles."""
        return self._store.coalesce_bytes()

    def trim(self, limit_bytes: int = 0) -> int:
        """Releases pooled handles until each buffer keeps at most `limit_bytes` of them; returns the bytes.

        Staging memory that waits for the next sleep goes, too, and handles that the driver refused to release earlier
        are tried again. Works in sleep, too.
        """
        return self._store.trim(limit_bytes)

    def copy_blocks(self, pairs: torch.Tensor | Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks, K, V and every state of all layers: for copy on write, beams, compaction.

        Queued on the current stream; does not wait for the device.

        Args:
            pairs: (source, target) block ids. A tensor, int32 or int64 `[n, 2]` on the cache's device, takes one launch
                and may be captured (after a first call outside or `compile_kernels`, and for the layers of that
                moment). A pair with a negative id is skipped, one beyond the committed blocks dropped and counted; no
                target may be another pair's source or target. A sequence on the host may overlap: it is as if all
                copies happened at once (by way of a staging buffer where a source is overwritten).

        Raises `ValueError` for ids on the host that are not committed or targets named twice, `CaptureError` for a
        sequence while the current stream captures, `NothingCommitted`, `Asleep`, `Closed`.
        """
        self._store.copy_blocks(pairs)

    def copy_launches(self) -> list[Launch]:
        """The kernel launches of `copy_blocks` and of a sleep that gathers blocks, for `compile_kernels`."""
        return self._store.copy_launches()

    def compaction_plan(self, live: Iterable[int]) -> CompactionPlan:
        """The fewest moves that put the `live` blocks in front, and the bytes that `shrink` then gives back.

        Changes nothing. `copy_blocks(plan.moves)` does it, `plan.remap(block_table)` translates, `shrink(
        plan.num_blocks)` gives back. Block 0 stays where it is if it is live. Copies a small table to the device.
        """
        return self._store.compaction_plan(live)

    def prepare_sleep(self, num_blocks: int | None = None) -> float:
        """Pins host memory for `sleep(keep="host")` of so many blocks (default: all committed); returns the seconds.

        Pinning takes longer than the copies, so it is worth doing beforehand; the memory stays until `close`. On a GPU
        it also loads the kernels that gather scattered blocks, and makes their staging memory (docs/memory.md).
        """
        return self._store.prepare_sleep(num_blocks)

    def sleep(
        self,
        keep: str | None = None,
        *,
        live: Iterable[int] | None = None,
        groups: Sequence[str] | None = None,
        after: Waitable | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> SleepReport:
        """Gives all memory back and keeps the addresses, until `wake`. All or nothing.

        While it sleeps `num_blocks` is 0 and every use raises `Asleep`; a captured graph must not be replayed.

        Args:
            keep: None drops the contents, "host" copies them to pinned host memory.
            live: block ids to keep (all committed by default); others are zero after `wake`.
            groups: names of the groups that sleep, by default all. Groups that share buffers sleep together.
            after: as in `shrink`.
            group: every rank of it makes the call; all of them sleep or none does (errors as in `extend`).

        Raises `ValueError` for blocks that are not committed and unknown groups, `Asleep` if they sleep already,
        `CaptureError`, `Closed`, `DriverError` if the host has too little memory to pin.
        """
        if group is None:
            return self._store.sleep(keep=keep, live=live, only=self._buffers_of(groups), after=after)

        def begin(confirm: Callable[[], None]) -> tuple[AbstractContextManager[Nap], None]:
            return self._store.sleeping(keep=keep, live=live, only=self._buffers_of(groups), after=after), None

        return self._store.slept(change_together("sleep", group, begin, undoable=False))

    def wake(self, groups: Sequence[str] | None = None, *, group: dist.ProcessGroup | None = None) -> WakeReport:
        """Commits again what `sleep` gave back, at the same addresses; restores kept contents, all else is zero.

        Captured graphs are valid again; the epoch moves. Nothing to do if nothing sleeps. Raises `OutOfMemory` where
        too little memory is free: the cache stays asleep, and a later call works. With `group` every rank of it makes
        the call, and all of them wake or none does (errors as in `extend`).
        """
        if group is None:
            return self._store.wake(self._buffers_of(groups))

        def begin(confirm: Callable[[], None]) -> tuple[AbstractContextManager[WakeReport], int]:
            return self._store.waking(self._buffers_of(groups), confirm=confirm), self._store.blocks_awake

        return change_together("wake", group, begin)

    @property
    def state(self) -> str:
        """ "open", "asleep" (all of it or some groups), "broken" (a failed change could not be undone) or "closed"."""
        return self._store.state

    @property
    def asleep(self) -> bool:
        """Whether the cache, or a group of it, sleeps."""
        return self._store.asleep

    @property
    def epoch(self) -> int:
        """Changes whenever an address that was backed loses its memory or gets other memory; never on a plain extend.

        Whoever registered the memory elsewhere registers it again then.
        """
        return self._store.epoch

    def watch(self, callback: Callable[[MemoryChange], object]) -> Callable[[], None]:
        """Have `callback` called around every change of what is behind the addresses; returns what ends that.

        It is called with phase "before" where memory is about to go (still there, no longer counted), and "after" where
        memory has come (not yet counted), on the changing thread, which holds the cache's lock. If it raises, the
        change is undone, and callbacks that were called are called again with the opposite.
        """
        return self._store.watch(callback)

    def stats(self) -> CacheStats:
        """Bytes, handles and counters at this moment; `.prometheus()` as text. Never waits."""
        return self._store.stats()

    def poll_errors(self) -> CheckReport:
        """What `check` tells, without waiting for the device: on a GPU as an earlier poll's copy saw it."""
        return self._store.poll_errors()

    @property
    def fallback_reason(self) -> str | None:
        """Why the cache is plain torch memory; None if it is not."""
        return None if self._store.elastic else getattr(self._store.memory, "reason", "")

    def _buffers_of(self, groups: Sequence[str] | None) -> list[int] | None:
        if groups is None:
            return None
        if isinstance(groups, str):
            raise TypeError(f"groups is a sequence of names, such as [{groups!r}]")
        known = {layer.group for layer in self._geometry.layers}
        if unknown := [name for name in groups if name not in known]:
            raise ValueError(f"no group {unknown[0]!r}: this cache has {', '.join(sorted(known))}")
        chosen = {layer.buffer for layer in self._geometry.layers if layer.group in groups}
        for layer in self._geometry.layers:
            if layer.buffer in chosen and layer.group not in groups:
                raise ValueError(f"group {layer.group!r} shares a buffer with {list(groups)}: name it too")
        return sorted(chosen)

    def close(self) -> None:
        """Gives back memory and addresses; waits for the device. Closing twice does nothing.

        Views that are still alive keep their address range reserved and fault when touched. If the driver refuses
        something, the rest is freed, the failure is raised, and the next call tries it again. Raises `CaptureError`
        while the current stream captures, `Forked` in a forked child.
        """
        self._store.close(self._drop_views)

    def _drop_views(self) -> None:
        with self._layers_lock:
            self._layers.clear()

    def __enter__(self) -> KVCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # Views.

    def __getitem__(self, layer: int | str) -> Any:
        """The views of one layer, by index or by name: a `LayerCache` of K and V, or a `StateCache`.

        Cached: the same object every time. Raises `KeyError`, `IndexError` or `TypeError` for a layer that does not
        exist, `Closed`.
        """
        index = self._layer_index(layer)
        found = self._layers.get(index)
        if found is None:
            with self._layers_lock, torch.inference_mode(False):  # not the lock of changes, which may last
                self._store.require_open()
                found = self._layers.get(index)
                if found is None:
                    found = self._layers[index] = self._make_layer(self._geometry.layers[index])
        return found

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(self.num_layers))

    def __len__(self) -> int:
        return self.num_layers

    def _layer_index(self, layer: int | str) -> int:
        if isinstance(layer, str):
            if layer not in self._indices:
                first, last = self._geometry.layers[0].name, self._geometry.layers[-1].name
                raise KeyError(f"no layer {layer!r}: this cache has {first} to {last}")
            return self._indices[layer]
        try:
            layer = whole_number("layer", layer)
        except TypeError:
            raise TypeError(f"a layer is named by its index or name, not by {type(layer).__name__}") from None
        if not -self.num_layers <= layer < self.num_layers:
            raise IndexError(f"no layer {layer}: this cache has layers 0 to {self.num_layers - 1}")
        return layer % self.num_layers

    def _make_layer(self, place: PlacedLayer) -> LayerCache | StateCache:
        if not isinstance(place.spec, AttentionSpec):
            return StateCache(
                name=place.name,
                index=place.index,
                spec=place.spec,
                states=self._state_views(place, self.capacity),
                names=tuple(tensor.name for tensor in place.tensors),
                control=self._store.control,
                layout=place.order,
                check_usable=partial(self._store.require_committed, place.buffer),
            )
        spec, layout = place.spec, place.layout
        assert layout is not None
        raw = self._buffers[place.buffer].view(place.base_bytes, layout.layer_span_bytes)
        flat = raw.view(spec.dtype)
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
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                v_head_dim=spec.value_dim,
                k_strides=layout.k_strides[:3],
                v_strides=layout.v_strides[:3],
            )
        return LayerCache(
            name=place.name,
            index=place.index,
            k=k,
            v=v,
            pair=None if layout.kv_stride is None else layout.kv_view(flat),
            flat=flat,
            control=self._store.control,
            operands=operands,
            layout=place.order,
            check_usable=partial(self._store.require_committed, place.buffer),
        )

    def _state_views(self, place: PlacedLayer, num_blocks: int) -> tuple[torch.Tensor, ...]:
        """`[num_blocks, *shape]` of each state, in a storage that ends with its last element."""
        views = []
        for tensor in place.tensors:
            itemsize = tensor.dtype.itemsize
            span = (num_blocks - 1) * place.block_stride_bytes + tensor.num_bytes
            raw = self._buffers[place.buffer].view(place.base_bytes + tensor.offset_bytes, span)
            inner = torch.empty(tensor.shape, device="meta").stride()
            strides = (place.block_stride_bytes // itemsize, *inner)
            views.append(raw.view(tensor.dtype).as_strided((num_blocks, *tensor.shape), strides))
        return tuple(views)

    def committed(self, layer: int | str) -> Any:
        """Views of a layer's committed blocks whose storages end with the committed bytes.

        A `CommittedViews` of K and V, or a tuple of states `[num_blocks, *shape]`. Safe to print, copy, pickle or
        register with a transfer library, which all take the whole storage. They do not grow with the cache: ask again
        after `extend`. Raises `ValueError` for a layout that spreads one layer's K over several segments, which no
        single storage can hold, and `NothingCommitted`.
        """
        place = self._geometry.layers[self._layer_index(layer)]
        self._store.require_committed(place.buffer)
        if place.layout is None:
            return self._state_views(place, self.num_blocks)
        return CommittedViews(self._committed_view(place, 0), self._committed_view(place, 1))

    def _committed_view(self, place: PlacedLayer, kv: int) -> torch.Tensor:
        spec, layout = place.spec, place.layout
        assert isinstance(spec, AttentionSpec)
        assert layout is not None
        block = layout.order.index("B")
        if any(layout.order.index(letter) < block for letter in "NHD"):
            raise ValueError(
                f"layout {layout.order!r} spreads one layer's K over several segments, so no single storage ends with "
                "the committed bytes. Use cache[layer] and copy the blocks you need"
            )
        start = place.base_bytes + kv * layout.v_offset * spec.itemsize_bytes
        num_bytes = self.num_blocks * layout.segment_block_bytes - start % layout.segment_stride_bytes
        flat = self._buffers[place.buffer].view(start, num_bytes).view(spec.dtype)
        strides = layout.v_strides if kv else layout.k_strides
        dim = spec.value_dim if kv else spec.head_dim
        return flat.as_strided((self.num_blocks, layout.block_size, spec.num_kv_heads, dim), strides)

    # Watching.

    def check(self, *, reset: bool = False) -> CheckReport:
        """Reads what kernels counted outside the watermark (synchronises); `reset` clears the count afterwards."""
        return self._store.check(reset=reset)

    def __repr__(self) -> str:
        if self._store.closed:
            return "KVCache(closed)"
        orders = ", ".join(sorted({repr(layer.order) for layer in self._geometry.layers}))
        return (
            f"KVCache({self.num_blocks} of {self.capacity} blocks of {self.block_size} tokens, "
            f"{self.num_layers} layers, layout={orders}, mapped={self.mapped_bytes / GIB:.2f} GiB of "
            f"{self.reserved_bytes / GIB:.2f} GiB of addresses, device={self.device})"
        )


def _reserve_buffers(
    geometry: CacheGeometry, memory: VirtualMemory, buffers: list[ExtensibleTensor], handles: HandlePolicy | None
) -> None:
    """Appends a buffer for each of the geometry's, so that the caller can free what was made before a failure."""
    for part in geometry.buffers:
        buffers.append(
            ExtensibleTensor(
                part.segment_capacity_bytes * part.num_segments,
                num_segments=part.num_segments,
                segment_stride_bytes=part.segment_stride_bytes,
                memory=memory,
                handles=handles,
            )
        )

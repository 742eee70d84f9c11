"""How many blocks fit: pure functions of measured numbers, and the readings that feed them."""

from __future__ import annotations

import json
import math
import weakref
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from triton_kv.description import (
    BlockTaker,
    block_takers,
    blocks_for_tokens,
    blocks_of_any_length,
    tokens_of_one_sequence,
)
from triton_kv.errors import OutOfMemory
from triton_kv.ledger import GIB, MIB, MemoryLedger, StageRecord, require_one_device, stage_table
from triton_kv.spec import positive_int, whole_number

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch.distributed as dist

    from triton_kv.cache import KVCache

# What an engine that allocates before capture may keep for its graphs: the lower end of the "1 to 3 GiB" that vLLM
# told its users in its log to expect.
GRAPH_ESTIMATE_BYTES = 1 << 30


class CacheCost(NamedTuple):
    """What planning needs to know of one cache; reads no device."""

    mapped_bytes_at: Callable[[int], int]  # physical bytes at a number of blocks, whole granules; must not fall
    capacity: int  # blocks reserved
    mapped_bytes: int = 0  # now
    block_size: int | None = None  # tokens
    digest: str = ""  # of layout, spec and block size: ranks compare it
    name: str = "cache"
    takers: tuple[BlockTaker, ...] = ()  # how a sequence takes blocks; empty: one for every block_size tokens
    pooled_bytes: int = 0  # kept beside mapped_bytes: growth takes them, or has them released where memory runs out
    aliased_bytes: int = 0  # of mapped_bytes: they go only once what replaces them is there, so growth cannot use them


@dataclass(frozen=True)
class CacheShare:
    """One cache's part of a plan."""

    num_blocks: int
    mapped_bytes: int  # physical bytes at num_blocks, whole granules
    held_bytes: int  # mapped when the plan was made
    capacity: int  # blocks
    block_size: int | None = None  # tokens
    digest: str = ""
    name: str = "cache"
    takers: tuple[BlockTaker, ...] = ()
    mapped_bytes_at: Callable[[int], int] | None = field(default=None, repr=False, compare=False)
    pooled_bytes: int = 0  # kept beside held_bytes when the plan was made

    @property
    def taken_bytes(self) -> int:
        """What the driver's free memory loses to the share: none where more is held, since extend gives none back."""
        return max(self.mapped_bytes - self.held_bytes - self.pooled_bytes, 0)

    def with_blocks(self, num_blocks: int) -> CacheShare:
        """The same share with another number of blocks, and the bytes that those take."""
        if num_blocks == self.num_blocks:
            return self
        if self.mapped_bytes_at is None:
            raise ValueError("a plan that was read back or sent has no cache to count bytes with: agree on it before")
        return replace(self, num_blocks=num_blocks, mapped_bytes=self.mapped_bytes_at(num_blocks))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "mapped_bytes_at": None}  # it holds on to a cache, which no other process has


@dataclass(frozen=True)
class LegacyGuess:
    """What sizing before capture gives: profile, then subtract an estimate of what graphs will take."""

    num_blocks: int
    mapped_bytes: int
    estimate_bytes: int  # for graphs and workspaces
    graph_bytes: int  # what they took in truth
    # Of the plan beside it, before ranks agreed on less; negative where the guess has more.
    gained_blocks: int = 0
    gained_bytes: int = 0

    @property
    def over_bytes(self) -> int:
        """How far the guess would have gone over the same budget once the graphs were there."""
        return max(self.graph_bytes - self.estimate_bytes, 0)


@dataclass(frozen=True)
class Plan:
    """How many blocks a cache may hold, and the numbers that say so. `KVCache.extend` takes it as it is.

    `str` is a table. With several caches, `plan["name"]` is the plan of one of them.
    """

    caches: tuple[CacheShare, ...]
    bound_by: str  # "utilization", "free", "capacity", "max_blocks", "num_blocks", "cache_bytes" or "rank N"
    limit_bytes: int  # what the caches may map at most, together
    total_bytes: int  # of the device
    free_bytes: int  # when it was read
    activation_bytes: int  # that a step needs again and nobody holds now
    reservation_bytes: int  # announced: they will live beside the cache
    headroom_bytes: int
    utilization: float
    spare_blocks: int = 0  # of each cache that no sequence gets, such as block 0
    legacy: LegacyGuess | None = None
    stages: tuple[StageRecord, ...] = ()
    rank_blocks: tuple[int, ...] = ()  # of the first cache by each rank's own plan, after `agree`

    def __getitem__(self, name: str) -> Plan:
        found = tuple(share for share in self.caches if share.name == name)
        if not found:
            raise KeyError(f"no cache {name!r} in the plan: there are {', '.join(share.name for share in self.caches)}")
        return replace(self, caches=found)

    @property
    def share(self) -> CacheShare:
        """The plan's only cache. Raises `ValueError` where it holds several."""
        if len(self.caches) != 1:
            names = ", ".join(repr(share.name) for share in self.caches)
            raise ValueError(
                f"the plan holds several caches ({names}): choose one, as in plan[{self.caches[0].name!r}]"
            )
        return self.caches[0]

    @property
    def num_blocks(self) -> int:
        return self.share.num_blocks

    @property
    def mapped_bytes(self) -> int:
        """Physical bytes of all caches of the plan, whole granules."""
        return sum(share.mapped_bytes for share in self.caches)

    @property
    def free_after_bytes(self) -> int:
        """What the plan leaves free on the device. A cache that holds more than its share keeps it."""
        return self.free_bytes - sum(share.taken_bytes for share in self.caches)

    @property
    def longest_sequence_tokens(self) -> int | None:
        """Tokens of the longest sequence that fits, if it has the cache to itself; `None` where it may have any length.

        That is so in a cache of states alone: a sequence takes one block, however long it gets.
        """
        return tokens_of_one_sequence(self._takers, self._usable_blocks)

    def num_sequences(self, num_tokens: int) -> int:
        """How many sequences of `num_tokens` tokens fit at once; each takes whole blocks."""
        if num_tokens < 1:
            raise ValueError(f"num_tokens must be at least 1, got {num_tokens}")
        return self._usable_blocks // blocks_for_tokens(self._takers, num_tokens)

    @property
    def _usable_blocks(self) -> int:
        return max(self.share.num_blocks - self.spare_blocks, 0)

    @property
    def _takers(self) -> tuple[BlockTaker, ...]:
        if not self.share.takers:
            raise ValueError("the plan knows blocks, not tokens: pass block_size to fit_blocks")
        return self.share.takers

    def agree(self, group: dist.ProcessGroup) -> Plan:
        """The plan that every rank of `group` follows: the least number of blocks of them all. Collective.

        The host waits for the other ranks, at most the group's timeout. Raises `RankError` on every rank where layouts,
        specs or block sizes differ or a rank failed, `RankLost` where one gave no answer.
        """
        from triton_kv.ranks import agree

        return agree(self, group)

    def to_json(self) -> str:
        """All fields, and what follows from them: `mapped_bytes`, `free_after_bytes`, `taken_bytes` and (where tokens
        are known) `longest_sequence_tokens` of each cache, `over_bytes` of the guess."""
        numbers = asdict(replace(self, caches=()))
        numbers["caches"] = [self._share_numbers(share) for share in self.caches]
        numbers |= {"mapped_bytes": self.mapped_bytes, "free_after_bytes": self.free_after_bytes}
        if self.legacy is not None:
            numbers["legacy"]["over_bytes"] = self.legacy.over_bytes
        return json.dumps(numbers, indent=1)

    def _share_numbers(self, share: CacheShare) -> dict[str, Any]:
        numbers = {name: value for name, value in vars(share).items() if name != "mapped_bytes_at"}
        numbers["taken_bytes"] = share.taken_bytes
        if share.takers:
            numbers["longest_sequence_tokens"] = replace(self, caches=(share,)).longest_sequence_tokens
        return numbers

    @classmethod
    def from_json(cls, text: str) -> Plan:
        numbers = _fields_of(cls, json.loads(text))
        numbers["caches"] = tuple(
            CacheShare(
                **{**_fields_of(CacheShare, share), "takers": tuple(BlockTaker(*one) for one in share["takers"])}
            )
            for share in numbers["caches"]
        )
        numbers["stages"] = tuple(StageRecord(**stage) for stage in numbers["stages"])
        numbers["legacy"] = numbers["legacy"] and LegacyGuess(**_fields_of(LegacyGuess, numbers["legacy"]))
        numbers["rank_blocks"] = tuple(numbers["rank_blocks"])
        return cls(**numbers)

    def __str__(self) -> str:
        lines = [stage_table(self.stages), ""] if self.stages else []
        for share in self.caches:
            lines.append(f"{share.name}: {share.num_blocks} blocks, {share.mapped_bytes / GIB:.3f} GiB mapped")
            if share.block_size:
                lines[-1] += self[share.name]._described_tokens()
        reserve = (
            f"kept free for activations {self.activation_bytes / GIB:.3f}, reservations "
            f"{self.reservation_bytes / GIB:.3f}, headroom {self.headroom_bytes / GIB:.3f} GiB"
        )
        lines += [
            f"limit {self.limit_bytes / GIB:.3f} GiB at utilization {self.utilization:g}, bound by {self.bound_by}; "
            f"free {self.free_bytes / GIB:.3f} of {self.total_bytes / GIB:.3f} GiB, "
            f"{self.free_after_bytes / GIB:.3f} after",
            reserve,
        ]
        if self.rank_blocks:
            lines.append(f"blocks by rank: {', '.join(map(str, self.rank_blocks))}")
        if self.legacy is not None:
            lines.append(self._compared(self.legacy))
        return "\n".join(lines)

    def _described_tokens(self) -> str:
        most = self.longest_sequence_tokens
        if most is None:
            return f", {self._usable_blocks // (blocks_of_any_length(self._takers) or 1)} sequences of any length"
        counts = ", ".join(f"{self.num_sequences(tokens)} of {tokens}" for tokens in (1024, 8192) if tokens <= most)
        return f", {most} tokens: one sequence of them" + (f", or {counts}" if counts else "")

    def _compared(self, legacy: LegacyGuess) -> str:
        text = (
            f"before capture, with {legacy.estimate_bytes / GIB:.3f} GiB guessed for graphs that took "
            f"{legacy.graph_bytes / GIB:.3f}: {legacy.num_blocks} blocks"
        )
        if legacy.over_bytes:
            return f"{text}, which is {legacy.over_bytes / GIB:.3f} GiB over the budget"
        if legacy.gained_blocks < 0:
            return f"{text}, {-legacy.gained_blocks} more than fit after it"
        whose = " on this rank, before it agreed" if self.rank_blocks else ""
        gained = f"{legacy.gained_blocks} blocks ({legacy.gained_bytes / GIB:.3f} GiB)"
        return f"{text}; measuring after it gains {gained}{whose}"


def _fields_of(kind: type[Any], numbers: dict[str, Any]) -> dict[str, Any]:
    """Without the derived numbers that `Plan.to_json` adds."""
    return {name: value for name, value in numbers.items() if name in kind.__dataclass_fields__}


def largest_fit(mapped_bytes_at: Callable[[int], int], limit_bytes: int, max_blocks: int) -> int:
    """The largest n in 0..max_blocks with `mapped_bytes_at(n) <= limit_bytes`; `mapped_bytes_at` must not fall."""
    low, high = 0, max_blocks
    while low < high:
        middle = (low + high + 1) // 2
        if mapped_bytes_at(middle) <= limit_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def fit_blocks(
    mapped_bytes_at: Callable[[int], int],
    *,
    capacity: int,
    mapped_bytes: int,
    total_bytes: int,
    free_bytes: int,
    utilization: float = 0.92,
    activation_bytes: int = 0,
    reservation_bytes: int = 0,
    headroom_bytes: int = 0,
    max_blocks: int | None = None,
    block_size: int | None = None,
) -> Plan:
    """The largest number of blocks that keeps the device within its budget. Pure: reads no device.

    `mapped_bytes_at(n)` is the physical bytes of the cache at n blocks, whole granules; `mapped_bytes` what it maps
    now. Two limits hold at once: everything in use on the device (all processes, the cache's growth, activations,
    reservations, headroom) stays within `utilization * total_bytes`, and the growth fits what is free now. The answer
    uses up its last granules: one block more would need another. All sizes in bytes; `block_size` in tokens.

    Raises `ValueError` for a utilization outside (0, 1] or negative sizes, `OutOfMemory` if not even one block fits.
    """
    return fit_caches(
        [CacheCost(mapped_bytes_at, capacity, mapped_bytes, block_size)],
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        utilization=utilization,
        activation_bytes=activation_bytes,
        reservation_bytes=reservation_bytes,
        headroom_bytes=headroom_bytes,
        max_blocks=max_blocks,
    )


def fit_caches(
    costs: Sequence[CacheCost],
    *,
    total_bytes: int,
    free_bytes: int,
    utilization: float = 0.92,
    activation_bytes: int = 0,
    reservation_bytes: int = 0,
    headroom_bytes: int = 0,
    max_blocks: int | None = None,
    ratio: Sequence[float] | None = None,
    num_blocks: int | None = None,
    cache_bytes: int | None = None,
) -> Plan:
    """`fit_blocks` for caches that share a device: a target model's and its draft's. Pure: reads no device.

    Several caches get the same number of tokens, or memory by `ratio` (what one cannot use for want of capacity goes to
    the others). `num_blocks` (of each cache) and `cache_bytes` (of all together) replace the budget: they are taken at
    the caller's word, and the driver will say whether they fit.

    Raises `ValueError` for impossible numbers, `TypeError` for bytes or blocks that are no integers, `OutOfMemory` if
    some cache gets not even one block.
    """
    for name, value in (
        ("total_bytes", total_bytes),
        ("free_bytes", free_bytes),
        ("activation_bytes", activation_bytes),
        ("reservation_bytes", reservation_bytes),
        ("headroom_bytes", headroom_bytes),
    ):
        _not_negative(name, value)
    _check_budget(utilization, max_blocks, num_blocks, cache_bytes, ratio, costs)
    held_bytes = sum(cost.mapped_bytes + cost.pooled_bytes for cost in costs)
    aliased_bytes = sum(cost.aliased_bytes for cost in costs)
    kept_bytes = activation_bytes + reservation_bytes + headroom_bytes
    by_utilization = int(utilization * total_bytes) - max(total_bytes - free_bytes, 0) - kept_bytes + held_bytes
    by_free = free_bytes - kept_bytes + held_bytes - aliased_bytes
    limit_bytes = min(by_utilization, by_free)
    bound_by = "utilization" if by_utilization < by_free else "free"
    most = [cost.capacity if max_blocks is None else min(cost.capacity, max_blocks) for cost in costs]
    if num_blocks is not None:
        chosen, bound_by = [num_blocks] * len(costs), "num_blocks"
        limit_bytes = sum(cost.mapped_bytes_at(num_blocks) for cost in costs)
    else:
        if cache_bytes is not None:
            limit_bytes, bound_by = cache_bytes, "cache_bytes"
        chosen = _divide(costs, most, limit_bytes, ratio)
        by_tokens = ratio is None and len(costs) > 1
        most_of_all = [cost.capacity for cost in costs]
        if chosen == (_equal_caps(costs, most) if by_tokens else most):
            same = _equal_caps(costs, most) == _equal_caps(costs, most_of_all) if by_tokens else most == most_of_all
            bound_by = "capacity" if same else "max_blocks"
    plan = Plan(
        caches=tuple(_share(cost, blocks) for cost, blocks in zip(costs, chosen)),
        bound_by=bound_by,
        limit_bytes=max(limit_bytes, 0),
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        activation_bytes=activation_bytes,
        reservation_bytes=reservation_bytes,
        headroom_bytes=headroom_bytes,
        utilization=utilization,
    )
    if 0 in chosen and cache_bytes is not None:
        each = ", ".join(f"{cost.name} {cost.mapped_bytes_at(1)}" for cost in costs)
        raise ValueError(
            f"cache_bytes={cache_bytes} gives {costs[chosen.index(0)].name} no block: one block takes whole granules, "
            f"in bytes {each}; give more"
        )
    if 0 in chosen:
        raise _no_block(plan, costs)
    return plan


def _not_negative(name: str, value: int) -> None:
    if whole_number(name, value) < 0:
        raise ValueError(f"{name} must not be negative, got {value}")


def _check_budget(
    utilization: float,
    max_blocks: int | None,
    num_blocks: int | None,
    cache_bytes: int | None,
    ratio: Sequence[float] | None,
    costs: Sequence[CacheCost],
) -> None:
    if not costs:
        raise ValueError("a plan needs at least one cache")
    if not 0.0 < utilization <= 1.0:
        raise ValueError(f"utilization must lie in (0, 1], got {utilization}")
    if max_blocks is not None:
        positive_int("max_blocks", max_blocks)
    if num_blocks is not None:
        for name, other in (("cache_bytes", cache_bytes), ("max_blocks", max_blocks)):
            if other is not None:
                raise ValueError(f"num_blocks={num_blocks} and {name}={other} both say the size: give one of them")
        least = min(cost.capacity for cost in costs)
        if not 1 <= whole_number("num_blocks", num_blocks) <= least:
            raise ValueError(f"num_blocks must lie in 1..{least} (the capacity), got {num_blocks}")
    if cache_bytes is not None:
        _not_negative("cache_bytes", cache_bytes)
    if ratio is not None and (len(ratio) != len(costs) or not all(0 < part < math.inf for part in ratio)):
        raise ValueError(f"ratio needs a positive number for each of the {len(costs)} caches, got {list(ratio)}")
    if ratio is None and len(costs) > 1 and any(cost.block_size is None for cost in costs):
        raise ValueError("caches that share by tokens need a block_size each; or give a ratio")
    if ratio is None and len(costs) > 1 and num_blocks is None:
        _check_equal_tokens(costs, max_blocks)


def _check_equal_tokens(costs: Sequence[CacheCost], max_blocks: int | None) -> None:
    """Raises `ValueError` where whole blocks of each cache cannot hold equal tokens within the capacities."""
    unit = math.lcm(*(cost.block_size or 1 for cost in costs))
    for cost in costs:
        for what, blocks in (("capacity", cost.capacity), ("max_blocks", max_blocks)):
            if blocks is not None and blocks * (cost.block_size or 1) < unit:
                sizes = ", ".join(f"{other.name} {other.block_size}" for other in costs)
                raise ValueError(
                    f"equal tokens come in multiples of {unit}, for blocks of {sizes} tokens: with {what} {blocks} "
                    f"{cost.name} holds {blocks * (cost.block_size or 1)}; allow more blocks, or give a ratio"
                )


def _divide(costs: Sequence[CacheCost], most: list[int], limit_bytes: int, ratio: Sequence[float] | None) -> list[int]:
    """Blocks of each cache within `limit_bytes` together."""
    if len(costs) == 1:
        return [largest_fit(costs[0].mapped_bytes_at, limit_bytes, most[0])]
    if ratio is None:
        return _equal_tokens(costs, most, limit_bytes)
    chosen, open_ones, left = [0] * len(costs), list(range(len(costs))), limit_bytes
    while open_ones:
        parts = sum(ratio[index] for index in open_ones)
        fits = {
            index: largest_fit(costs[index].mapped_bytes_at, int(left * ratio[index] / parts), most[index])
            for index in open_ones
        }
        full = [index for index in open_ones if fits[index] == most[index]]
        for index in full or open_ones:
            chosen[index] = fits[index]
            left -= costs[index].mapped_bytes_at(fits[index])
        open_ones = [index for index in open_ones if index not in full] if full else []
    return chosen


def _equal_tokens(costs: Sequence[CacheCost], most: list[int], limit_bytes: int) -> list[int]:
    sizes = [cost.block_size or 1 for cost in costs]

    def blocks_at(num_tokens: int) -> list[int]:
        return [num_tokens // size for size in sizes]

    def mapped_at(num_tokens: int) -> int:
        return sum(cost.mapped_bytes_at(blocks) for cost, blocks in zip(costs, blocks_at(num_tokens)))

    unit = math.lcm(*sizes)
    units = _equal_caps(costs, most)[0] * sizes[0] // unit
    return blocks_at(unit * largest_fit(lambda count: mapped_at(unit * count), limit_bytes, units))


def _equal_caps(costs: Sequence[CacheCost], most: list[int]) -> list[int]:
    """The most blocks of each that hold equal tokens: whole blocks everywhere, so that they are truly equal."""
    sizes = [cost.block_size or 1 for cost in costs]
    unit = math.lcm(*sizes)
    num_tokens = min(cap * size for cap, size in zip(most, sizes)) // unit * unit
    return [num_tokens // size for size in sizes]


def _share(cost: CacheCost, num_blocks: int) -> CacheShare:
    return CacheShare(
        num_blocks=num_blocks,
        mapped_bytes=cost.mapped_bytes_at(num_blocks),
        held_bytes=cost.mapped_bytes,
        capacity=cost.capacity,
        block_size=cost.block_size,
        digest=cost.digest,
        name=cost.name,
        takers=cost.takers or (() if cost.block_size is None else (BlockTaker(cost.block_size),)),
        mapped_bytes_at=cost.mapped_bytes_at,
        pooled_bytes=cost.pooled_bytes,
    )


def _no_block(plan: Plan, costs: Sequence[CacheCost]) -> OutOfMemory:
    return OutOfMemory(
        sum(cost.mapped_bytes_at(1) for cost in costs),
        plan.free_bytes,
        would_fit=0,
        unit="blocks",
        detail=(
            f"plan: not even one block fits in the {plan.limit_bytes} bytes left (total {plan.total_bytes}, "
            f"activations {plan.activation_bytes}, reservations {plan.reservation_bytes}, headroom "
            f"{plan.headroom_bytes}, utilization {plan.utilization}; raise utilization, lower headroom_bytes, capture "
            "fewer graphs or profile a smaller step)"
        ),
    )


def plan_blocks(
    cache: KVCache | Mapping[str, KVCache],
    ledger: MemoryLedger | None = None,
    *,
    utilization: float = 0.92,
    headroom_bytes: int = 150 * MIB,
    activation_bytes: int | None = None,
    max_blocks: int | None = None,
    num_blocks: int | None = None,
    cache_bytes: int | None = None,
    ratio: Mapping[str, float] | None = None,
    spare_blocks: int = 0,
    graph_estimate_bytes: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> Plan:
    """Reads the cache's device and says how many blocks it may hold; call it after warm-up and capture.

    Synchronises the device, so that memory which queued work still frees is counted. Handles that a cache keeps in its
    pool count as free for it (`trim` what growth leaves of them); granules that segments alias do not, since they go
    only after the extend.

    Args:
        cache: one cache, or several by name; these get equal tokens, or memory by `ratio`.
        ledger: of the start-up. It knows what activations need again and what was announced.
        utilization: the share of the device's memory that may be in use, everybody's use counted.
        headroom_bytes: left free within that share.
        activation_bytes: what a step needs and nobody holds; by default the ledger's, or without a ledger what torch's
            allocator needed at its peak and no longer holds.
        max_blocks: no more than these.
        num_blocks, cache_bytes: a fixed size instead of the budget.
        spare_blocks: blocks that no sequence gets, such as a block 0 for padding: they hold no tokens of the plan.
        graph_estimate_bytes: for the comparison: what sizing before capture keeps for graphs (1 GiB on a GPU). There is
            none with several caches, with a fixed size, or where the ledger did not watch the cache.
        group: every rank of it makes the call, and `agree` is part of it: a rank that cannot plan is an error on all.

    Raises what `fit_caches` raises (`OutOfMemory` with the ledger as a note), `ValueError` for a ledger of another
    device, one with an open stage or one without a profile run, and `Closed`; with `group` also what `agree` raises.
    """
    if group is not None:
        from triton_kv.ranks import agree

        own: Plan | BaseException
        try:
            own = plan_blocks(
                cache,
                ledger,
                utilization=utilization,
                headroom_bytes=headroom_bytes,
                activation_bytes=activation_bytes,
                max_blocks=max_blocks,
                num_blocks=num_blocks,
                cache_bytes=cache_bytes,
                ratio=ratio,
                spare_blocks=spare_blocks,
                graph_estimate_bytes=graph_estimate_bytes,
            )
        except BaseException as error:  # also an interrupt: the others wait for this rank
            own = error
        return agree(own, group)
    caches = {"cache": cache} if not hasattr(cache, "items") else dict(cache.items())
    if ratio is not None and set(ratio) != set(caches):
        raise ValueError(f"ratio names {', '.join(ratio)}; the caches are {', '.join(caches)}")
    _not_negative("spare_blocks", spare_blocks)
    if graph_estimate_bytes is not None:
        _not_negative("graph_estimate_bytes", graph_estimate_bytes)
    first = next(iter(caches.values()), None)
    if first is None:
        raise ValueError("a plan needs at least one cache")
    if len({id(one) for one in caches.values()}) < len(caches):
        raise ValueError(f"the plan has one cache under several of the names {', '.join(caches)}: name each cache once")
    require_one_device(list(caches.values()), ledger)
    reservation_bytes, watched = 0, True
    if ledger is None:
        free_bytes, total_bytes = first.memory_info()
        if activation_bytes is None:
            activation_bytes = _peak_not_held(first.device)
    else:
        for one in caches.values():
            one._store.require_usable()
            watched &= not ledger.watch(one)
        reading = ledger.read()
        free_bytes, total_bytes = reading.free_bytes, reading.total_bytes
        reservation_bytes = ledger.announced_bytes
        if activation_bytes is None:
            activation_bytes = ledger.activation_bytes(reading)
    costs = [_cost(name, one) for name, one in caches.items()]
    try:
        plan = fit_caches(
            costs,
            total_bytes=total_bytes,
            free_bytes=free_bytes,
            utilization=utilization,
            activation_bytes=activation_bytes,
            reservation_bytes=reservation_bytes,
            headroom_bytes=headroom_bytes,
            max_blocks=max_blocks,
            num_blocks=num_blocks,
            cache_bytes=cache_bytes,
            ratio=None if ratio is None else [ratio[name] for name in caches],
        )
    except OutOfMemory as error:
        if ledger is not None:
            error.add_note(str(ledger))
        raise
    if graph_estimate_bytes is None:
        graph_estimate_bytes = GRAPH_ESTIMATE_BYTES if first.device.type == "cuda" else 0
    legacy = None
    if ledger is not None and watched and num_blocks is None and cache_bytes is None:
        legacy = _legacy_guess(plan, costs, ledger, graph_estimate_bytes, max_blocks)
    return replace(plan, spare_blocks=spare_blocks, legacy=legacy, stages=tuple(ledger.stages) if ledger else ())


def _cost(name: str, cache: KVCache) -> CacheCost:
    from triton_kv.ranks import digest

    reference = weakref.ref(cache)

    def mapped_bytes_at(num_blocks: int) -> int:
        alive = reference()
        if alive is None:
            raise ValueError("the cache that was planned is gone: plan again with the new one")
        return alive.mapped_bytes_at(num_blocks)

    stats = cache.stats()
    return CacheCost(
        mapped_bytes_at,
        cache.capacity,
        stats.mapped_bytes,
        cache.block_size,
        digest(cache),
        name,
        block_takers(cache.geometry),
        stats.pooled_bytes,
        aliased_bytes=stats.mapped_bytes if cache._store._alias == "on" else 0,
    )


def _legacy_guess(
    plan: Plan, costs: Sequence[CacheCost], ledger: MemoryLedger, estimate_bytes: int, max_blocks: int | None
) -> LegacyGuess | None:
    """One cache's size by today's method: the budget as it stood after the profile run, less the peak and a guess."""
    profile = ledger.find("profile run")
    if profile is None or ledger.find("capture") is None or len(costs) != 1:
        return None
    cost = costs[0]
    used_bytes = profile.total_bytes - profile.free_bytes - profile.cache_bytes
    # Engines give the profile run's cached memory back before they read, so that its peak counts once.
    used_bytes -= profile.reusable_bytes
    kept_bytes = profile.peak_beyond_bytes + plan.reservation_bytes + plan.headroom_bytes + estimate_bytes
    limit_bytes = int(plan.utilization * profile.total_bytes) - used_bytes - kept_bytes
    most = cost.capacity if max_blocks is None else min(cost.capacity, max_blocks)
    num_blocks = largest_fit(cost.mapped_bytes_at, limit_bytes, most)
    mapped_bytes = cost.mapped_bytes_at(num_blocks)
    return LegacyGuess(
        num_blocks,
        mapped_bytes,
        estimate_bytes,
        ledger.graph_bytes,
        gained_blocks=plan.num_blocks - num_blocks,
        gained_bytes=plan.mapped_bytes - mapped_bytes,
    )


def _peak_not_held(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return max(torch.cuda.max_memory_allocated(device) - torch.cuda.memory_reserved(device), 0)

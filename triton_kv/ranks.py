"""Ranks that agree: one size for all of them, and changes that happen on every rank or on none.

Everything here is collective: each rank of the group makes the same calls in the same order. What is exchanged is a few
hundred bytes over gloo on the host, so no device is waited for and a rank that died is an error after the group's
timeout, not a hang.
"""

from __future__ import annotations

import hashlib
import json
import time
import unicodedata
import weakref
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from triton_kv.errors import InconsistentRanks, RankError, RankLost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

    from triton_kv.cache import KVCache
    from triton_kv.sizing import Plan

Result = TypeVar("Result")

BALLOT_BYTES = 2048  # one size for every rank, so that one collective does
_ERROR_CHARS = 400  # of an error's text that others get to see, fewer where they take many bytes

_control_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Ballot:
    """What one rank tells the others."""

    operation: str
    world_size: int  # of the whole job, as this rank knows it
    num_blocks: tuple[int, ...] = ()  # that the rank's caches would hold
    digest: str = ""
    error: str = ""  # why this rank cannot go on

    def to_tensor(self) -> torch.Tensor:
        """uint8 `[BALLOT_BYTES]` on the CPU: JSON, padded with spaces. The error is cleaned and cut to what fits."""
        room = BALLOT_BYTES - len(replace(self, error="")._encoded())
        data = replace(self, error=_cut(_cleaned(self.error[:_ERROR_CHARS]), room))._encoded()
        if len(data) > BALLOT_BYTES:
            raise ValueError(f"a ballot of {len(data)} bytes for at most {BALLOT_BYTES}: plan fewer caches at once")
        return torch.frombuffer(bytearray(data.ljust(BALLOT_BYTES)), dtype=torch.uint8)

    def _encoded(self) -> bytes:
        return json.dumps(asdict(self), ensure_ascii=False).encode()

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> Ballot:
        fields = json.loads(bytes(tensor.tolist()))
        return cls(**{**fields, "num_blocks": tuple(fields["num_blocks"])})


def _cleaned(text: str) -> str:
    """Text that UTF-8 can hold and a terminal can show: file names may bring lone surrogates, drivers control bytes."""
    return "".join(
        "\N{REPLACEMENT CHARACTER}" if unicodedata.category(char) in ("Cc", "Cs") and char not in "\n\t" else char
        for char in text
    )


def _cut(text: str, room: int) -> str:
    """The longest beginning of at most `room` bytes as JSON, but a character at least: no text means no error."""
    used = 0
    for index, char in enumerate(text):
        used += len(json.dumps(char, ensure_ascii=False).encode()) - 2  # without its quotes
        if used > room and index:
            return text[:index]
    return text


def digest(cache: KVCache) -> str:
    """16 hex digits over `KVCache.signature`: what ranks that share block ids must have in common."""
    return hashlib.sha256(cache.signature().encode()).hexdigest()[:16]


def control_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same ranks that exchanges host memory: `group` itself where it has gloo, else a new gloo group.

    The new one is made once for each group and with its timeout. Collective then. An NCCL group is never used, since
    its timeout may end the process.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("no process group is there: call torch.distributed.init_process_group first")
    if group is None or dist.get_rank(group) < 0:
        raise ValueError("this process is not in the group: call it on the group's ranks only")
    if "gloo" in _backends(group).get("cpu", ""):
        return group
    if group not in _control_groups:
        try:
            _control_groups[group] = dist.new_group(
                dist.get_process_group_ranks(group),
                backend="gloo",
                timeout=_timeout(group),
                use_local_synchronization=True,  # only the ranks of the group are here
            )
        except RuntimeError as error:
            raise RankLost("making a gloo group", str(error)) from error
    return _control_groups[group]


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Device type: backend, for example `{"cpu": "gloo", "cuda": "nccl"}`."""
    config = dist.distributed_c10d.get_backend_config(group)
    return dict(pair.split(":", 1) for pair in config.split(",") if ":" in pair)


def _timeout(group: dist.ProcessGroup) -> timedelta | None:
    """The group's timeout; None, which is torch's default, where the backend does not tell."""
    for device in _backends(group):
        try:
            return group._get_backend(torch.device(device)).options._timeout
        except (AttributeError, RuntimeError):
            continue
    return None


def exchange(group: dist.ProcessGroup, ballot: Ballot) -> list[Ballot]:
    """Every rank's ballot, by rank in the group. Collective; waits at most the group's timeout.

    Raises `RankLost` if one gives no answer in time or its connection is gone.
    """
    control = control_group(group)
    mine = ballot.to_tensor()
    all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size(control))]
    started = time.perf_counter()
    try:
        dist.all_gather(all_of_them, mine, group=control)
    except RuntimeError as error:
        waited = f"after {time.perf_counter() - started:.1f} s: {error}"
        raise RankLost(ballot.operation, waited) from error
    return [Ballot.from_tensor(tensor) for tensor in all_of_them]


def judge(operation: str, ballots: Sequence[Ballot]) -> None:
    """Raises `RankError`, the same on every rank, unless all ballots say that they can go on and fit together."""
    failures = {rank: ballot.error for rank, ballot in enumerate(ballots) if ballot.error}
    _add_odd_ones(failures, [ballot.operation for ballot in ballots], "is at {0!r} where rank {2} is at {1!r}")
    _add_odd_ones(failures, [ballot.world_size for ballot in ballots], "counts {0} processes where rank {2} counts {1}")
    if failures:
        raise RankError(operation, failures)


def _add_odd_ones(failures: dict[int, str], values: Sequence[Any], text: str) -> None:
    """A failure for each rank, not failed yet, whose value is not that of the lowest such rank."""
    sound = [rank for rank in range(len(values)) if rank not in failures]
    for rank in sound[1:]:
        if values[rank] != values[sound[0]]:
            failures[rank] = text.format(values[rank], values[sound[0]], sound[0])


def agree(
    plan: Plan | Sequence[Plan] | BaseException | None, group: dist.ProcessGroup, *, same_layout: bool = True
) -> Plan:
    """`Plan.agree`, also for a rank that made no plan or several: the error then reaches every rank.

    Where planning failed, pass what it raised (`plan_blocks(..., group=group)` does): all ranks raise and name it, this
    one with it as the cause. An interrupt is raised here as it is, once the others know.

    `same_layout=False` lets layouts, specs and layers differ, for ranks that hold different layers (a pipeline):
    only the number of blocks, the caches' names, and tokens in a block, must be one then. Returns the rank's own
    plan with the least number of blocks of all ranks, cache by cache: those that share by equal tokens on every
    rank still do, those that share by a ratio need not keep to it. `bound_by` is the rank that lowered the first
    cache that is lower than in the own plan.

    Raises `RankError` and `RankLost`; the host waits for the other ranks.
    """
    from triton_kv.sizing import Plan

    operation = "agree"
    failure = plan if isinstance(plan, BaseException) else None
    plans: list[Plan] = []
    if isinstance(plan, Plan):
        plans = [plan]
    elif plan is not None and not isinstance(plan, BaseException):
        plans = list(plan)
    world_size = dist.get_world_size() if dist.is_initialized() else 0
    if len(plans) == 1:
        shares = plans[0].caches
        digests = [_paired(share.name, share.digest if same_layout else str(share.block_size)) for share in shares]
        mine = Ballot(operation, world_size, tuple(share.num_blocks for share in shares), " ".join(digests))
    elif failure is not None:
        mine = Ballot(operation, world_size, error=_describe(failure))
    elif plans:
        mine = Ballot(operation, world_size, error=f"gave {len(plans)} plans: make one, for all caches of the rank")
    else:
        mine = Ballot(operation, world_size, error="gave no plan: where planning failed, pass its exception to agree")
    what = "layout, spec or block size" if same_layout else "block size"
    text = f"has another {what} than rank {{2}}, or other names of caches (digests {{0}} and {{1}}); use one on all"
    ballots = _vote(group, mine, failure, lambda ballot: ballot.digest, text)
    own = plans[0]
    by_cache = list(zip(*(ballot.num_blocks for ballot in ballots), strict=True))
    agreed = [min(counts) for counts in by_cache]
    lowered = [index for index, share in enumerate(own.caches) if agreed[index] < share.num_blocks]
    return replace(
        own,
        caches=tuple(share.with_blocks(blocks) for blocks, share in zip(agreed, own.caches)),
        bound_by=f"rank {by_cache[lowered[0]].index(agreed[lowered[0]])}" if lowered else own.bound_by,
        rank_blocks=by_cache[0],
    )


def _paired(name: str, digest: str) -> str:
    """Caches meet those of their own name on other ranks."""
    return hashlib.sha256(f"{name}\0{digest}".encode()).hexdigest()[:16]


def change_together(
    operation: str,
    group: dist.ProcessGroup,
    begin: Callable[[Callable[[], None]], tuple[AbstractContextManager[Result], int | None]],
    *,
    undoable: bool = True,
) -> Result:
    """A change of a cache on every rank of the group or on none: two steps and two votes. Collective.

    `begin(confirm)` checks the call and gives the change as a context manager, and the number of blocks that the cache
    will then hold (None: it need not be the same everywhere). Entering it does all that can fail and shows nothing;
    an exception inside it undoes everything; leaving it publishes, calls `confirm` and only then becomes final. The
    first vote is taken inside, the second by `confirm`. A change that is final when it is published (not `undoable`)
    leaves `confirm` alone, and the second vote is taken afterwards. Returns what the context manager gave.

    Raises `RankError` on every rank if one of them failed (each is as before), `RankLost` if a rank gave no answer to
    the first vote (this rank is as before), `InconsistentRanks` if it gave none to the second, or failed when nothing
    could be taken back any more (this rank has changed).
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 0
    failure: BaseException | None = None
    lost: RankLost | None = None
    prepared = confirmed = False

    def vote(operation: str, failure: BaseException | None, blocks: int | None) -> None:
        counts = () if blocks is None else (blocks,)
        ballot = Ballot(operation, world_size, counts, error=_describe(failure))
        text = "would hold {0[0]} blocks where rank {2} would hold {1[0]}"
        _vote(group, ballot, failure, lambda other: other.num_blocks, text)

    def confirm() -> None:
        nonlocal confirmed, lost
        confirmed = True
        try:
            vote(f"{operation}, published", None, num_blocks)
        except RankLost as error:  # nothing to take back: the others may have published, too
            lost = error

    try:
        with ExitStack() as stack:
            num_blocks: int | None = None
            try:
                steps, num_blocks = begin(confirm)
                result = stack.enter_context(steps)
            except BaseException as error:  # also an interrupt: the others wait for this rank's vote
                failure = error
            vote(operation, failure, num_blocks)
            prepared = True
    except BaseException as error:
        if prepared and not confirmed:  # publishing failed here, and the others wait for the second vote
            try:
                vote(f"{operation}, published", error, num_blocks)
            except RankError as refused:
                if undoable:
                    raise
                raise InconsistentRanks(operation, str(refused)) from error
        raise
    if not confirmed:
        try:
            confirm()
        except RankError as refused:
            if undoable:  # there was nothing to do here, so nothing to take back
                raise
            raise InconsistentRanks(operation, str(refused)) from refused
    if lost is not None:
        raise InconsistentRanks(operation, lost.reason) from lost
    return result


def _vote(
    group: dist.ProcessGroup,
    ballot: Ballot,
    failure: BaseException | None,
    common: Callable[[Ballot], Any],
    text: str,
) -> list[Ballot]:
    """Everybody's ballots, where all can go on and have the same in `common`; `text` says so of one that has not."""
    try:
        ballots = exchange(group, ballot)
        judge(ballot.operation, ballots)
        failures: dict[int, str] = {}
        _add_odd_ones(failures, [common(other) for other in ballots], text)
        if failures:
            raise RankError(ballot.operation, failures)
        return ballots
    except RankError as error:
        if failure is not None and not isinstance(failure, Exception):
            raise failure from error  # an interrupt stays one
        raise error from failure


def _describe(failure: BaseException | None) -> str:
    if failure is None:
        return ""
    try:
        text = str(failure)
    except Exception as error:  # the others wait for the vote, whatever the error is like
        text = f"(its text cannot be made: {type(error).__name__})"
    return f"{type(failure).__name__}: {text}"

"""Ranks agree or stay as they were: real processes over gloo, every phase failing once, and processes that die."""

import os
import signal
import statistics
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from rank_processes import run_ranks

import triton_kv as tkv
from triton_kv import ranks
from triton_kv.ranks import BALLOT_BYTES, Ballot, digest, exchange

GRANULE = 4096
KIB = 1 << 10
WORLD = "world"
MEMORIES = {"host": tkv.HostMemory, "fake": tkv.FakeMemory}


def reserve(
    budget_bytes=512 * KIB, kind="fake", *, layout="LTBNHD", block_size=4, heads=2, layers=2, capacity=64, memory=None
):
    """A block is `4 segments * 512 bytes`: 8 blocks a granule of each segment."""
    memory = memory or tkv.FaultyMemory(MEMORIES[kind](GRANULE, budget_bytes))
    spec = tkv.AttentionSpec(num_kv_heads=heads, head_dim=16, dtype=torch.float32)
    return tkv.KVCache.reserve(
        spec, block_size=block_size, num_layers=layers, layout=layout, memory=memory, capacity=capacity
    )


def plan(cache, **options):
    return tkv.plan_blocks(cache, **{"utilization": 1.0, "headroom_bytes": 0, **options})


def extended(cache, target, group):
    """Extends together; an error takes along what the cache is then."""
    try:
        cache.extend(target, group=group)
    except tkv.TritonKVError as error:
        memory = cache._store.memory
        error.args = (
            f"{error} [{cache.num_blocks} blocks, {cache.mapped_bytes} mapped, {memory.live.handles} handles]",
        )
        raise


# Agreement.


def _agree_and_extend(rank, kind, budgets):
    cache = reserve(budgets[rank], kind)
    own = plan(cache)
    agreed = own.agree(dist.group.WORLD)
    assert agreed.mapped_bytes == cache.mapped_bytes_at(agreed.num_blocks)
    assert cache.extend(agreed, group=dist.group.WORLD) is cache
    assert cache.mapped_bytes == agreed.mapped_bytes
    return own.num_blocks, agreed.num_blocks, cache.num_blocks, agreed.bound_by, agreed.rank_blocks


@pytest.mark.parametrize("kind", ["host", "fake"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_unequal_budgets_give_the_least(kind, world_size):
    budgets = [128 * KIB, 64 * KIB, 96 * KIB, 65 * KIB][:world_size]
    outcomes = run_ranks(_agree_and_extend, world_size, kind, budgets)
    own = (64, 32, 48, 32)[:world_size]
    for rank, outcome in enumerate(outcomes):
        bound_by = "rank 1" if own[rank] > 32 else "free"
        assert outcome.value == (own[rank], 32, 32, bound_by, own), outcome


def _agree_on_several(rank, capacities, ratio):
    memory = tkv.FakeMemory(GRANULE, 512 * KIB)
    target, draft = (
        reserve(block_size=size, capacity=capacity, memory=memory)
        for size, capacity in zip((4, 8), capacities[rank], strict=True)
    )
    own = plan({"target": target, "draft": draft}, ratio=ratio)
    agreed = own.agree(dist.group.WORLD)
    return [share.num_blocks for share in agreed.caches], agreed.bound_by, agreed.rank_blocks


SEVERAL = {  # capacities by rank; blocks; by rank the bound; each rank's blocks of the first
    "equal tokens": (
        [(64, 99), (99, 10), (40, 99)],
        None,
        [20, 10],
        ["rank 1", "capacity", "rank 1"],
        (64, 20, 40),
    ),
    "each lowers another": (
        [(16, 32), (64, 8), (64, 32)],
        {"target": 1, "draft": 1},
        [16, 8],
        ["rank 1", "rank 0", "rank 0"],
        (16, 64, 64),
    ),
}


@pytest.mark.parametrize(("capacities", "ratio", "blocks", "bounds", "first"), SEVERAL.values(), ids=SEVERAL.keys())
def test_several_caches_in_one_agreement(capacities, ratio, blocks, bounds, first):
    outcomes = run_ranks(_agree_on_several, len(capacities), capacities, ratio)
    assert [outcome.value for outcome in outcomes] == [(blocks, bound, first) for bound in bounds], outcomes


def _agree_with(rank, odd, options, same_layout=True):
    cache = reserve(**options) if rank == odd else reserve()
    return ranks.agree(plan(cache), dist.group.WORLD, same_layout=same_layout).num_blocks


DIFFERENT = {
    "layout": {"layout": "BLTNHD"},
    "block size": {"block_size": 8},
    "spec": {"heads": 1},
    "layers": {"layers": 3},
}


def test_digests_tell_what_must_be_the_same():
    same = digest(reserve())
    assert same == digest(reserve(64 * KIB, "host", capacity=32)), "memory and capacity may differ between ranks"
    assert same not in [digest(reserve(**options)) for options in DIFFERENT.values()]


@pytest.mark.parametrize(("world_size", "odd"), [(2, 1), (4, 2)])
def test_unequal_layouts_are_an_error_everywhere(world_size, odd):
    for outcome in run_ranks(_agree_with, world_size, odd, DIFFERENT["layout"]):
        assert outcome.error == "RankError"
        assert set(outcome.failures) == {odd}
        assert "has another layout, spec or block size than rank 0" in outcome.text


def test_a_pipeline_may_hold_different_layers():
    assert [one.value for one in run_ranks(_agree_with, 2, 1, {"layers": 3}, False)] == [64, 64]
    assert {one.error for one in run_ranks(_agree_with, 2, 1, {"block_size": 8}, False)} == {"RankError"}


def _give(rank, counts):
    own = plan(reserve())
    plans = [own] * counts[rank]
    return ranks.agree(plans if counts[rank] != 1 else own, dist.group.WORLD)


def test_a_rank_that_gives_no_plan_or_two():
    for outcome in run_ranks(_give, 4, [1, 0, 1, 2]):
        assert outcome.error == "RankError"
        assert set(outcome.failures) == {1, 3}
        assert "rank 1: gave no plan: where planning failed, pass its exception to agree" in outcome.text
        assert "rank 3: gave 2 plans" in outcome.text


def _agree_by_name(rank, names, same_layout):
    memory = tkv.FakeMemory(GRANULE, 512 * KIB)
    own = plan({name: reserve(memory=memory) for name in names[rank]})
    return [share.name for share in ranks.agree(own, dist.group.WORLD, same_layout=same_layout).caches]


@pytest.mark.parametrize("same_layout", [True, False])
@pytest.mark.parametrize("order", [("target", "draft"), ("draft", "target")], ids=["same", "swapped"])
def test_caches_of_one_layout_meet_by_name(order, same_layout):
    names = [("target", "draft"), order]
    for rank, outcome in enumerate(run_ranks(_agree_by_name, 2, names, same_layout)):
        if order == names[0]:
            assert outcome.value == list(names[rank]), outcome
        else:
            assert outcome.error == "RankError", outcome
            assert "or other names of caches" in outcome.failures[1]


def _plan_together(rank, how):
    cache, group = reserve(4 * GRANULE if rank == 1 else 512 * KIB), dist.group.WORLD
    options = {"utilization": 1.0, "headroom_bytes": 1 if rank == 1 and how != "all well" else 0}
    if how == "interrupted" and rank == 1:
        cache.stats = _interrupted
    try:
        return tkv.plan_blocks(cache, group=group, **options).num_blocks
    except tkv.RankError as error:
        error.args = (f"{error} [caused by {type(error.__cause__).__name__}]",)
        raise


def test_a_plan_that_is_made_together():
    assert [outcome.value for outcome in run_ranks(_plan_together, 3, "all well")] == [8, 8, 8]


def test_a_rank_that_cannot_plan_gives_all_its_reason():
    for rank, outcome in enumerate(run_ranks(_plan_together, 3, "too little")):
        assert outcome.error == "RankError", outcome
        assert set(outcome.failures) == {1}
        assert "OutOfMemory: " in outcome.failures[1]
        assert "not even one block fits" in outcome.failures[1]
        assert f"[caused by {'OutOfMemory' if rank == 1 else 'NoneType'}]" in outcome.text


def test_a_plan_that_is_interrupted_reaches_the_others():
    first, second = run_ranks(_plan_together, 2, "interrupted")
    assert second.error == "KeyboardInterrupt"
    assert "KeyboardInterrupt" in first.failures[1]


def _agree_twice_on_rank_1(rank):
    cache = reserve()
    agreed = plan(cache).agree(dist.group.WORLD)
    if rank == 1:
        plan(cache).agree(dist.group.WORLD)
    extended(cache, agreed, dist.group.WORLD)


def test_a_rank_that_agrees_once_too_often():
    for outcome in run_ranks(_agree_twice_on_rank_1, 2):
        assert outcome.error == "RankError"
        assert "rank 1: is at 'agree' where rank 0 is at 'extend'" in outcome.text


def _agree_in_another_world(rank):
    if rank == 1:
        real = dist.get_world_size
        dist.get_world_size = lambda *group: real(*group) if group else 3
    plan(reserve()).agree(dist.group.WORLD)


def test_ranks_of_different_worlds():
    for outcome in run_ranks(_agree_in_another_world, 2):
        assert outcome.error == "RankError"
        assert outcome.failures == {1: "counts 3 processes where rank 0 counts 2"}


# 400 characters at most: what they are replaced by, or shortened to.
ERRORS = {
    "surrogates": ("\ud800 bad path \udcff", "\ufffd bad path \ufffd"),
    "control characters": ("\x00\x1b[1m\x7f" * 100, ("\ufffd\ufffd[1m\ufffd" * 100)[:400]),
    "lines": ("one\n\ttwo", "one\n\ttwo"),
    "quotes": ('"\\' * 500, '"\\' * 200),
    "four bytes": ("\U0001f600" * 500, "\U0001f600" * 400),
}


@pytest.mark.parametrize(("text", "sent"), ERRORS.values(), ids=ERRORS.keys())
def test_no_error_text_stops_a_ballot(text, sent):
    tensor = Ballot("extend", 2, error=text).to_tensor()
    assert tensor.numel() == BALLOT_BYTES
    assert Ballot.from_tensor(tensor).error == sent


@pytest.mark.parametrize("char", ["x", '"', "\N{SNOWMAN}"])
@pytest.mark.parametrize("caches", [10, 60, 80])
def test_an_error_is_cut_where_a_ballot_is_full(char, caches):
    ballot = Ballot("agree", 2, (123456,) * caches, " ".join(["d" * 13] * caches), error=char * 400)
    assert char * 3 in Ballot.from_tensor(ballot.to_tensor()).error


class _MuteError(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def test_an_error_without_text_is_still_one():
    assert ranks._describe(_MuteError()) == "_MuteError: (its text cannot be made: RuntimeError)"


def test_a_long_error_fits_a_ballot():
    ballot = Ballot("extend", 2, (1,), "d" * 16, "\N{SNOWMAN}" * 5000)
    assert Ballot.from_tensor(ballot.to_tensor()).error == "\N{SNOWMAN}" * 400
    with pytest.raises(ValueError, match="plan fewer caches"):
        Ballot("agree", 2, digest="d" * 3000).to_tensor()


# Extending together.


def _fail_watermark(cache):
    def fail(num_blocks):
        cache._store._set_watermark = real
        raise tkv.DriverError("memcpy", "EIO", "injected")

    real, cache._store._set_watermark = cache._store._set_watermark, fail


BREAK = {
    "creating memory": (lambda cache: cache._store.memory.fail("create", 3), "OutOfMemory"),
    "mapping": (lambda cache: cache._store.memory.fail("map", 2), "map failed with EIO"),
    "access": (lambda cache: cache._store.memory.fail("set_access", 1), "set_access failed with EIO"),
    "zeroing": (lambda cache: cache._store.memory.fail("fill", 1), "fill failed with EIO"),
    "waiting for zeros": (lambda cache: cache._store.memory.fail("wait", 1), "wait failed with EIO"),
    "publishing": (_fail_watermark, "memcpy failed with EIO"),
    "a capture": (lambda cache: setattr(cache._store.memory, "is_capturing", lambda: True), "CaptureError"),
}


def _fail_once(rank, kind, odd, names):
    seen = []
    for name in names:
        cache = reserve(kind=kind).extend(3, group=dist.group.WORLD)
        before = cache.num_blocks, cache.mapped_bytes, cache._store.memory.live, cache.control[0].item()
        if rank == odd:
            BREAK[name][0](cache)
        try:
            cache.extend(40, group=dist.group.WORLD)
        except tkv.RankError as error:
            seen.append((dict(error.failures), type(error.__cause__).__name__))
        assert before == (cache.num_blocks, cache.mapped_bytes, cache._store.memory.live, cache.control[0].item()), name
        if rank == odd and name == "a capture":
            del cache._store.memory.is_capturing
        assert cache.extend(40, group=dist.group.WORLD).num_blocks == 40 == cache.control[0].item()
        cache.close()
    return seen


@pytest.mark.parametrize(("kind", "world_size", "odd"), [("host", 2, 0), ("fake", 4, 2)])
def test_a_rank_that_fails_takes_all_back(kind, world_size, odd):
    for rank, outcome in enumerate(run_ranks(_fail_once, world_size, kind, odd, list(BREAK))):
        assert outcome.error is None, outcome.text
        assert len(outcome.value) == len(BREAK)
        for (name, (_, text)), (failures, cause) in zip(BREAK.items(), outcome.value):
            assert list(failures) == [odd], name
            assert text in failures[odd], name
            assert (cause == "NoneType") == (rank != odd), "the rank that failed has its own error as the cause"


def _extend_to(rank, targets, before, interrupt=None):
    cache = reserve().extend(before[rank])
    if rank == interrupt:
        cache._store.memory.wait = _interrupted
    extended(cache, targets[rank], dist.group.WORLD)
    return cache.num_blocks


def _fail_beside_a_rank_with_nothing_to_do(rank):
    cache = reserve().extend([40, 3][rank])
    if rank == 1:
        _fail_watermark(cache)
    extended(cache, 40, dist.group.WORLD)


def test_a_rank_that_fails_beside_one_with_nothing_to_do():
    for rank, outcome in enumerate(run_ranks(_fail_beside_a_rank_with_nothing_to_do, 2)):
        assert outcome.error == "RankError", outcome
        assert set(outcome.failures) == {1}
        assert f"[{[40, 3][rank]} blocks" in outcome.text


def _interrupted():
    raise KeyboardInterrupt


TARGETS = {  # targets, blocks before, failures
    "the same from different starts": ([9, 9], [1, 5], {}),
    "already there": ([3, 3], [5, 5], {}),
    "different targets": ([9, 10], [1, 1], {1: "would hold 10 blocks where rank 0 would hold 9"}),
    "one is beyond the target": ([3, 3], [1, 5], {1: "would hold 5 blocks where rank 0 would hold 3"}),
    "beyond the capacity": ([9, 65], [1, 1], {1: "ValueError: extend(65) goes beyond the capacity of 64"}),
    "no number": ([9, 2.5], [1, 1], {1: "TypeError: num_blocks must be an integer"}),
}


@pytest.mark.parametrize(("targets", "before", "failures"), TARGETS.values(), ids=TARGETS.keys())
def test_targets(targets, before, failures):
    for rank, outcome in enumerate(run_ranks(_extend_to, 2, targets, before)):
        if not failures:
            assert outcome.value == max(targets[rank], before[rank]), outcome
            continue
        assert outcome.error == "RankError"
        assert set(outcome.failures) == set(failures)
        assert outcome.failures[1].startswith(failures[1])
        assert f"[{before[rank]} blocks" in outcome.text


def test_an_interrupt_reaches_the_others_as_an_error():
    first, second = run_ranks(_extend_to, 2, [9, 9], [1, 1], 1)
    assert second.error == "KeyboardInterrupt"
    assert first.error == "RankError"
    assert "[1 blocks" in first.text


# Shrinking, sleeping, waking.


def _shrink_sleep_wake(rank, kind):
    group = dist.group.WORLD
    cache = reserve(kind=kind).extend(40, group=group)
    freed = cache.shrink(8, group=group)
    assert freed == 4 * 4 * GRANULE
    assert cache.num_blocks == 8
    if kind == "host":
        cache[0].k[:8] = rank + 1.0
    report = cache.sleep(keep="host" if kind == "host" else None, group=group)
    assert report.freed == 4 * GRANULE
    assert cache.asleep
    assert cache.wake(group=group).num_blocks == 8 == cache.num_blocks
    if kind == "host":
        assert (cache[0].k[:8] == rank + 1.0).all()
    return True


@pytest.mark.parametrize(("kind", "world_size"), [("host", 2), ("fake", 4)])
def test_all_shrink_sleep_and_wake(kind, world_size):
    for outcome in run_ranks(_shrink_sleep_wake, world_size, kind):
        assert outcome.value is True, outcome


def _fail_finish(cache):
    def fail(progress):
        cache._store._finish = real
        raise tkv.DriverError("release", "EIO", "injected")

    real, cache._store._finish = cache._store._finish, fail


DOWN = {  # operation, what breaks on one rank, its error, whether all are as before
    "shrink: waiting for the device": ("shrink", lambda cache: cache._store.memory.fail("synchronize"), "EIO", True),
    "shrink: unmapping": ("shrink", lambda cache: cache._store.memory.fail("unmap"), "EIO", True),
    "shrink: more than there is": ("shrink", lambda cache: cache.shrink(2), "ValueError: shrink(8) of 2", True),
    "shrink: giving back": ("shrink", _fail_finish, "release failed with EIO", False),
    "sleep: unmapping": ("sleep", lambda cache: cache._store.memory.fail("unmap"), "EIO", True),
    "sleep: giving back": ("sleep", _fail_finish, "release failed with EIO", False),
    "wake: memory": ("wake", lambda cache: cache._store.memory.fail("create", 2), "OutOfMemory", True),
    "wake: zeroing": ("wake", lambda cache: cache._store.memory.fail("fill"), "EIO", True),
    "wake: publishing": ("wake", _fail_watermark, "memcpy failed with EIO", True),
}


def _state(cache):
    memory = cache._store.memory
    return cache.num_blocks, cache.mapped_bytes, memory.live.mappings, cache.control[0].item(), cache.asleep


def _fail_down(rank, names):
    group = dist.group.WORLD
    seen = []
    for name in names:
        operation, break_it, _, undoable = DOWN[name]
        cache = reserve().extend(40, group=group)
        if operation == "wake":
            cache.sleep(group=group)
        arguments = (8,) if operation == "shrink" else ()
        if rank == 1:
            break_it(cache)
        before = _state(cache)
        try:
            getattr(cache, operation)(*arguments, group=group)
        except tkv.TritonKVError as error:
            seen.append((type(error).__name__, str(error)))
        if undoable:
            assert _state(cache) == before, name
            if "more than" not in name:
                getattr(cache, operation)(*arguments, group=group)
                assert _state(cache) != before, name
        cache.close()
    return seen


def test_a_rank_that_fails_to_shrink_sleep_or_wake():
    for outcome in run_ranks(_fail_down, 2, list(DOWN)):
        assert outcome.error is None, outcome.text
        assert len(outcome.value) == len(DOWN)
        for (name, (_, _, text, undoable)), (error, message) in zip(DOWN.items(), outcome.value):
            assert error == ("RankError" if undoable else "InconsistentRanks"), name
            assert "rank 1: " in message, name
            assert text in message, name


# Ranks that die.


def _die(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)


def _die_at(rank, victim, phase):
    cache = reserve().extend(3)
    dist.barrier()
    if rank == victim and phase == "mapped":
        cache._store.memory.wait = _die
    if rank == victim and phase == "voted":
        cache._store._publish = _die
    extended(cache, 40, dist.group.WORLD)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    ("phase", "error", "state"),
    [
        pytest.param("mapped", "RankLost", "[3 blocks, 16384 mapped", id="before the vote"),
        pytest.param("voted", "InconsistentRanks", "[40 blocks, 81920 mapped", id="after the vote"),
    ],
)
def test_a_rank_that_is_killed(world_size, phase, error, state):
    victim = world_size - 1
    outcomes = run_ranks(_die_at, world_size, victim, phase)
    assert outcomes[victim].exit_code == -signal.SIGKILL
    for outcome in outcomes[:victim]:
        assert outcome.error == error, outcome
        assert state in outcome.text
        assert "restart the group" in outcome.text
        assert ("the group is inconsistent" in outcome.text) == (phase == "voted")
        assert outcome.seconds < 8.0


def _die_in_agree(rank, phase):
    cache = reserve()
    own = plan(cache)
    dist.barrier()
    if rank == 1 and phase == "before":
        _die()
    if rank == 1:
        _die_behind_exchange()
    agreed = own.agree(dist.group.WORLD)
    extended(cache, agreed, dist.group.WORLD)


def _die_behind_exchange(name="agree"):
    real = ranks.exchange

    def exchange_and_die(group, ballot):
        ballots = real(group, ballot)
        if ballot.operation == name:
            time.sleep(0.2)  # what was sent must be out
            _die()
        return ballots

    ranks.exchange = exchange_and_die


@pytest.mark.parametrize("phase", ["before", "after"])
def test_a_rank_that_dies_around_an_agreement(phase):
    """After it the next change finds out."""
    survivor, victim = run_ranks(_die_in_agree, 2, phase)
    assert victim.exit_code == -signal.SIGKILL
    assert survivor.error == "RankLost", survivor
    assert ("[0 blocks" in survivor.text) == (phase == "after")
    assert survivor.seconds < 8.0


def _die_after_the_vote(rank, operation):
    cache = reserve().extend(40)
    if operation == "wake":
        cache.sleep()
    dist.barrier()
    if rank == 1:
        _die_behind_exchange(operation)
    arguments = (8,) if operation == "shrink" else ()
    try:
        getattr(cache, operation)(*arguments, group=dist.group.WORLD)
    except tkv.InconsistentRanks:
        return cache.num_blocks, cache.asleep


AFTER_THE_VOTE = {"shrink": (8, False), "sleep": (0, True), "wake": (40, False)}  # the survivor has changed


@pytest.mark.parametrize(("operation", "state"), AFTER_THE_VOTE.items(), ids=AFTER_THE_VOTE)
def test_a_rank_that_dies_after_the_vote_to(operation, state):
    survivor, victim = run_ranks(_die_after_the_vote, 2, operation)
    assert victim.exit_code == -signal.SIGKILL
    assert survivor.value == state, survivor
    assert survivor.seconds < 8.0


def _die_asleep(rank):
    cache = reserve(kind="host").extend(3)
    cache[0].k[:3] = 7.0
    dist.barrier()
    if rank == 1:
        cache._store.memory.unmap = _die
    try:
        cache.sleep(group=dist.group.WORLD)
    except tkv.RankLost:
        return cache.asleep, cache.num_blocks, bool((cache[0].k[:3] == 7.0).all())


def test_nobody_sleeps_if_a_rank_dies_on_the_way():
    survivor, victim = run_ranks(_die_asleep, 2)
    assert victim.exit_code == -signal.SIGKILL
    assert survivor.value == (False, 3, True), survivor


def _sleep_through(rank, seconds):
    if rank == 1:
        time.sleep(seconds)
        return
    plan(reserve()).agree(dist.group.WORLD)


@pytest.mark.parametrize("backend", ["gloo", "deviceonly"])
def test_the_groups_timeout_is_honoured(backend):
    """Also while a gloo group is being made."""
    first, _ = run_ranks(_sleep_through, 2, 3.0, timeout_s=1.0, backend=backend)
    assert first.error == "RankLost", first
    assert 0.8 < first.seconds < 2.9


# Groups.


def _agree_without_host_backend(rank):
    group = dist.group.WORLD
    control = ranks.control_group(group)
    assert control is not group
    assert ranks.control_group(group) is control, "one for each group"
    assert dist.get_backend(control) == "gloo"
    timeout_s = control._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    cache = reserve()
    cache.extend(plan(cache).agree(group), group=group)
    return cache.num_blocks, timeout_s


def test_a_gloo_group_is_made_where_only_device_memory_is_served():
    for outcome in run_ranks(_agree_without_host_backend, 2, timeout_s=17.0, backend="deviceonly"):
        assert outcome.error is None, outcome
        assert outcome.value == (64, 17.0)


def _agree_in_pairs(rank):
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    cache = reserve((rank + 1) * 16 * KIB)
    agreed = plan(cache).agree(pairs[rank % 2])
    with pytest.raises(ValueError, match="not in the group"):
        plan(cache).agree(pairs[1 - rank % 2])
    return agreed.num_blocks, agreed.rank_blocks


def test_groups_inside_the_world():
    values = [outcome.value for outcome in run_ranks(_agree_in_pairs, 4)]
    assert values == [(8, (8, 24)), (16, (16, 32))] * 2


def test_without_a_group():
    with pytest.raises(ValueError, match="init_process_group first"):
        plan(reserve()).agree(SimpleNamespace())


def _time_agreement(rank):
    own, ballot, group = plan(reserve()), Ballot("agree", 2), dist.group.WORLD
    bare, whole = [], []
    mine = ballot.to_tensor()
    for _ in range(30):
        started = time.perf_counter()
        dist.all_gather([torch.empty_like(mine), torch.empty_like(mine)], mine, group=group)
        bare.append(time.perf_counter() - started)
        started = time.perf_counter()
        own.agree(group)
        whole.append(time.perf_counter() - started)
    assert len(exchange(group, ballot)) == 2
    return statistics.quantiles(whole, n=5)[0] - statistics.quantiles(bare, n=5)[0]  # little of what else runs here


def test_agreement_costs_little_beyond_the_collective():
    for outcome in run_ranks(_time_agreement, 2):
        assert outcome.value < 5e-3, f"{outcome.value * 1e3:.2f} ms"

"""The example engine's allocator and scheduler, without a model."""

import pytest

from examples.engine.block_allocator import BlockAllocator
from examples.engine.scheduler import Request, Scheduler

BLOCK_SIZE = 4


def make_scheduler(num_blocks=64, max_seqs=4, max_tokens=16, context_tokens=1024):
    allocator = BlockAllocator(num_blocks)
    limits = {"max_seqs": max_seqs, "max_tokens": max_tokens, "context_tokens": context_tokens}
    return Scheduler(allocator, block_size=BLOCK_SIZE, **limits), allocator


def run_step(scheduler, max_seqs, max_tokens):
    """One step as the engine does it (every sampled token is 7), with everything checked that must hold in any step."""
    chunks = scheduler.schedule()
    assert chunks, "work waits, but the step is empty"
    assert len(chunks) <= max_seqs
    assert sum(chunk.num_tokens for chunk in chunks) <= max_tokens
    assert len({id(chunk.request) for chunk in chunks}) == len(chunks)
    used = [block for request in scheduler.running for block in request.blocks]
    assert len(set(used)) == len(used), "two requests share a block"
    assert 0 not in used
    assert all(not request.blocks and not request.num_cached for request in scheduler.waiting)
    sizes = {chunk.request.id: chunk.num_tokens for chunk in chunks}
    for chunk in chunks:
        assert chunk.num_tokens > 0
        assert len(chunk.request.blocks) * BLOCK_SIZE >= chunk.end
        last = chunk.is_last
        chunk.request.num_cached = chunk.end
        if last:
            chunk.request.append(7)
            if chunk.request.finish_reason:
                scheduler.leave(chunk.request)
    return sizes


@pytest.mark.parametrize("seed", [None, 0, 1], ids=lambda seed: f"seed={seed}")
def test_blocks_are_handed_out_once_and_never_block_zero(seed):
    allocator = BlockAllocator(100, seed)
    blocks = allocator.allocate(99)
    assert sorted(blocks) == list(range(1, 100))
    assert (blocks == sorted(blocks)) == (seed is None)
    assert blocks == BlockAllocator(100, seed).allocate(99)
    assert allocator.num_free == 0
    assert allocator.allocate(1) is None
    allocator.free([5, 3])
    assert allocator.allocate(3) is None
    assert allocator.num_free == 2, "a refused allocation took blocks"
    assert allocator.allocate(2) == [5, 3]


def test_freed_blocks_are_used_last():
    allocator = BlockAllocator(5)
    allocator.free(allocator.allocate(2))
    assert allocator.allocate(4) == [3, 4, 1, 2]


@pytest.mark.parametrize("num_blocks", [0, 1])
def test_a_cache_without_a_block_to_hand_out_is_refused(num_blocks):
    with pytest.raises(ValueError, match=rf"a cache of {num_blocks} block\(s\) has none to hand out"):
        BlockAllocator(num_blocks)


@pytest.mark.parametrize(
    ("prompts", "new", "max_seqs", "max_tokens", "expected"),
    [
        pytest.param([5], 2, 4, 16, [{0: 5}, {0: 1}], id="one prompt, one decode"),
        pytest.param([40], 1, 4, 16, [{0: 16}, {0: 16}, {0: 8}], id="a long prompt in three chunks"),
        pytest.param([32], 1, 4, 16, [{0: 16}, {0: 16}], id="chunks that divide evenly"),
        pytest.param([10, 10], 1, 4, 16, [{0: 10, 1: 6}, {1: 4}], id="the second prompt gets what is left"),
        pytest.param(
            [3, 40], 3, 4, 16, [{0: 3, 1: 13}, {0: 1, 1: 15}, {0: 1, 1: 12}, {1: 1}, {1: 1}], id="mixed steps"
        ),
        pytest.param([2, 2, 2], 1, 2, 16, [{0: 2, 1: 2}, {2: 2}], id="a third waits for a seat"),
        pytest.param([17], 2, 1, 1, [{0: 1}] * 18, id="one token a step"),
    ],
)
def test_steps_are_filled_in_order(prompts, new, max_seqs, max_tokens, expected):
    scheduler, _ = make_scheduler(max_seqs=max_seqs, max_tokens=max_tokens)
    for index, length in enumerate(prompts):
        scheduler.add(Request(index, [1] * length, new))
    steps = []
    while scheduler.has_work:
        steps.append(run_step(scheduler, max_seqs, max_tokens))
    assert steps == expected
    assert scheduler.schedule() == []


def test_decodes_go_before_an_older_prompt():
    scheduler, _ = make_scheduler(max_tokens=8)
    scheduler.add(Request(0, [1] * 30, 1))
    run_step(scheduler, 4, 8)
    late = Request(1, [1], 4)
    scheduler.waiting.appendleft(late)
    scheduler._take_blocks(late)
    scheduler.running.append(scheduler.waiting.popleft())
    assert run_step(scheduler, 4, 8) == {1: 1, 0: 7}


def test_requests_join_and_leave_in_the_middle():
    scheduler, allocator = make_scheduler()
    first, second = Request(0, [1] * 6, 3), Request(1, [1] * 2, 5)
    scheduler.add(first)
    assert run_step(scheduler, 4, 16) == {0: 6}
    scheduler.add(second)
    assert run_step(scheduler, 4, 16) == {0: 1, 1: 2}
    assert run_step(scheduler, 4, 16) == {0: 1, 1: 1}
    assert first.finish_reason == "length"
    assert first.blocks == []
    assert run_step(scheduler, 4, 16) == {1: 1}
    while scheduler.has_work:
        run_step(scheduler, 4, 16)
    assert second.output_ids == [7] * 5
    assert allocator.num_free == 63, "blocks were lost"


def test_a_stop_token_ends_a_request_and_is_no_output():
    scheduler, _ = make_scheduler()
    request = Request(0, [1, 2], 5, stop_ids=frozenset({7}))
    scheduler.add(request)
    run_step(scheduler, 4, 16)
    assert (request.finish_reason, request.output_ids, scheduler.has_work) == ("stop", [], False)


@pytest.mark.parametrize("num_blocks", [6, 7, 9, 12])
def test_a_cache_that_is_too_small_preempts_the_latest_and_finishes_all(num_blocks):
    scheduler, allocator = make_scheduler(num_blocks=num_blocks)
    requests = [Request(index, [1] * length, 12) for index, length in enumerate([7, 3, 8, 5])]
    for request in requests:
        scheduler.add(request)
    for _ in range(500):
        if not scheduler.has_work:
            break
        run_step(scheduler, 4, 16)
    assert [request.output_ids for request in requests] == [[7] * 12] * 4
    assert requests[0].num_preemptions == 0, "the oldest request must never go"
    assert sum(request.num_preemptions for request in requests) > 0
    assert allocator.num_free == num_blocks - 1


@pytest.mark.parametrize(
    ("prompt", "new", "temperature", "message"),
    [
        pytest.param(0, 1, 0.0, "needs a prompt and a token to generate, got 0 and 1", id="no prompt"),
        pytest.param(3, 0, 0.0, "needs a prompt and a token to generate, got 3 and 0", id="nothing to generate"),
        pytest.param(30, 5, 0.0, "30 tokens and 5 new ones make 35, the limit is 34", id="limit"),
        pytest.param(30, 11, 0.0, "30 tokens and 11 new ones make 41, the cache holds 40", id="cache"),
        pytest.param(3, 3, -1.0, "temperature must not be negative, got -1.0", id="temperature"),
    ],
)
def test_a_request_that_cannot_finish_is_refused(prompt, new, temperature, message):
    scheduler, _ = make_scheduler(num_blocks=11, context_tokens=34)
    with pytest.raises(ValueError, match=message):
        scheduler.add(Request(0, [1] * prompt, new, temperature))
    assert not scheduler.has_work


def test_the_largest_request_that_fits_is_served():
    scheduler, _ = make_scheduler(num_blocks=11, context_tokens=64)
    request = Request(0, [1] * 30, 10)
    scheduler.add(request)
    while scheduler.has_work:
        run_step(scheduler, 4, 16)
    assert len(request.output_ids) == 10


def test_more_sequences_than_tokens_a_step_are_refused():
    with pytest.raises(ValueError, match="8 sequences that decode do not fit into 4 tokens"):
        make_scheduler(max_seqs=8, max_tokens=4)

"""Decode beside an extension: the replays that are counted, and what would spoil the figure."""

from concurrent.futures import Future

import pytest
import torch

import triton_kv as tkv
from bench import background
from bench.background import decode_beside_extension
from bench.session import Session

SESSION = Session(torch.device("cpu"), smoke=True)
MIB = 1 << 20


class Slowly(Future):
    """A finished extension that says so only when asked for the n-th time."""

    def __init__(self, done, asks):
        super().__init__()
        self.set_result(done.result())
        self.asks = asks

    def done(self):
        self.asks -= 1
        return self.asks < 0


@pytest.fixture
def slow(monkeypatch):
    plain = tkv.KVCache.extend_async
    monkeypatch.setattr(tkv.KVCache, "extend_async", lambda self, blocks: Slowly(plain(self, blocks), 8))


def measured():
    return decode_beside_extension(SESSION, tkv.HostMemory(), 32 * MIB, batch=2, context=40)


def test_extensions_are_repeated_until_enough_replays_overlap(slow):
    results = measured()
    ours, alone = results["ours"], results["alone"]
    assert (ours["extensions"], ours["samples"], alone["samples"]) == (3, 24, 100)
    assert ours["median_us"] <= ours["p99_us"]


def test_too_few_replays_are_no_figure(monkeypatch):
    on_gpu = []  # from the first extension on: what runs before it is the host's way
    monkeypatch.setattr(Session, "on_gpu", property(lambda self: bool(on_gpu)))
    plain = tkv.KVCache.extend_async

    def extend(self, blocks):
        on_gpu.append(True)
        return Slowly(plain(self, blocks), 0)

    monkeypatch.setattr(tkv.KVCache, "extend_async", extend)
    with pytest.raises(AssertionError, match="0 replays overlap 8 extensions, not 20"):
        measured()


def test_a_new_block_that_is_not_zero_is_seen(slow, monkeypatch):
    plain = background._timer

    def timer(session, step):
        timed = plain(session, step)

        def spoil():
            if cache.num_blocks == cache.capacity:
                cache[3].v[-1] = 1
            return timed()

        return spoil

    kept = tkv.KVCache.reserve.__func__

    def reserve(cls, *arguments, **options):
        nonlocal cache
        cache = kept(cls, *arguments, **options)
        return cache

    cache = None
    monkeypatch.setattr(tkv.KVCache, "reserve", classmethod(reserve))
    monkeypatch.setattr(background, "_timer", timer)
    with pytest.raises(AssertionError, match="new blocks that are not zero"):
        measured()

"""docs/sizing.md: its Python is Python, and what it names exists."""

import re
from pathlib import Path

import pytest

import triton_kv as tkv

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "sizing.md").read_text(encoding="utf-8")
(DIFF,) = re.findall(r"```diff\n(.*?)```", TEXT, flags=re.S)


def side(sign):
    return "".join(f"{line[1:]}\n" for line in DIFF.splitlines() if line[:1] in (" ", sign, ""))


@pytest.mark.parametrize("sign", ["-", "+"], ids=["before", "after"])
def test_both_sides_of_the_diff_are_python(sign):
    compile(side(sign), "sizing.md", "exec")
    assert ("tkv." in side(sign)) == (sign == "+")


def test_the_diff_is_short():
    assert sum(line.startswith("+") for line in DIFF.splitlines()) <= 40


def test_the_migrated_runner_runs():
    """Over the host driver, with a model that only writes: the order of calls and every name in it is right."""
    import torch

    class Model:
        num_layers, num_kv_heads, head_dim = 2, 2, 16

        def __init__(self):
            self.attention_layers = [type("Layer", (), {})() for _ in range(self.num_layers)]

    class Config:
        path, block_size, utilization, max_length, num_blocks = "", 16, 0.5, 1 << 30, None

    memory = tkv.HostMemory(4096, budget_bytes=8 << 20)

    class Host:
        """triton_kv, told where to work."""

        AttentionSpec, plan_blocks = (
            tkv.AttentionSpec,
            staticmethod(lambda *a, **k: tkv.plan_blocks(*a, headroom_bytes=0, **k)),
        )
        MemoryLedger = staticmethod(lambda device: tkv.MemoryLedger(memory=memory))

        class KVCache:
            reserve = staticmethod(lambda *a, **k: tkv.KVCache.reserve(*a, memory=memory, **k))

    names = {"tkv": Host, "torch": torch, "load_weights": lambda model, path: None}
    exec(side("+"), names)

    class Runner(names["ModelRunner"]):
        def run_largest_step(self):
            for layer in self.model.attention_layers:
                layer.k_cache[0].fill_(1.0)

        def capture_graphs(self):
            self.graphs = {}

    runner = Runner(Config(), Model())
    assert runner.config.num_blocks == runner.kv_cache.num_blocks == 1024
    assert runner.config.max_length == 1023 * 16
    assert [stage.name for stage in runner.ledger.stages] == ["weights", "first block", "profile run", "capture"]
    assert runner.model.attention_layers[1].k_cache[1023].sum() == 0


@pytest.mark.parametrize("name", sorted(set(re.findall(r"tkv\.(\w+)", TEXT))))
def test_names_exist(name):
    assert hasattr(tkv, name)


def test_errors_named_there_exist():
    for name in re.findall(r"`(RankError|RankLost|InconsistentRanks)`", TEXT):
        assert issubclass(getattr(tkv, name), tkv.TritonKVError)

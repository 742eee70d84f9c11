"""The example engine split over ranks: the same tokens as one process, over gloo on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_processes import run_ranks

import triton_kv as tkv
from examples.engine.engine import Engine, EngineOptions
from examples.engine.gguf_file import GGUFModel, ModelNotFoundError, find_model
from examples.engine.model import Llama, LlamaConfig, LlamaWeights

ROOT = Path(__file__).resolve().parents[2]
TINY = LlamaConfig(2, 64, 96, 8, 4, 16, 101, 256, rope_base=1000.0)
PROMPTS = [[7], list(range(1, 31)), [5, 4, 3, 2, 1]]
WITH_MODEL = os.environ.get("TRITON_KV_RANKS_MODEL") == "1"


def serve(model, prompts, budget_bytes, new_tokens, **options):
    options = {"block_size": 4, "max_seqs": 4, "max_tokens": 32, "utilization": 1.0, "headroom_bytes": 0, **options}
    memory = tkv.PoisonedMemory(tkv.HostMemory(granularity=4096, budget_bytes=budget_bytes))
    engine = Engine(memory, EngineOptions(**options))
    try:
        engine.start(model)
        return engine.generate(prompts, new_tokens), engine.cache.num_blocks, engine.plan.rank_blocks
    finally:
        engine.close()


def _serve_tiny(rank, budgets):
    size = len(budgets)
    weights = LlamaWeights.random(TINY, 3, torch.float32, "cpu").shard(TINY, rank, size)
    model = Llama(TINY.split(size), weights, dist.group.WORLD)
    with torch.inference_mode():
        return serve(model, PROMPTS, budgets[rank], 16)


@pytest.mark.parametrize("budgets", [[1 << 20, 512 << 10], [1 << 20] * 4], ids=["2 ranks", "4 ranks"])
def test_ranks_generate_what_one_process_generates(budgets):
    torch.set_num_threads(1)
    expected, _, _ = serve(Llama(TINY, LlamaWeights.random(TINY, 3, torch.float32, "cpu")), PROMPTS, 2 << 20, 16)
    # 4 segments; a block is 4 tokens of 16 floats a KV head in each of them.
    own = tuple(budget // (4 * 4 * 16 * 4 * (4 // len(budgets))) for budget in budgets)
    for outcome in run_ranks(_serve_tiny, len(budgets), budgets):
        assert outcome.error is None, outcome.text
        assert outcome.value == (expected, min(own), own)


def _start_tiny(rank, budgets, headrooms):
    weights = LlamaWeights.random(TINY, 3, torch.float32, "cpu").shard(TINY, rank, 2)
    with torch.inference_mode():
        serve(Llama(TINY.split(2), weights, dist.group.WORLD), [], budgets[rank], 1, headroom_bytes=headrooms[rank])


SHORT = {  # budgets, headrooms, the reason that both get to see
    "of a first block": ([1 << 20, 4096], [0, 0], "OutOfMemory: extend(1)"),
    "of a plan": ([1 << 20, 1 << 20], [0, 1 << 20], "OutOfMemory: plan: not even one block fits"),
}


@pytest.mark.parametrize(("budgets", "headrooms", "reason"), SHORT.values(), ids=SHORT.keys())
def test_a_rank_that_is_short_of_memory_is_named_on_all(budgets, headrooms, reason):
    for outcome in run_ranks(_start_tiny, 2, budgets, headrooms):
        assert outcome.error == "RankError", outcome
        assert list(outcome.failures) == [1]
        assert outcome.failures[1].startswith(reason), outcome.failures


def test_heads_that_do_not_split():
    with pytest.raises(ValueError, match=r"\(8, 4, 96\) query heads, KV heads and MLP columns do not split over 3"):
        TINY.split(3)


@pytest.fixture(scope="module")
def smollm():
    if not WITH_MODEL:
        pytest.skip("takes a minute: set TRITON_KV_RANKS_MODEL=1, or run make test-ranks")
    try:
        return find_model()
    except ModelNotFoundError as error:
        pytest.skip(str(error))


def _serve_smollm(rank, num_ranks, path, prompts):
    file = GGUFModel(path)
    weights = file.weights(torch.float32, "cpu", rank=rank, num_ranks=num_ranks)
    model = Llama(file.config.split(num_ranks), weights, dist.group.WORLD if num_ranks > 1 else None)
    with torch.inference_mode():
        return serve(model, prompts, 64 << 20, 12, block_size=16, capacity=256)[0]


@pytest.mark.model
def test_three_ranks_serve_a_real_model(smollm):
    prompts = [[1, 2683, 314, 260, 3575, 282, 4649, 47], list(range(400, 440))]
    expected = _serve_smollm(0, 1, smollm, prompts)
    for outcome in run_ranks(_serve_smollm, 3, 3, smollm, prompts, timeout_s=120.0):
        assert outcome.error is None, outcome.text
        assert outcome.value == expected


@pytest.mark.model
def test_torchrun_starts_the_demo(smollm):
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "3", "--standalone", "-m", "examples.engine"]
    arguments = ["--device", "cpu", "--max-new-tokens", "4", "--prompt", "What is the capital of France?"]
    done = subprocess.run(
        [sys.executable, *command, *arguments],
        cwd=ROOT,
        env={**os.environ, "MODEL": str(smollm), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tokens/s") == 1, "only one rank prints"
    assert "blocks by rank: " in done.stdout
    assert "Paris" in done.stdout or "capital" in done.stdout

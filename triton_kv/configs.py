"""From a model's `config.json` (the fields of Hugging Face transformers) to what each of its layers keeps.

Nothing is downloaded and transformers is not needed. An architecture is a function in `ARCHITECTURES`; the fields are
those of the published configurations, and where one may leave a field out the default is the model class's own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from triton_kv.spec import AttentionSpec, LayerSpec, MambaSpec, MLASpec, positive_int

Config = Mapping[str, Any]


class _Context(NamedTuple):
    """What the caller chose."""

    tp_size: int
    dtype: torch.dtype
    state_dtype: torch.dtype


def specs_from_config(
    config: Config | str | Path,
    *,
    tp_size: int = 1,
    cache_dtype: torch.dtype | None = None,
    state_dtype: torch.dtype | None = None,
) -> dict[str, LayerSpec]:
    """What each layer of a model keeps on one rank, by name, in the model's order: for `KVCache.reserve`.

    config: a `config.json` as a dict, its path, or the path of the folder that holds it.
    tp_size: tensor-parallel ranks. KV heads are divided among them, or replicated where there are fewer heads than
        ranks; latent vectors are replicated; heads of states are divided.
    cache_dtype: of keys, values, latents and convolution states; `None` is the model's own.
    state_dtype: of recurrent states; `None` is the config's `mamba_ssm_dtype`, else float32, in which the kernels
        accumulate.

    Layers are `layers.0`, `layers.1`, ...; a layer with two kinds of state is `layers.0.attention` and
    `layers.0.mamba`. Layers of a multi-token-prediction head are left out.

    Raises `ValueError` for an unknown architecture, for fields that are missing (all are named) and for heads that
    cannot be divided; `FileNotFoundError` for a path with nothing there.
    """
    fields = _read(config)
    tp_size = positive_int("tp_size", tp_size)
    kind = fields.get("model_type")
    if kind not in ARCHITECTURES and isinstance(fields.get("text_config"), Mapping):
        outer = {name: fields[name] for name in ("torch_dtype", "dtype") if name in fields}
        fields = {**outer, **fields["text_config"]}
        kind = fields.get("model_type")
    if kind not in ARCHITECTURES:
        named = "it has no model_type" if kind is None else f"model_type {kind!r} is not among them"
        raise ValueError(
            f"known architectures are {', '.join(sorted(ARCHITECTURES))}; {named}. What is missing is what its layers "
            "keep: pass KVCache.reserve a mapping of layer name to AttentionSpec, MLASpec or MambaSpec instead"
        )
    dtype = cache_dtype or _dtype(fields, ("torch_dtype", "dtype"), torch.bfloat16)
    state = state_dtype or _dtype(fields, ("mamba_ssm_dtype",), torch.float32)
    return ARCHITECTURES[kind](_Fields(fields), _Context(tp_size, dtype, state))


class _Fields:
    """The fields of a config; a missing one is an error that names all that are missing."""

    def __init__(self, fields: Config) -> None:
        self._fields = fields

    def ints(self, *names: str) -> list[int]:
        missing = [name for name in names if self._fields.get(name) is None]
        if missing:
            raise ValueError(f"the config of model_type {self._fields['model_type']!r} lacks {', '.join(missing)}")
        return [positive_int(name, self._fields[name]) for name in names]

    def get(self, name: str, default: Any = None) -> Any:
        value = self._fields.get(name)
        return default if value is None else value

    def layer_types(self, default: Callable[[int], str]) -> list[str]:
        """One word a layer: the config's own list, or what the model class makes of the other fields."""
        (num_layers,) = self.ints("num_hidden_layers")
        stated = self.get("layer_types") or self.get("layers_block_type")
        if stated is None:
            return [default(index) for index in range(num_layers)]
        if len(stated) != num_layers:
            raise ValueError(f"layer_types has {len(stated)} entries, num_hidden_layers is {num_layers}")
        return list(stated)


def divide_heads(what: str, num_heads: int, tp_size: int, *, replicate: bool = False) -> int:
    """Heads of one rank. Raises `ValueError` with both numbers where they cannot be divided (or replicated)."""
    if num_heads % tp_size == 0:
        return num_heads // tp_size
    if replicate and tp_size % num_heads == 0:
        return 1
    raise ValueError(
        f"{num_heads} {what} are not divisible by the tensor-parallel size {tp_size}"
        + (", nor the other way round" if replicate else "")
        + "; choose another tp_size"
    )


def _attention(fields: _Fields, context: _Context, window: int | None = None) -> AttentionSpec:
    (num_heads,) = fields.ints("num_attention_heads")
    divide_heads("attention heads", num_heads, context.tp_size)
    kv_heads = positive_int("num_key_value_heads", fields.get("num_key_value_heads", num_heads))
    head_dim = fields.get("head_dim")
    if head_dim is None:
        (hidden_size,) = fields.ints("hidden_size")
        head_dim = hidden_size // num_heads
    return AttentionSpec(
        num_kv_heads=divide_heads("KV heads", kv_heads, context.tp_size, replicate=True),
        head_dim=head_dim,
        dtype=context.dtype,
        window=window,
    )


def _by_type(fields: _Fields, context: _Context, types: list[str]) -> dict[str, LayerSpec]:
    """Full and sliding attention layers."""
    specs: dict[str, LayerSpec] = {}
    for index, kind in enumerate(types):
        if kind not in ("full_attention", "sliding_attention"):
            raise ValueError(f"layer {index} is of type {kind!r}; what is missing is what such a layer keeps")
        window = fields.ints("sliding_window")[0] if kind == "sliding_attention" else None
        specs[f"layers.{index}"] = _attention(fields, context, window)
    return specs


def _llama(fields: _Fields, context: _Context) -> dict[str, LayerSpec]:
    return _by_type(fields, context, fields.layer_types(lambda _: "full_attention"))


def _mistral(fields: _Fields, context: _Context) -> dict[str, LayerSpec]:
    kind = "full_attention" if fields.get("sliding_window") is None else "sliding_attention"
    return _by_type(fields, context, fields.layer_types(lambda _: kind))


def _qwen(fields: _Fields, context: _Context) -> dict[str, LayerSpec]:
    slides = fields.get("use_sliding_window", False) and fields.get("sliding_window") is not None
    first = fields.get("max_window_layers", 0)
    return _by_type(
        fields,
        context,
        fields.layer_types(lambda index: "sliding_attention" if slides and index >= first else "full_attention"),
    )


def _gemma2(fields: _Fields, context: _Context) -> dict[str, LayerSpec]:
    fields = _with_defaults(fields, head_dim=256, sliding_window=4096)
    types = fields.layer_types(lambda index: "full_attention" if index % 2 else "sliding_attention")
    return _by_type(fields, context, types)


def _gemma3(fields: _Fields, context: _Context) -> dict[str, LayerSpec]:
    # The published text_configs leave out what equals the class's defaults.
    fields = _with_defaults(
        fields,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        num_hidden_layers=26,
        sliding_window=4096,
    )
    every = fields.get("sliding_window_pattern", 6)
    types = fields.layer_types(lambda index: "sliding_attention" if (index + 1) % every else "full_attention")
    return _by_type(fields, context, types)


def _gpt_oss(fields: _Fields, context: _Context) -> dict[str, LayerSpec]:
    # Sinks are parameters of the model, one a head: the cache keeps nothing for them.
    fields = _with_defaults(fields, head_dim=64, num_key_value_heads=8, sliding_window=128)
    types = fields.layer_types(lambda index: "full_attention" if index % 2 else "sliding_attention")
    return _by_type(fields, context, types)


def _deepseek(fields: _Fields, context: _Context) -> dict[str, LayerSpec]:
    rank, rope, num_layers, heads = fields.ints(
        "kv_lora_rank", "qk_rope_head_dim", "num_hidden_layers", "num_attention_heads"
    )
    divide_heads("attention heads", heads, context.tp_size)
    return {f"layers.{index}": MLASpec(rank, rope, context.dtype) for index in range(num_layers)}


def mamba2_state(
    *,
    conv_width: int,
    inner_size: int,
    num_groups: int,
    num_heads: int,
    head_dim: int,
    state_size: int,
    tp_size: int,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
) -> MambaSpec:
    """One Mamba-2 layer (Dao and Gu, 2024): the last inputs of its convolution, and a matrix a head.

    conv `[conv_width - 1, inner_size + 2 * num_groups * state_size]`, ssm `[num_heads, head_dim, state_size]`; heads
    are divided by `tp_size`, groups divided or replicated.
    """
    heads = divide_heads("state heads", num_heads, tp_size)
    groups = divide_heads("state groups", num_groups, tp_size, replicate=True)
    channels = divide_heads("inner channels", inner_size, tp_size) + 2 * groups * state_size
    return MambaSpec([("conv", (conv_width - 1, channels), dtype), ("ssm", (heads, head_dim, state_size), state_dtype)])


def _mamba2(fields: _Fields, context: _Context) -> dict[str, LayerSpec]:
    num_layers, heads, head_dim, state_size = fields.ints("num_hidden_layers", "num_heads", "head_dim", "state_size")
    spec = mamba2_state(
        conv_width=fields.get("conv_kernel", 4),
        inner_size=heads * head_dim,
        num_groups=fields.get("n_groups", 8),
        num_heads=heads,
        head_dim=head_dim,
        state_size=state_size,
        tp_size=context.tp_size,
        dtype=context.dtype,
        state_dtype=context.state_dtype,
    )
    return {f"layers.{index}": spec for index in range(num_layers)}


def _jamba(fields: _Fields, context: _Context) -> dict[str, LayerSpec]:
    hidden_size, period, offset = fields.ints("hidden_size", "attn_layer_period", "attn_layer_offset")
    channels = divide_heads("inner channels", fields.get("mamba_expand", 2) * hidden_size, context.tp_size)
    # Mamba-1: a state of its own for every channel.
    state = MambaSpec(
        [
            ("conv", (fields.get("mamba_d_conv", 4) - 1, channels), context.dtype),
            ("ssm", (channels, fields.get("mamba_d_state", 16)), context.state_dtype),
        ]
    )
    attention = _attention(fields, context)
    types = fields.layer_types(lambda index: "attention" if index % period == offset else "mamba")
    return {f"layers.{index}": attention if kind == "attention" else state for index, kind in enumerate(types)}


def _qwen3_next(fields: _Fields, context: _Context) -> dict[str, LayerSpec]:
    keys, values, key_dim, value_dim = fields.ints(
        "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"
    )
    keys = divide_heads("linear key heads", keys, context.tp_size)
    values = divide_heads("linear value heads", values, context.tp_size)
    # Gated delta net (Yang et al., 2024): its convolution runs over queries, keys and values.
    state = MambaSpec(
        [
            (
                "conv",
                (fields.get("linear_conv_kernel_dim", 4) - 1, 2 * keys * key_dim + values * value_dim),
                context.dtype,
            ),
            ("delta", (values, key_dim, value_dim), context.state_dtype),
        ]
    )
    attention = _attention(fields, context)
    every = fields.get("full_attention_interval", 4)
    types = fields.layer_types(lambda index: "linear_attention" if (index + 1) % every else "full_attention")
    return {f"layers.{index}": attention if kind == "full_attention" else state for index, kind in enumerate(types)}


def _falcon_h1(fields: _Fields, context: _Context) -> dict[str, LayerSpec]:
    num_layers, heads, state_size = fields.ints("num_hidden_layers", "mamba_n_heads", "mamba_d_state")
    inner_size = fields.get("mamba_d_ssm")
    if inner_size is None:
        inner_size = fields.get("mamba_expand", 2) * fields.ints("hidden_size")[0]
    head_dim = fields.get("mamba_d_head", "auto")
    state = mamba2_state(
        conv_width=fields.get("mamba_d_conv", 4),
        inner_size=inner_size,
        num_groups=fields.get("mamba_n_groups", 1),
        num_heads=heads,
        head_dim=inner_size // heads if head_dim == "auto" else head_dim,
        state_size=state_size,
        tp_size=context.tp_size,
        dtype=context.dtype,
        state_dtype=context.state_dtype,
    )
    attention = _attention(fields, context)
    specs: dict[str, LayerSpec] = {}
    for index in range(num_layers):  # both run in parallel in every layer
        specs[f"layers.{index}.attention"] = attention
        specs[f"layers.{index}.mamba"] = state
    return specs


ARCHITECTURES: dict[str, Callable[[_Fields, _Context], dict[str, LayerSpec]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mistral,
    "qwen2": _qwen,
    "qwen2_moe": _qwen,
    "qwen3": _qwen,
    "qwen3_moe": _qwen,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gpt_oss": _gpt_oss,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "mamba2": _mamba2,
    "jamba": _jamba,
    "qwen3_next": _qwen3_next,
    "falcon_h1": _falcon_h1,
}


def _with_defaults(fields: _Fields, **defaults: Any) -> _Fields:
    stated = {name: value for name, value in fields._fields.items() if value is not None}
    return _Fields({**defaults, **stated})


def _read(config: Config | str | Path) -> Config:
    if isinstance(config, Mapping):
        return config
    path = Path(config)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"no config at {path}: pass a config.json, its folder, or a dict")
    try:
        fields = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{path} holds no JSON object")
    return fields


def _dtype(fields: Config, names: tuple[str, ...], default: torch.dtype) -> torch.dtype:
    for name in names:
        if fields.get(name) is not None:
            return parse_dtype(str(fields[name]))
    return default


def parse_dtype(name: str) -> torch.dtype:
    """`bfloat16`, `torch.float16`, `fp32` and the like. Raises `ValueError` for anything that is no dtype."""
    plain = name.removeprefix("torch.")
    plain = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}.get(
        plain, plain
    )
    dtype = getattr(torch, plain, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype; use one such as bfloat16, float16 or float32")
    return dtype

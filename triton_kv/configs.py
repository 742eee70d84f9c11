"""From a model's `config.json` (the fields of Hugging Face transformers) to what each of its layers keeps.

Nothing is downloaded and transformers is not needed. An architecture is a function in `ARCHITECTURES`; the fields are
those of the published configurations, and where one may leave a field out the default is the model class's own (as in
transformers 5). The number of layers and of heads and the hidden size may be left out only where they are: in the
`text_config` of a model of several kinds; at the top they are missing. A field that is null is not left out: it is what
the class makes of None.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from triton_kv.spec import AttentionSpec, LayerSpec, MambaSpec, MLASpec, positive_int, whole_number

Config = Mapping[str, Any]

_DTYPE_FIELDS = ("torch_dtype", "dtype")
# Layers, hidden size and attention heads of the model classes: a text_config states only what differs from them.
_SIZES = {
    "llama": (32, 4096, 32),
    "mistral": (32, 4096, 32),
    "mixtral": (32, 4096, 32),
    "qwen2": (32, 4096, 32),
    "qwen2_moe": (24, 2048, 16),
    "qwen3": (32, 4096, 32),
    "qwen3_moe": (24, 2048, 32),
    "gemma2": (26, 2304, 8),
    "gemma3_text": (26, 2304, 8),
    "gpt_oss": (36, 2880, 64),
    "deepseek_v2": (32, 4096, 32),
    "deepseek_v3": (61, 7168, 128),
    "mamba2": (64, 4096),
    "jamba": (32, 4096, 32),
    "qwen3_next": (48, 2048, 16),
    "falcon_h1": (32, 4096, 32),
}

_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"


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
    cannot be divided or fields that are out of range; `TypeError` for fields of another type; `FileNotFoundError` for a
    path with nothing there.
    """
    fields = _read(config)
    tp_size = positive_int("tp_size", tp_size)
    kind = _model_type(fields)
    if kind not in ARCHITECTURES and isinstance(fields.get("text_config"), Mapping):
        fields = _text_fields(fields)
        kind = _model_type(fields)
    if kind is None or kind not in ARCHITECTURES:
        named = "it has no model_type" if kind is None else f"model_type {kind!r} is not among them"
        raise ValueError(
            f"known architectures are {', '.join(sorted(ARCHITECTURES))}; {named}. What is missing is what its layers "
            "keep: pass KVCache.reserve a mapping of layer name to AttentionSpec, MLASpec or MambaSpec instead"
        )
    dtype = cache_dtype or _dtype(fields, _DTYPE_FIELDS, torch.bfloat16)
    state = state_dtype or _dtype(fields, ("mamba_ssm_dtype",), torch.float32)
    for name, value in (("cache_dtype", dtype), ("state_dtype", state)):
        if not isinstance(value, torch.dtype):
            raise TypeError(f"{name} must be a torch.dtype such as torch.bfloat16, got {value!r}")
        if not value.is_floating_point:
            raise ValueError(f"{name} {value} cannot hold what layers keep; use one such as torch.bfloat16")
    return ARCHITECTURES[kind](_Fields(fields), _Context(tp_size, dtype, state))


def _text_fields(fields: Config) -> Config:
    """The `text_config` with its class's sizes where it states none, and the outer dtype if it has no dtype."""
    text = {name: value for name, value in fields["text_config"].items() if name not in _DTYPE_FIELDS or value}
    if not any(name in text for name in _DTYPE_FIELDS):
        text |= {name: fields[name] for name in _DTYPE_FIELDS if name in fields}
    sizes = _SIZES.get(_model_type(text) or "", ())
    return {**dict(zip(("num_hidden_layers", "hidden_size", "num_attention_heads"), sizes)), **text}


def _model_type(fields: Config) -> str | None:
    kind = fields.get("model_type")
    if kind is not None and not isinstance(kind, str):
        raise TypeError(f"model_type must be one word, got {kind!r}")
    return kind


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

    def positive(self, name: str, default: int) -> int:
        return positive_int(name, self.get(name, default))

    def from_zero(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 0, which `ints` refuses."""
        if self.get(name, default) is None:
            self.ints(name)
        number = whole_number(name, self.get(name, default))
        if number < 0:
            raise ValueError(f"{name} must not be negative, got {number}")
        return number

    def layer_types(self, known: Collection[str], default: Callable[[int], str]) -> list[str]:
        """One of the `known` words a layer: the config's own list, or what the model class makes of other fields."""
        (num_layers,) = self.ints("num_hidden_layers")
        for name in ("layer_types", "layers_block_type"):
            if (stated := self.get(name)) is None:
                continue
            if not isinstance(stated, (list, tuple)):
                raise TypeError(f"{name} must be a list of one word a layer, got {stated!r}")
            if len(stated) != num_layers:
                raise ValueError(f"{name} has {len(stated)} entries, num_hidden_layers is {num_layers}")
            for index, kind in enumerate(stated):
                if not isinstance(kind, str) or kind not in known:
                    raise ValueError(
                        f"{name}: layer {index} is of type {kind!r}; what is missing is what such a layer keeps. "
                        f"Known here are {', '.join(known)}"
                    )
            return list(stated)
        return [default(index) for index in range(num_layers)]


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
    if num_heads % kv_heads:
        raise ValueError(f"num_attention_heads {num_heads} must be a multiple of num_key_value_heads {kv_heads}")
    head_dim = fields.get("head_dim")
    if head_dim is None:
        (hidden_size,) = fields.ints("hidden_size")
        head_dim = hidden_size // num_heads
    return AttentionSpec(
        num_kv_heads=divide_heads("KV heads", kv_heads, context.tp_size, replicate=True),
        head_dim=positive_int("head_dim", head_dim),
        dtype=context.dtype,
        window=window,
    )


def _by_type(fields: _Fields, context: _Context, default: Callable[[int], str]) -> dict[str, LayerSpec]:
    """Full and sliding attention layers."""
    specs: dict[str, LayerSpec] = {}
    for index, kind in enumerate(fields.layer_types((_FULL, _SLIDING), default)):
        window = fields.ints("sliding_window")[0] if kind == _SLIDING else None
        specs[f"layers.{index}"] = _attention(fields, context, window)
    return specs


def _llama(fields: _Fields, context: _Context) -> dict[str, LayerSpec]:
    return _by_type(fields, context, lambda _: _FULL)


def _mistral(fields: _Fields, context: _Context) -> dict[str, LayerSpec]:
    fields = _with_defaults(fields, num_key_value_heads=8, sliding_window=4096)
    kind = _FULL if fields.get("sliding_window") is None else _SLIDING
    return _by_type(fields, context, lambda _: kind)


def _mixtral(fields: _Fields, context: _Context) -> dict[str, LayerSpec]:
    return _mistral(_with_defaults(fields, sliding_window=None), context)


def _slides(fields: _Fields) -> bool:
    """Whether a Qwen model has windows at all."""
    return bool(fields.get("use_sliding_window", False)) and fields.get("sliding_window") is not None


def _qwen2(fields: _Fields, context: _Context) -> dict[str, LayerSpec]:
    fields = _with_defaults(fields, num_key_value_heads=32, sliding_window=4096)
    slides, first = _slides(fields), fields.from_zero("max_window_layers", 28)
    return _by_type(fields, context, lambda index: _SLIDING if slides and index >= first else _FULL)


def _qwen2_moe(fields: _Fields, context: _Context) -> dict[str, LayerSpec]:
    fields = _with_defaults(fields, num_key_value_heads=16, sliding_window=4096)
    # Not as in the dense model: every other layer, and those below max_window_layers.
    slides, end = _slides(fields), fields.from_zero("max_window_layers", 28)
    return _by_type(fields, context, lambda index: _SLIDING if slides and index % 2 == 0 and index < end else _FULL)


def _qwen3(fields: _Fields, context: _Context) -> dict[str, LayerSpec]:
    return _qwen2(_with_defaults(fields, head_dim=128), context)


def _qwen3_moe(fields: _Fields, context: _Context) -> dict[str, LayerSpec]:
    fields = _with_defaults(fields, num_key_value_heads=4, sliding_window=4096)
    kind = _SLIDING if _slides(fields) else _FULL  # the class has no max_window_layers
    return _by_type(fields, context, lambda _: kind)


def _gemma2(fields: _Fields, context: _Context) -> dict[str, LayerSpec]:
    fields = _with_defaults(fields, num_key_value_heads=4, head_dim=256, sliding_window=4096)
    return _by_type(fields, context, lambda index: _FULL if index % 2 else _SLIDING)


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
    every = fields.positive("sliding_window_pattern", 6)
    return _by_type(fields, context, lambda index: _SLIDING if (index + 1) % every else _FULL)


def _gpt_oss(fields: _Fields, context: _Context) -> dict[str, LayerSpec]:
    # Sinks are parameters of the model, one a head: the cache keeps nothing for them.
    fields = _with_defaults(fields, head_dim=64, num_key_value_heads=8, sliding_window=128)
    return _by_type(fields, context, lambda index: _FULL if index % 2 else _SLIDING)


def _deepseek(fields: _Fields, context: _Context) -> dict[str, LayerSpec]:
    fields = _with_defaults(fields, kv_lora_rank=512, qk_rope_head_dim=64)
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
    fields = _with_defaults(fields, num_heads=128, head_dim=64, state_size=128)
    num_layers, heads, head_dim, state_size = fields.ints("num_hidden_layers", "num_heads", "head_dim", "state_size")
    spec = mamba2_state(
        conv_width=fields.positive("conv_kernel", 4),
        inner_size=heads * head_dim,
        num_groups=fields.positive("n_groups", 8),
        num_heads=heads,
        head_dim=head_dim,
        state_size=state_size,
        tp_size=context.tp_size,
        dtype=context.dtype,
        state_dtype=context.state_dtype,
    )
    return {f"layers.{index}": spec for index in range(num_layers)}


def _jamba(fields: _Fields, context: _Context) -> dict[str, LayerSpec]:
    fields = _with_defaults(fields, num_key_value_heads=8, attn_layer_period=8, attn_layer_offset=4)
    hidden_size, period = fields.ints("hidden_size", "attn_layer_period")
    offset = fields.from_zero("attn_layer_offset")
    if offset >= period:
        raise ValueError(f"attn_layer_offset must be below attn_layer_period ({period}), got {offset}")
    channels = divide_heads("inner channels", fields.positive("mamba_expand", 2) * hidden_size, context.tp_size)
    # Mamba-1: a state of its own for every channel.
    state = MambaSpec(
        [
            ("conv", (fields.positive("mamba_d_conv", 4) - 1, channels), context.dtype),
            ("ssm", (channels, fields.positive("mamba_d_state", 16)), context.state_dtype),
        ]
    )
    attention = _attention(fields, context)
    types = fields.layer_types(
        ("attention", "mamba", _FULL, _LINEAR), lambda index: "attention" if index % period == offset else "mamba"
    )
    return {f"layers.{index}": attention if kind in ("attention", _FULL) else state for index, kind in enumerate(types)}


def _qwen3_next(fields: _Fields, context: _Context) -> dict[str, LayerSpec]:
    fields = _with_defaults(
        fields,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
    )
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
                (fields.positive("linear_conv_kernel_dim", 4) - 1, 2 * keys * key_dim + values * value_dim),
                context.dtype,
            ),
            ("delta", (values, key_dim, value_dim), context.state_dtype),
        ]
    )
    attention = _attention(fields, context)
    every = fields.positive("full_attention_interval", 4)
    types = fields.layer_types((_LINEAR, _FULL), lambda index: _LINEAR if (index + 1) % every else _FULL)
    return {f"layers.{index}": attention if kind == _FULL else state for index, kind in enumerate(types)}


def _falcon_h1(fields: _Fields, context: _Context) -> dict[str, LayerSpec]:
    fields = _with_defaults(fields, num_key_value_heads=8, mamba_d_ssm=1024, mamba_n_heads=128, mamba_d_state=256)
    num_layers, heads, state_size = fields.ints("num_hidden_layers", "mamba_n_heads", "mamba_d_state")
    if fields.get("mamba_d_ssm") is None:
        inner_size = fields.positive("mamba_expand", 2) * fields.ints("hidden_size")[0]
    else:
        (inner_size,) = fields.ints("mamba_d_ssm")
    head_dim = fields.get("mamba_d_head", "auto")
    head_dim = inner_size // heads if head_dim == "auto" else positive_int("mamba_d_head", head_dim)
    if heads * head_dim != inner_size:
        raise ValueError(
            f"mamba_n_heads {heads} of mamba_d_head {head_dim} are not the {inner_size} channels of mamba_d_ssm (or of "
            "mamba_expand * hidden_size where that is null)"
        )
    state = mamba2_state(
        conv_width=fields.positive("mamba_d_conv", 4),
        inner_size=inner_size,
        num_groups=fields.positive("mamba_n_groups", 1),
        num_heads=heads,
        head_dim=head_dim,
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
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
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
    """The fields with what the model class has for those that are left out; null stays null."""
    return _Fields({**defaults, **fields._fields})


def _read(config: Config | str | Path) -> Config:
    if isinstance(config, Mapping):
        return config
    path = Path(config)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"no config at {path}: pass a config.json, its folder, or a dict")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
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

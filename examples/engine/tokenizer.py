"""The byte-level BPE tokenizer and the chat template that a GGUF file carries."""

from collections.abc import Sequence

from .gguf_file import GGUFModel


class ChatTokenizer:
    """Text to token ids and back. `stop_ids` end a turn of the assistant."""

    def __init__(self, model: GGUFModel) -> None:
        from jinja2.sandbox import ImmutableSandboxedEnvironment
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        kind = f"{model.field('tokenizer.ggml.model')}/{model.field('tokenizer.ggml.pre', 'default')}"
        if kind != "gpt2/smollm":
            raise ValueError(f"this engine splits text as SmolLM does (gpt2/smollm), not as {kind}")
        vocabulary, kinds = model.field("tokenizer.ggml.tokens"), model.field("tokenizer.ggml.token_type")
        merges = [tuple(merge.split(" ")) for merge in model.field("tokenizer.ggml.merges")]
        self._tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, merges))
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        self._tokenizer.decoder = decoders.ByteLevel()
        self._tokenizer.add_special_tokens([token for token, kind in zip(vocabulary, kinds) if kind == 3])  # control
        self.stop_ids = frozenset({model.field("tokenizer.ggml.eos_token_id")})
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        self._template = environment.from_string(model.field("tokenizer.chat_template"))

    def encode_chat(self, prompt: str) -> list[int]:
        """Token ids of a conversation that holds one user message and awaits the assistant's answer."""
        messages = [{"role": "user", "content": prompt}]
        text = self._template.render(messages=messages, add_generation_prompt=True)
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without control tokens; a character whose bytes are not all there yet comes out as U+FFFD."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

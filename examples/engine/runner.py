"""Runs the model over one step's chunks: eagerly, or by replaying the CUDA graph of a batch size."""

import torch

import triton_kv as tkv

from .model import Llama
from .scheduler import Chunk, Request


class ModelRunner:
    """Static inputs, the forward pass over them, and graphs of it.

    Everything a graph bakes in lives as long as the runner: token ids, positions and attention metadata are slices of
    tensors made once, and the cache's addresses never move. So graphs captured with one block committed stay right.
    """

    def __init__(self, model: Llama, *, block_size: int, max_seqs: int, max_tokens: int, context_tokens: int) -> None:
        self.model, self._block_size, self._largest = model, block_size, (max_tokens, max_seqs)
        max_blocks = -(-context_tokens // block_size)
        self._buffers = tkv.AttentionBuffers(max_tokens, max_seqs, max_blocks, model.device, block_size=block_size)
        self._inputs = torch.zeros(2, max_tokens, dtype=torch.int64, device=model.device)  # token ids, positions
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}  # batch size: graph, its logits
        self.num_replays = 0

    @torch.inference_mode()
    def profile(self, cache: tkv.KVCache) -> None:
        """The largest step there can be, over block 0: what activations need at most, and all lazy initialisation."""
        self._dummy_step(*self._largest, cache).float().softmax(dim=-1)
        self._synchronize()

    @torch.inference_mode()
    def capture(self, cache: tkv.KVCache, batch_sizes: list[int]) -> None:
        """One graph for each decode batch size, largest first: the smaller ones then reuse its memory pool."""
        pool = torch.cuda.graph_pool_handle() if batch_sizes else None
        for size in sorted(batch_sizes, reverse=True):
            self._dummy_step(size, size, cache)  # cuBLAS chooses and allocates outside the capture
            self._synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                logits = self.model.logits(self._forward(cache, self._buffers.view(size, size)))
            self._graphs[size] = graph, logits

    @torch.inference_mode()
    def replay_all(self) -> None:
        """Every graph once: the driver allocates some of a graph's memory only when it first runs."""
        for size, (graph, _) in self._graphs.items():
            self._buffers.dummy(size, size)
            graph.replay()
        self._synchronize()

    @torch.inference_mode()
    def run(self, chunks: list[Chunk], cache: tkv.KVCache) -> torch.Tensor:
        """Logits `[chunks, vocab]` after the last token of each chunk; valid until the next call."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for chunk in chunks:
            for position in range(chunk.request.num_cached, chunk.end):
                block, offset = divmod(position, self._block_size)
                ids.append(chunk.request.tokens[position])
                positions.append(position)
                slots.append(chunk.request.blocks[block] * self._block_size + offset)
        lengths = [chunk.num_tokens for chunk in chunks]
        tables, ends = [chunk.request.blocks for chunk in chunks], [chunk.end for chunk in chunks]
        metadata = self._buffers.fill(tables, ends, slots, lengths)  # pads the rest: length 0, slot -1
        self._inputs[:, : len(ids)].copy_(torch.tensor([ids, positions]))
        size = min((size for size in self._graphs if size >= len(chunks)), default=None)
        if size and len(ids) == len(chunks):
            graph, logits = self._graphs[size]
            graph.replay()
            self.num_replays += 1
            return logits[: len(chunks)]
        hidden = self._forward(cache, metadata)
        return self.model.logits(hidden[(torch.tensor(lengths).cumsum(0) - 1).to(hidden.device)])

    def _dummy_step(self, num_tokens: int, num_seqs: int, cache: tkv.KVCache) -> torch.Tensor:
        hidden = self._forward(cache, self._buffers.dummy(num_tokens, num_seqs))
        return self.model.logits(hidden[:num_seqs])

    def _forward(self, cache: tkv.KVCache, metadata: tkv.AttentionMetadata) -> torch.Tensor:
        token_ids, positions = self._inputs[:, : metadata.num_tokens]
        return self.model.forward(token_ids, positions, cache, metadata)

    def _synchronize(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)


@torch.inference_mode()
def sample(logits: torch.Tensor, requests: list[Request]) -> list[int]:
    """One token for each row of `logits` `[requests, vocab]`: the likeliest, or drawn at the request's temperature.

    Synchronises: the host needs the tokens to go on.
    """
    tokens = logits.argmax(dim=-1).tolist()
    for row, request in enumerate(requests):
        if request.temperature > 0:
            probabilities = (logits[row].float() / request.temperature).softmax(dim=-1)
            tokens[row] = int(torch.multinomial(probabilities.cpu(), 1, generator=request.generator))
    return tokens

"""How dot products become softmax weights: what paged attention's keyword arguments say, checked once."""

from __future__ import annotations

from typing import NamedTuple

import torch

_LOG2_E = 1.4426950408889634
MAX_TREE_TOKENS = 64  # query tokens of a sequence with a tree mask: the bits of a word


class Scoring(NamedTuple):
    """The scores of one attention layer. An op takes the fields in this order."""

    scale: float
    causal: bool
    window: int  # keys that a query sees, its own included; 0: all
    softcap: float  # 0: none
    sinks: torch.Tensor | None  # [num_query_heads]: a score without a value, in each row's softmax
    alibi_slopes: torch.Tensor | None  # [num_query_heads]
    tree_mask: torch.Tensor | None = None  # int64 [num_tokens]: which query tokens of its sequence each one sees

    @property
    def scale_log2(self) -> float:
        """What kernels multiply dot products with: in units of log2, and ready for their tanh where there is a cap."""
        return self.scale * _LOG2_E * (2.0 / self.softcap if self.softcap else 1.0)

    @property
    def softcap_log2(self) -> float:
        return self.softcap * _LOG2_E


SCORING_SCHEMA = (
    "float scale, bool causal, int window, float softcap, Tensor? sinks, Tensor? alibi_slopes, Tensor? tree_mask"
)


def make_scoring(
    head_dim: int,
    num_query_heads: int,
    device: torch.device,
    *,
    scale: float | None,
    causal: bool,
    window: int | None,
    softcap: float,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    tree_mask: torch.Tensor | None = None,
    num_tokens: int = 0,
    max_query_len: int = 1,
) -> Scoring:
    """The arguments of `paged_attention` as kernels take them; `ValueError` or `TypeError` for what cannot be.

    `num_tokens` and `max_query_len` are the batch's; only a tree mask asks for them.
    """
    if window is not None and (isinstance(window, bool) or not isinstance(window, int)):
        raise TypeError(f"window must be an int or None, got {window!r}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 (a query sees its own key), got {window}; None sees everything")
    if softcap < 0:
        raise ValueError(f"softcap must be positive, or 0 for none, got {softcap}")
    if scale is not None:
        scale = float(scale)
    for name, tensor in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
        if tensor.shape != (num_query_heads,):
            raise ValueError(f"{name} must be [num_query_heads] = [{num_query_heads}], got {list(tensor.shape)}")
        if not tensor.dtype.is_floating_point:
            raise TypeError(f"{name} must be floating point, got {tensor.dtype}")
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, but q is on {device}")
        if tensor.stride(0) != 1 and num_query_heads > 1:
            raise ValueError(f"{name} must be contiguous, got stride {tensor.stride(0)}")
    if tree_mask is not None:
        _check_tree_mask(tree_mask, num_tokens, max_query_len, device)
        if not causal:
            raise ValueError("a tree_mask stands in place of the causal mask: leave causal at True, and set bits")
        if alibi_slopes is not None:
            raise ValueError(
                "tree_mask does not go with alibi_slopes: a key's bias would need its depth in the tree; "
                "check one branch at a time, causally"
            )
    return Scoring(
        scale=head_dim**-0.5 if scale is None else scale,
        causal=causal,
        window=window or 0,
        softcap=float(softcap),
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        tree_mask=tree_mask,
    )


def _check_tree_mask(tree_mask: torch.Tensor, num_tokens: int, max_query_len: int, device: torch.device) -> None:
    if not isinstance(tree_mask, torch.Tensor):
        raise TypeError(f"tree_mask must be a tensor, not {type(tree_mask).__name__}")
    if tree_mask.dtype != torch.int64:
        raise TypeError(f"tree_mask must be int64 (bit j: the sequence's j-th query token), got {tree_mask.dtype}")
    if tree_mask.shape != (num_tokens,):
        raise ValueError(f"tree_mask must be [num_tokens] = [{num_tokens}], got {list(tree_mask.shape)}")
    if tree_mask.device != device:
        raise ValueError(f"tree_mask is on {tree_mask.device}, but q is on {device}")
    if tree_mask.stride(0) != 1 and num_tokens > 1:
        raise ValueError(f"tree_mask must be contiguous, got stride {tree_mask.stride(0)}")
    if max_query_len > MAX_TREE_TOKENS:
        raise ValueError(
            f"tree_mask has bits for {MAX_TREE_TOKENS} query tokens a sequence, but the metadata's max_query_len is "
            f"{max_query_len}: pass the true maximum (AttentionBuffers.view), and attend to longer prompts in a call "
            "without it"
        )

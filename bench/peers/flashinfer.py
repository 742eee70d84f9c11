"""FlashInfer: decode on tensor cores, prefill by its fa2 and fa3 backends, and its cache append.

Its wheel carries sources only, so each kernel family is compiled with nvcc on first use: `bench.peers.flashinfer_build`
does that ahead of timing, in parallel and within a time limit.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from bench.candidate import Candidate, NotApplicableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.attention_case import AttentionCase
    from bench.attention_inputs import AttentionInputs
    from bench.write_inputs import WriteInputs

WORKSPACE_BYTES = 384 << 20  # vLLM gives it as much

built: set[str] = set()  # modules that `flashinfer_build` finished


def probe() -> str:
    """Imports the peer. Returns its version; raises if it cannot run here."""
    import flashinfer

    return str(flashinfer.__version__)


def modules_for(cases: Sequence[AttentionCase]) -> list[str]:
    """What `flashinfer_build` has to build for these cases, as `backend:dtype:head_dim`."""
    wanted = []
    for case in cases:
        for backend in ("fa2",) if case.is_decode else ("fa2", "fa3"):
            wanted.append(f"{backend}:{case.dtype}:{case.head_dim}")
    return list(dict.fromkeys(wanted))


@lru_cache(maxsize=1)
def _workspace(device: torch.device) -> torch.Tensor:
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _require(backend: str, case: AttentionCase) -> None:
    name = f"{backend}:{case.dtype}:{case.head_dim}"
    if name not in built:
        raise RuntimeError(f"its module {name} was not built in time")


def attention(inputs: AttentionInputs) -> list[Candidate]:
    """The decode wrapper on tensor cores if every sequence has one query, else both backends of the prefill wrapper."""
    case = inputs.case
    if case.torch_dtype not in (torch.bfloat16, torch.float16):
        raise NotApplicableError(f"no {case.dtype}")
    if case.is_decode:
        return [_decode(inputs)]
    return [_prefill(inputs, backend) for backend in ("fa3", "fa2")]


def _decode(inputs: AttentionInputs) -> Candidate:
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    case, pages = inputs.case, inputs.paged_indices
    wrapper: Any = None

    def plan() -> None:
        nonlocal wrapper
        _require("fa2", case)
        if wrapper is None:
            wrapper = BatchDecodeWithPagedKVCacheWrapper(
                _workspace(inputs.device), kv_layout="NHD", use_tensor_cores=True
            )
        wrapper.plan(
            pages["indptr"],
            pages["indices"],
            pages["last_page_len"],
            num_qo_heads=case.num_query_heads,
            num_kv_heads=case.num_kv_heads,
            head_dim=case.head_dim,
            page_size=case.block_size,
            q_data_type=inputs.dtype,
            kv_data_type=inputs.dtype,
            sm_scale=inputs.scale,
        )

    def run(index: int) -> Any:
        layer = inputs.layers[index]
        return wrapper.run(inputs.q[index], (layer.k, layer.v), out=inputs.out)

    return Candidate("flashinfer", run, "decode wrapper, tensor cores (fa2), planned on the host, not timed", plan=plan)


def _prefill(inputs: AttentionInputs, backend: str) -> Candidate:
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    case, pages = inputs.case, inputs.paged_indices
    wrapper: Any = None

    def plan() -> None:
        nonlocal wrapper
        _require(backend, case)
        if wrapper is None:
            wrapper = BatchPrefillWithPagedKVCacheWrapper(_workspace(inputs.device), kv_layout="NHD", backend=backend)
        wrapper.plan(
            pages["query_indptr"],
            pages["indptr"],
            pages["indices"],
            pages["last_page_len"],
            num_qo_heads=case.num_query_heads,
            num_kv_heads=case.num_kv_heads,
            head_dim_qk=case.head_dim,
            page_size=case.block_size,
            causal=True,
            q_data_type=inputs.dtype,
            kv_data_type=inputs.dtype,
            sm_scale=inputs.scale,
        )

    def run(index: int) -> Any:
        layer = inputs.layers[index]
        return wrapper.run(inputs.q[index], (layer.k, layer.v), out=inputs.out)

    settings = f"prefill wrapper, {backend}, planned on the host, not timed"
    return Candidate(f"flashinfer-{backend}", run, settings, plan=plan)


def write(inputs: WriteInputs) -> list[Candidate]:
    """`append_paged_kv_cache`, one new token or run of tokens a sequence."""
    from flashinfer import append_paged_kv_cache

    if "page" not in built:
        raise RuntimeError("its module page was not built in time")
    pages = inputs.paged_indices

    def run(index: int) -> None:
        layer = inputs.layers[index]
        append_paged_kv_cache(
            inputs.k[index],
            inputs.v[index],
            pages["batch_indices"],
            pages["positions"],
            (layer.k, layer.v),
            pages["indices"],
            pages["indptr"],
            pages["last_page_len"],
            kv_layout="NHD",
        )

    return [Candidate("flashinfer", run, "append_paged_kv_cache, batch indices and positions given")]

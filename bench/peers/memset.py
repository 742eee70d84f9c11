"""`cuMemsetD8Async` and `tensor.zero_()`: what else fills memory with zeros."""

from __future__ import annotations

from typing import Any

import torch


def probe() -> str:
    """Imports the bindings. Returns their version; raises if there is no driver."""
    from importlib import metadata

    from cuda.bindings import driver

    (code,) = driver.cuInit(0)
    if code:
        raise RuntimeError(f"cuInit failed with {code.name}")
    return metadata.version("cuda-bindings")


def memset(address: int, num_bytes: int, value: int = 0) -> None:
    """Queues a fill on torch's current stream. Does not synchronise."""
    from cuda.bindings import driver

    stream: Any = torch.cuda.current_stream().cuda_stream
    (code,) = driver.cuMemsetD8Async(address, value, num_bytes, stream)
    if code:
        raise RuntimeError(f"cuMemsetD8Async failed with {code.name}")

"""Address space and physical memory: one protocol, three drivers, two wrappers for tests."""

from __future__ import annotations

import logging
import os
import threading

import torch

from triton_kv.errors import Forked, Unavailable
from triton_kv.memory.allocated import AllocatedMemory
from triton_kv.memory.books import Live
from triton_kv.memory.cuda import CudaMemory, why_unusable
from triton_kv.memory.fake import FakeMemory
from triton_kv.memory.faults import FaultyMemory
from triton_kv.memory.host import HostMemory
from triton_kv.memory.poison import PoisonedMemory
from triton_kv.memory.policy import HandlePolicy
from triton_kv.memory.protocol import VirtualMemory

logger = logging.getLogger(__name__)

_open: dict[torch.device, tuple[int, VirtualMemory]] = {}  # with the process that opened it
_lock = threading.Lock()


def probe(device: torch.device | str | int | None = "cuda") -> tuple[bool, str]:
    """Whether a device can back reservations, and why not (empty if it can).

    Initialises the CUDA driver, but no context; never raises for what a machine lacks.
    """
    device = torch.device("cuda" if device is None else device)
    if device.type == "cpu":
        return (True, "") if hasattr(os, "memfd_create") else (False, "the host driver needs Linux (memfd_create)")
    if device.type != "cuda":
        return False, f"no driver for device type {device.type!r}: use 'cuda' or 'cpu'"
    reason = why_unusable(_cuda_index(device))
    return not reason, reason


def open_memory(device: torch.device | str | int | None = None) -> VirtualMemory:
    """The driver of a device, one object a device and process.

    Args:
        device: a CUDA device (without an index the current one) or the CPU. None is the current CUDA device where there
            is a usable one, else the CPU.

    Raises:
        Unavailable: the device cannot back reservations; the text says why.
        Forked: the parent process opened this CUDA device before the fork.
    """
    if device is None:
        device = "cuda" if probe("cuda")[0] else "cpu"
    device = torch.device(device)
    if device.type == "cuda":
        device = torch.device("cuda", _cuda_index(device))
    elif device.type == "cpu":
        device = torch.device("cpu")
    pid, memory = _open.get(device, (0, None))  # before the lock, which a fork may have copied locked
    if memory is not None and pid != os.getpid() and device.type == "cuda":
        raise Forked(f"the memory of {device}")
    if memory is not None and pid == os.getpid():
        return memory
    with _lock:
        pid, memory = _open.get(device, (0, None))
        if memory is None or pid != os.getpid():
            usable, reason = probe(device)
            if not usable:
                raise Unavailable(f"device {str(device)!r} cannot back a reservation: {reason}")
            memory = CudaMemory(device) if device.type == "cuda" else HostMemory()
            _open[device] = (os.getpid(), memory)
        return memory


def open_or_allocate(device: torch.device | str | int | None, fallback: str | None) -> VirtualMemory:
    """`open_memory`, or plain torch memory where that raises `Unavailable` and `fallback` is "allocate"."""
    if fallback not in (None, "allocate"):
        raise ValueError(f'fallback must be None or "allocate", got {fallback!r}')
    try:
        return open_memory(device)
    except Unavailable as error:
        if fallback is None:
            raise Unavailable(
                f'{error.reason}. KVCache.reserve(..., fallback="allocate") allocates the whole capacity with torch'
            ) from error
        if torch.device("cuda" if device is None else device).type == "cuda" and not torch.cuda.is_available():
            raise Unavailable(f"{error.reason}, and torch finds no GPU here either: pass device='cpu'") from error
        logger.warning("no virtual memory, so all of a cache is allocated at once: %s", error.reason)
        return AllocatedMemory(torch.device("cuda" if device is None else device), error.reason)


def names_device(device: torch.device | str | None, actual: torch.device) -> bool:
    """Whether `device` names `actual`: the same type, and the same index where it states one; None names any."""
    if device is None:
        return True
    device = torch.device(device)
    return device.type == actual.type and device.index in (None, actual.index)


def _cuda_index(device: torch.device) -> int:
    if device.index is not None:
        return device.index
    return torch.cuda.current_device() if torch.cuda.is_initialized() else 0


__all__ = [
    "AllocatedMemory",
    "CudaMemory",
    "FakeMemory",
    "FaultyMemory",
    "HandlePolicy",
    "HostMemory",
    "Live",
    "PoisonedMemory",
    "VirtualMemory",
    "names_device",
    "open_memory",
    "open_or_allocate",
    "probe",
]

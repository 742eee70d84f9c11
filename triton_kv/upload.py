"""Pinned host memory that is packed by the host and copied to the device, step after step, past torch."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from triton_kv.errors import CaptureError, DriverError
from triton_kv.launch import on_device, raw_stream
from triton_kv.memory.cuda import load_driver

if TYPE_CHECKING:
    import numpy.typing as npt


class Upload:
    """One host buffer and its copies to a device tensor.

    The copy and its event go straight to the driver. Torch's allocator would keep an event of its own for each copy,
    and that is host time in every step (`python -m bench run host`).

    Args:
        target: int32 `[num_words]`, contiguous. On a CPU it is the host buffer too, and nothing is copied.
    """

    def __init__(self, target: torch.Tensor) -> None:
        self._target = target
        self._device = target.device
        on_gpu = target.is_cuda
        self._host = (
            target if not on_gpu else torch.zeros(target.shape, dtype=target.dtype, device="cpu", pin_memory=True)
        )
        #: What the host writes, and the same memory in pairs of words, as int64.
        self.words: npt.NDArray[np.int32] = self._host.numpy()
        self.pairs: npt.NDArray[np.int64] = self.words.view(np.int64)
        self._copied = torch.cuda.Event() if on_gpu else None
        if self._copied is None:
            return
        self._driver = load_driver() if torch.version.cuda else None  # HIP's copies go through torch
        with on_device(self._device):
            self._copied.record()  # makes the event
        # Torch knows nothing of the driver's copies, and would hand the memory to somebody else under the last of them.
        weakref.finalize(self, _outlast, self._driver, self._copied, self._host).atexit = False

    def wait(self, what: str) -> None:
        """Waits until the last copy has run. Raises `CaptureError` for `what` while the current stream captures."""
        if self._copied is None:
            return
        with on_device(self._device):
            if torch.cuda.is_current_stream_capturing():
                raise CaptureError(what)
        self._copied.synchronize()

    def send(self, num_words: int) -> None:
        """Queue the copy of the first words on the device's current stream. Raises `DriverError`."""
        if self._copied is None:
            return
        with on_device(self._device):
            if self._driver is None:
                self._target[:num_words].copy_(self._host[:num_words], non_blocking=True)
                self._copied.record()
                return
            stream = raw_stream(self._device)
            target, source = self._target.data_ptr(), self._host.data_ptr()
            _check("cuMemcpyHtoDAsync", self._driver.cuMemcpyHtoDAsync(target, source, 4 * num_words, stream))
            _check("cuEventRecord", self._driver.cuEventRecord(self._copied.cuda_event, stream))


def _check(call: str, result: tuple[Any, ...]) -> None:
    if result[0]:
        raise DriverError(call, result[0].name)


def _outlast(driver: Any, copied: torch.cuda.Event, host: torch.Tensor) -> None:
    """Waits for the last copy out of `host`, which the caller then lets go."""
    if driver is None:
        return
    # In the strict mode, waiting would invalidate a capture of another thread.
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    code, mode = driver.cuThreadExchangeStreamCaptureMode(relaxed)
    if code:  # no context, no copies
        return
    try:
        copied.synchronize()
    except RuntimeError:  # the device is lost, and its copies with it
        pass
    finally:
        driver.cuThreadExchangeStreamCaptureMode(mode)


__all__ = ["Upload"]

"""The CUDA driver: virtual memory management through `cuda.bindings.driver`."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from triton_kv.errors import AddressSpaceExhausted, DriverError, Forked, Unavailable, format_bytes

# What reserving answers when no range of that size is left; other codes have other causes.
_EXHAUSTED = frozenset({"CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_INVALID_VALUE"})
_STICKY = frozenset(
    {
        "CUDA_ERROR_ILLEGAL_ADDRESS",
        "CUDA_ERROR_LAUNCH_FAILED",
        "CUDA_ERROR_LAUNCH_TIMEOUT",
        "CUDA_ERROR_MISALIGNED_ADDRESS",
        "CUDA_ERROR_ASSERT",
        "CUDA_ERROR_ECC_UNCORRECTABLE",
    }
)


def load_driver() -> Any:
    """The bindings module. Imports in 60-90 ms, does not need the driver library to be there."""
    from cuda.bindings import driver

    return driver


def why_unusable(index: int, driver: Any = None) -> str:
    """Why device `index` cannot back reservations; empty if it can. Initialises the driver, but no context."""
    if driver is None:
        try:
            driver = load_driver()
        except ImportError as error:
            return f"the CUDA bindings are missing ({error}): install cuda-python"
    try:
        (code,) = driver.cuInit(0)
    except RuntimeError as error:  # what the bindings raise without libcuda
        return f"no CUDA driver library (libcuda.so.1): install the NVIDIA driver ({_first_line(error)})"
    if code == driver.CUresult.CUDA_ERROR_NO_DEVICE:
        return "no CUDA device: the driver is installed, but sees no GPU (CUDA_VISIBLE_DEVICES?)"
    if code:
        return f"no CUDA device: cuInit failed with {code.name}"
    code, count = driver.cuDeviceGetCount()
    if code or count == 0:
        return "no CUDA device: the driver is installed, but sees no GPU (CUDA_VISIBLE_DEVICES?)"
    if not 0 <= index < count:
        return f"no CUDA device {index}: the driver sees {count} (0 to {count - 1})"
    code, device = driver.cuDeviceGet(index)
    if code:
        return f"CUDA device {index}: cuDeviceGet failed with {code.name}"
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    code, supported = driver.cuDeviceGetAttribute(attribute, device)
    if code or not supported:
        return (
            f"CUDA device {index} has no virtual memory management (the attribute {attribute.name} is 0), "
            "as under WSL2 and on some virtual GPUs"
        )
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) is built without CUDA: install a CUDA build"
    properties = allocation_properties(driver, index)
    minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    code, granularity = driver.cuMemGetAllocationGranularity(properties, minimum)
    if code:
        return f"CUDA device {index}: cuMemGetAllocationGranularity failed with {code.name}"
    code, handle = driver.cuMemCreate(granularity, properties, 0)
    if code == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:  # a full device is still a usable one
        return ""
    if code:
        return f"CUDA device {index} refuses to create memory: cuMemCreate failed with {code.name}"
    driver.cuMemRelease(handle)
    return ""


def allocation_properties(driver: Any, index: int) -> Any:
    """Pinned device memory on device `index`, not exportable."""
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = index
    return properties


_active = threading.local()  # .memory: whose context the thread's innermost activate made current


class Span:
    """What torch needs to build a tensor over addresses, and to keep `owner` alive with it."""

    def __init__(self, address: int, num_bytes: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class CudaMemory:
    """Memory of one CUDA device. Use `open_memory`, which keeps one of these a device.

    Works on the device's primary context, which torch uses too; it is current only inside `activate`. Fills run on a
    stream of this object's own that no other stream is ordered with, and never in anybody's capture. `fill` with 0 uses
    a Triton kernel, other values `cuMemsetD8Async`.
    `VirtualMemory` says what each call does.

    Args:
        device: a CUDA device with an index.

    Raises:
        Unavailable: the device cannot; the text says why.
    """

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cuda"
        assert device.index is not None
        reason = why_unusable(device.index)
        if reason:
            raise Unavailable(reason)
        self.device = device
        self._pid = os.getpid()
        self._driver = driver = load_driver()
        torch.cuda.init()
        self._context = self._call("cuDevicePrimaryCtxRetain", self._call("cuDeviceGet", device.index))
        self._properties = allocation_properties(driver, device.index)
        minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granularity: int = self._call("cuMemGetAllocationGranularity", self._properties, minimum)
        access = driver.CUmemAccessDesc()
        access.location = self._properties.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._access = [access]
        self._relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        with self.activate():
            # Not one of torch's pooled streams: those are shared, and somebody may be capturing on one.
            self._stream = self._call("cuStreamCreate", driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
            # Fills and copies are in order on it.
            self.copy_stream = torch.cuda.ExternalStream(int(self._stream), device=device)
            # Kernels that work beside the copies; whoever uses it orders the two.
            beside = self._call("cuStreamCreate", driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
            self.kernel_stream = torch.cuda.ExternalStream(int(beside), device=device)

    def reserve(self, num_bytes: int) -> int:
        if num_bytes >= 1 << 63:  # the binding takes 64 bits
            raise AddressSpaceExhausted(
                "cuMemAddressReserve", "CUDA_ERROR_OUT_OF_MEMORY", f"asked for {num_bytes} bytes"
            )
        try:
            return int(self._call("cuMemAddressReserve", num_bytes, 0, 0, 0, num_bytes=num_bytes))
        except DriverError as error:
            if error.code in _EXHAUSTED:
                raise AddressSpaceExhausted(error.call, error.code, error.detail) from None
            raise

    def free(self, address: int, num_bytes: int) -> None:
        self._call("cuMemAddressFree", address, num_bytes)

    def create(self, num_bytes: int) -> int:
        return int(self._call("cuMemCreate", num_bytes, self._properties, 0, num_bytes=num_bytes))

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", handle)

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        self._call("cuMemMap", address, num_bytes, 0, handle, 0)

    def set_access(self, address: int, num_bytes: int) -> None:
        self._call("cuMemSetAccess", address, num_bytes, self._access, 1)

    def unmap(self, address: int, num_bytes: int) -> None:
        self._call("cuMemUnmap", address, num_bytes)

    def view(self, address: int, num_bytes: int, owner: object) -> torch.Tensor:
        self._check_process()
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=self.device)
        # With an explicit index torch takes our word for the device; without it, it asks about the unmapped address.
        return torch.as_tensor(Span(address, num_bytes, owner), device=self.device)

    def fill(self, address: int, num_bytes: int, value: int = 0, *, stride: int = 0, count: int = 1) -> None:
        if num_bytes <= 0 or count <= 0:
            return
        with self.activate():
            if value:
                for index in range(count):
                    self._call("cuMemsetD8Async", address + index * stride, value, num_bytes, self._stream)
                return
            from triton_kv.blocks import zero_ranges

            with torch.cuda.device(self.device), torch.cuda.stream(self.copy_stream):
                zero_ranges(address, num_bytes, stride=stride, count=count, device=self.device)

    def enqueue(self, work: Callable[[], object], *, beside: bool = False) -> None:
        """Call `work`, whose kernels then run on the stream of the fills, in order with them.

        `beside`: on `kernel_stream` instead, in order with nothing but what the caller has it wait for.
        """
        stream = self.kernel_stream if beside else self.copy_stream
        with self.activate(), torch.cuda.device(self.device), torch.cuda.stream(stream):
            work()

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        if num_bytes > 0:
            with self.activate():
                self._call("cuMemcpyAsync", target, source, num_bytes, self._stream)

    def pin(self, num_bytes: int) -> int:
        # Not torch's pinned memory: its allocator rounds to powers of two and keeps what is freed.
        with self.activate():
            return int(self._call("cuMemHostAlloc", num_bytes, 0, num_bytes=num_bytes))

    def unpin(self, address: int, num_bytes: int) -> None:
        with self.activate():
            self._call("cuMemFreeHost", address)

    def wait(self) -> None:
        with self.activate():
            self._call("cuStreamSynchronize", self._stream)

    def synchronize(self) -> None:
        with self.activate():
            self._call("cuCtxSynchronize")

    def memory_info(self) -> tuple[int, int]:
        with self.activate():
            free, total = self._call("cuMemGetInfo")
        return int(free), int(total)

    def is_capturing(self) -> bool:
        if not torch.cuda.is_initialized():
            return False
        # The caller's current device may be another one, and a capture there counts as well. Asked on the same device
        # without our context, the runtime would leave one behind in a thread that had none.
        if torch.cuda.current_device() != self.device.index and torch.cuda.is_current_stream_capturing():
            return True
        with self.activate(), torch.cuda.device(self.device):
            return bool(torch.cuda.is_current_stream_capturing())

    @contextmanager
    def activate(self) -> Iterator[None]:
        outer = getattr(_active, "memory", None)
        if outer is self:
            yield
            return
        self._call("cuCtxPushCurrent", self._context)
        _active.memory = self
        try:
            # Another thread's capture, in its strict mode, would be invalidated by what this thread does.
            mode = self._call("cuThreadExchangeStreamCaptureMode", self._relaxed)
            try:
                yield
            finally:
                self._call("cuThreadExchangeStreamCaptureMode", mode)
        finally:
            _active.memory = outer
            self._call("cuCtxPopCurrent")

    def _call(self, name: str, *arguments: Any, num_bytes: int | None = None) -> Any:
        """Call the driver; its results without the code, one alone or a tuple."""
        self._check_process()
        code, *results = getattr(self._driver, name)(*arguments)
        if code:
            detail = "" if num_bytes is None else f"asked for {format_bytes(num_bytes)}"
            if code.name in _STICKY:
                detail = "an earlier kernel broke this process's CUDA context; only a new process helps"
            raise DriverError(name, code.name, detail)
        return results[0] if len(results) == 1 else tuple(results)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise Forked(f"the memory of {self.device}")

    def __repr__(self) -> str:
        return f"CudaMemory({str(self.device)!r})"


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__

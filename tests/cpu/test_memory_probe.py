"""What `probe` and `open_memory` say about a device, and how CUDA's errors are named, with a driver made of answers."""

from __future__ import annotations

import os
import pickle
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from memory_drivers import without_gpu

from triton_kv import errors
from triton_kv.errors import AddressSpaceExhausted, DriverError, Forked, OutOfMemory, Unavailable
from triton_kv.memory import CudaMemory, HostMemory, open_memory, probe
from triton_kv.memory.cuda import load_driver, why_unusable

bindings = load_driver()
Code = bindings.CUresult


def stub(**answers: Any) -> SimpleNamespace:
    """The real enums and structures; calls that answer as on a good machine with two GPUs, unless told otherwise."""
    good = {
        "cuInit": (Code.CUDA_SUCCESS,),
        "cuDeviceGetCount": (Code.CUDA_SUCCESS, 2),
        "cuDeviceGet": (Code.CUDA_SUCCESS, 1),
        "cuDeviceGetAttribute": (Code.CUDA_SUCCESS, 1),
        "cuMemGetAllocationGranularity": (Code.CUDA_SUCCESS, 2 << 20),
        "cuMemCreate": (Code.CUDA_SUCCESS, 7),
        "cuMemRelease": (Code.CUDA_SUCCESS,),
    }
    calls: list[tuple[str, tuple[Any, ...]]] = []

    def answering(name: str, answer: Any) -> Any:
        def call(*arguments: Any) -> Any:
            calls.append((name, arguments))
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call

    names = [name for name in dir(bindings) if name.startswith("CU")]
    driver = SimpleNamespace(**{name: getattr(bindings, name) for name in names}, calls=calls)
    for name, answer in {**good, **answers}.items():
        setattr(driver, name, answering(name, answer))
    return driver


@pytest.mark.parametrize(
    ("index", "answers", "reason"),
    [
        pytest.param(
            0, {"cuInit": RuntimeError("libcuda.so.1 not found")}, "no CUDA driver library .* not found", id="lib"
        ),
        pytest.param(0, {"cuInit": (Code.CUDA_ERROR_NO_DEVICE,)}, "no CUDA device: .* sees no GPU", id="no device"),
        pytest.param(
            0, {"cuInit": (Code.CUDA_ERROR_SYSTEM_NOT_READY,)}, "cuInit failed with CUDA_ERROR_SYSTEM", id="init"
        ),
        pytest.param(
            0, {"cuDeviceGetCount": (Code.CUDA_SUCCESS, 0)}, "no CUDA device: .* sees no GPU", id="none visible"
        ),
        pytest.param(2, {}, r"no CUDA device 2: the driver sees 2 \(0 to 1\)", id="index"),
        pytest.param(
            1,
            {"cuDeviceGetAttribute": (Code.CUDA_SUCCESS, 0)},
            "device 1 has no virtual memory management .*WSL2",
            id="VMM",
        ),
        pytest.param(
            0,
            {"cuMemCreate": (Code.CUDA_ERROR_NOT_PERMITTED, None)},
            "refuses to create memory: cuMemCreate failed with CUDA_ERROR_NOT_PERMITTED",
            id="create refused",
        ),
    ],
)
def test_each_reason_has_a_name(
    monkeypatch: pytest.MonkeyPatch, index: int, answers: dict[str, Any], reason: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert re.search(reason, why_unusable(index, stub(**answers)))


def test_a_good_device_has_no_reason_and_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    driver = stub()
    assert why_unusable(1, driver) == ""
    assert driver.calls[-2][0] == "cuMemCreate"
    assert driver.calls[-2][1][1].location.id == 1
    assert driver.calls[-1] == ("cuMemRelease", (7,))


def test_a_full_device_is_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert why_unusable(0, stub(cuMemCreate=(Code.CUDA_ERROR_OUT_OF_MEMORY, None))) == ""


def test_a_cpu_build_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "is built without CUDA" in why_unusable(0, stub())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu() -> None:
    usable, reason = probe("cuda")
    assert not usable
    assert reason.startswith("no CUDA")
    with pytest.raises(Unavailable, match=r"device 'cuda:0' cannot back a reservation: no CUDA"):
        open_memory("cuda")
    assert open_memory() is open_memory("cpu") is open_memory(torch.device("cpu"))
    assert isinstance(open_memory(), HostMemory)


def test_other_devices() -> None:
    assert probe("cpu") == (True, "")
    assert probe("meta") == (False, "no driver for device type 'meta': use 'cuda' or 'cpu'")
    with pytest.raises(Unavailable, match="no driver for device type 'meta'"):
        open_memory("meta")


@without_gpu
def test_with_a_gpu() -> None:
    assert probe("cuda") == (True, "")
    assert open_memory("cuda") is open_memory(torch.device("cuda", torch.cuda.current_device()))
    count = torch.cuda.device_count()
    assert probe(f"cuda:{count}")[1].startswith(f"no CUDA device {count}: the driver sees {count}")


def _memory(**answers: Any) -> CudaMemory:
    memory = CudaMemory.__new__(CudaMemory)
    memory.device = torch.device("cuda", 0)
    memory._pid = os.getpid()
    memory._driver = stub(**answers)
    memory._properties = memory._context = memory._stream = None
    memory._access = []
    return memory


@pytest.mark.parametrize(
    ("call", "arguments", "name", "code"),
    [
        ("create", (2 << 20,), "cuMemCreate", Code.CUDA_ERROR_OUT_OF_MEMORY),
        ("release", (1,), "cuMemRelease", Code.CUDA_ERROR_INVALID_VALUE),
        ("map", (1, 2, 3), "cuMemMap", Code.CUDA_ERROR_NOT_SUPPORTED),
        ("set_access", (1, 2), "cuMemSetAccess", Code.CUDA_ERROR_INVALID_DEVICE),
        ("unmap", (1, 2), "cuMemUnmap", Code.CUDA_ERROR_INVALID_VALUE),
        ("free", (1, 2), "cuMemAddressFree", Code.CUDA_ERROR_INVALID_VALUE),
        ("reserve", (1,), "cuMemAddressReserve", Code.CUDA_ERROR_OUT_OF_MEMORY),
        ("reserve", (1,), "cuMemAddressReserve", Code.CUDA_ERROR_DEINITIALIZED),
        ("unmap", (1, 2), "cuMemUnmap", Code.CUDA_ERROR_ILLEGAL_ADDRESS),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "name", ""),
)
def test_errors_name_call_and_code(call: str, arguments: tuple[int, ...], name: str, code: Any) -> None:
    memory = _memory(**{name: (code, None)})
    with pytest.raises(DriverError, match=f"^{name} failed with {code.name}") as caught:
        getattr(memory, call)(*arguments)
    error = caught.value
    assert (error.call, error.code) == (name, code.name)
    assert error.out_of_memory == (call == "create")
    assert isinstance(error, AddressSpaceExhausted) == (call == "reserve" and "MEMORY" in code.name)
    assert ("only a new process helps" in str(error)) == (code == Code.CUDA_ERROR_ILLEGAL_ADDRESS)


def test_a_forked_child_makes_no_call() -> None:
    memory = _memory()
    memory._pid = os.getpid() + 1
    for use in (
        lambda: memory.reserve(1),
        lambda: memory.create(1),
        memory.memory_info,
        memory.wait,
        lambda: memory.fill(1, 1),
        lambda: memory.view(1, 1, None),
    ):
        with pytest.raises(Forked, match="cuda:0 belongs to the parent"):
            use()
    assert memory._driver.calls == []


@pytest.mark.parametrize(
    "error",
    [
        DriverError("cuMemMap", "CUDA_ERROR_UNKNOWN", "why"),
        AddressSpaceExhausted("reserve", "ENOMEM", "asked for 5 bytes"),
        OutOfMemory(5 << 30, 1 << 30, 7, "blocks", "extend(9)"),
        errors.CaptureError("extend"),
        Forked("this cache"),
        Unavailable("no GPU"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_travel_between_processes(error: Exception) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_out_of_memory_says_all() -> None:
    text = str(OutOfMemory(5 << 30, 1 << 30, 7, "blocks", "extend(9)"))
    assert text.startswith(
        "extend(9): out of memory: asked for 5368709120 bytes (5.00 GiB), 1073741824 bytes (1.00 GiB) free"
    )
    assert "7 blocks would fit" in text
    assert "free memory unknown" in str(OutOfMemory(1))

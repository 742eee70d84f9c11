"""Launches of a small kernel by Triton's own launcher, C code and all, over the libcuda of recording_cuda.c.

Run as a program of its own, with the library's path: the library must be loaded before any other libcuda.so.1.
"""

import ctypes
import sys

cuda = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)

import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia.driver import CudaDriver  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from triton_kv import launch_cache  # noqa: E402
from triton_kv.launch import Launch  # noqa: E402

STREAM, CPU = 7, torch.device("cpu")
# Two tensor maps with two sizes and two strides each, among pointers and numbers; two scratch pointers behind.
PARAMETER_BYTES = [8, *(128, 4, 4, 8, 8), 4, *(128, 4, 4, 8, 8), 8, 4, 8, 8]


class Driver(CudaDriver):
    """Triton's, on a torch that has no CUDA."""

    def __init__(self):
        super().__init__()
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: STREAM
        self.get_device_capability = lambda device=0: (9, 0)

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


@triton.jit
def kernel(q_ptr, k_desc, rows: tl.int32, v_desc, lse_ptr, v_ptr, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    k = k_desc.load([row, 0])
    v = v_desc.load([row, 0])
    offsets = tl.arange(0, BLOCK)[None, :]
    tl.store(q_ptr + offsets, (k + v).to(tl.float32) * scale + tl.load(v_ptr + offsets) + rows)
    if lse_ptr is not None:
        tl.store(lse_ptr, scale)


def boxes(tensor):
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, 16])


def build(q, both):
    arguments = {
        "q_ptr": q,
        "k_desc": boxes(both[0]),
        "rows": 11,
        "v_desc": boxes(both[1]),
        "lse_ptr": None,
        "v_ptr": both[1],
        "scale": 0.5,
        "BLOCK": 16,
    }
    return Launch(kernel=kernel, grid=(5, 2), arguments=arguments, num_warps=4, num_stages=1, launch_pdl=True)


def aligned(*shape):
    storage = torch.zeros(torch.Size(shape).numel() + 64, dtype=torch.float16)
    start = -storage.data_ptr() % 128 // 2
    return storage[start : start + torch.Size(shape).numel()].view(shape)


def integer(name, kind=ctypes.c_int):
    return kind.in_dll(cuda, name)


def recorded():
    numbers = [integer(name, ctypes.c_uint).value for name in ("block", "shared", "num_attributes")]
    grid = tuple((ctypes.c_uint * 3).in_dll(cuda, "grid"))
    handles = [integer(name, ctypes.c_ulonglong).value for name in ("stream", "function")]
    return grid, numbers, handles, bytes((ctypes.c_ubyte * sum(PARAMETER_BYTES)).in_dll(cuda, "launched"))


def main():
    driver.set_active(Driver())
    integer("num_parameters").value = len(PARAMETER_BYTES)
    (ctypes.c_int * 64).in_dll(cuda, "parameter_bytes")[: len(PARAMETER_BYTES)] = PARAMETER_BYTES

    calls = [(aligned(32), aligned(2, 8, 16)) for _ in range(2)]
    new = []
    for call in calls:
        build(*call).run(CPU)
        new.append(recorded())
    assert new[0] != new[1]
    for (q, both), (grid, numbers, handles, parameters) in zip(calls, new, strict=True):
        assert grid == (5, 2, 1)
        assert numbers[0] == 128
        assert numbers[2] == 1
        assert handles[0] == STREAM
        for address in (q.data_ptr(), both[0].data_ptr(), both[1].data_ptr()):
            assert address.to_bytes(8, "little") in parameters

    cache = launch_cache.LaunchCache(
        ("q_ptr", "kv_ptr"), derived=dict.fromkeys(("k_desc", "v_desc", "v_ptr"), "kv_ptr")
    )
    launch_cache.current_stream = lambda device: STREAM
    cache.run("key", CPU, calls[0], lambda: [build(*calls[0])])
    (again,) = cache.find("key").launches
    assert again._direct is not None, "this Triton's launcher was not recognised"
    encoded = integer("num_encoded").value
    for index in (1, 0, 1, 0):
        (ctypes.c_ubyte * sum(PARAMETER_BYTES)).in_dll(cuda, "launched")[:] = [0] * sum(PARAMETER_BYTES)
        launched = integer("num_launches").value
        cache.run("key", CPU, calls[index], lambda: [])
        assert integer("num_launches").value == launched + 1
        assert recorded() == new[index]
    assert integer("num_encoded").value == encoded + 4  # K and V of two calls
    launch_cache.current_stream = lambda device: None
    for index in (1, 0):
        cache.run("key", CPU, calls[index], lambda: [])
        assert recorded() == new[index]
    print("as recorded")


main()

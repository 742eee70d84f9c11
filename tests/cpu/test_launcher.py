"""Triton's launcher past its runner: Triton's own Python code on top of a driver that only writes down what it gets.

What its C code makes of that is in test_launch_on_recorder.py.
"""

from types import SimpleNamespace

import pytest
import torch
import triton
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from triton_kv import compiled_launch
from triton_kv.compiled_launch import CompiledLaunch, Pointer
from triton_kv.launcher import find_launcher

GRID = (3, 2, 1)
STREAM = 77


class Driver:
    """As much of a CUDA driver as launching asks for. A tensor map is a tuple of what it was made of."""

    def __init__(self):
        self.launches, self.encoded, self.kernels = [], [], []
        encode = self._encode
        self.utils = SimpleNamespace(fill_tma_descriptor=encode, fill_tma_descriptor_tiled=encode)

    def _encode(self, base, *geometry):
        self.encoded.append(base)
        return ("map", base, *map(repr, geometry))

    def launch(self, *arguments):
        self.launches.append(tuple(list(x) if isinstance(x, (tuple, list)) else x for x in arguments))

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return STREAM


@pytest.fixture
def recorder():
    before, found = driver._active, Driver()
    driver.set_active(found)
    yield found
    for kernel in found.kernels:  # else `__del__` would unload them, by whatever driver is active then
        kernel.module = None
    driver.set_active(before)


SIGNATURE = {
    "q_ptr": "*fp16",
    "k_desc": "tensordesc<fp16[1, 16]>",
    "size": "i32",
    "v_desc": "tensordesc<fp16[1, 16]>",
    "lse_ptr": "constexpr",
    "v_ptr": "*fp16",
    "BLOCK": "constexpr",
}
BOX = {"swizzle": 1, "elem_size": 2, "elem_type": 6, "block_size": [1, 16], "fp4_padded": False}


def compiled_kernel(recorder, *, signature=SIGNATURE, **attributes):
    """A `CompiledKernel` that was neither compiled nor loaded."""
    maps = [BOX for kind in signature.values() if kind.startswith("tensordesc")]
    run = nvidia.CudaLauncher.__new__(nvidia.CudaLauncher)
    run.num_ctas, run.launch_cooperative_grid, run.launch_pdl, run.gsan_enabled = 1, False, True, False
    run.global_scratch_size = run.profile_scratch_size = 0
    run.global_scratch_align = run.profile_scratch_align = 1
    run.arg_annotations, run.kernel_signature = ["annotations"], b"signature"
    run.launch = nvidia.wrap_handle_tensordesc(recorder.launch, signature, maps)
    for name, value in attributes.items():
        setattr(run, name, value)
    kernel = triton.compiler.CompiledKernel.__new__(triton.compiler.CompiledKernel)
    kernel.src = SimpleNamespace(signature=signature)
    kernel.metadata = SimpleNamespace(tensordesc_meta=maps)
    kernel.name, kernel.packed_metadata, kernel.function = "kernel", (4, 1, 0), 1234
    kernel.module, kernel._run = 1, run
    recorder.kernels.append(kernel)
    return kernel


def boxes(tensor):
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, 16])


def arguments_of(q, both):
    """Of a kernel with K and V in one tensor `[2, rows, 16]`."""
    return {
        "q_ptr": q.data_ptr(),
        "k_desc": boxes(both[0]),
        "size": 5,
        "v_desc": boxes(both[1]),
        "lse_ptr": None,
        "v_ptr": both[1].data_ptr(),
        "BLOCK": 16,
    }


def a_call():
    return torch.zeros(7, dtype=torch.float16), torch.zeros(2, 8, 16, dtype=torch.float16)


POINTERS = [Pointer(0, 0, 0), Pointer(1, 1, 0), Pointer(3, 1, 256), Pointer(5, 1, 256)]


def addresses(*tensors):
    return [tensor.data_ptr() for tensor in tensors]


def expected(kernel, call):
    """What Triton's runner hands to the launcher for a call, without metadata for hooks that are not there."""
    arguments = arguments_of(*call)
    kernel.run(*GRID, STREAM, kernel.function, kernel.packed_metadata, None, None, None, *arguments.values())


def test_a_launch_past_the_runner_hands_over_what_the_runner_would(recorder):
    kernel, calls = compiled_kernel(recorder), [a_call(), a_call()]
    again = CompiledLaunch(kernel, GRID, arguments_of(*calls[0]), POINTERS)
    assert recorder.launches == []
    for call in (*calls, *reversed(calls)):
        again.run(addresses(*call), STREAM)
        expected(kernel, call)
        found, wanted = recorder.launches
        assert found == wanted
        recorder.launches.clear()


def test_a_descriptor_is_encoded_once_an_address(recorder):
    kernel, calls, maps = compiled_kernel(recorder), [a_call(), a_call()], {}
    again = CompiledLaunch(kernel, GRID, arguments_of(*calls[0]), POINTERS, maps)
    recorder.encoded.clear()
    for call in calls * 3:
        again.run(addresses(*call), STREAM)
    assert sorted(recorder.encoded) == sorted(x.data_ptr() for _, both in calls for x in both)
    assert len(maps) == 4


def test_two_geometries_at_one_address_have_two_maps(recorder):
    kernel, maps = compiled_kernel(recorder), {}
    q, both = a_call()
    other = both.view(2, 4, 32)
    for tensor in (both, other):
        CompiledLaunch(kernel, GRID, arguments_of(q, tensor), POINTERS, maps).run(addresses(q, tensor), STREAM)
        expected(kernel, (q, tensor))
        assert recorder.launches[0] == recorder.launches[1]
        recorder.launches.clear()
    assert len(maps) == 4


def test_the_table_of_maps_is_bounded(recorder, monkeypatch):
    monkeypatch.setattr(compiled_launch, "_MAX_TENSOR_MAPS", 6)
    kernel, maps = compiled_kernel(recorder), {}
    again = CompiledLaunch(kernel, GRID, arguments_of(*a_call()), POINTERS, maps)
    for call in [a_call() for _ in range(8)]:
        again.run(addresses(*call), STREAM)
        assert len(maps) <= 6
        expected(kernel, call)
        assert recorder.launches[-2] == recorder.launches[-1]


def test_without_a_stream_the_runner_launches_and_calls_hooks(recorder):
    kernel, call, seen = compiled_kernel(recorder), a_call(), []
    again = CompiledLaunch(kernel, GRID, arguments_of(*call), POINTERS)
    chain = triton.knobs.runtime.launch_enter_hook
    other = a_call()
    chain.add(seen.append)
    try:
        again.run(addresses(*other), None)
    finally:
        chain.remove(seen.append)
    expected(kernel, other)
    found, wanted = recorder.launches
    assert chain in found  # Triton's C code calls it
    assert chain not in wanted
    assert found[-1] == wanted[-1]


@pytest.mark.parametrize(
    "attributes",
    [
        pytest.param({"global_scratch_size": 8}, id="scratch-of-the-kernel"),
        pytest.param({"profile_scratch_size": 8}, id="scratch-of-a-profiler"),
        pytest.param({"gsan_enabled": True}, id="sanitizer"),
        pytest.param({"launch": print}, id="a-launcher-without-triton's-encoding-around-it"),
    ],
)
def test_kernels_that_need_the_runner(recorder, attributes):
    assert find_launcher(compiled_kernel(recorder, **attributes), GRID) is None


def test_other_launchers_and_other_kernels_keep_the_runner(recorder):
    kernel = compiled_kernel(recorder)
    kernel._run = lambda *arguments: None
    assert find_launcher(kernel, GRID) is None
    assert find_launcher(object(), GRID) is None


def test_a_kernel_with_other_parameters_than_the_launch_keeps_the_runner(recorder):
    kernel = compiled_kernel(recorder, signature={"q_ptr": "*fp16", "hidden": "i32"})
    again = CompiledLaunch(kernel, GRID, {"q_ptr": 64}, [Pointer(0, 0, 0)])
    assert again._direct is None

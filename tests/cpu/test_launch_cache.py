"""LaunchCache: the second call of a key launches what the first one compiled, with its own tensors."""

import weakref
from types import SimpleNamespace

import pytest
import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from triton_kv import compiled_launch
from triton_kv.compiled_launch import current_stream
from triton_kv.launch import Launch
from triton_kv.launch_cache import LaunchCache, SameLaunch, described

CPU = torch.device("cpu")
GPU = torch.device("cuda", 3)


class Compiled:
    """Stands for Triton's compiled kernel."""

    def __init__(self):
        self.calls = []

    def __getitem__(self, grid):
        return lambda *arguments: self.calls.append((grid, arguments))


class Kernel(Compiled):
    """Stands for a @triton.jit function; launching it returns the compiled kernel."""

    def __init__(self):
        super().__init__()
        self.compiled = Compiled()

    def __getitem__(self, grid):
        def launch(**arguments):
            self.calls.append((grid, arguments))
            options = ("num_warps", "num_stages", "enable_fp_fusion")
            self.compiled.parameters = [name for name in arguments if name not in options]
            return self.compiled

        return launch


class Launcher:
    """Stands for Triton's launcher, where one is known. These tests launch by the runner, for want of a stream."""

    def __init__(self, compiled, grid):
        self.parameters = compiled.parameters

    def expand(self, name, descriptor):
        return [descriptor.base.data_ptr()]

    def takes(self, arguments, values, maps):
        return True


@pytest.fixture
def known_launcher(monkeypatch):
    monkeypatch.setattr(compiled_launch, "find_launcher", Launcher)


def launch(kernel, **arguments):
    return Launch(kernel=kernel, grid=(3,), arguments=arguments, num_warps=4, num_stages=1)


def test_known_keys_go_past_the_first_preparation(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    kernel, cache = Kernel(), LaunchCache(("a_ptr", "b_ptr"))
    first, second = (torch.zeros(2), None), (torch.ones(2), None)
    built = []

    def build():
        built.append(1)
        return [launch(kernel, a_ptr=first[0], size=7, b_ptr=None, BLOCK=16)]

    assert not cache.knows("key")
    cache.run("key", CPU, first, build)
    assert cache.knows("key")
    cache.run("key", CPU, second, build)
    assert len(built) == len(kernel.calls) == 1
    ((grid, arguments),) = kernel.compiled.calls
    assert grid == (3, 1, 1)
    assert arguments[0] == second[0].data_ptr()
    assert arguments[1:] == (7, None, 16)
    cache.run("other", CPU, first, build)
    assert len(built) == 2


def test_launches_with_tensors_that_are_not_named_are_prepared_each_time(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    kernel, cache = Kernel(), LaunchCache(("a_ptr",))
    for _ in range(2):
        cache.run("key", CPU, (None,), lambda: [launch(kernel, a_ptr=None, hidden=torch.zeros(1))])
    assert len(kernel.calls) == 2
    assert not cache.knows("key")


def test_the_same_launch_is_prepared_once():
    kernel, tensor = Kernel(), torch.zeros(2)
    same = SameLaunch(launch(kernel, a_ptr=tensor, b_ptr=None, size=7, BLOCK=16))
    for _ in range(3):
        same.run(CPU)
    assert len(kernel.calls) == 1
    assert kernel.compiled.calls == [((3, 1, 1), (tensor.data_ptr(), None, 7, 16))] * 2


def test_no_tensor_is_kept_alive(known_launcher):
    kernel = Kernel()
    cache = LaunchCache(("a_ptr", "work_ptr"), derived={"a_desc": "a_ptr", "marks_ptr": "work_ptr"})

    def call():
        tensor, work = torch.zeros(4, 16), torch.zeros(64)
        arguments = {"a_ptr": tensor, "a_desc": boxes(tensor), "work_ptr": work, "marks_ptr": work[16:]}
        cache.run("key", CPU, (tensor, None), lambda: [launch(kernel, **arguments)])
        kernel.calls.clear()
        return weakref.ref(tensor), weakref.ref(work)

    for _ in range(2):
        assert [alive() for alive in call()] == [None, None]
    assert cache.knows("key")


def boxes(tensor):
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, 16])


def test_descriptors_and_views_follow_the_tensors_of_a_call(known_launcher):
    kernel = Kernel()
    cache = LaunchCache(("q_ptr", "k_cache_ptr"), derived={"q_desc": "q_ptr", "v_desc": "k_cache_ptr"})
    first, second = ((torch.zeros(4, 16), torch.zeros(2, 8, 16)) for _ in range(2))

    def build():
        q, cache_ = first
        return [launch(kernel, q_desc=boxes(q), v_desc=boxes(cache_[1]), k_cache_ptr=cache_, size=5)]

    cache.run("key", CPU, first, build)
    for q, both in (second, first):
        cache.run("key", CPU, (q, both), build)
        _, (q_desc, v_desc, k_ptr, size) = kernel.compiled.calls.pop()
        assert (q_desc.base.data_ptr(), k_ptr, size) == (q.data_ptr(), both.data_ptr(), 5)
        assert v_desc.base.data_ptr() == both[1].data_ptr()
        assert type(q_desc) is TensorDescriptor
        assert (q_desc.shape, q_desc.strides, q_desc.block_shape) == ([4, 16], [16, 1], [1, 16])
        assert v_desc.shape == [8, 16]
    assert len(kernel.calls) == 1


def test_a_tensor_that_launches_share_and_a_call_does_not_bring_is_made_anew():
    kernel = Kernel()
    cache = LaunchCache(("q_ptr", "work_ptr"), derived={"marks_ptr": "work_ptr"})
    q, given = torch.zeros(2), torch.zeros(40, dtype=torch.int32)

    def build(work):
        marks = work[24:].view(torch.int8)
        return [launch(kernel, work_ptr=work, marks_ptr=marks), launch(kernel, q_ptr=q, work_ptr=work)]

    cache.run("none", CPU, (q, None), lambda: build(torch.empty(40, dtype=torch.int32)))
    cache.run("given", CPU, (q, given), lambda: build(given))
    assert cache.find("none").temporaries == [(1, (40,), torch.int32)]
    assert cache.find("given").temporaries == []
    for key, work in (("none", None), ("given", given)):
        cache.run(key, CPU, (q, work), None)
        (_, (listed, marks)), (_, (q_ptr, walked)) = kernel.compiled.calls
        assert listed == walked != 0
        assert marks == listed + 24 * 4
        assert q_ptr == q.data_ptr()
        if work is not None:
            assert listed == work.data_ptr()
        kernel.compiled.calls.clear()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param("marks_ptr", torch.zeros(4), id="derived-from-another-storage"),
        pytest.param("q_ptr", torch.zeros(4), id="another-tensor-than-the-call's"),
        pytest.param("v_desc", boxes(torch.zeros(4, 16)), id="a-descriptor-of-another-tensor"),
        pytest.param("mystery_desc", boxes(torch.zeros(4, 16)), id="a-descriptor-that-is-not-named"),
        pytest.param("config", ("a", 1), id="a-tuple"),
        pytest.param("config", torch.float16, id="a-dtype"),
    ],
)
def test_other_arguments_are_prepared_each_time(known_launcher, name, value):
    kernel = Kernel()
    cache = LaunchCache(("q_ptr",), derived={"marks_ptr": "q_ptr", "v_desc": "q_ptr"})
    q = torch.zeros(4)
    for _ in range(2):
        cache.run("key", CPU, (q,), lambda: [launch(kernel, **{"q_ptr": q, name: value})])
    assert len(kernel.calls) == 2
    assert not cache.knows("key")


def test_descriptors_are_not_kept_for_a_launcher_that_is_not_known():
    kernel, q = Kernel(), torch.zeros(4, 16)
    cache = LaunchCache(("q_ptr",), derived={"q_desc": "q_ptr"})
    for _ in range(2):
        cache.run("key", CPU, (q,), lambda: [launch(kernel, q_desc=boxes(q))])
    assert len(kernel.calls) == 2
    assert not cache.knows("key")


def test_the_runner_launches_where_hooks_are_set(monkeypatch):
    monkeypatch.setattr("triton_kv.launch._stream_handle", lambda index: 100 + index)
    runtime = triton.knobs.runtime
    assert current_stream(GPU) == 103
    assert current_stream(CPU) is None
    for name in ("launch_enter_hook", "launch_exit_hook"):
        with monkeypatch.context() as patch:
            patch.setattr(runtime, name, lambda metadata: None)
            assert current_stream(GPU) is None
            patch.setattr(runtime, name, None)
            assert current_stream(GPU) == 103
        chain = getattr(runtime, name)
        chain.add(print)
        try:
            assert current_stream(GPU) is None
        finally:
            chain.remove(print)
    assert current_stream(GPU) == 103
    monkeypatch.setattr("triton_kv.launch._stream_handle", None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=200 + device.index))
    assert current_stream(GPU) == 203


def test_a_call_asks_for_the_stream_once(monkeypatch):
    asked = []
    monkeypatch.setattr("triton_kv.launch_cache.current_stream", lambda device: asked.append(device))
    kernel, cache, q = Kernel(), LaunchCache(("q_ptr",)), torch.zeros(4)
    for _ in range(3):
        cache.run("key", CPU, (q,), lambda: [launch(kernel, q_ptr=q)] * 2)
    assert asked == [CPU] * 2


def test_a_description_tells_shapes_strides_types_and_alignment_apart():
    base = torch.zeros(64)
    same = described(base[16:20])
    assert described(base[32:36]) == same
    for other in (base[16:21], base[16:24:2], base[17:21], base[16:20].int(), None):
        assert described(other) != same

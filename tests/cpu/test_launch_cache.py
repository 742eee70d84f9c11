"""LaunchCache: the second call of a key launches what the first one compiled, with its own tensors."""

import torch

from triton_kv.launch import Launch
from triton_kv.launch_cache import LaunchCache, SameLaunch, described

CPU = torch.device("cpu")


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
            return self.compiled

        return launch


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


def test_a_template_keeps_no_tensor_alive():
    kernel, cache = Kernel(), LaunchCache(("a_ptr",))
    tensor = torch.zeros(2)
    cache.run("key", CPU, (tensor,), lambda: [launch(kernel, a_ptr=tensor)])
    ((prepared,),) = cache._known.values()
    assert prepared.arguments == [None]


def test_a_description_tells_shapes_strides_types_and_alignment_apart():
    base = torch.zeros(64)
    same = described(base[16:20])
    assert described(base[32:36]) == same
    for other in (base[16:21], base[16:24:2], base[17:21], base[16:20].int(), None):
        assert described(other) != same

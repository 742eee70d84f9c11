"""Registration, the way around the dispatcher, and what a launch compiles."""

import pytest
import torch
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from triton_kv.launch import Launch, count_compilations, eager, register


class Recording(TorchDispatchMode):
    """Notes every op that reaches the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    pass


def add_one_(x: torch.Tensor) -> None:
    x.add_(1)


@pytest.fixture(scope="module")
def op():
    return register("add_one_for_tests", "(Tensor(a!) x) -> ()", add_one_)


def test_register(op):
    x = torch.zeros(3)
    op(x)
    assert x.tolist() == [1, 1, 1]
    torch.library.opcheck(op, (torch.zeros(3),))
    op(torch.zeros(3, device="meta"))
    with pytest.raises(NotImplementedError, match="add_one_for_tests"):
        op(torch.zeros(3).to_sparse())


def test_eager_calls_skip_the_dispatcher():
    x = torch.zeros(3)
    assert eager(x, None)
    with torch.no_grad(), torch.device("cpu"):  # factory defaults concern no op over given tensors
        assert eager(x)


def test_tracers_see_the_op(op):
    x = torch.zeros(3)
    with Recording() as mode:
        assert not eager(x)
        op(x)
    assert op in mode.seen
    with BaseTorchFunctionMode():
        assert not eager(x)
    with torch.device("cpu"), BaseTorchFunctionMode():
        assert not eager(x)
    assert not eager(x, x.as_subclass(Subclass))
    under_vmap = []
    torch.func.vmap(lambda row: (under_vmap.append(eager(row)), row)[1])(x)
    assert under_vmap == [False]
    compiled = torch.compile(lambda y: y + (1 if eager(y) else 2), backend="eager", fullgraph=True)
    assert compiled(torch.zeros(3)).tolist() == [2, 2, 2]


class FakeKernel:
    """Takes a launch as a jit function does, and records it."""

    def __init__(self) -> None:
        self.calls = []
        self.loaded = 0

    def __getitem__(self, grid):
        return lambda **arguments: self.calls.append((grid, arguments))

    def warmup(self, *, grid, **arguments):
        self.calls.append((grid, arguments))
        return self

    def _init_handles(self):
        self.loaded += 1


@pytest.mark.parametrize("launch_pdl", [False, True])
def test_a_launch_hands_everything_on(launch_pdl):
    kernel = FakeKernel()
    launch = Launch(kernel, (2, 3), {"x": 1}, num_warps=4, num_stages=2, launch_pdl=launch_pdl)
    wanted = {"x": 1, "num_warps": 4, "num_stages": 2, "enable_fp_fusion": True}
    if launch_pdl:
        wanted["launch_pdl"] = True
    launch.run()
    launch.run(torch.device("cpu"))
    assert launch.compile(load=False) is kernel
    assert kernel.loaded == 0
    assert launch.compile() is kernel
    assert kernel.loaded == 1
    assert kernel.calls == [((2, 3), wanted)] * 4


def test_count_compilations_keeps_the_hook_that_was_there(monkeypatch):
    import triton

    heard = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **call: heard.append(call["repr"]))
    with count_compilations() as compiled:
        triton.knobs.runtime.jit_cache_hook(repr="kernel")
    triton.knobs.runtime.jit_cache_hook(repr="later")
    assert (compiled, heard) == (["kernel"], ["kernel", "later"])

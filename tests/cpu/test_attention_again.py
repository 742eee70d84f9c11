"""Eager calls of `paged_attention` again: with other tensors, known launches get what launches built for them would.

CPU tensors that claim to be on a GPU, and kernels that write down their arguments.
"""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.cpu.test_launch_cache import Launcher
from triton_kv import AttentionMetadata, AttentionPlan, attention, compiled_launch, launch, paged_attention, plan
from triton_kv.choices import Hardware
from triton_kv.compiled_launch import is_descriptor
from triton_kv.launch_cache import LaunchCache
from triton_kv.prefill_hopper import use_prefill_kernel

H200 = Hardware(132, 90)
FIELDS = [field.name for field in dataclasses.fields(AttentionMetadata)]


class Compiled:
    def __init__(self, name, parameters, calls):
        self.name, self.parameters, self.calls = name, parameters, calls

    def __getitem__(self, grid):
        return lambda *arguments: self.calls.append((self.name, grid, [told(x) for x in arguments]))


def told(argument):
    """An argument as one can compare it: tensors and bases as addresses."""
    if is_descriptor(argument):
        layout = getattr(argument, "layout", None)
        return argument.base.data_ptr(), argument.shape, argument.strides, argument.block_shape, layout
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument


class Calls(list):
    def __init__(self):
        super().__init__()
        self.built = []


@pytest.fixture
def calls(monkeypatch):
    """The launches of calls known before; what was built anew is in `calls.built`."""
    calls = Calls()

    def run(self, device=None):
        name = self.kernel.__name__
        grid = (*self.grid, 1, 1)[:3]
        calls.built.append((name, grid, [told(x) for x in self.arguments.values()]))
        return Compiled(name, list(self.arguments), calls)

    monkeypatch.setattr(launch.Launch, "run", run)
    monkeypatch.setattr(compiled_launch, "find_launcher", Launcher)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    monkeypatch.setattr(attention, "hardware_of", lambda device: H200)
    monkeypatch.setattr(plan, "hardware_of", lambda device: H200)
    monkeypatch.setattr(plan, "interpreted", lambda kernel: True)  # a CPU's plan has nothing to share otherwise
    known = attention._CALLS
    derived = {name: list(known._index)[index] for name, index in known._derived.items()}
    monkeypatch.setattr(attention, "_CALLS", LaunchCache(list(known._index), derived))
    return calls


def aligned(*shape, dtype=torch.float16):
    """TMA needs 16 bytes, and the kernels' variants depend on it."""
    storage = torch.zeros(torch.Size(shape).numel() + 64, dtype=dtype)
    start = -storage.data_ptr() % 128 // storage.element_size()
    return storage[start : start + torch.Size(shape).numel()].view(shape)


def metadata(num_seqs, query_len):
    num_tokens = num_seqs * query_len
    return AttentionMetadata(
        block_table=torch.zeros(num_seqs, 64, dtype=torch.int32),
        seq_lens=torch.full((num_seqs,), 1000, dtype=torch.int32),
        slot_mapping=torch.arange(num_tokens, dtype=torch.int32),
        num_tokens=num_tokens,
        num_seqs=num_seqs,
        max_query_len=query_len,
        query_start_loc=None if query_len == 1 else torch.arange(num_seqs + 1, dtype=torch.int32) * query_len,
    )


def two_tensors(block_size):
    return aligned(64, block_size, 8, 128), aligned(64, block_size, 8, 128)


def one_tensor(block_size):
    k, v = aligned(2, 64, block_size, 8, 128)
    return k, v


def interleaved(block_size):
    both = aligned(64, block_size, 8, 2, 128)
    return both[:, :, :, 0], both[:, :, :, 1]


ROUTES = [
    pytest.param(1, None, ["decode_kernel", "join_kernel"], id="decode"),
    pytest.param(256, None, ["work_kernel", "hopper_kernel"], id="hopper"),
    pytest.param(256, "portable", ["prefill_kernel"], id="portable"),
]


@pytest.mark.parametrize("make_cache", [two_tensors, one_tensor, interleaved])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(("query_len", "kernel", "names"), ROUTES)
@pytest.mark.parametrize("with_plan", [False, True])
def test_known_launches_get_what_new_ones_would(calls, query_len, kernel, names, block_size, make_cache, with_plan):
    steps = []
    for _ in range(2):
        batch = metadata(4, query_len)
        q, out = aligned(batch.num_tokens, 32, 128), aligned(batch.num_tokens, 32, 128)
        steps.append((q, make_cache(block_size), batch, out))

    def attend(q, cache, batch, out):
        shared = None
        with use_prefill_kernel(kernel):
            if with_plan:
                shared = AttentionPlan(cache, 32, max_seqs=4, max_tokens=1024)
                shared.prepare(batch)
                calls.built.clear()
            paged_attention(q, cache, batch, out=out, plan=shared)
        plans.append(shared)  # its memory stays, so that no other plan gets the same

    plans = []
    attend(*steps[0])
    built = calls.built.copy()
    if names[-1] == "hopper_kernel" and built[-1][0] != "hopper_kernel":
        pytest.skip("this Triton has no Hopper kernel")
    assert [name for name, _, _ in built] == (names[-1:] if with_plan and len(names) == 2 and query_len > 1 else names)
    attend(*steps[1])
    assert len(calls) == len(built)
    known = calls.copy()
    attention._CALLS._known.clear()
    calls.built.clear()
    shared = plans[-1]
    with use_prefill_kernel(kernel):
        paged_attention(*steps[1][:3], out=steps[1][3], plan=shared)
    for (name, grid, found), (new_name, new_grid, wanted), (_, _, first) in zip(known, calls.built, built, strict=True):
        assert (name, grid, len(found)) == (new_name, new_grid, len(wanted))
        temporary = set() if with_plan else addresses_of_temporaries(found, wanted, first)
        for position, pair in enumerate(zip(found, wanted, strict=True)):
            assert pair[0] == pair[1] or position in temporary
        assert found != first


def addresses_of_temporaries(found, wanted, first):
    """Positions of what each call allocates: partials of decode, or the work list and views of it."""
    differ = {i for i, pair in enumerate(zip(found, wanted, strict=True)) if pair[0] != pair[1]}
    assert len(differ) <= 2
    offsets = {found[i] - wanted[i] for i in differ}
    assert len(offsets) <= 1  # one allocation
    return differ


def test_a_plan_without_a_list_is_another_call(calls):
    """Prepared under one kernel, called under another: the list has to be made in the call."""
    cache, batch = two_tensors(64), metadata(4, 256)
    q, out = aligned(1024, 32, 128), aligned(1024, 32, 128)
    shared = AttentionPlan(cache, 32, max_seqs=4, max_tokens=1024)
    found = []
    for kernel in (None, "portable"):
        with use_prefill_kernel(kernel):
            shared.prepare(batch)
        calls.built.clear()
        paged_attention(q, cache, batch, out=out, plan=shared)
        found.append([name for name, _, _ in calls.built])
    if found[0] != ["hopper_kernel"]:
        pytest.skip("this Triton has no Hopper kernel")
    assert found == [["hopper_kernel"], ["work_kernel", "hopper_kernel"]]
    assert calls == []


def test_descriptors_are_told_apart():
    tensor = torch.zeros(4, 16)
    assert is_descriptor(TensorDescriptor(tensor, [4, 16], [16, 1], [1, 16]))
    assert not is_descriptor(tensor)


def test_what_shapes_a_call_is_told_by_value_and_by_type(calls):
    """A scale that lies in a tensor may change under the same object; True equals 1 and is no window."""
    cache, batch, q = two_tensors(64), metadata(4, 1), aligned(4, 32, 128)
    scale = torch.tensor(0.5)
    paged_attention(q, cache, batch, scale=scale, window=1)
    scale.fill_(0.125)
    paged_attention(q, cache, batch, scale=scale, window=1)
    assert calls == [], "another scale is another call"
    paged_attention(q, cache, batch, scale=0.125, window=1, softcap=torch.tensor(0.0), causal=torch.tensor(True))
    assert [name for name, _, _ in calls] == ["decode_kernel", "join_kernel"]
    for window in (True, 1.0):
        with pytest.raises(TypeError, match="window must be an int"):
            paged_attention(q, cache, batch, scale=0.125, window=window)
    for name, value in (("sinks", [0.0] * 32), ("alibi_slopes", 0.5), ("tree_mask", [1, 2])):
        with pytest.raises(TypeError, match=f"{name} must be"):
            paged_attention(q, cache, batch, **{name: value})


def test_what_only_looks_like_metadata_is_refused_by_a_known_call_too(calls):
    cache, batch, q = two_tensors(64), metadata(4, 1), aligned(4, 32, 128)
    paged_attention(q, cache, batch)
    for other in (SimpleNamespace(**{name: getattr(batch, name) for name in (*FIELDS, "device")}), {}):
        with pytest.raises(TypeError, match="metadata must be an AttentionMetadata"):
            paged_attention(q, cache, other)
    assert calls == []


def test_padding_tokens_without_a_sequence_launch_nothing(calls):
    batch = AttentionMetadata(
        block_table=torch.zeros(0, 4, dtype=torch.int32),
        seq_lens=torch.zeros(0, dtype=torch.int32),
        slot_mapping=torch.full((3,), -1, dtype=torch.int32),
        query_start_loc=torch.zeros(1, dtype=torch.int32),
        num_tokens=3,
        num_seqs=0,
        max_query_len=1,
    )
    shared = AttentionPlan(two_tensors(16), 32, max_seqs=4)
    shared.prepare(batch)
    for known in (None, shared):
        out, lse = paged_attention(aligned(3, 32, 128) + 1, two_tensors(16), batch, return_lse=True, plan=known)
        assert not out.any()
        assert torch.isneginf(lse).all()
    assert calls == calls.built == []

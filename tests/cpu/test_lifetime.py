"""Views, close, death in any order, interpreter exit, fork: each case in a process of its own.

A case passes when the process ends with the expected code, prints what is expected, and writes nothing to stderr.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PRELUDE = """
import gc, os, sys, threading, weakref
import torch
from triton_kv.errors import *
from triton_kv.extensible import ExtensibleTensor
from triton_kv.memory import FakeMemory, FaultyMemory, HostMemory, PoisonedMemory, open_memory
from triton_kv.memory.reservation import reap

G = 4096

def make(memory=None, num_segments=2):
    memory = memory or HostMemory(G)
    buffer = ExtensibleTensor(num_segments * 8 * G, num_segments=num_segments, memory=memory)
    buffer.resize_per_segment_(2 * G, zero_new=True)
    return memory, buffer
"""


# Importing torch takes seconds: one process does it, and forks for each case. The child runs its case as the rest of
# the program, so it ends the way any interpreter ends.
NURSERY = """
import json, os, sys
for order in sys.stdin:
    case, out, err = json.loads(order)
    child = os.fork()
    if child == 0:
        os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(os.open(err, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
exec(case)
"""


class Nursery:
    def __init__(self, folder: Path) -> None:
        self.out, self.err = folder / "out", folder / "err"
        program = [sys.executable, "-X", "dev", "-c", PRELUDE + NURSERY]
        self.process = subprocess.Popen(program, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, code: str) -> tuple[int, str, str]:
        """Exit code (negative: a signal), stdout and stderr of a process that runs `code`."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps([textwrap.dedent(code), str(self.out), str(self.err)]) + "\n")
        stdin.flush()
        return int(stdout.readline()), self.out.read_text().strip(), self.err.read_text()


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path_factory.mktemp("nursery"))
    yield nursery
    nursery.process.communicate(timeout=60)


def test_the_nursery_reports_what_happens(nursery: Nursery) -> None:
    assert nursery.run("print('hello'); sys.exit(3)") == (3, "hello", "")
    code, _, err = nursery.run("raise ValueError('seen')")
    assert code == 1
    assert "ValueError: seen" in err
    code, _, err = nursery.run(
        """
        class Loud:
            def __del__(self): raise OSError("noise at exit")
        loud = Loud()
        """
    )
    assert "noise at exit" in err


QUIET_EXITS = {
    "everything alive": """
        memory, buffer = make()
        view = buffer.full_view()
    """,
    "view outlives the buffer": """
        memory, buffer = make()
        view = buffer.full_view()
        del buffer
    """,
    "view alone": """
        view = make()[1].full_view()
        assert not view[:G].any()
    """,
    "memory first": """
        memory, buffer = make()
        view = buffer.full_view()
        del memory, buffer
        gc.collect()
        del view
    """,
    "closed with a view": """
        memory, buffer = make()
        view = buffer.full_view()
        buffer.free()
    """,
    "closed twice": """
        memory, buffer = make()
        buffer.free()
        buffer.free()
        assert memory.live == (0, 0, 0)
    """,
    "reference cycle": """
        memory, buffer = make()
        cycle = [buffer, buffer.full_view()]
        cycle.append(cycle)
        del memory, buffer, cycle
    """,
    "cycle collected, then used again": """
        memory, buffer = make()
        cycle = [buffer, buffer.full_view()]
        cycle.append(cycle)
        del buffer, cycle
        gc.collect()
        make(memory)[1].free()
        assert memory.live == (0, 0, 0), memory.live
    """,
    "kept by an exception": """
        memory, buffer = make()
        try:
            buffer.resize_per_segment_(0)
        except ValueError as error:
            kept = error
    """,
    "kept by a module": """
        memory, buffer = make()
        sys.modules["triton_kv.kept"] = buffer
        torch.kept = buffer.full_view()
    """,
    "modules torn down first": """
        memory, buffer = make()
        view = buffer.full_view()
        for name in [name for name in sys.modules if name.startswith("triton_kv")]:
            vars(sys.modules[name]).clear()
            del sys.modules[name]
        gc.collect()
        del buffer, view, memory
    """,
    "thread-local": """
        local = threading.local()
        local.buffer = make()[1]
        thread = threading.Thread(target=lambda: setattr(local, "buffer", make()[1]))
        thread.start(); thread.join()
    """,
    "half-built buffer": """
        memory = FaultyMemory(HostMemory(G))
        memory.fail("reserve")
        try:
            make(memory)
        except AddressSpaceExhausted:
            pass
        assert memory.live == (0, 0, 0)
        try:
            HostMemory(granularity=5)
        except ValueError:
            pass
    """,
    "half-grown buffer": """
        memory = FaultyMemory(HostMemory(G))
        memory.fail("map", 2)
        try:
            make(memory)
        except DriverError:
            pass
    """,
    "broken buffer": """
        memory = FaultyMemory(HostMemory(G))
        memory.fail("map", 2)
        memory.fail("unmap")
        try:
            make(memory)
        except DriverError as error:
            assert len(error.undo_failures) == 1
    """,
    "in the middle of a transaction": """
        from triton_kv.memory.transaction import Transaction
        memory, buffer = make()
        transaction = Transaction()
        transaction.__enter__()
        buffer.grow_(4 * G, transaction)
    """,
    "shared memory of the process": """
        buffer = ExtensibleTensor(1 << 30, "cpu").resize_(1 << 20, zero_new=True)
        view = buffer.tensor
    """,
    "dying in a finaliser at exit": """
        import atexit
        memory, buffer = make()
        atexit.register(lambda kept=[buffer, buffer.full_view()]: kept.clear())
        del buffer
    """,
}


@pytest.mark.parametrize("code", QUIET_EXITS.values(), ids=QUIET_EXITS.keys())
def test_exit_is_silent(nursery: Nursery, code: str) -> None:
    assert nursery.run(code) == (0, "", "")


FAULTS = {
    "read past the commit": "memory, buffer = make(); buffer.full_view()[2 * G].item()",
    "write past the commit": "memory, buffer = make(); buffer.full_view()[2 * G] = 1",
    "last byte of the reservation": "memory, buffer = make(); buffer.full_view()[-1].item()",
    "second segment": "memory, buffer = make(); buffer.full_view()[8 * G + 2 * G].item()",
    "nothing committed": "view = ExtensibleTensor(G, memory=HostMemory(G)).full_view(); view[0].item()",
    "stale view after close": "buffer = make()[1]; view = buffer.full_view(); buffer.free(); view[0].item()",
    "stale view after shrink": """
        memory, buffer = make()
        view = buffer.full_view()
        buffer.shrink_per_segment_(0)
        view[0].item()
    """,
    "stale view, range asked for again": """
        memory, buffer = make()
        view = buffer.full_view()
        buffer.free()
        others = [make(memory)[1] for _ in range(50)]
        view[0].item()
    """,
    "fill past the commit": "memory, buffer = make(); memory.fill(buffer.base_ptr + 2 * G - 1, 2)",
    "large zero fill past the commit": "memory, buffer = make(HostMemory()); memory.fill(buffer.base_ptr, 8 << 20)",
    "mapped but no access": """
        memory = HostMemory(G)
        address, handle = memory.reserve(G), memory.create(G)
        memory.map(address, G, handle)
        memory.view(address, G, None)[0].item()
    """,
}


@pytest.mark.parametrize("code", FAULTS.values(), ids=FAULTS.keys())
def test_touching_what_is_not_committed_is_fatal(nursery: Nursery, code: str) -> None:
    outcome = nursery.run("import faulthandler; faulthandler.disable()\n" + textwrap.dedent(code))
    assert outcome == (-signal.SIGSEGV, "", "")


def test_repr_touches_nothing(nursery: Nursery) -> None:
    code = """
        memory, buffer = make()
        for state in ("open", "freed"):
            text = repr(buffer) + str(buffer) + repr(buffer._reservation) + repr(memory)
            buffer.free()
        print("ExtensibleTensor" in text)
    """
    assert nursery.run(code) == (0, "True", "")


def test_finalisers_make_no_driver_call(nursery: Nursery) -> None:
    code = """
        memory, buffer = make(FaultyMemory(HostMemory(G)))
        view = buffer.full_view()
        before = memory.calls.total()
        del buffer
        gc.collect()
        del view
        gc.collect()
        assert memory.calls.total() == before
        assert memory.live == (1, 2, 2)
        assert reap(memory) == []
        assert memory.live == (0, 0, 0)
    """
    assert nursery.run(code) == (0, "", "")


FORK = """
    memory, buffer = make(FaultyMemory(HostMemory(G)))
    view = buffer.full_view()
    before = memory.calls.total()
    pid = os.fork()
    if pid == 0:
        refused = []
        for name, use in {
            "resize": lambda: buffer.resize_per_segment_(3 * G),
            "shrink": lambda: buffer.shrink_per_segment_(0),
            "free": buffer.free,
            "view": buffer.full_view,
            "new": lambda: make(memory),
            "reserve": lambda: memory.reserve(G),
            "free range": lambda: memory.free(buffer.base_ptr, 16 * G),
            "create": lambda: memory.create(G),
            "release": lambda: memory.release(1),
            "map": lambda: memory.map(buffer.base_ptr, G, 1),
            "set_access": lambda: memory.set_access(buffer.base_ptr, G),
            "unmap": lambda: memory.unmap(buffer.base_ptr, G),
            "fill": lambda: memory.fill(buffer.base_ptr, G),
            "wait": memory.wait,
            "synchronize": memory.synchronize,
            "memory_info": memory.memory_info,
        }.items():
            try:
                use()
            except Forked as error:
                assert "in the child" in str(error)
            else:
                print("not refused:", name)
        del view, buffer
        gc.collect()
        # What the child makes for itself works, and what it inherited is forgotten without a call.
        inner = memory.memory
        own, other = make()
        other.resize_per_segment_(3 * G, zero_new=True)
        other.free()
        assert own.live == (0, 0, 0)
        assert inner._books.live == (1, 2, 2)
        sys.exit(0)
    status = os.waitpid(pid, 0)[1]
    assert status == 0, status
    assert memory.calls.total() == before
    buffer.resize_per_segment_(4 * G, zero_new=True)
    assert not view[: 4 * G].any()
    buffer.free()
    del view
    reap(memory)
    assert memory.live == (0, 0, 0)
"""


def test_forked_child_is_refused_and_the_parent_works_on(nursery: Nursery) -> None:
    assert nursery.run(FORK) == (0, "", "")


def test_fork_while_another_thread_holds_the_lock(nursery: Nursery) -> None:
    code = """
        memory, buffer = make()
        holding, done = threading.Event(), threading.Event()
        def hold():
            with buffer._lock, memory._books.lock:
                holding.set()
                done.wait()
        thread = threading.Thread(target=hold)
        thread.start()
        holding.wait()
        pid = os.fork()
        if pid == 0:
            for use in (lambda: buffer.resize_per_segment_(3 * G), buffer.free, lambda: memory.create(G)):
                try:
                    use()
                    os._exit(1)
                except Forked:
                    pass
            os._exit(0)
        done.set()
        thread.join()
        assert os.waitpid(pid, 0)[1] == 0
    """
    assert nursery.run(code) == (0, "", "")


def test_child_opens_host_memory_of_its_own(nursery: Nursery) -> None:
    code = """
        parent = open_memory("cpu")
        assert open_memory("cpu") is parent
        pid = os.fork()
        if pid == 0:
            child = open_memory("cpu")
            assert child is not parent
            ExtensibleTensor(G, "cpu").resize_(G, zero_new=True).free()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
    """
    assert nursery.run(code) == (0, "", "")


def test_import_is_light_and_starts_no_cuda() -> None:
    code = """
        assert not torch.cuda.is_initialized()
        assert "cuda.bindings.driver" not in [name for name in sys.modules if name not in before]
    """
    program = "import torch, sys; before = set(sys.modules)\n" + PRELUDE + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")

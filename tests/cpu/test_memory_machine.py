"""How much memory there is, from made-up `/proc` and `/sys` trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from triton_kv.memory import HostMemory
from triton_kv.memory.machine import machine_memory

KIB, GIB = 1 << 10, 1 << 30
MEMINFO = "MemTotal: {} kB\nMemFree: {} kB\nMemAvailable: {} kB\nHugePages_Total: 0\n"

V1 = "sys/fs/cgroup/memory"
V2 = "sys/fs/cgroup"


def _tree(root: Path, files: dict[str, str]) -> Path:
    meminfo = MEMINFO.format(16 * GIB // KIB, 1 * GIB // KIB, 12 * GIB // KIB)
    for name, text in {"proc/meminfo": meminfo, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def _v2(group: str, limit: object, usage: int, cache: int = 0) -> dict[str, str]:
    at = f"{V2}{group}"
    return {
        f"{at}/memory.max": f"{limit}\n",
        f"{at}/memory.current": f"{usage}\n",
        f"{at}/memory.stat": f"inactive_file {cache}\n",
    }


def _v1(group: str, limit: int, usage: int, cache: int = 0) -> dict[str, str]:
    at = f"{V1}{group}"
    return {
        f"{at}/memory.limit_in_bytes": f"{limit}\n",
        f"{at}/memory.usage_in_bytes": f"{usage}\n",
        f"{at}/memory.stat": f"total_inactive_file {cache}\n",
    }


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({}, (12 * GIB, 16 * GIB), id="no control groups"),
        pytest.param({"proc/self/cgroup": "0::/a/b\n", **_v2("/a/b", 4 * GIB, GIB)}, (3 * GIB, 4 * GIB), id="v2"),
        pytest.param(
            {"proc/self/cgroup": "0::/a/b\n", **_v2("/a/b", 4 * GIB, 3 * GIB, 2 * GIB)},
            (3 * GIB, 4 * GIB),
            id="v2, droppable cache is free",
        ),
        pytest.param(
            {"proc/self/cgroup": "0::/a/b\n", **_v2("/a/b", "max", GIB), **_v2("/a", 8 * GIB, 6 * GIB)},
            (2 * GIB, 8 * GIB),
            id="v2, limit of the parent",
        ),
        pytest.param({"proc/self/cgroup": "0::/a\n", **_v2("/a", "max", GIB)}, (12 * GIB, 16 * GIB), id="v2, no limit"),
        pytest.param({"proc/self/cgroup": "0::/a\n", **_v2("/a", 64 * GIB, GIB)}, (12 * GIB, 16 * GIB), id="v2, large"),
        pytest.param(
            {"proc/self/cgroup": "0::/a\n", **_v2("/a", 4 * GIB, 5 * GIB)}, (0, 4 * GIB), id="v2, over the limit"
        ),
        pytest.param(
            {"proc/self/cgroup": "5:cpu:/x\n4:memory:/c\n0::/\n", **_v1("/c", 2 * GIB, GIB, GIB // 2)},
            (3 * GIB // 2, 2 * GIB),
            id="v1",
        ),
        pytest.param(
            {"proc/self/cgroup": "4:memory:/of/the/host\n", **_v1("", 2 * GIB, GIB)},
            (GIB, 2 * GIB),
            id="v1, the path is outside the container",
        ),
        pytest.param(
            {"proc/self/cgroup": "4:memory:/c\n", **_v1("/c", 0x7FFFFFFFFFFFF000, GIB)},
            (12 * GIB, 16 * GIB),
            id="v1, no limit",
        ),
    ],
)
def test_free_and_total(tmp_path: Path, files: dict[str, str], expected: tuple[int, int]) -> None:
    assert machine_memory(_tree(tmp_path, files)) == expected


def test_host_memory_without_a_budget_is_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton_kv.memory.host.machine_memory", lambda: (8 << 20, 16 << 20))
    memory = HostMemory(4096)
    assert memory.memory_info() == (8 << 20, 16 << 20)
    handle = memory.create(3 << 20)  # nothing touched it, so the machine still calls it free
    assert memory.memory_info() == (5 << 20, 16 << 20)
    memory.release(handle)
    assert memory.memory_info() == (8 << 20, 16 << 20)


def test_this_machine() -> None:
    free, total = machine_memory()
    assert 0 < free <= total

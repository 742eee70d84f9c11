"""How much memory this machine, or the control group that the process runs in, has and has left."""

from __future__ import annotations

from pathlib import Path

_NO_LIMIT = 1 << 60  # cgroup v1 writes a page-rounded 2^63 where there is no limit


def machine_memory(root: Path = Path("/")) -> tuple[int, int]:
    """Free and total bytes, from `/proc/meminfo` and every control group above the process, whichever is less.

    File cache that the kernel can drop counts as free. `root` is where `/proc` and `/sys` are looked for.
    """
    info = _fields(root / "proc/meminfo")
    total = info["MemTotal:"] * 1024
    free = info.get("MemAvailable:", info["MemFree:"]) * 1024
    for group, limit_name, usage_name, cache_name in _control_groups(root):
        limit, usage = _number(group / limit_name), _number(group / usage_name)
        if limit is None or usage is None or limit >= _NO_LIMIT:
            continue
        cache = _fields(group / "memory.stat").get(cache_name, 0)
        total = min(total, limit)
        free = min(free, limit - usage + cache)
    return max(0, min(free, total)), total


def _control_groups(root: Path) -> list[tuple[Path, str, str, str]]:
    """The memory groups of this process, innermost first, with the names of their limit, usage and cache."""
    v1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    v2 = ("memory.max", "memory.current", "inactive_file")
    groups = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, names = root / "sys/fs/cgroup", v2
        elif "memory" in controllers.split(","):
            mount, names = root / "sys/fs/cgroup/memory", v1
        else:
            continue
        # Inside a container the path may be the host's and lead nowhere; the mount's own root is then the group.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for length in range(len(parts), -1, -1):
            groups.append((mount.joinpath(*parts[:length]), *names))
    return groups


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _fields(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines)
    return {words[0]: int(words[1]) for words in pairs if len(words) > 1 and words[1].isdigit()}

"""What a cache holds and what happened to it, as numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


class CacheStats(NamedTuple):
    """Counters of a cache at one moment. Bytes are exact; those of memory agree with the driver."""

    state: str  # "open", "asleep" (also in part), "broken" or "closed"
    capacity: int  # blocks reserved
    num_blocks: int  # blocks committed
    reserved_bytes: int  # address space
    committed_bytes: int  # of the committed blocks
    mapped_bytes: int  # physical, whole granules
    padding_bytes: int  # mapped and not committed
    pooled_bytes: int  # of unused handles that are kept
    stray_bytes: int  # of handles that the driver refused to release so far
    staging_bytes: int  # of device memory to gather blocks in, made by `prepare_sleep` or held by a sleep that goes on
    host_bytes: int  # pinned
    num_handles: int
    epoch: int
    extends: int
    shrinks: int
    sleeps: int
    failures: int  # changes that raised and were undone (or broke the cache)

    def prometheus(self, labels: Mapping[str, str] | None = None) -> str:
        """The numbers in Prometheus' text format, one gauge or counter each, with `labels` on every line."""
        counters = {"extends", "shrinks", "sleeps", "failures"}
        pairs = {"state": self.state, **(labels or {})}
        lines = []
        for name, value in self._asdict().items():
            if name == "state":
                lines += _metric("triton_kv_info", "gauge", pairs, 1)
            elif name in counters:
                lines += _metric(f"triton_kv_{name}_total", "counter", labels or {}, value)
            else:
                name = {"capacity": "capacity_blocks", "num_blocks": "committed_blocks", "num_handles": "handles"}.get(
                    name, name
                )
                lines += _metric(f"triton_kv_{name}", "gauge", labels or {}, value)
        return "\n".join(lines) + "\n"


def _metric(name: str, kind: str, labels: Mapping[str, str], value: int) -> list[str]:
    inside = ",".join(f'{key}="{_escape(text)}"' for key, text in labels.items())
    return [f"# TYPE {name} {kind}", f"{name}{{{inside}}} {value}" if inside else f"{name} {value}"]


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


__all__ = ["CacheStats"]

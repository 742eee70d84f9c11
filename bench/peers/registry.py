"""The peers by family name: how each is found, and why one is absent."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from bench.candidate import Candidate, NotApplicableError
from bench.measure import describe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from bench.session import Session

MODULES = {
    "fa3": "bench.peers.fa3",
    "flashinfer": "bench.peers.flashinfer",
    "vllm": "bench.peers.vllm_triton",
    "sglang": "bench.peers.sglang_triton",
    "sdpa": "bench.peers.sdpa",
    "flex": "bench.peers.flex",
    "memset": "bench.peers.memset",
}
# Packages whose kernels no suite calls: their presence is recorded, so that nobody takes them for beaten.
UNUSED = {"flashmla": ("flash_mla", "it decodes multi-head latent attention only, which no op here does")}


def probe_peers() -> dict[str, dict[str, Any]]:
    """Family -> `available`, and `version` or the `reason` for its absence."""
    found = {family: probe_peer(family) for family in MODULES}
    for family, (package, why) in UNUSED.items():
        there = importlib.util.find_spec(package) is not None
        found[family] = {"available": False, "reason": why if there else f"No module named {package!r}"}
    return found


def probe_peer(family: str) -> dict[str, Any]:
    """Imports one peer and asks whether it can run here."""
    try:
        return {"available": True, "version": importlib.import_module(MODULES[family]).probe()}
    except Exception as error:
        return {"available": False, "reason": describe(error)}


def peer_candidates(
    session: Session, families: Iterable[str], build: Callable[[Any], list[Candidate]]
) -> list[Candidate]:
    """The candidates of the available families. `build(module)` makes one family's; if it raises, so does its run."""
    candidates = []
    for family in families:
        if not session.peer_available(family):
            continue
        try:
            candidates += build(importlib.import_module(MODULES[family]))
        except Exception as error:
            candidates.append(_refusing(family, error))
    return candidates


def _refusing(name: str, error: Exception) -> Candidate:
    def run(index: int) -> Any:
        if isinstance(error, NotApplicableError):
            raise NotApplicableError(str(error))
        raise error

    return Candidate(name, run)

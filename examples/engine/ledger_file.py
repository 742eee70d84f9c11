"""A start-up as a record: its ledger and plan as JSON, with the sources and the machine that made them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .engine import Engine

try:
    from bench.provenance import provenance
except ModuleNotFoundError:  # the example was copied out of the repository
    provenance = None  # type: ignore[assignment]


def write_ledger(engine: Engine, path: Path, command: str) -> None:
    """Writes what a started engine's ledger and plan hold. `command` is how it was started."""
    env: dict[str, Any] = provenance(command) if provenance is not None else {"source_id": None, "command": command}
    record = {
        "suite": "demo",
        "source_id": env.pop("source_id"),
        "env": env,
        "ledger": json.loads(engine.ledger.to_json()),
        "plan": json.loads(engine.plan.to_json()),
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

"""One run of the harness: the device, its rooflines, the peers that are there, and where it stands."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pathlib import Path


@dataclass
class Session:
    """What a case's measurement needs to know.

    `place` is a file that says which candidate of which case is running, so that after a crash of the process the next
    one knows whom to leave out.
    """

    device: torch.device
    quick: bool = False
    smoke: bool = False
    use_peers: bool = True
    rooflines: dict[str, Any] = field(default_factory=dict)
    peers: dict[str, dict[str, Any]] = field(default_factory=dict)
    bans: dict[str, str] = field(default_factory=dict)  # "case candidate" -> what it did
    place: Path | None = None
    started: float = field(default_factory=time.monotonic)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        """The host waits for the device."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def enter(self, case_id: str, candidate: str) -> None:
        """Notes what runs from now on."""
        if self.place is not None:
            self.place.write_text(json.dumps({"case": case_id, "candidate": candidate}), encoding="utf-8")

    def is_banned(self, case_id: str, candidate: str) -> bool:
        return f"{case_id} {candidate}" in self.bans

    def ban_reason(self, case_id: str, candidate: str) -> str:
        return self.bans[f"{case_id} {candidate}"]

    def peer_available(self, name: str) -> bool:
        """Whether a peer family ("fa3", "flashinfer", ...) may be used in this run."""
        return self.use_peers and bool(self.peers.get(name, {}).get("available"))

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started

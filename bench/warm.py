"""Compiles a share of the cases' Triton kernels into the disk cache: `python -m bench.warm OPTIONS SHARE SHARES`."""

from __future__ import annotations

import sys
import traceback

import torch

from bench.peers.registry import probe_peer
from bench.run import RunOptions
from bench.session import Session


def main(options: RunOptions, share: int, shares: int) -> int:
    """Runs every `shares`-th case on short inputs. Returns the number of cases that failed."""
    session = Session(torch.device("cuda", 0), quick=options.quick)
    session.peers = {"vllm": probe_peer("vllm")} if options.peers else {}
    work = [(suite, case) for suite, cases in options.selected() if suite.warm is not None for case in cases]
    failures = 0
    for suite, case in work[share::shares]:
        assert suite.warm is not None
        try:
            suite.warm(session, case)
        except Exception:
            failures += 1
            print(f"{case.id} was not compiled ahead:\n{traceback.format_exc(limit=-2)}", file=sys.stderr, flush=True)
            if failures > 3:
                break
    return failures


if __name__ == "__main__":
    sys.exit(min(main(RunOptions.from_json(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])), 100))

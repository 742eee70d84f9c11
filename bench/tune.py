"""Measures launch choices of decode attention side by side: `python -m bench tune [--case PATTERN] [--out FILE]`.

For each case of the decode suite every candidate choice is compiled (in several processes), checked against the
reference, and timed in turn with the others. The record holds all of them; what is chosen by default comes first. Its
`table` holds the fastest one of each case, as a row of `triton_kv.choices.DECODE_LOOPS`.
"""

from __future__ import annotations

import fnmatch
import json
import math
import multiprocessing
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench.attention_inputs import AttentionInputs
from bench.candidate import Candidate
from bench.floor import floor_us
from bench.measure import Effort, describe, measure
from bench.provenance import provenance
from bench.rooflines import measure_rooflines
from bench.session import Session
from bench.suites.decode import SUITE
from triton_kv.batch import Batch
from triton_kv.choices import DecodeChoice, hardware_of, kind_of_decode, lanes_of
from triton_kv.decode import choice_of, decode_launches
from triton_kv.layer import operands_of
from triton_kv.scoring import Scoring

if TYPE_CHECKING:
    from bench.attention_case import AttentionCase

EFFORT = Effort(rounds=3, samples=3, replay_us=1000.0, host_calls=0)
WORKERS = 12
# (tokens a tile, warps, stages, programs an SM)
LOOPS = ((64, 4, 3, 2), (32, 2, 3, 4), (32, 2, 4, 4), (64, 4, 4, 2), (32, 4, 3, 4), (64, 8, 3, 2), (128, 8, 3, 1))
JOINS = ((16, 128, 1), (32, 128, 4), (64, 32, 2), (128, 32, 4), (256, 32, 8))  # (partials, channels, warps)


def candidates(case: AttentionCase, default: DecodeChoice, num_sms: int) -> list[DecodeChoice]:
    """The default, its programs in the other order, every other loop with its join, every other join with its loop."""
    lanes = max(64, 1 << (case.head_dim - 1).bit_length())
    found = [default, replace(default, spreads_idle=not default.spreads_idle)]
    for tile, num_warps, num_stages, per_sm in LOOPS:
        tile = min(max(16, tile * 128 // lanes), 8 * case.block_size)
        num_chunks = max(1, num_sms * per_sm // case.num_kv_heads)
        found.append(replace(default, tile=tile, num_warps=num_warps, num_stages=num_stages, num_chunks=num_chunks))
        if num_chunks > 8:  # fewer partials
            found.append(replace(found[-1], num_chunks=num_chunks * 3 // 4))
    for parts, channels, warps in JOINS:
        channels = min(channels, lanes)
        found.append(replace(default, join_parts=parts, join_channels=channels, join_warps=warps))
    return list(dict.fromkeys(found))


def row_of(case: AttentionCase, choice: DecodeChoice, num_sms: int) -> tuple[int, int, int, float]:
    """The loop of a choice as a row of `DECODE_LOOPS`: tokens a tile of 128 lanes, warps, stages, programs an SM.

    Programs in quarters: the fewest that make so many chunks.
    """
    per_sm = math.ceil(4 * choice.num_chunks * case.num_kv_heads / num_sms) / 4
    return choice.tile * lanes_of(case.head_dim) // 128, choice.num_warps, choice.num_stages, per_sm


def fastest(case: AttentionCase, measured: list[dict[str, Any]], num_sms: int) -> dict[str, Any] | None:
    """The fastest of a case's choices that was right, as an entry of the table; None if none was.

    `measured` are the record's choices, what is chosen by default first. `of_default` is the fastest one's time over
    that of the default, None where the default was wrong.
    """
    right = [entry for entry in measured if entry["ok"]]
    if not right:
        return None
    best, default = min(right, key=lambda entry: entry["median_us"]), measured[0]
    choice = DecodeChoice(**best["choice"])
    lanes, itemsize_bytes = lanes_of(case.head_dim), case.torch_dtype.itemsize
    return {
        "id": case.id,
        "kind": kind_of_decode(case.num_seqs, case.num_kv_heads, choice.rows, lanes, itemsize_bytes),
        "row": row_of(case, choice, num_sms),
        "join": (choice.join_parts, choice.join_channels, choice.join_warps),
        "spreads_idle": choice.spreads_idle,
        "median_us": best["median_us"],
        "of_default": best["median_us"] / default["median_us"] if default["ok"] else None,
    }


def table_text(table: list[dict[str, Any]]) -> str:
    """A line for each entry, entries of one row of `DECODE_LOOPS` together."""
    lines = []
    for entry in sorted(table, key=lambda entry: entry["kind"]):
        tile, num_warps, num_stages, per_sm = entry["row"]
        ratio = "the default was wrong" if entry["of_default"] is None else f"{entry['of_default']:.3f} of the default"
        lines.append(
            f'"{entry["kind"]}": ({tile}, {num_warps}, {num_stages}, {per_sm:g}),  # {entry["id"]}, {ratio}; join '
            f"{'x'.join(map(str, entry['join']))}{', spread' if entry['spreads_idle'] else ''}"
        )
    return "\n".join(lines)


def launches_of(inputs: AttentionInputs, index: int, choice: DecodeChoice) -> tuple[Any, Any]:
    """The launches of one input set under a choice."""
    scoring = Scoring(inputs.scale, True, 0, 0.0, None, None)
    return decode_launches(
        inputs.q[index],
        operands_of(inputs.layers[index]),
        Batch.of(inputs.metadata),
        inputs.out,
        None,
        scoring,
        hardware=hardware_of(inputs.device),
        choice=choice,
    )


def choices_for(inputs: AttentionInputs) -> list[DecodeChoice]:
    hardware = hardware_of(inputs.device)
    operands = operands_of(inputs.layers[0])
    default = choice_of(Batch.of(inputs.metadata), inputs.case.num_query_heads, operands, hardware, False)
    return candidates(inputs.case, default, hardware.num_sms)


def _compile(share: int, pattern: str) -> None:
    session = Session(torch.device("cuda", 0))
    done: set[object] = set()
    number = 0
    for case in _cases(pattern):
        with AttentionInputs(session, case, short=True) as inputs:
            for choice in choices_for(inputs):
                for launch in launches_of(inputs, 0, choice):
                    constants = tuple((k, v) for k, v in launch.arguments.items() if k.isupper())
                    key = (str(launch.kernel), str(launch.options()), constants)
                    if key in done:
                        continue
                    done.add(key)
                    number += 1
                    if number % WORKERS == share:
                        try:
                            launch.compile(load=False)
                        except Exception as error:  # too much shared memory: measured as failed
                            print(f"  {case.id}: {describe(error)}", flush=True)


def _cases(pattern: str) -> list[AttentionCase]:
    return [case for case in SUITE.cases if any(fnmatch.fnmatch(case.id, part) for part in pattern.split(","))]


def tune(pattern: str, out: Path | None) -> dict[str, Any]:
    """Measures and returns the record; prints a line for each choice, and the table.

    Raises `KeyError` where no case matches the pattern.
    """
    if not _cases(pattern):
        raise KeyError(f"no case matches {pattern!r}")
    session = Session(torch.device("cuda", 0))
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_compile, args=(share, pattern)) for share in range(WORKERS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(f"compiled  t={session.elapsed_s:.0f}s", flush=True)
    session.rooflines = measure_rooflines(session.device, quick=True)
    environment = provenance(["python", "-m", "bench", "tune", "--case", pattern])
    record: dict[str, Any] = {
        "suite": "tune",
        "source_id": environment["source_id"],
        "env": environment,
        "rooflines": session.rooflines,
        "cases": [],
        "table": [],
    }
    num_sms = hardware_of(session.device).num_sms
    for case in _cases(pattern):
        record["cases"].append(_measure(session, case))
        entry = fastest(case, record["cases"][-1]["choices"], num_sms)
        if entry is not None:
            record["table"].append(entry)
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"the fastest choices, as rows of DECODE_LOOPS:\n{table_text(record['table'])}", flush=True)
    return record


def _measure(session: Session, case: AttentionCase) -> dict[str, Any]:
    floor = floor_us(session.rooflines, bytes_read=case.bytes_moved, flops=case.flops)
    with AttentionInputs(session, case) as inputs:
        choices = choices_for(inputs)

        def candidate(number: int, choice: DecodeChoice) -> Candidate:
            prepared = [launches_of(inputs, index, choice) for index in range(inputs.sets)]

            def run(index: int) -> torch.Tensor:
                for launch in prepared[index]:
                    launch.run(inputs.device)
                return inputs.out

            return Candidate("ours" if number == 0 else str(number), run)

        results = measure(
            session,
            case.id,
            [candidate(number, choice) for number, choice in enumerate(choices)],
            sets=inputs.sets,
            floor_us=floor,
            effort=EFFORT,
            verify=inputs.verify,
            poison=inputs.poison,
        )
    measured = [{"choice": asdict(choice), **result} for choice, result in zip(choices, results.values())]
    default = measured[0].get("median_us", float("nan"))
    print(f"{case.id}: floor {floor:.1f} us", flush=True)
    for entry in sorted(measured, key=lambda entry: entry.get("median_us", float("inf"))):
        choice = entry["choice"]
        text = (
            f"tile {choice['tile']:3} warps {choice['num_warps']} stages {choice['num_stages']} chunks "
            f"{choice['num_chunks']:3} join {choice['join_parts']}x{choice['join_channels']}x{choice['join_warps']}"
            f"{' spread' if choice['spreads_idle'] else ''}"
        )
        if not entry["ok"]:
            print(f"  failed  {text}: {entry['error']}", flush=True)
            continue
        median = entry["median_us"]
        mark = "  <- default" if entry is measured[0] else ""
        print(
            f"  {median:8.2f} us  {median / default:.3f} of the default, {floor / median:.1%}  {text}{mark}", flush=True
        )
    return {"id": case.id, "floor_us": floor, "choices": measured}

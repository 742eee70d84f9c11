"""The command line: `python -m bench list | run | compare | plot | report | tune | profile`."""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.record import BadRecordError, has_timings, read_record

if TYPE_CHECKING:
    from collections.abc import Sequence

OK, FAILED, USAGE = 0, 1, 2  # exit codes
PREPARE_S, QUICK_PREPARE_S = 240.0, 45.0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    listing = commands.add_parser("list", help="suites and their cases")
    listing.add_argument("suites", nargs="*")
    listing.add_argument("--cases", action="store_true", help="every case's id")

    run = commands.add_parser("run", help="measure suites (all of them by default)")
    run.add_argument("suites", nargs="*")
    run.add_argument("--quick", action="store_true", help="the main cases, all suites in about 3 minutes")
    run.add_argument("--smoke", action="store_true", help="tiny cases on the CPU, no peers: whether the harness works")
    run.add_argument("--out", help="a .json file for one suite, or a folder (default: bench/results/<gpu>/)")
    run.add_argument("--case", help="only ids that match this pattern, as in 'decode/B64*'")
    run.add_argument("--no-peers", action="store_true", help="measure ours alone")
    run.add_argument("--no-warm", action="store_true", help="do not compile kernels ahead in several processes")
    run.add_argument(
        "--prepare-limit",
        type=float,
        metavar="S",
        help=f"seconds for compiling and builds (default {PREPARE_S:.0f}, with --quick {QUICK_PREPARE_S:.0f})",
    )

    compare = commands.add_parser("compare", help="two records of one suite")
    compare.add_argument("before")
    compare.add_argument("after")
    compare.add_argument("--fail-below", type=float, default=None, metavar="RATIO", help="exit with 1 below this speed")

    plot = commands.add_parser("plot", help="pictures of records")
    plot.add_argument("records", nargs="+")
    plot.add_argument("-o", "--out", default=".", help="a folder")
    plot.add_argument("--format", choices=("svg", "png"), default="svg")

    report = commands.add_parser("report", help="one self-contained HTML page of records")
    report.add_argument("records", nargs="+")
    report.add_argument("-o", "--out", default="bench-report.html")
    report.add_argument("--standing", help="also rewrite the table between the markers of this Markdown file")

    tune = commands.add_parser("tune", help="launch choices of decode attention side by side, on a GPU")
    tune.add_argument("--case", default="*", help="only ids that match one of these patterns, separated by commas")
    tune.add_argument("--out", type=Path, help="a .json file with all of them")

    profile = commands.add_parser("profile", help="hardware counters of attention kernels, by Nsight Compute")
    profile.add_argument("--case", help="only ids that match one of these patterns, separated by commas")
    profile.add_argument("--out", type=Path, help="a .json file for the record")

    worker = commands.add_parser("worker")  # the measuring process of `run`
    worker.add_argument("options")
    worker.add_argument("state")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 for success, 1 for failed cases or a regression, 2 for bad usage or files."""
    asked = parse(arguments)
    try:
        return globals()[f"_{asked.command}"](asked)
    except BrokenPipeError:  # `| head`
        sys.stderr.close()
        return OK
    except (BadRecordError, KeyError) as error:
        print(f"error: {error.args[0] if error.args else error}", file=sys.stderr)
        return USAGE


def _list(asked: argparse.Namespace) -> int:
    from bench.suites import load_suites

    for suite in load_suites(asked.suites):
        quick = suite.selected(quick=True)
        print(
            f"{suite.name:8} {len(suite.cases):3} cases, about {suite.seconds():4.0f} s, of which "
            f"{suite.setup_s:.0f} to prepare; --quick {len(quick)} cases, {suite.seconds(quick=True):.0f} s: "
            f"{suite.about}"
        )
        if asked.cases:
            for case in suite.cases:
                print(f"    {case.id}{'  (quick)' if case.quick else ''}")
    return OK


def _run(asked: argparse.Namespace) -> int:
    import torch

    from bench.run import RunOptions, gpu_folder
    from bench.suites import load_suites
    from bench.supervise import supervise
    from bench.table import record_table

    load_suites(asked.suites)
    if asked.out and asked.out.endswith(".json") and len(asked.suites) != 1:
        print("error: --out names a file, but that holds one suite; name a folder", file=sys.stderr)
        return USAGE
    options = RunOptions(
        suites=tuple(asked.suites),
        quick=asked.quick,
        smoke=asked.smoke,
        peers=not asked.no_peers,
        warm=not asked.no_warm,
        case=asked.case,
        out=asked.out or (tempfile.mkdtemp(prefix="bench-smoke-") if asked.smoke else None),
        prepare_s=asked.prepare_limit or (QUICK_PREPARE_S if asked.quick else PREPARE_S),
        command=shlex.join(["python", "-m", "bench", *sys.argv[1:]]),
    )
    if not asked.smoke and not torch.cuda.is_available():
        print("error: no CUDA device here: `bench run` measures a GPU, only --smoke runs on a CPU", file=sys.stderr)
        return USAGE
    chosen = options.selected()
    if not chosen:
        print(f"error: no case matches {asked.case!r}", file=sys.stderr)
        return USAGE
    print(f"{sum(len(cases) for _, cases in chosen)} cases, about {options.seconds():.0f} s on an H200", flush=True)
    code = supervise(options)
    gpu = gpu_folder()
    records = [options.path_of(suite.name, gpu) for suite, _ in chosen]
    complete = code == 0
    for path in records:
        if not path.exists():
            continue
        record = read_record(path)
        print(f"\n{record_table(record)}\n{path}")
        complete = complete and all(case["ok"] for case in record["cases"])
    return OK if complete else FAILED


def _tune(asked: argparse.Namespace) -> int:
    import torch

    from bench.tune import tune

    if not torch.cuda.is_available():
        print("error: no CUDA device here: `bench tune` measures a GPU", file=sys.stderr)
        return USAGE
    return OK if tune(asked.case, asked.out)["cases"] else USAGE


def _profile(asked: argparse.Namespace) -> int:
    from bench.profile import DEFAULT_CASES, profile

    try:
        return OK if profile(asked.case or DEFAULT_CASES, asked.out)["profiles"] else USAGE
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE


def _worker(asked: argparse.Namespace) -> int:
    from bench.run import RunOptions, run

    run(RunOptions.from_json(asked.options), Path(asked.state))
    return OK


def _compare(asked: argparse.Namespace) -> int:
    from bench.compare import compare

    text, good = compare(read_record(asked.before), read_record(asked.after), fail_below=asked.fail_below)
    print(text)
    return OK if good else FAILED


def _plot(asked: argparse.Namespace) -> int:
    from bench.plots import save_plots

    made = save_plots(_measured(asked.records), Path(asked.out), asked.format)
    for path in made:
        print(path)
    if not made:
        print("error: no picture shows what these records hold", file=sys.stderr)
    return OK if made else USAGE


def _measured(paths: Sequence[str]) -> list[dict[str, Any]]:
    """The records of suites. Those of another form are named and left out."""
    records = []
    for path in paths:
        if has_timings(path):
            records.append(read_record(path))
        else:
            print(f"{path} is not the record of a suite: left out", file=sys.stderr)
    return records


def _report(asked: argparse.Namespace) -> int:
    from bench.report import html_report
    from bench.standing import write_standing

    records = _measured(asked.records)
    Path(asked.out).write_text(html_report(records), encoding="utf-8")
    print(asked.out)
    if asked.standing:
        write_standing(records, Path(asked.standing))
        print(asked.standing)
    return OK


if __name__ == "__main__":
    sys.exit(main())

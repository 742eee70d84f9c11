"""`python -m triton_kv doctor` and `plan`: what this machine has, and how many tokens a model's cache would hold."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import sys
from typing import Any

import torch

from triton_kv.errors import TritonKVError
from triton_kv.memory import HostMemory, open_memory, probe
from triton_kv.plan_command import add_plan_command, run_plan
from triton_kv.version import __version__


def examine() -> dict[str, Any]:
    """Versions, devices and what is missing, as plain data. Creates and frees one granule on each GPU."""
    devices: list[dict[str, Any]] = []
    missing: list[str] = []
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        usable, reason = probe(device)
        entry: dict[str, Any] = {"device": str(device), "name": torch.cuda.get_device_name(index), "vmm": usable}
        if usable:
            memory = open_memory(device)
            free_bytes, total_bytes = memory.memory_info()
            entry |= {"granularity_bytes": memory.granularity, "free_bytes": free_bytes, "total_bytes": total_bytes}
        else:
            entry["reason"] = reason
            missing.append(f"{device}: {reason}")
        devices.append(entry)
    if not devices:
        _, reason = probe(torch.device("cuda", 0))
        missing.append(f"no GPU: {reason}")
    host = HostMemory()
    free_bytes, total_bytes = host.memory_info()
    devices.append(
        {
            "device": "cpu",
            "name": platform.processor() or platform.machine(),
            "vmm": True,
            "granularity_bytes": host.granularity,
            "free_bytes": free_bytes,
            "total_bytes": total_bytes,
        }
    )
    versions = {"triton_kv": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for package in ("triton", "cuda-bindings", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "missing"
            missing.append(f"package {package}: pip install {package}")
    versions["cuda (torch)"] = torch.version.cuda or "none (a CPU build of torch)"
    return {"versions": versions, "driver": _driver_version(), "devices": devices, "missing": missing}


def _driver_version() -> str:
    try:
        from cuda.bindings import driver

        code, version = driver.cuDriverGetVersion()
    except (ImportError, RuntimeError) as error:
        return f"none ({str(error).splitlines()[0]})"
    return f"CUDA {version // 1000}.{version % 1000 // 10}" if int(code) == 0 else f"none ({code.name})"


def _print_report(report: dict[str, Any]) -> None:
    for name, version in report["versions"].items():
        print(f"{name:16} {version}")
    print(f"{'driver':16} {report['driver']}")
    for entry in report["devices"]:
        print(f"\n{entry['device']}: {entry['name']}")
        if entry["vmm"]:
            print(f"  virtual memory  yes, granules of {entry['granularity_bytes'] / 2**20:g} MiB")
            print(f"  memory          {entry['free_bytes'] / 2**30:.1f} of {entry['total_bytes'] / 2**30:.1f} GiB free")
        else:
            print(f"  virtual memory  no: {entry['reason']}")
    print("\nmissing: " + ("nothing" if not report["missing"] else ""))
    for line in report["missing"]:
        print(f"  {line}")


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code (0 also where there is no GPU: the CPU driver works everywhere)."""
    parser = argparse.ArgumentParser(prog="python -m triton_kv", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="versions, driver, virtual memory support, and what is missing")
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    plan = add_plan_command(commands)
    options = parser.parse_args(arguments)
    if options.command == "plan":
        return run_plan(plan, options)
    try:
        report = examine()
    except TritonKVError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        _print_report(report)
    return 0

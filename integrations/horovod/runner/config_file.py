"""The file that `horovodrun --config-file` names: options in sections, as YAML."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from multiring.errors import UsageError

__all__ = ["add_config"]

_OPTIONS = {
    "params.hierarchical_allreduce": "hierarchical_allreduce",
    "timeline.filename": "timeline_filename",
    "timeline.mark_cycles": "timeline_mark_cycles",
    "stall_check.warning_time_seconds": "stall_check_warning_time_seconds",
    "stall_check.shutdown_time_seconds": "stall_check_shutdown_time_seconds",
    "logging.level": "log_level",
    "verbose": "verbose",
}


def add_config(args: argparse.Namespace, path: str) -> None:
    """Adds what the file says to options that the command line has not given.

    Raises:
        UsageError: It cannot be read.
    """
    given = {name for name, value in vars(args).items() if value is not None}
    if args.verbose:
        given.add("log_level")
    if args.stall_check:
        given.add("no_stall_check")
    for name, value in _entries(path).items():
        if name == "stall_check.enabled":
            if "no_stall_check" not in given:
                args.no_stall_check = not value
        elif name not in _OPTIONS:
            args.without_effect = [*args.without_effect, f"{name} in {path}"]
        elif _OPTIONS[name] not in given:
            setattr(args, _OPTIONS[name], value)


def _entries(path: str) -> dict[str, Any]:
    try:
        import yaml  # type: ignore[import-untyped]

        found = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
        sections = {name: value if isinstance(value, dict) else {"": value} for name, value in found.items()}
    except ModuleNotFoundError as error:
        raise UsageError("horovodrun --config-file needs PyYAML: run pip install pyyaml") from error
    except (OSError, AttributeError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"horovodrun --config-file {path}: {error}") from error
    return {
        f"{name}.{key}".rstrip("."): value for name, part in sections.items() for key, value in part.items()
    }

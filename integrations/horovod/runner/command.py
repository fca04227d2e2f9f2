"""`multiring horovodrun`: starts a program with the options of Horovod's command.

The wheel multiring-horovod installs it as `horovodrun`; that of multiring does not, for it would take the
place of that of a Horovod in the same environment.
"""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec

from multiring import cli
from multiring.commands.launcher import options as run_options
from multiring.horovod import __version__
from multiring.horovod.runner.options import add_arguments, run_arguments

__all__ = ["add_arguments", "main"]

_FRAMEWORKS = {"TensorFlow": "tensorflow", "PyTorch": "torch", "MXNet": "mxnet"}
_CONTROLLERS = {"MPI": False, "Gloo": False, "multiring": True}
_OPERATIONS = {"NCCL": False, "DDL": False, "CCL": False, "MPI": False, "Gloo": False, "multiring": True}


def main(args: argparse.Namespace) -> int:
    """Runs the job that `args` describes; returns the exit code.

    Raises:
        UsageError: An argument is wrong, or a variable of multiring has a value that is not accepted.
    """
    if args.version:
        print(__version__)
        return 0
    if args.check_build:
        print(_build())
        return 0
    words = run_arguments(args)
    if args.without_effect:
        named = ", ".join(dict.fromkeys(args.without_effect))
        print(f"multiring: horovodrun: these have no effect here: {named}", file=sys.stderr)
    parser = argparse.ArgumentParser(prog="multiring run", allow_abbrev=False)
    run_options.add_arguments(parser)
    return run_options.main(parser.parse_args(words))


def _build() -> str:
    parts = {
        "Available Frameworks": {name: _is_there(module) for name, module in _FRAMEWORKS.items()},
        "Available Controllers": _CONTROLLERS,
        "Available Tensor Operations": _OPERATIONS,
    }
    lines = [f"Horovod v{__version__}, by multiring {cli.version()}:"]
    for title, entries in parts.items():
        lines += ["", f"{title}:"]
        lines += [f"    [{'X' if is_there else ' '}] {name}" for name, is_there in entries.items()]
    return "\n".join(lines)


def _is_there(framework: str) -> bool:
    """Whether a framework is installed, and has Horovod's API here."""
    return find_spec(framework) is not None and find_spec(f"multiring.horovod.{framework}") is not None

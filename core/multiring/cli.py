"""The command `multiring`: finds the subcommand, loads its module and no other, and runs it."""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

from multiring.commands.command_parser import CommandParser
from multiring.errors import MultiringError, UsageError

__all__ = ["COMMANDS", "Command", "main", "version"]


@dataclass(frozen=True)
class Command:
    """A subcommand.

    Attributes:
        module: Holds `add_arguments(parser)` and `main(args) -> int`; imported only when the command is used.
        help: One line.
        extras: The extras of the package that it needs besides the base install.
    """

    module: str
    help: str
    extras: str = ""


COMMANDS = {
    "run": Command(
        "multiring.commands.launcher.options", "start a program as several ranks, on this host or on several"
    ),
    "horovodrun": Command(
        "multiring.horovod.runner.command",
        "start a program as several ranks, with the options of Horovod's horovodrun",
    ),
    "train": Command("multiring.models.train", "train a ResNet on real images", extras="torch,train"),
    "caffe": Command(
        "multiring.models.caffe.command", "train a net from Caffe's prototxt files", extras="caffe"
    ),
    "bench": Command(
        "multiring.benchmarks.command",
        "measure collectives and training beside other libraries",
        extras="bench",
    ),
    "regress": Command(
        "multiring.models.regress.command",
        "check that all frameworks train alike, on one rank and on several",
        extras="train",
    ),
    "build": Command("multiring.commands.build", "compile what lets MPI carry the bytes between hosts"),
    "plan": Command(
        "multiring.commands.plan.command", "show how an allreduce over several hosts would be divided"
    ),
    "tune": Command(
        "multiring.commands.tune", "measure which algorithms of allreduce are fastest across hosts, by size"
    ),
    "env": Command("multiring.commands.env", "print versions, machine, launcher and settings"),
    "doctor": Command(
        "multiring.commands.doctor.doctor", "check that this machine, or several hosts, can run a job"
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `multiring` with the arguments `argv` (default: those of the process); returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where it may fail, and not at exit
        return code
    except UsageError as error:
        _say(error)
        return 2
    except MultiringError as error:
        _say(error)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output is gone; without this Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141


def version() -> str:
    """The version of the installed package."""
    try:
        return importlib.metadata.version("multiring")
    except importlib.metadata.PackageNotFoundError:
        return "unknown (not installed)"


def _dispatch(arguments: list[str]) -> int:
    if arguments and arguments[0] in COMMANDS:
        name = arguments[0]
        command = COMMANDS[name]
        module = _load(name, command)
        described = f"{command.help[0].upper()}{command.help[1:]}."
        parser = CommandParser(prog=f"multiring {name}", description=described, allow_abbrev=False)
        module.add_arguments(parser)
        return int(module.main(parser.parse_args(arguments[1:])))
    parser = _top_parser()
    parser.parse_args(arguments[:1])  # ends the process for --help, --version and what is not understood
    parser.print_help()
    return 0


def _load(name: str, command: Command) -> ModuleType:
    try:
        return importlib.import_module(command.module)
    except ModuleNotFoundError as error:
        if not command.extras or (error.name or "").split(".")[0] == "multiring":
            raise
        raise UsageError(
            f"`multiring {name}` needs {error.name}, which is not installed: run "
            f"pip install 'multiring[{command.extras}]'"
        ) from error


def _top_parser() -> CommandParser:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    parser = CommandParser(
        prog="multiring",
        usage="multiring command [options]",
        description="Synchronous data-parallel training on several processes.",
        epilog="commands:\n" + "\n".join(lines) + "\n\n`multiring command --help` tells more about one.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"multiring {version()}")
    parser.add_argument("command", nargs="?", type=_command, help=argparse.SUPPRESS)
    return parser


def _command(text: str) -> str:
    close = difflib.get_close_matches(text, COMMANDS, n=1)
    meant = f"; is {close[0]!r} meant?" if close else ""
    raise argparse.ArgumentTypeError(f"there is no command {text!r}{meant}")


def _say(error: Exception) -> None:
    print(f"multiring: {error}", file=sys.stderr)

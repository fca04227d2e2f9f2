"""The command `multiring`: finds the subcommand, loads its module and no other, and runs it."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import shlex
import sys
from collections.abc import Sequence
from types import ModuleType

from multiring.commands.command_parser import CommandParser
from multiring.commands.table import COMMANDS, Command
from multiring.errors import MultiringError, UsageError

__all__ = ["COMMANDS", "Command", "main", "version"]


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
        from multiring.version import __version__
    except ImportError:  # PackageNotFoundError is one
        return "unknown (not installed)"
    return __version__


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
    if meant := _run_meant(arguments):
        parser.error(f"{arguments[0]} begins no command; is `{shlex.join(meant)}` meant?")
    parser.parse_args(arguments[:1])  # ends the process for --help, --version and what is not understood
    parser.print_help()
    return 0


def _run_meant(arguments: Sequence[str]) -> list[str]:
    """The command of which these words are the options, or a program and its options; none: there is none."""
    if not arguments or arguments[0] in ("-h", "--help", "--version"):
        return []
    if arguments[0].endswith(".py"):
        return ["multiring", "run", "-np", "2", *arguments]
    return ["multiring", "run", *arguments] if arguments[0].startswith("-") and len(arguments) > 1 else []


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

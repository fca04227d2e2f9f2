"""`multiring completion`: what makes a shell complete commands, options and choices."""

from __future__ import annotations

import argparse
import importlib
import sys
import warnings

from multiring.commands.command_parser import CommandParser
from multiring.commands.table import COMMANDS
from multiring.errors import UsageError

__all__ = ["SHELLS", "add_arguments", "main", "whole_parser"]

SHELLS = ("bash", "zsh", "fish")
_EXAMPLES = """\
examples:
  mkdir -p ~/.local/share/bash-completion/completions     # then start a new shell
  multiring completion bash > ~/.local/share/bash-completion/completions/multiring
  multiring completion zsh  > ~/.zfunc/_multiring      # with `fpath+=~/.zfunc` before compinit in .zshrc
  multiring completion fish > ~/.config/fish/completions/multiring.fish
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `multiring completion`."""
    parser.epilog = _EXAMPLES
    parser.add_argument("shell", nargs="?", choices=SHELLS, help="the shell that completes")


def main(args: argparse.Namespace) -> int:
    """Prints the script for a shell.

    Raises:
        UsageError: No shell is named; what makes it is not installed, or does not know this shell.
    """
    if args.shell is None:
        raise UsageError(f"name the shell: {', '.join(SHELLS[:-1])} or {SHELLS[-1]}")
    try:
        import shtab
    except ModuleNotFoundError as error:
        raise UsageError(
            "`multiring completion` needs shtab, which is not installed: run "
            "pip install 'multiring[completion]', and then this command again (a file that its output was to "
            "go to is empty)"
        ) from error
    if args.shell not in shtab.SUPPORTED_SHELLS:
        raise UsageError(f"shtab {shtab.__version__} knows no {args.shell}: run pip install --upgrade shtab")
    print(shtab.complete(whole_parser(), args.shell))
    return 0


def whole_parser() -> argparse.ArgumentParser:
    """A parser with all commands and their options; a command that needs what is not installed has none."""
    whole = argparse.ArgumentParser(prog="multiring")
    whole.add_argument("--version", action="store_true", help="show the version and exit")
    commands = whole.add_subparsers(parser_class=CommandParser)
    for name, command in COMMANDS.items():
        parser = commands.add_parser(name, help=command.help)
        try:
            with warnings.catch_warnings(action="ignore"):  # of what frameworks import: not about completion
                importlib.import_module(command.module).add_arguments(parser)
        except Exception as error:  # a framework that is broken, say: the others have theirs nevertheless
            if not isinstance(error, ImportError):
                print(f"multiring completion: {name} has no options: {error}", file=sys.stderr)
            continue
        _list_choices(parser)
    return whole


def _list_choices(parser: argparse.ArgumentParser) -> None:
    """Choices that are keys of a table become a list: shtab takes a table for one of commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                _list_choices(inner)
        elif isinstance(action.choices, dict):
            action.choices = list(action.choices)

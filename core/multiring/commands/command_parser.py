"""The parser of the commands: where words are not understood it says so first, and what may be meant; and its
help fits the terminal."""

from __future__ import annotations

import argparse
import difflib
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

__all__ = ["CommandParser"]

# What others call our options, and their values.
_OPTIONS = {
    "--np": "-np",
    "--nproc-per-node": "-np",
    "--num-proc": "-np",
    "--num-processes": "-np",
    "--nprocs": "-np",
    "--ranks": "-np",
    "--host": "-H",
    "--nnodes": "-H",
    "--machinefile": "--hostfile",
    "--bind-to": "--bind",
    "--export": "--env",
    "-x": "--env",
    "--arch": "--depth",
    "--model": "--depth",
    "--batch": "--batch-size",
    "--dataset": "--data",
    "--data-dir": "--data",
    "--learning-rate": "--lr",
    "--log-dir": "--output-dir",
    "--num-workers": "--workers",
}
_OPTION_CUTOFF = 0.75  # of difflib: short options have the dashes in common
_VALUES = {"pytorch": "torch", "keras": "tensorflow", "tf": "tensorflow", "chainermn": "chainer"}


# A line of two columns: a word or more, two spaces, and what is said about them.
_ENTRY = re.compile(r"( *\S.*? {2,})(\S.*)")
_FULL_LINE = 90  # columns from which on a line of a text in the sources goes on in the next one


class CommandParser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are two lines, and whose texts keep their lines where these fit."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**{"formatter_class": _HelpFormatter, **how})

        self._plain: frozenset[str] | None = None  # options that --help shows; None: all

    def shorten_help(self, plain: Iterable[str], rest: str) -> None:
        """Have --help show some options only, and --help-all everything.

        Args:
            plain: Their names, as in the namespace.
            rest: What --help-all shows.
        """
        self._plain = frozenset({"help", "help_all", *plain})
        self.add_argument("--help-all", action=_HelpAll, help=f"show {rest}")

    def format_help(self) -> str:
        """As that of the base class, or the shortened help."""
        if self._plain is None:
            return super().format_help()
        hidden = [(action, action.help) for action in self._actions if action.dest not in self._plain]
        usage, epilog = self.usage, self.epilog
        for action, _ in hidden:
            action.help = argparse.SUPPRESS
        self.usage, self.epilog = f"{self.prog} [options]", None
        try:
            return super().format_help()
        finally:
            self.usage, self.epilog = usage, epilog
            for action, text in hidden:
                action.help = text

    def show_all(self) -> NoReturn:
        """Show the whole help, and end the process."""
        self._plain = None
        self.print_help()
        self.exit()

    def parse_args(  # type: ignore[override]  # the base class has an overload for each kind of namespace
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """As that of the base class; ends the process with code 2 where something is not understood."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(self._unknown(unknown))
        return found

    def error(self, message: str) -> NoReturn:
        """Says what is wrong, and ends the process with code 2."""
        self.exit(2, f"{self.prog}: {message}\n`{self.prog} --help` lists the options.\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        choices = list(action.choices)
        what = f"{value} is not one of {', '.join(map(str, choices))}"
        raise argparse.ArgumentError(action, what + _question(_nearest_value(value, choices)))

    def _unknown(self, words: Sequence[str]) -> str:
        option = next((word for word in words if word.startswith("-")), "")
        if not option:
            return f"not understood: {' '.join(words)}"
        name = option.partition("=")[0]
        return f"there is no option {name}{_question(self._nearest_option(name))}"

    def _nearest_option(self, name: str) -> str:
        have: list[str] = list(self._option_string_actions)
        written = name.replace("_", "-")
        for ours in (written, _OPTIONS.get(written, "")):
            if ours in have:
                return ours
        return _nearest(written, [each for each in have if each.startswith("--")], _OPTION_CUTOFF)


class _HelpAll(argparse.Action):
    """The option that shows the whole help."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:  # noqa: A002
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *values: Any
    ) -> NoReturn:
        assert isinstance(parser, CommandParser)
        parser.show_all()


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Wraps lines that are longer than the terminal is wide, entries of two columns within their column."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs: list[tuple[str, str]] = []  # what begins a paragraph, and the rest
        is_full = False  # the line before goes on in the next one
        for line in text.splitlines():
            words = line.lstrip()
            margin = line[: len(line) - len(words)]
            entry = _ENTRY.fullmatch(line)
            goes_on = paragraphs and is_full and len(margin) == len(paragraphs[-1][0])
            if words and goes_on and entry is None:
                paragraphs[-1] = (paragraphs[-1][0], f"{paragraphs[-1][1]} {words}")
            else:
                paragraphs.append((entry[1], entry[2]) if entry else (margin, words))
            is_full = len(line) >= _FULL_LINE
        return "\n".join(
            textwrap.fill(
                rest,
                width,
                initial_indent=indent + begin,
                subsequent_indent=indent + " " * len(begin),
                break_long_words=False,
                break_on_hyphens=False,
            )
            for begin, rest in paragraphs
        )


def _nearest_value(value: Any, choices: Sequence[Any]) -> str:
    if isinstance(value, int):
        return str(min((each for each in choices), key=lambda each: (abs(each - value), each)))
    ours = _VALUES.get(str(value).lower(), "")
    if ours and ours in choices:
        return str(ours)
    return _nearest(str(value).lower(), map(str, choices))


def _nearest(word: str, words: Iterable[str], cutoff: float = 0.6) -> str:
    return next(iter(difflib.get_close_matches(word, list(words), n=1, cutoff=cutoff)), "")


def _question(meant: str) -> str:
    return f"; is {meant} meant?" if meant else ""

"""The parser of the commands: where words are not understood it says so first, and what may be meant."""

from __future__ import annotations

import argparse
import difflib
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


class CommandParser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are two lines."""

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

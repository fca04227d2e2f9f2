"""Caffe's text files as messages, with the line of everything in them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf import text_format

from multiring.errors import UsageError
from multiring.models.caffe.upgrade import upgraded

__all__ = ["Location", "PrototxtError", "parse", "read"]


class PrototxtError(UsageError):
    """A prototxt cannot be used; the message begins with file and line."""


# What to do about fields of older and other Caffes.
_HINTS = {
    "mean_file": "give mean_value instead",
}
# The types of solvers, in the order of the numbers that `solver_type` had.
_SOLVER_TYPES = ("SGD", "Nesterov", "AdaGrad", "RMSProp", "AdaDelta", "Adam")


@dataclass
class Location:
    """Where a field stands in a file, and the fields inside of it.

    Attributes:
        file: Path of the file, or what stands for it.
        line: Number of the line, from 1.
        fields: Inner fields by name, in the order in which they are repeated.
    """

    file: str
    line: int
    fields: dict[str, list[Location]] = field(default_factory=dict)

    def find(self, *path: str | int) -> Location:
        """The place of an inner field: names, each perhaps followed by which of its repetitions. Where the
        file leaves it out, the place of what encloses it."""
        here = self
        for position, part in enumerate(path):
            if isinstance(part, int):
                continue
            following = path[position + 1] if position + 1 < len(path) else 0
            number = following if isinstance(following, int) else 0
            found = here.fields.get(part, [])
            if number >= len(found):
                break
            here = found[number]
        return here

    def error(self, text: str, *path: str | int) -> PrototxtError:
        """An error that begins with the place of an inner field."""
        location = self.find(*path)
        return PrototxtError(f"{location.file}:{location.line}: {text}")


def read(path: str | Path, kind: Any) -> tuple[Any, Location]:
    """Read a file; see `parse`.

    Raises:
        PrototxtError: The file cannot be read, or `parse` refuses it.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # some editors put a mark of the encoding first
    except (OSError, UnicodeDecodeError) as error:
        raise PrototxtError(f"{path}:1: cannot be read: {error}") from error
    return parse(text, kind, str(path))


def parse(text: str, kind: Any, name: str = "<text>") -> tuple[Any, Location]:
    """Parse text.

    Args:
        text: A message in protobuf's text format.
        kind: Class of the message.
        name: Name of the file, for errors.

    Returns:
        The message, and where its fields stand.

    Raises:
        PrototxtError: It is no such message, or has a field that is not supported; names the line.
    """
    result = kind()
    text = upgraded(text)
    try:
        text_format.Parse(text, result)
    except text_format.ParseError as error:
        line = error.GetLine() or 1
        raise PrototxtError(f"{name}:{line}: {_explain(error, text, kind)}") from error
    return result, _Scanner(text, name).scan()


def _explain(error: Any, text: str, kind: Any) -> str:
    """What is wrong in a text for a message of this kind, and what to do."""
    told = re.sub(r"^\d+:\d+ : ", "", str(error))
    found = re.search(r'Message type "caffe\.(\w+)" has no field named "(\w+)"', told)
    if found is None:
        return told
    message, name = found[1], found[2]
    return f"field {name} of {message} is not supported; {_hint(message, name, text, kind.DESCRIPTOR)}"


def _hint(message: str, name: str, text: str, root: Any) -> str:
    if name == "solver_type":
        given = re.search(r"\bsolver_type\s*:\s*(\w+)", text)
        value = given[1] if given else ""
        types = {each.upper(): each for each in _SOLVER_TYPES} | dict(
            zip("012345", _SOLVER_TYPES, strict=True)
        )
        return f'write type: "{types.get(value.upper(), "SGD")}" instead'
    if name in _HINTS:
        return _HINTS[name]
    if message != root.name and name in root.fields_by_name:
        return f"it is one of {root.name}: a closing brace is missing in a line before"
    fields = root.file.message_types_by_name[message].fields_by_name
    if close := difflib.get_close_matches(name, fields, 1):
        return f"is {close[0]} meant?"
    return "take it out, or train this net with Caffe itself"


_TOKEN = re.compile(r"""#[^\n]*|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[\w.+-]+|\n|[^\s]""")
_OPENING, _CLOSING = "{<", "}>"


class _Scanner:
    """Finds the line of each field of a text that is known to be well-formed."""

    def __init__(self, text: str, file: str) -> None:
        self._file = file
        self._tokens = list(self._numbered(text))
        self._next = 0

    @staticmethod
    def _numbered(text: str) -> Iterator[tuple[str, int]]:
        line = 1
        for match in _TOKEN.finditer(text):
            token = match.group()
            if token == "\n":
                line += 1
            elif not token.startswith("#"):
                yield token, line

    def scan(self) -> Location:
        root = Location(self._file, 1)
        self._fields(root)
        return root

    def _fields(self, parent: Location) -> None:
        while self._next < len(self._tokens):
            token, line = self._tokens[self._next]
            self._next += 1
            if token in _CLOSING:
                return
            if token in ",;":
                continue
            location = Location(self._file, line)
            parent.fields.setdefault(token, []).append(location)
            self._value(parent, token, location)

    def _value(self, parent: Location, name: str, location: Location) -> None:
        if self._peek() == ":":
            self._next += 1
        if self._peek() == "[":
            self._list(parent, name, location)
        elif self._peek() in tuple(_OPENING):
            self._next += 1
            self._fields(location)
        else:
            self._next += 1
            while self._peek()[:1] in ('"', "'"):  # strings side by side are one
                self._next += 1

    def _list(self, parent: Location, name: str, location: Location) -> None:
        """Values in brackets: each is one repetition of the field."""
        first = True
        self._next += 1
        while (token := self._peek()) not in ("]", ""):
            if not first and token != ",":
                location = Location(self._file, self._tokens[self._next][1])
                parent.fields[name].append(location)
            self._next += 1
            if token in _OPENING:
                self._fields(location)
            first = first and token == ","
        self._next += 1

    def _peek(self) -> str:
        return self._tokens[self._next][0] if self._next < len(self._tokens) else ""

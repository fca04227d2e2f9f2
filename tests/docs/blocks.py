"""The code blocks of the README and of the pages in docs/."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import NamedTuple

from tests.support import REPOSITORY

__all__ = ["PAGES", "Code", "code_of", "commands_of", "python_of"]

PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "docs").rglob("*.md")),
]

_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
_INDENTED = re.compile(r"(?:^|\n\n)((?:    .*\n|\n)+)")


class Code(NamedTuple):
    """A block: its page, language ("" for an indented one) and text."""

    page: str
    language: str
    text: str


def code_of(page: str) -> list[Code]:
    """All blocks of a page: those between fences, then those that are indented."""
    text = (REPOSITORY / page).read_text()
    found = [Code(page, m[2] or "text", textwrap.dedent(m[3])) for m in _FENCE.finditer(text)]
    rest = _FENCE.sub("", text)
    return found + [Code(page, "", textwrap.dedent(m[1])) for m in _INDENTED.finditer(rest)]


def python_of(page: str) -> list[str]:
    """The Python blocks of a page."""
    return [code.text for code in code_of(page) if code.language == "python"]


def commands_of(page: str) -> list[str]:
    """The command lines of a page, without comments."""
    lines = [
        line.partition(" #")[0].strip()
        for code in code_of(page)
        if code.language in ("sh", "bash", "console", "")
        for line in code.text.splitlines()
    ]
    return [line for line in lines if _is_command(line)]


def _is_command(line: str) -> bool:
    words = re.split(r"\s+", re.sub(r"^(\w+=\S+\s+)+", "", line))
    if re.match(r"\S+ {2,}", line):
        return False  # a row of a table of folders
    if words[0].startswith("ci/"):
        return True
    return Path(words[0]).name in _PROGRAMS and (len(words) > 1 or words[0] == "multiring")


_PROGRAMS = {
    *(
        "multiring",
        "make",
        "pip",
        "python",
        "pytest",
        "source",
        "salloc",
        "sbatch",
        "srun",
        "mpirun",
        "torchrun",
    ),
}

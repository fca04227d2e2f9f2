"""The code blocks of the README and of the pages in docs/."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from tests.support import REPOSITORY

PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "docs").rglob("*.md")),
]

_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
_INDENTED = re.compile(r"(?:^|\n\n)((?:    .*\n|\n)+)")


def code_of(page: str) -> list[tuple[str, str]]:
    """Language ("" for an indented one) and text of all blocks: first those between fences."""
    text = (REPOSITORY / page).read_text()
    found = [(m[2] or "text", textwrap.dedent(m[3])) for m in _FENCE.finditer(text)]
    return found + [("", textwrap.dedent(m[1])) for m in _INDENTED.finditer(_FENCE.sub("", text))]


def python_of(page: str) -> list[str]:
    """The Python blocks of a page."""
    return [text for language, text in code_of(page) if language == "python"]


def commands_of(page: str) -> list[str]:
    """The command lines of a page, without comments."""
    texts = [text for language, text in code_of(page) if language in ("sh", "bash", "console", "")]
    lines = [line.partition(" #")[0].strip() for text in texts for line in text.splitlines()]
    return [line for line in lines if _is_command(line)]


def _is_command(line: str) -> bool:
    words = re.split(r"\s+", re.sub(r"^(\w+=\S+\s+)+", "", line))
    if re.match(r"\S+ {2,}", line):
        return False  # a row of a table of folders
    if words[0].startswith("ci/"):
        return True
    program = _PROGRAMS.fullmatch(Path(words[0]).name)
    return program is not None and (len(words) > 1 or words[0] == "multiring")


_PROGRAMS = re.compile("multiring|make|pip|python|pytest|source|salloc|sbatch|srun|mpirun|torchrun")

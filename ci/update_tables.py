"""Writes the tables of docs/algorithms.md anew, from the commands above them, and there and in docs/plans.md
those of the letters of a mode, from core/topology/algorithms.

Run it after a change of the cost model or of an algorithm, and read what changes:
python ci/update_tables.py.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

from multiring import _core, cli

PAGE = Path(__file__).resolve().parent.parent / "docs" / "algorithms.md"
# By page: a line of an algorithm in the table of letters.
LETTERS = {
    PAGE: "| `{letter}` {name} | {hops} | {bytes} | {canonical} |\n",
    PAGE.with_name("plans.md"): "| `{letter}` | {name}: {description} | {hops} | {good_for} |\n",
}


def printed(*arguments: str) -> str:
    """What `multiring plan --explain` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert cli.main(["plan", "--explain", *arguments]) == 0
    return output.getvalue()


def blocks(text: str) -> list[tuple[str, str]]:
    """The commands of a page, and each with what stands below it, indented."""
    found = re.findall(r"(?m)^    multiring plan (.*--explain.*)\n((?:\n|    .*\n)+)", text)
    return [(command, f"    multiring plan {command}\n{below}") for command, below in found]


def shown(command: str) -> str:
    """The block of a command as it should be."""
    lines = printed(*command.replace("--explain", "").split()).splitlines()
    return (
        f"    multiring plan {command}\n\n" + "".join(f"    {line}".rstrip() + "\n" for line in lines) + "\n"
    )


def with_letters(page: Path) -> str:
    """The text of a page, with its first table of letters as it should be."""
    lines = "".join(LETTERS[page].format(**each) for each in _core.documented_algorithms())
    found = re.search(r"(?m)(^\| `[a-z]` .*\n)+", text := page.read_text())
    assert found, page
    return text.replace(found[0], lines)


def main() -> None:
    """Replaces the tables of letters, and each block by what its command prints."""
    for page in LETTERS:
        page.write_text(with_letters(page))
    text = PAGE.read_text() + "\n"
    for command, block in blocks(text):
        text = text.replace(block, shown(command))
    PAGE.write_text(text.rstrip() + "\n")


if __name__ == "__main__":
    main()

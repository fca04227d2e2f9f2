"""Writes the tables of docs/algorithms.md anew, from the commands above them.

Run it after a change of the cost model or of an algorithm, and read what changes:
python ci/update_tables.py.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

from multiring import cli

PAGE = Path(__file__).resolve().parent.parent / "docs" / "algorithms.md"


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


def main() -> None:
    """Replaces each block by what its command prints."""
    text = PAGE.read_text() + "\n"
    for command, block in blocks(text):
        text = text.replace(block, shown(command))
    PAGE.write_text(text.rstrip() + "\n")


if __name__ == "__main__":
    main()

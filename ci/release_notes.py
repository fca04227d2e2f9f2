"""Prints the section of CHANGELOG.md about a version: the text of its tag and of its release.

git tag --annotate --cleanup=whitespace v0.1.0 --file <(python ci/release_notes.py 0.1.0)
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

CHANGELOG = Path(__file__).resolve().parent.parent / "CHANGELOG.md"


def notes(version: str, changelog: str) -> str:
    """Return the heading and the text of a version.

    Raises:
        SystemExit: The version has no dated section.
    """
    heading = rf"^## \[({re.escape(version)})\] - (\d{{4}}-\d\d-\d\d)\n"
    found = re.search(heading + r"(.*?)(?=^## \[|\Z)", changelog, re.MULTILINE | re.DOTALL)
    if found is None:
        sys.exit(f"CHANGELOG.md has no section '## [{version}] - YYYY-MM-DD'")
    return f"multiring {found[1]} ({found[2]})\n\n{found[3].strip()}\n"


if __name__ == "__main__":
    print(notes(sys.argv[1], CHANGELOG.read_text()), end="")

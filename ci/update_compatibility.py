"""Writes the table of projects in docs/compatibility.md anew, from what tests/projects have recorded.

python ci/update_compatibility.py, after `pytest tests/projects` with the environment that
ci/make_projects_environment.sh makes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "compatibility.md"
HEAD = "| project | by | run, with 2 ranks | over multiring | without |\n|---|---|---|---|---|\n"


def versions() -> dict[str, str]:
    """Return the version of each distribution that the tests run with, by its name in small letters."""
    lines = "\n".join((ROOT / "ci" / name).read_text() for name in ("projects.txt", "constraints.txt"))
    return {name.lower(): version for name, version in re.findall(r"(?m)^([\w.-]+)==(\S+)", lines)}


def main() -> None:
    """Replaces the table."""
    known = versions()
    rows = [json.loads(path.read_text()) for path in sorted((ROOT / "build" / "projects").glob("*.json"))]
    table = HEAD + "".join(
        f"| {row['project']} {known[row['project'].lower()]} | {row['by']} | {row['what']} | {row['ours']} | "
        f"{row['theirs']} |\n"
        for row in rows
    )
    text, count = re.subn(r"\| project \|.*\n(\|.*\n)+", lambda _: table, PAGE.read_text())
    assert count == 1, f"{PAGE} has {count} tables of projects"
    PAGE.write_text(text)


if __name__ == "__main__":
    main()

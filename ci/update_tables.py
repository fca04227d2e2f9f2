"""Writes the tables of docs/algorithms.md anew, from the commands above them.

Run it after a change of the cost model or of an algorithm, and read what changes:
python ci/update_tables.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.python.commands.test_plan_tables import PAGE, blocks, shown


def main() -> None:
    """Replaces each block by what its command prints."""
    text = PAGE.read_text() + "\n"
    for command, block in blocks(text):
        text = text.replace(block, shown(command))
    PAGE.write_text(text.rstrip() + "\n")


if __name__ == "__main__":
    main()

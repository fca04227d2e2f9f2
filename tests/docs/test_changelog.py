"""The text of a tag."""

from __future__ import annotations

import subprocess
import sys

import multiring
from tests.support import REPOSITORY

SCRIPT = REPOSITORY / "ci" / "release_notes.py"


def test_the_version_of_the_package_has_notes() -> None:
    told = subprocess.check_output([sys.executable, SCRIPT, multiring.__version__], text=True)
    assert told.startswith(f"multiring {multiring.__version__} (2")
    assert "### Collectives" in told
    assert "[Unreleased]" not in told


def test_a_version_without_notes_is_an_error() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "9.9"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "'## [9.9] - YYYY-MM-DD'" in done.stderr

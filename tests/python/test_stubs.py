"""The stub of the native module says what the module has."""

from __future__ import annotations

import subprocess
import sys

from tests.support import REPOSITORY


def test_the_stub_is_up_to_date() -> None:
    command = [sys.executable, str(REPOSITORY / "ci" / "update_stubs.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    shown = f"{result.stdout}{result.stderr}"
    assert result.returncode == 0, f"run `python ci/update_stubs.py` and look at the difference\n{shown}"

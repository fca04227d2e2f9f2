"""Writes core/multiring/_core.pyi, the types of the native module, from the module that is installed.

python ci/update_stubs.py           writes the file
python ci/update_stubs.py --check   fails if the file is out of date, and shows how
"""

from __future__ import annotations

import argparse
import difflib
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STUB = ROOT / "core" / "multiring" / "_core.pyi"


def generate() -> str:
    """The stub of the installed native module, formatted."""
    with tempfile.TemporaryDirectory() as directory:
        options = ["--exit-code", "--numpy-array-remove-parameters", "-o", directory]
        _run("pybind11_stubgen", "multiring._core", *options)
        text = (Path(directory) / "multiring" / "_core.pyi").read_text()
    name = ["--stdin-filename", str(STUB)]
    text = _run("ruff", "check", "--fix-only", "--quiet", *name, "-", text=text)
    return _run("ruff", "format", *name, "-", text=text)


def _run(module: str, *args: str, text: str | None = None) -> str:
    command = [sys.executable, "-m", module, *args]
    result = subprocess.run(command, input=text, capture_output=True, text=True, check=False, cwd=ROOT)
    if result.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{result.stdout}{result.stderr}")
    return result.stdout


def main() -> int:
    """Exit code 1: the stub is out of date."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    wanted = generate()
    if not arguments.check:
        STUB.write_text(wanted)
        return 0
    found = STUB.read_text()
    names = (str(STUB.relative_to(ROOT)), "what the native module has")
    sys.stdout.writelines(difflib.unified_diff(found.splitlines(True), wanted.splitlines(True), *names))
    return int(found != wanted)


if __name__ == "__main__":
    sys.exit(main())

"""Prints what an extra of pyproject.toml requires, so that it can be installed while the library is compiled.

python ci/requirements.py dev
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).resolve().parent.parent / "pyproject.toml").read_text())["project"]


def required(extra: str) -> list[str]:
    """The requirements of one extra; those of the extras that it names in their place."""
    found = []
    for requirement in PROJECT["optional-dependencies"][extra]:
        own = re.fullmatch(r"multiring\[(.*)\]", requirement)
        found += [each for name in own[1].split(",") for each in required(name)] if own else [requirement]
    return found


if __name__ == "__main__":
    print(
        "\n".join(
            dict.fromkeys(
                [*PROJECT["dependencies"], *(each for name in sys.argv[1:] for each in required(name))]
            )
        )
    )

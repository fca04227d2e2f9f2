"""Checks that private words do not come back: each has a term of the field that stands for it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = (".py", ".pyi", ".h", ".cpp", ".inc", ".md", ".sh", ".txt", ".toml")
# A pattern (whole words, any case), and what to write instead.
BANNED = {
    r"doorkeepers?": "acceptor",
    r"strangers?": "unauthenticated peer",
    r"roll.?calls?": "liveness query",
    r"rumou?rs?|hearsay": "liveness information, gossip",
    r"mend(s|ed|ing)?": "fix",
    r"in vain": "until it times out, or: without a result",
    r"goes by|go by": "uses",
    r"whoever": "the rank (process, user) that",
    r"driver.?seat": "progress lock",
}
PATTERN = re.compile("|".join(rf"\b(?P<p{i}>{word})\b" for i, word in enumerate(BANNED)), re.IGNORECASE)
INSTEAD = list(BANNED.values())


def findings() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    found = []
    for name in listed.splitlines():
        path = ROOT / name
        if path == Path(__file__) or path.suffix not in SUFFIXES or not path.is_file():
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            for match in PATTERN.finditer(line):
                assert match.lastgroup is not None
                instead = INSTEAD[int(match.lastgroup[1:])]
                found.append(f"{name}:{number}: '{match.group()}': write {instead}")
    return found


def main() -> int:
    found = findings()
    print("\n".join(found) if found else "words: the field's terms")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

"""Checks that private words do not come back, also in identifiers: each has a term of the field."""

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
    r"(roll.?calls?|call.?roll|calls? a roll)": "liveness query, confirm",
    r"carry on": "transfer",
    r"seats?": "slot",
    r"flights": "pending call",
    r"rumou?rs?|hearsay": "liveness information, gossip",
    r"mend(s|ed|ing)?": "fix",
    r"in vain": "until it times out, or: without a result",
    r"goes by|go by": "uses",
    r"whoever": "the rank (process, user) that",
    r"driver.?seat": "progress lock",
}
PATTERN = re.compile("|".join(rf"\b(?P<p{i}>{word})\b" for i, word in enumerate(BANNED)), re.IGNORECASE)
LIMIT = re.compile(r"\b(k(Most|Least)([A-Z]\w*)?|_?(MOST|LEAST)_\w+)\b")
# Where the words of an identifier meet: call_roll, CallRoll.
JOINT = re.compile(r"_+|(?<=[a-z0-9])(?=[A-Z])")
INSTEAD = list(BANNED.values())


def findings() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    found = []
    for name in listed.splitlines():
        path = ROOT / name
        if path == Path(__file__) or path.suffix not in SUFFIXES or not path.is_file():
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            for match in PATTERN.finditer(JOINT.sub(" ", line)):
                assert match.lastgroup is not None
                instead = INSTEAD[int(match.lastgroup[1:])]
                found.append(f"{name}:{number}: '{match.group()}': write {instead}")
            limits = (match.group() for match in LIMIT.finditer(line))
            found.extend(f"{name}:{number}: '{limit}': limits are max and min" for limit in limits)
    return found


def main() -> int:
    found = findings()
    print("\n".join(found) if found else "words: the field's terms")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

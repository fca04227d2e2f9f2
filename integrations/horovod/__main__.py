"""`python -m multiring.horovod train.py`: runs a script in which `import horovod` gives multiring.horovod."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from multiring.horovod.installation import install

__all__ = ["main"]

_USAGE = """\
usage: python -m multiring.horovod script.py [arguments ...]
       python -m multiring.horovod -m module [arguments ...]

Runs a script in which `import horovod.torch` gives multiring.horovod.torch, as a rank of the job that this
process was started in, or alone. `multiring run --horovod -np 4 python script.py` starts four ranks.
"""


def main(arguments: list[str]) -> int:
    """Runs what the arguments name; returns an exit code."""
    if not arguments or arguments[0] in ("-h", "--help") or arguments == ["-m"]:
        print(_USAGE, file=sys.stdout if arguments[:1] in (["-h"], ["--help"]) else sys.stderr, end="")
        return 0 if arguments[:1] in (["-h"], ["--help"]) else 2
    if arguments[0] != "-m" and not sys.flags.safe_path:
        sys.path[0] = str(Path(arguments[0]).resolve().parent)  # as Python does; the shim goes before it
    install()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`python -m multiring.horovod.runner`, and `horovodrun` of the wheel multiring-horovod: the command
`multiring horovodrun`."""

from __future__ import annotations

import sys

from multiring import cli

__all__ = ["main"]


def main() -> int:
    """Run the command with the arguments of this process; return the exit code."""
    return cli.main(["horovodrun", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())

"""`python -m multiring.horovod.runner`: the command `multiring horovodrun`."""

from __future__ import annotations

import sys

from multiring import cli

if __name__ == "__main__":
    sys.exit(cli.main(["horovodrun", *sys.argv[1:]]))

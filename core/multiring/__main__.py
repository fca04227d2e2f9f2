"""`python -m multiring` is the command `multiring`."""

from __future__ import annotations

import sys

from multiring.cli import main

if __name__ == "__main__":
    sys.exit(main())

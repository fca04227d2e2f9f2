"""`python -m multiring` is the command `multiring`, which begins here."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> int:
    """Run the command; return its exit code. Ctrl-C while its modules are imported is no traceback either."""
    try:
        from multiring import cli

        return cli.main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())

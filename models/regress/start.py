"""Starts one job of `multiring regress` and sees it through.

    python -m multiring.models.regress.start ORDER.json --ranks 2 [--mpi] [--alive FD]

A process of its own, since the launcher acts on the signals of its process. It ends the job when the process
that has started it is gone.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading

from multiring.benchmarks import launch
from multiring.commands.launcher import JobOptions, run_job
from multiring.commands.launcher.binding import THREAD_VARIABLES
from multiring.errors import MultiringError

__all__ = ["main"]

WORKER = "multiring.models.regress.worker"


def main() -> int:
    """Run the job; returns the launcher's exit code."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("order")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--mpi", action="store_true")
    parser.add_argument("--alive", type=int, help="descriptor that is closed when our parent has ended")
    args = parser.parse_args()
    if args.alive is not None:
        threading.Thread(target=_end_with_parent, args=(args.alive,), daemon=True).start()
    # Every rank computes with one thread, as if it had one processor.
    environ = dict.fromkeys(THREAD_VARIABLES, "1")
    try:
        if args.mpi:
            program = [sys.executable, "-u", "-m", WORKER, args.order]
            command = launch.find_mpirun().command(args.ranks, program)
            return launch.run_mpi(command, launch.mpi_environment({**os.environ, **environ}))
        options = JobOptions(args.ranks, [args.order], module=WORKER, bind="none", environment=environ)
        return run_job(options)
    except MultiringError as error:
        print(f"multiring: {error}", file=sys.stderr)
        return 2


def _end_with_parent(descriptor: int) -> None:
    os.read(descriptor, 1)  # nothing is ever written: returns when the last writer is gone
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())

"""How a training command becomes the ranks of a job, and how each of them ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NoReturn

import multiring
from multiring import Communicator, config
from multiring.errors import MultiringError, UsageError
from multiring.rendezvous import launch_environment
from multiring.rendezvous.joined import EXPLAINED_KEY, tell_launcher

__all__ = ["has_to_start", "run_rank", "start_ranks"]

# Exit code of a command that Ctrl-C ended, as shells have it.
INTERRUPTED = 130


def has_to_start(ranks: int | None) -> bool:
    """Whether `-np RANKS` was given outside of a job."""
    return ranks is not None and launch_environment.detect().launcher == "none"


def start_ranks(ranks: int, *words: str) -> NoReturn:
    """Become `multiring run -np RANKS` with these words."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "multiring", "run", "-np", str(ranks), *words])


def run_rank(command: str, ranks: int | None, run: Callable[[Communicator], int]) -> int:
    """Join the job and run a command as one of its ranks.

    Args:
        command: Its name in messages.
        ranks: Of `-np`: how many there have to be; None: any number.
        run: Runs it; returns its exit code, and has told the user why if that is not 0.

    Returns:
        Exit code: that of `run`; 1 for an error and 2 for a wrong option, which are reported on stderr; 130
        after Ctrl-C. Every code but 0 makes the launcher end the other ranks.
    """
    comm = multiring.init()
    try:
        if ranks not in (None, comm.size):
            raise UsageError(f"-np {ranks} was given inside a job of {comm.size} ranks; leave it out")
        code = run(comm)
        if code:
            tell_launcher(config.load(), EXPLAINED_KEY)
        return code
    except (MultiringError, OSError) as error:
        if isinstance(error, UsageError):
            tell_launcher(config.load(), EXPLAINED_KEY)
        # All ranks have the same options; where one alone has raised, rank 0 is aborted with what it says.
        if comm.rank == 0 or not isinstance(error, multiring.AbortedError | UsageError):
            print(f"{command}: rank {comm.rank}: {type(error).__name__}: {error}", file=sys.stderr)
        # The others may be waiting in a collective that this rank will not join.
        comm.abort(f"rank {comm.rank}: {error}")
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        comm.abort(f"rank {comm.rank}: interrupted")
        return INTERRUPTED
    except BaseException as error:
        comm.abort(f"rank {comm.rank}: {type(error).__name__}: {error}")
        raise
    finally:
        multiring.shutdown()

"""`multiring tune`: measures what allreduces across hosts cost, for the table of algorithms."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import multiring
from multiring import config, units
from multiring.commands.argument_types import array_sizes, wall_seconds
from multiring.commands.plan.report import table
from multiring.communicator import Communicator
from multiring.errors import UsageError
from multiring.rendezvous import launch_environment
from multiring.tuning.file import OFF
from multiring.tuning.measure import Measured, algorithms_of, measure

__all__ = ["add_arguments", "main"]

DEFAULT_SIZES = [1024 * 4**power for power in range(9)]
_TURN_SECONDS = 0.004


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `multiring tune`."""
    parser.epilog = (
        "It is a job itself: start it on the hosts, and with as many ranks on each, as the jobs that are to\n"
        "use what it finds. Nothing else should be running there.\n\n"
        "  multiring run -H node0:4,node1:4 -m multiring tune\n"
        "  MULTIRING_TUNING=~/.cache/multiring/tuning-2x4.txt multiring run -H node0:4,node1:4 train.py"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="what to write, on the host of rank 0 [~/.cache/multiring/tuning-HOSTSxRANKS.txt]",
    )
    parser.add_argument(
        "--sizes",
        type=array_sizes,
        default=DEFAULT_SIZES,
        metavar="LIST",
        help="bytes to reduce, as 4K,1M,64M [1K to 64M in powers of four]",
    )
    parser.add_argument(
        "--seconds",
        type=wall_seconds,
        default=60.0,
        metavar="S",
        help="time for all sizes together, about; of slow networks the largest sizes are left out [60]",
    )


def main(args: argparse.Namespace) -> int:
    """Measures, prints and writes, as a rank of a job.

    Raises:
        UsageError: This is no job on several hosts, a mode is forced, or the file cannot be written.
    """
    if launch_environment.detect().launcher == "none":
        raise UsageError(
            "`multiring tune` measures as a job on the hosts it is for: "
            "multiring run -H node0:4,node1:4 -m multiring tune"
        )
    if mode := config.load().mode:
        raise UsageError(f"MULTIRING_MODE={mode} leaves nothing to choose: unset it for `multiring tune`")
    # The file that is to be replaced may be of another cluster, and need not be there.
    os.environ["MULTIRING_TUNING"] = OFF
    comm = multiring.init()
    try:
        if comm.cross_size == 1:
            raise UsageError(
                f"all {comm.size} ranks are on one host, where no plan is used: "
                "multiring run -H node0:4,node1:4 -m multiring tune"
            )
        _tune(comm, args)
        return 0
    finally:
        multiring.shutdown()


def _tune(comm: Communicator, args: argparse.Namespace) -> None:
    layout = _layout(comm)
    path = (args.output or Path.home() / ".cache" / "multiring" / f"tuning-{layout}.txt").absolute()
    _require_writable(comm, path)
    say = _say if comm.rank == 0 else _be_silent
    measured = measure(
        comm, algorithms_of(comm), sorted(args.sizes), args.seconds, say, turn_seconds=_TURN_SECONDS
    )
    costs = comm.broadcast_object(comm._core.fit_costs(measured) if comm.rank == 0 else "")
    comm._core.set_tuning(costs)
    if comm.rank == 0:
        lines = _compare(comm, measured)
        print("\n".join(lines))
        _write(path, [f"multiring {multiring.__version__}, {layout} (hosts x ranks)", *lines], costs)
        print(f"\nwritten: {path}\nto use it, on every host: export MULTIRING_TUNING={path}", flush=True)
    comm.barrier()


def _layout(comm: Communicator) -> str:
    """The hosts in short: "4x2" is four of two ranks each, "2+1" two that differ."""
    hosts = comm._core.hosts
    ranks = [hosts.count(host) for host in dict.fromkeys(hosts)]
    return f"{len(ranks)}x{ranks[0]}" if len(set(ranks)) == 1 else "+".join(map(str, ranks))


def _require_writable(comm: Communicator, path: Path) -> None:
    """All ranks raise what rank 0 finds, before anything is measured."""
    wrong = ""
    if comm.rank == 0:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                wrong = "it is a directory"
            elif not os.access(path.parent, os.W_OK | os.X_OK):
                wrong = f"{path.parent} cannot be written to"
        except OSError as error:
            wrong = str(error)
    if wrong := comm.broadcast_object(wrong):
        raise UsageError(f"{path} cannot be written on the host of rank 0: {wrong}; name another --output")


def _compare(comm: Communicator, measured: Sequence[Measured]) -> list[str]:
    """What the costs predict beside what was measured, and how much longer than the quickest the chosen
    algorithm takes."""
    rows = [["size", "algorithm", "predicted", "measured", ""]]
    worst = 0.0
    for nbytes in sorted({one.nbytes for one in measured}):
        here = {one.algorithm: one.seconds for one in measured if one.nbytes == nbytes}
        least = min(here.values())
        for row in comm._core.algorithm_rows("allreduce", nbytes, "canonical"):
            if row.name not in here and not row.is_chosen:
                continue
            seconds = here.get(row.name)
            notes = ["chosen"] if row.is_chosen else []
            notes += ["quickest"] if seconds == least else []
            if row.is_chosen and seconds is not None:
                worst = max(worst, seconds / least)
            rows.append(
                [
                    units.size_text(nbytes),
                    row.name,
                    units.seconds_text(row.seconds),
                    "-" if seconds is None else units.seconds_text(seconds),
                    ", ".join(notes),
                ]
            )
    return [*table(rows, left=(1, 4)), f"at worst the chosen one takes {worst:.2f} times the quickest"]


def _write(path: Path, comments: Sequence[str], costs: str) -> None:
    """The file is there whole or not at all: jobs may be starting."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as draft:
        draft.write("".join(f"# {line}\n" for line in comments) + costs + "\n")
    try:
        Path(draft.name).chmod(0o644)
        Path(draft.name).replace(path)
    except OSError:
        Path(draft.name).unlink()
        raise


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _be_silent(text: str) -> None:
    """Every rank but the first."""

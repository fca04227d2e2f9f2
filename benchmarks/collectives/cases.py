"""What the benchmarks of collectives share: options, and one operation and size measured after the other."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from multiring import Communicator
from multiring.benchmarks.collectives.results import ALLREDUCE, LIMIT, LIMIT_BYTES, Row
from multiring.benchmarks.contenders import PEERS, Contender, Elsewhere
from multiring.benchmarks.emulation.start import Emulation
from multiring.benchmarks.emulation.traffic import LOOPBACK
from multiring.benchmarks.measure import Meeting, Pace, Sample, Task, measure
from multiring.benchmarks.table import size_text, time_text
from multiring.commands.argument_types import array_sizes, wall_seconds
from multiring.errors import InternalError

__all__ = [
    "BANDWIDTH_COLUMN",
    "HOW_TIMED",
    "LATER_COLUMNS",
    "Case",
    "Crossing",
    "add_case_arguments",
    "check_crossed",
    "measure_cases",
]

Arrays = TypeVar("Arrays")

# Parts of the texts that explain what is printed.
HOW_TIMED = """\
how the time is taken:
  All contenders take turns of a few iterations within one run, so that what else the machine does meets all
  of them alike. Before every iteration each rank writes its array anew, as a backward pass does, and all
  ranks meet at a barrier that belongs to no contender. An iteration lasts from when the last rank enters the
  call to when the last rank leaves it. Results are checked."""
BANDWIDTH_COLUMN = "algorithm GB/s  algorithm bandwidth: size / median; 1 GB = 10^9 B"
LATER_COLUMNS = f"""\
  x Gloo ...      how many times as long that library takes: its median / multiring's; above 1 multiring is
                  faster
  of limit        how much of the limit multiring reaches: the limit's median / multiring's; from
                  {LIMIT_BYTES // 1024} KiB on, since below the call from Python takes longest
  links busy      on emulated hosts: which part of what each link can send in the median's time it has sent,
                  headers included; of the host where that is"""


@dataclass(frozen=True)
class Crossing:
    """Bytes that have to cross the links of emulated hosts, whatever the algorithm.

    Attributes:
        busiest: Of the host that has most of them to send, or to receive.
        together: That all hosts send.
    """

    busiest: float
    together: float


@dataclass(frozen=True)
class Case(Generic[Arrays]):
    """One operation on one size.

    Attributes:
        operation: Its name.
        bytes: Size of the array.
        count: As `Contender.prepare`.
        contenders: Who does it.
        task: What it is.
        crossing: What it needs of emulated hosts; None: the ranks are not on any.
        limit: Names of the contenders the slowest of which is the limit; empty: it is not one of these.
    """

    operation: str
    bytes: int
    count: int
    contenders: Sequence[Contender[Arrays] | Elsewhere]
    task: Task[Arrays]
    crossing: Crossing | None
    limit: Sequence[str] = ()


def add_case_arguments(
    parser: argparse.ArgumentParser, sizes: list[int], *, array: str, shown: str, seconds_for: str
) -> None:
    """Adds the options about sizes, peers and time.

    Args:
        parser: Gets them.
        sizes: The default.
        array: What has the size.
        shown: The default as the help tells it.
        seconds_for: What the time is for.
    """
    parser.add_argument(
        "--sizes",
        type=array_sizes,
        default=sizes,
        metavar="LIST",
        help=f"sizes of the {array}, such as 4,1KiB,64KiB,1MiB [{shown}]",
    )
    parser.add_argument(
        "--peers",
        type=_peers,
        default=None,  # not that of all benchmarks, which is no peers
        metavar="LIST",
        help=f"other libraries: {', '.join(PEERS)}, or none [those that are installed]",
    )
    parser.add_argument(
        "--seconds",
        type=wall_seconds,
        default=0.5,
        metavar="S",
        help=f"time for each {seconds_for}; a few iterations are made even if they take longer [0.5]",
    )


def _peers(text: str) -> list[str]:
    names = list(dict.fromkeys(part.strip() for part in text.split(",")))
    if names == ["none"]:
        return []
    for name in names:
        if name not in PEERS:
            known = " and ".join(f"{peer} (in the package {PEERS[peer][0]})" for peer in PEERS)
            raise argparse.ArgumentTypeError(
                f"there is no peer {name!r}: known are {known}; or give none; --mpich of `multiring bench "
                "allreduce` adds MPICH"
            )
    return names


def measure_cases(comm: Communicator, args: argparse.Namespace, cases: Sequence[Case[Arrays]]) -> list[Row]:
    """Measures one case after the other, with a line on stderr for each. Collective.

    On emulated hosts, and with `Case.limit`, the limit follows the contenders.

    Raises:
        InternalError: A contender's result is wrong, or did not cross the emulated links, or a rank does
            not come back from it.
    """
    emulation: Emulation | None = args.emulation
    meeting = Meeting(comm, args.cores, emulated=emulation is not None)
    pace, short = Pace(seconds=args.seconds), Pace(seconds=min(args.seconds, 0.2))
    measured: list[Row] = []
    warm: set[str] = set()
    for case in cases:
        if case.operation not in warm:
            # What happens once only, in any of the libraries, and what their threads still do from the start.
            measure(comm, case.contenders, case.task, case.count, short, meeting)
            warm.add(case.operation)
        found = measure(comm, case.contenders, case.task, case.count, pace, meeting)
        new = [
            Row(contender.name, case.bytes, *one, case.operation)
            for contender, one in zip(case.contenders, found, strict=True)
        ]
        measured += new
        if emulation is not None:
            measured.append(_limit(emulation, case, new))
        if case.limit:
            slowest = max(one.sample.median for one in new if one.contender in case.limit)
            measured.append(_calculated(case, slowest))
        if comm.rank == 0:
            title = "" if case.operation == ALLREDUCE else f"{case.operation} "
            line = ", ".join(f"{one.contender} {time_text(one.sample.median)} us" for one in new)
            print(f"{title}{size_text(case.bytes)}: {line}", file=sys.stderr, flush=True)
    return measured


def _limit(emulation: Emulation, case: Case[Arrays], measured: Sequence[Row]) -> Row:
    """The limit by calculation, once it is seen that all bytes have crossed the links."""
    assert case.crossing is not None
    for contender, one in zip(case.contenders, measured, strict=True):
        if contender.exact:
            check_crossed(one, case.crossing)
    seconds = case.crossing.busiest / emulation.bytes_per_second
    return _calculated(case, seconds)


def _calculated(case: Case[Arrays], seconds: float) -> Row:
    return Row(LIMIT, case.bytes, Sample(seconds, seconds, seconds, 0), collective=case.operation)


def check_crossed(measured: Row, crossing: Crossing) -> None:
    """Sees that the hosts' links have carried what has to cross them.

    Raises:
        InternalError: Some of it has gone another way. Libraries may find out that the hosts share a kernel.
    """
    crossed = sum(sum(hosts) for name, hosts in measured.sent.items() if name != LOOPBACK)
    if crossed < crossing.together:
        article = "an" if measured.collective[0] == "a" else "a"
        raise InternalError(
            f"{measured.contender} sent {crossed:.0f} B over the links of the emulated hosts for {article} "
            f"{measured.collective} of {measured.bytes} B, where {crossing.together:.0f} B have to cross "
            "them: the rest went through memory, which hosts do not share; look for settings of it in the "
            "environment, as UCX_TLS or FI_PROVIDER"
        )

"""`multiring bench allreduce`: latency and bandwidth over sizes, beside the peers and the machine's limit."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from multiring import Communicator
from multiring.argument_types import ITEM, array_sizes, wall_seconds
from multiring.errors import InternalError, UsageError
from multiring.models.bench.contenders import PEERS, Contender, Elsewhere, make_contenders
from multiring.models.bench.emulated_start import Emulation
from multiring.models.bench.measure import Meeting, Pace, Sample, measure
from multiring.models.bench.mpich import NAME, Mpich
from multiring.models.bench.progress import open_progress
from multiring.models.bench.results import LIMIT, LIMIT_BYTES, Machine, Report, Row
from multiring.models.bench.table import size_text, time_text
from multiring.models.bench.traffic import LOOPBACK, Sent

__all__ = ["DEFAULT_SIZES", "add_arguments", "run"]

DEFAULT_SIZES = [4**power for power in range(1, 15)]
_LEFT_OUT = f"{NAME} was left out: --mpich adds it, from a virtual environment with mpich, mpi4py and numpy"

_EXPLANATION = f"""\
what is measured:
  Every rank has an array of float32 and gets the sum of all ranks' arrays, in place. The ranks are processes
  of this host, and each stays on one processor. With --emulate they are on several hosts: network namespaces
  of this machine, joined by links of the given rate (needs root).

  multiring symmetric  multiring on memory that all ranks have mapped (`Communicator.symmetric_empty`), as the
                       adapters use it for gradients
  multiring            multiring on ordinary memory of NumPy's
  multiring bfloat16   the same, with elements that cross from host to host in half precision (--wire)
  limit                the additions and the memory traffic without any synchronisation: every rank adds up
                       its share of all ranks' arrays and writes it to all of them. On several hosts, by
                       calculation: what every host has to send, 2 (hosts - 1) / hosts of the array, at the
                       rate of its links, headers not counted (TCP's share of a frame is 0.949)
  Gloo                 torch.distributed over Gloo (--peers gloo)
  Open MPI, MPICH ...  MPI_Allreduce of the library that mpi4py loads (--peers mpi)
  MPICH                the same beside Open MPI, in processes of its own that take the ranks' place for their
                       turns (--mpich)

how the time is taken:
  All contenders take turns of a few iterations within one run, so that what else the machine does meets all
  of them alike. Before every iteration each rank writes its array anew, as a backward pass does, and all
  ranks meet at a barrier that belongs to no contender. An iteration lasts from when the last rank enters the
  call to when the last rank leaves it. Results are checked.

columns:
  size            of the array on each rank; 1 KiB = 1024 B
  library         see above
  latency us      microseconds of one allreduce: the median, and in brackets the 10th and the 90th percentile
  algorithm GB/s  algorithm bandwidth: size / median; 1 GB = 10^9 B
  bus GB/s        bus bandwidth: algorithm bandwidth * 2 (n - 1) / n for n ranks, which is what each rank
                  would have to send and to receive if a ring did it; comparable over numbers of ranks
  x Gloo ...      how many times as long that library takes: its median / multiring's; above 1 multiring is
                  faster
  of limit        how much of the limit multiring reaches: the limit's median / multiring's; from
                  {LIMIT_BYTES // 1024} KiB on, since below the call from Python takes longest
  links busy      on emulated hosts: which part of what each link can send in the median's time it has sent,
                  headers included; of the host where that is least; from {LIMIT_BYTES // 1024} KiB on

examples:
  multiring bench allreduce
  multiring bench allreduce -np 4 --sizes 4,64KiB,16MiB --peers gloo --json results.json --plot results.png
  mpirun -n 2 multiring bench allreduce
  multiring bench allreduce --emulate 2x4 --rate 1gbit --sizes 4KiB,1MiB,16MiB
  multiring bench allreduce --emulate 2x1 --mpich ~/mpich
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options, and explains the table."""
    parser.epilog = _EXPLANATION
    parser.add_argument(
        "--sizes",
        type=array_sizes,
        default=DEFAULT_SIZES,
        metavar="LIST",
        help="sizes of the array, such as 4,1KiB,64KiB,1MiB [4 B to 256 MiB in powers of four]",
    )
    parser.add_argument(
        "--peers",
        type=_peers,
        default=None,  # not that of all benchmarks, which is no peers
        metavar="LIST",
        help=f"other libraries: {', '.join(PEERS)}, or none [those that are installed]",
    )
    parser.add_argument(
        "--mpich",
        type=Path,
        metavar="DIRECTORY",
        help="measure also MPICH, from a virtual environment (or a Python) that has mpich, mpi4py and numpy: "
        "it cannot be in one with Open MPI",
    )
    parser.add_argument(
        "--wire",
        choices=("bfloat16", "float16"),
        help="measure also what crosses from host to host in half precision",
    )
    parser.add_argument(
        "--seconds",
        type=wall_seconds,
        default=0.5,
        metavar="S",
        help="time for each contender and size; a few iterations are made even if they take longer [0.5]",
    )


def run(comm: Communicator, args: argparse.Namespace) -> Report:
    """Measures all sizes; see `command.Benchmark`.

    Raises:
        UsageError: MPI was not started by its own launcher.
        InternalError: A contender's result is wrong, or did not cross the emulated links, or a rank does
            not come back from it.
    """
    emulation: Emulation | None = args.emulation
    contenders: list[Contender | Elsewhere] = [*make_contenders(comm, args.peers, args.wire)]
    mpich = None if args.mpich is None else _add_mpich(comm, contenders, args)
    names = [contender.name for contender in contenders]
    meeting = Meeting(comm, args.cores, emulated=emulation is not None)
    pace = Pace(seconds=args.seconds)
    rows: list[Row] = []
    # What happens once only, in any of the libraries, and what their threads still do from the start.
    measure(comm, contenders, args.sizes[0] // ITEM, Pace(seconds=min(args.seconds, 0.2)), meeting)
    with open_progress(len(args.sizes), args.progress_terminal, shown=comm.rank == 0) as progress:
        for size in args.sizes:
            progress.begin(size_text(size))
            found = measure(comm, contenders, size // ITEM, pace, meeting)
            if emulation is not None:
                for contender, (_, sent) in zip(contenders, found, strict=True):
                    check_crossed(contender, emulation, size, sent)
            rows += [Row(name, size, *one) for name, one in zip(names, found, strict=True)]
            if emulation is not None:
                rows.append(Row(LIMIT, size, _limit(emulation, size)))
            progress.done(f"{size_text(size)}: {_line(names, [sample for sample, _ in found])}")
    for contender in contenders:
        contender.close()
    return Report(
        command=args.shown_as,
        launcher=args.launcher,
        machine=Machine.here(
            args.cores, mpi="mpi" in args.peers, others=None if mpich is None else mpich.versions
        ),
        ranks=comm.size,
        hosts="" if emulation is None else str(emulation),
        date=comm.broadcast_object(datetime.now().astimezone().isoformat(timespec="seconds")),
        rows=tuple(rows),
        left_out=_LEFT_OUT if args.peers and NAME not in names else "",
    )


def check_crossed(contender: Contender | Elsewhere, emulation: Emulation, size: int, sent: Sent) -> None:
    """Sees that the hosts' links have carried what has to cross them.

    Raises:
        InternalError: Some of it has gone another way. Libraries may find out that the hosts share a kernel.
    """
    least = 2 * (emulation.hosts - 1) * size  # any algorithm: every host's part to one, and the sum back
    crossed = sum(sum(hosts) for name, hosts in sent.items() if name != LOOPBACK)
    if contender.exact and crossed < least:
        raise InternalError(
            f"{contender.name} sent {crossed:.0f} B over the links of the emulated hosts for an allreduce of "
            f"{size} B, where {least} B have to cross them: the rest went through memory, which hosts do not "
            "share; look for settings of it in the environment, as UCX_TLS or FI_PROVIDER"
        )


def _add_mpich(
    comm: Communicator, contenders: list[Contender | Elsewhere], args: argparse.Namespace
) -> Mpich:
    if NAME in [contender.name for contender in contenders]:
        raise UsageError(f"the mpi4py of {sys.executable} uses {NAME} already: leave --mpich out")
    crowded = comm.size > args.cores
    cpus = sorted(os.sched_getaffinity(0))
    mpich = Mpich(comm, args.mpich, cpus, crowded=crowded, emulation=args.emulation)
    contenders.append(mpich)
    return mpich


def _limit(emulation: Emulation, size: int) -> Sample:
    sent = 2 * (emulation.hosts - 1) / emulation.hosts * size
    seconds = sent / emulation.bytes_per_second
    return Sample(seconds, seconds, seconds, 0)


def _line(names: Sequence[str], samples: Sequence[Sample]) -> str:
    found = zip(names, samples, strict=True)
    return ", ".join(f"{name} {time_text(sample.median)} us" for name, sample in found)


def _peers(text: str) -> list[str]:
    names = list(dict.fromkeys(part.strip() for part in text.split(",")))
    if names == ["none"]:
        return []
    for name in names:
        if name not in PEERS:
            known = " and ".join(f"{peer} (in the package {PEERS[peer][0]})" for peer in PEERS)
            raise argparse.ArgumentTypeError(
                f"there is no peer {name!r}: known are {known}; or give none; --mpich adds MPICH"
            )
    return names

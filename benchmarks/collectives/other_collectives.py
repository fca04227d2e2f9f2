"""`multiring bench collectives`: what is there beside allreduce, over sizes, beside the peers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from multiring import Communicator
from multiring.benchmarks.collectives.cases import (
    BANDWIDTH_COLUMN,
    HOW_TIMED,
    LATER_COLUMNS,
    Case,
    add_case_arguments,
    measure_cases,
)
from multiring.benchmarks.collectives.kinds import COLLECTIVES, Blocks, Buffers
from multiring.benchmarks.collectives.libraries import Library, OneCollective, join_libraries
from multiring.benchmarks.collectives.results import LIMIT_BYTES, Report
from multiring.commands.argument_types import ITEM

__all__ = ["DEFAULT_SIZES", "add_arguments", "run"]

DEFAULT_SIZES = [2**12, 2**18, 2**22, 2**24]

_EXPLANATION = f"""\
what is measured:
  An array of float32 is made of as many blocks as there are ranks, equally long (its size is rounded up to
  such), and rank 0 is the root of what has one. The ranks are processes of this host, and each stays on one
  processor. With --emulate they are on several hosts: network namespaces of this machine, joined by links of
  the given rate (needs root).

  broadcast            every rank gets the array of the root, in place
  allgather            every rank has a block and gets the array of all ranks' blocks
  reduce_scatter       every rank has an array and gets its block of the sum of all ranks' arrays
  alltoall             every rank has an array, sends block i of it to rank i, and gets an array
  scatter              the root has an array, and every rank gets its block of it
  gather               every rank has a block, and the root gets the array of all ranks' blocks

  multiring            multiring on ordinary memory of NumPy's; alltoall, scatter and gather return a new
                       array in every call, where the other libraries fill one that they are given
  limit                on emulated hosts, by calculation: what the host that has most of it to send or to
                       receive needs for that at the rate of its links, headers not counted (TCP's share of a
                       frame is 0.949). For h hosts: broadcast the array; allgather, reduce_scatter, scatter
                       and gather (h - 1) / h of the array; alltoall as much for each rank of a host
  Gloo                 torch.distributed over Gloo (--peers gloo): broadcast, all_gather_single,
                       reduce_scatter_single, all_to_all_single, scatter, gather
  Open MPI, MPICH ...  the library that mpi4py loads (--peers mpi): MPI_Bcast, MPI_Allgather,
                       MPI_Reduce_scatter_block, MPI_Alltoall, MPI_Scatter, MPI_Gather

{HOW_TIMED}

columns:
  collective      see above
  size            of the whole array: that which is broadcast, the gathered one, the input of reduce_scatter,
                  alltoall and scatter; 1 KiB = 1024 B
  library         see above
  latency us      microseconds of one operation: the median, and in brackets the 10th and the 90th percentile
  {BANDWIDTH_COLUMN}
  bus GB/s        bus bandwidth: algorithm bandwidth * (n - 1) / n for n ranks, since a rank's own block stays
                  where it is; for broadcast the same as the algorithm's
{LATER_COLUMNS} most; from {LIMIT_BYTES // 1024} KiB on

examples:
  multiring bench collectives
  multiring bench collectives -np 4 --collectives allgather,alltoall --sizes 64KiB,1MiB --json results.json
  multiring bench collectives --emulate 4x2 --rate 1gbit --peers gloo
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options, and explains the table."""
    parser.epilog = _EXPLANATION
    parser.add_argument(
        "--collectives",
        type=_names,
        default=list(COLLECTIVES),
        metavar="LIST",
        help=f"which: {', '.join(COLLECTIVES)} [all]",
    )
    add_case_arguments(
        parser,
        DEFAULT_SIZES,
        array="whole array",
        shown="4KiB,256KiB,4MiB,16MiB",
        seconds_for="contender, collective and size",
    )
    parser.set_defaults(quick_values={"seconds": 0.05, "sizes": [1 << 16, 1 << 22]})


def _names(text: str) -> list[str]:
    names = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in COLLECTIVES:
            raise argparse.ArgumentTypeError(
                f"there is no collective {name!r} here: known are {', '.join(COLLECTIVES)}; for allreduce "
                "there is `multiring bench allreduce`"
            )
    return names


def run(comm: Communicator, args: argparse.Namespace) -> Report:
    """Measures all collectives on all sizes; see `command.Benchmark`.

    Raises:
        UsageError: MPI was not started by its own launcher.
        InternalError: A contender's result is wrong, or did not cross the emulated links, or a rank does
            not come back from it.
    """
    libraries = join_libraries(comm, args.peers)
    measured = measure_cases(comm, args, list(_cases(comm, args, libraries)))
    for library in libraries:
        library.close()
    return Report(**Report.run_fields(comm, args), rows=tuple(measured))


def _cases(
    comm: Communicator, args: argparse.Namespace, libraries: Sequence[Library]
) -> Iterator[Case[Buffers]]:
    for name in args.collectives:
        collective = COLLECTIVES[name]
        contenders = [OneCollective(comm, library, collective) for library in libraries]
        task = Blocks(collective, comm.rank, comm.size)
        for size in args.sizes:
            count = -(-size // (ITEM * comm.size))
            whole = count * ITEM * comm.size
            crossing = None if args.emulation is None else collective.crossing_of(args.emulation, whole)
            yield Case(name, size, count, contenders, task, crossing)

"""`multiring bench allreduce`: latency and bandwidth over sizes, beside the peers and the machine's limit."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from multiring import Communicator
from multiring.benchmarks.collectives import on_devices
from multiring.benchmarks.collectives.cases import (
    BANDWIDTH_COLUMN,
    HOW_TIMED,
    LATER_COLUMNS,
    Case,
    Crossing,
    add_case_arguments,
    measure_cases,
)
from multiring.benchmarks.collectives.results import ALLREDUCE, LIMIT_BYTES, Report
from multiring.benchmarks.collectives.tcp_streams import TcpStreams
from multiring.benchmarks.contenders import Contender, Elsewhere, FloatArray, make_contenders
from multiring.benchmarks.emulation.start import Emulation
from multiring.benchmarks.measure import Sum
from multiring.benchmarks.mpich import NAME, Mpich
from multiring.commands.argument_types import ITEM
from multiring.errors import UsageError

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
  multiring bfloat16   the same, with elements that cross from host to host in half precision (--comm-dtype)
  limit                the additions and the memory traffic without any synchronisation: every rank adds up
                       its share of all ranks' arrays and writes it to all of them. On several hosts, by
                       calculation: what every host has to send, 2 (hosts - 1) / hosts of the array, at the
                       rate of its links, headers not counted (TCP's share of a frame is 0.949)
  Gloo                 torch.distributed over Gloo (--peers gloo)
  Open MPI, MPICH ...  MPI_Allreduce of the library that mpi4py loads (--peers mpi)
  TCP streams          as many bytes as every host has to send, by a plain TCP stream to the next host, while
                       as many come from the one before; nothing is added (--tcp-streams)
  MPICH                the same beside Open MPI, in processes of its own that take the ranks' place for their
                       turns (--mpich)

  With --device cuda the arrays lie on GPUs: each rank's is that of its number on its host, in turn where
  there are fewer. The limit is the slowest of three parts, which are measured as well: copies to pinned host
  memory by all ranks at once, the allreduce on the host, and copies back. NCCL, which needs a GPU for each
  rank and passes no host where GPUs reach each other, may be faster than that. --peers gloo leaves NCCL out.

{HOW_TIMED}

columns:
  size            of the array on each rank; 1 KiB = 1024 B
  library         see above
  latency us      microseconds of one allreduce: the median, and in brackets the 10th and the 90th percentile
  {BANDWIDTH_COLUMN}
  bus GB/s        bus bandwidth: algorithm bandwidth * 2 (n - 1) / n for n ranks, which is what each rank
                  would have to send and to receive if a ring did it; comparable over numbers of ranks
{LATER_COLUMNS} least; from {LIMIT_BYTES // 1024} KiB on

examples:
  multiring bench allreduce
  multiring bench allreduce -np 4 --sizes 4,64KiB,16MiB --peers gloo --json results.json --plot results.png
  mpirun -n 2 multiring bench allreduce
  multiring bench allreduce --emulate 2x4 --rate 1gbit --sizes 4KiB,1MiB,16MiB
  multiring bench allreduce --emulate 2x1 --mpich ~/mpich
  multiring bench allreduce --device cuda -np 2 --json results.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options, and explains the table."""
    parser.epilog = _EXPLANATION
    add_case_arguments(
        parser,
        DEFAULT_SIZES,
        array="array",
        shown="4 B to 256 MiB in powers of four",
        seconds_for="contender and size",
    )
    parser.set_defaults(quick_values={"seconds": 0.05, "sizes": [4, 1 << 10, 1 << 16, 1 << 20, 1 << 24]})
    parser.add_argument(
        "--mpich",
        type=Path,
        metavar="DIRECTORY",
        help="measure also MPICH, from a virtual environment (or a Python) that has mpich, mpi4py and numpy: "
        "it cannot be in one with Open MPI",
    )
    parser.add_argument(
        "--tcp-streams",
        action="store_true",
        help="with --emulate: measure also what plain TCP streams between neighbouring hosts carry, as many "
        "bytes as every host has to send",
    )
    parser.add_argument(
        "--device",
        choices=("cuda",),
        help="measure arrays on GPUs, PyTorch's or CuPy's, beside NCCL and Gloo",
    )
    parser.add_argument(
        "--comm-dtype",
        choices=("bfloat16", "float16"),
        help="measure also what crosses from host to host in half precision",
    )
    parser.add_argument(
        "--modes",
        type=lambda text: text.split(","),
        default=[],
        metavar="LIST",
        help="measure also plans of these modes, as 1x4r,1x4c; those with rings add in any order",
    )


def run(comm: Communicator, args: argparse.Namespace) -> Report:
    """Measures all sizes; see `command.Benchmark`.

    Raises:
        UsageError: MPI was not started by its own launcher, or there is no device.
        InternalError: A contender's result is wrong, or did not cross the emulated links, or a rank does
            not come back from it.
    """
    if args.device is not None:
        return _run_on_devices(comm, args)
    contenders: list[Contender[FloatArray] | Elsewhere] = [
        *make_contenders(comm, args.peers, args.comm_dtype, args.modes)
    ]
    if args.tcp_streams:
        contenders.append(TcpStreams(comm, args.emulation))
    mpich = None if args.mpich is None else _add_mpich(comm, contenders, args)
    task = Sum(comm.rank, comm.size)
    cases = [
        Case(ALLREDUCE, size, size // ITEM, contenders, task, _crossing(args.emulation, size))
        for size in args.sizes
    ]
    measured = measure_cases(comm, args, cases)
    for contender in contenders:
        contender.close()
    names = [contender.name for contender in contenders]
    return Report(
        **Report.run_fields(comm, args, None if mpich is None else mpich.versions),
        rows=tuple(measured),
        left_out=_LEFT_OUT if args.peers and NAME not in names else "",
    )


def _run_on_devices(comm: Communicator, args: argparse.Namespace) -> Report:
    field, task = on_devices.Field(comm, args.peers), Sum(comm.rank, comm.size)
    parts = on_devices.LIMIT_PARTS
    cases = [Case(ALLREDUCE, size, size // ITEM, field.contenders, task, None, parts) for size in args.sizes]
    measured = measure_cases(comm, args, cases)
    field.close()
    fields = Report.run_fields(comm, args, {"on": field.device})
    return Report(**fields, rows=tuple(measured), parts=parts, left_out=field.left_out)


def _crossing(emulation: Emulation | None, size: int) -> Crossing | None:
    """Any algorithm has to send every host's part to one, and the sum back."""
    if emulation is None:
        return None
    together = 2 * (emulation.hosts - 1) * size
    return Crossing(together / emulation.hosts, together)


def _add_mpich(
    comm: Communicator, contenders: list[Contender[FloatArray] | Elsewhere], args: argparse.Namespace
) -> Mpich:
    if NAME in [contender.name for contender in contenders]:
        raise UsageError(f"the mpi4py of {sys.executable} uses {NAME} already: leave --mpich out")
    crowded = comm.size > args.cores
    cpus = sorted(os.sched_getaffinity(0))
    mpich = Mpich(comm, args.mpich, cpus, crowded=crowded, emulation=args.emulation)
    contenders.append(mpich)
    return mpich

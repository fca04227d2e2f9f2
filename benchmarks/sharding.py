"""`multiring bench sharding`: JAX programs that shard, over multiring and over Gloo."""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import numpy.typing as npt

from multiring import Communicator
from multiring._core import own_addresses
from multiring.benchmarks.measure import Ratio, Sample, durations
from multiring.benchmarks.plot import Bars, Panel
from multiring.benchmarks.progress import rounds
from multiring.benchmarks.results import Results
from multiring.benchmarks.table import Table, number, size_text, time_text
from multiring.commands.argument_types import array_sizes, number_of
from multiring.errors import InternalError

__all__ = ["ShardingReport", "ShardingRow", "add_arguments", "run"]

_KINDS = ("gloo", "multiring")
_SIZES = [64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
_OPERATIONS = ("psum", "all_gather", "psum_scatter")
_TURN = 3
_EPILOG = """\
what is measured:
  psum, all_gather, psum_scatter   of an array of float32, bytes on each rank, in a jitted shard_map
  train                            a step of a small transformer with sharded parameters (FSDP)
  gloo                             JAX's default on CPUs
  multiring                        import multiring.jax_collectives
  alone                            the same program on one device: JAX itself, without communication

  Every rank starts one process for each of the two, which take turns. Inputs are written anew before each
  step. A step lasts from when the last rank begins to when the last rank has its result; times are medians.
"""


@dataclass(frozen=True)
class ShardingRow:
    """Seconds of one operation over both, and of the program on one device."""

    operation: str
    bytes: int
    gloo: Sample
    multiring: Sample
    alone: Sample
    times: Ratio


@dataclass(frozen=True, kw_only=True)
class ShardingReport(Results):
    """Everything that one run has measured."""

    rows: tuple[ShardingRow, ...]

    @property
    def what(self) -> str:
        """As `Results`."""
        return "JAX programs that shard"

    def tables(self, *, compact: bool) -> Sequence[Table]:
        """As `Results`; there is no shorter form."""
        columns = ["operation", "bytes a rank", "Gloo us", "multiring us", "Gloo / multiring", "alone us"]
        rows = [
            [
                *(row.operation, size_text(row.bytes) if row.bytes else ""),
                *(time_text(each.median) for each in (row.gloo, row.multiring)),
                *(row.times.text(2), time_text(row.alone.median)),
            ]
            for row in self.rows
        ]
        return [Table(columns, rows, columns[:1], parts=1)]

    def panels(self) -> Sequence[Sequence[Panel]]:
        """As `Results`."""
        names = list(dict.fromkeys(row.operation for row in self.rows))
        return [
            [
                Bars(
                    name,
                    "times as quick as Gloo",
                    [
                        (
                            size_text(row.bytes) if row.bytes else "step",
                            row.times.median,
                            number(row.times.median),
                        )
                        for row in self.rows
                        if row.operation == name
                    ],
                )
                for name in names
            ]
        ]

    def derived(self) -> dict[str, Any]:
        """As `Results`: nothing."""
        return {}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the benchmark."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "--sizes",
        type=array_sizes,
        default=_SIZES,
        metavar="LIST",
        help="bytes on each rank [64KiB to 64MiB]",
    )
    parser.add_argument("--turns", type=number_of("turns"), default=15, metavar="N", help="of each way [15]")
    parser.set_defaults(quick_values={"turns": 4, "sizes": [64 << 10, 4 << 20]})


def run(comm: Communicator, args: argparse.Namespace) -> ShardingReport:
    """Measures; called on all ranks; the same report on all."""
    cases = [(name, size) for name in _OPERATIONS for size in args.sizes] + [("train", 0)]
    with _worker(comm, "gloo") as gloo, _worker(comm, "multiring") as multiring:
        rows = [_measure(comm, args.turns, case, gloo, multiring) for case in cases]
    return ShardingReport(**ShardingReport.run_fields(comm, args, {"jax": version("jax")}), rows=tuple(rows))


def _measure(
    comm: Communicator, turns: int, case: tuple[str, int], gloo: _Worker, multiring: _Worker
) -> ShardingRow:
    name, size = case
    ways = ((gloo, name), (multiring, name), (multiring, f"{name}/alone"))
    times = []
    for turn in rounds(f"{name} {size_text(size) if size else ''}".strip(), turns + 1):
        taken = []
        for worker, operation in ways:
            comm.barrier()
            taken.append(worker.ask(operation, size, _TURN))
        if turn > 0:  # the first one compiles
            times.append(taken)
    seconds = durations(comm, times)  # of shape (turns, ways, steps)
    by_gloo, by_multiring, alone = (Sample.of(seconds[:, way].ravel()) for way in range(len(ways)))
    faster = Ratio.of(_medians(seconds[:, 0]), _medians(seconds[:, 1]))
    return ShardingRow(name, size, by_gloo, by_multiring, alone, faster)


def _medians(seconds: npt.NDArray[np.float64]) -> list[float]:
    """Return the median of each turn."""
    return [float(median) for median in np.median(seconds, axis=1)]


class _Worker:
    """A process of JAX on this rank."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def answer(self, beginning: str) -> str:
        """Return its next line that begins so: Gloo writes lines of its own."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(beginning):
                return line
        raise InternalError(f"a process of JAX has ended with exit code {self._process.wait()}: see above")

    def ask(self, operation: str, size: int, times: int) -> list[tuple[int, int]]:
        """Let it run steps; return when each began and ended."""
        assert self._process.stdin is not None
        print(operation, size, times, file=self._process.stdin, flush=True)
        answer: list[tuple[int, int]] = json.loads(self.answer("[["))
        return answer


@contextmanager
def _worker(comm: Communicator, kind: str) -> Iterator[_Worker]:
    """Start a process on each rank; they find each other where rank 0 is. Collective."""
    host = "127.0.0.1" if comm.cross_size == 1 else own_addresses([])[0]
    place = None
    if comm.rank == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            place = f"{host}:{probe.getsockname()[1]}"
    address = comm.broadcast_object(place)
    # What has started this rank says nothing to the process.
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MULTIRING_", "OMPI_", "PMIX_", "PMI_"))
    }
    command = [sys.executable, "-m", "multiring.benchmarks.sharding_worker", kind, address]
    with subprocess.Popen(
        [*command, str(comm.size), str(comm.rank), host],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**environ, "MULTIRING_QUIET": "1", "JAX_PLATFORMS": "cpu"},
    ) as process:
        try:
            worker = _Worker(process)
            worker.answer("ready")
            yield worker
            assert process.stdin is not None
            process.stdin.close()
            process.wait()
        finally:
            process.kill()

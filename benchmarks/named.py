"""`multiring bench named`: small allreduces that are matched by name, one after the other, through Horovod's
API and without it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import multiring.horovod.torch as hvd
from multiring import Communicator
from multiring.benchmarks.measure import Meeting, Sample, durations
from multiring.benchmarks.plot import Bars, Panel
from multiring.benchmarks.progress import rounds
from multiring.benchmarks.results import Results
from multiring.benchmarks.table import Table
from multiring.commands.argument_types import array_sizes, number_of
from multiring.named_queue import NamedQueue

__all__ = ["NamedReport", "NamedRow", "add_arguments", "run"]

_SIZES = [4, 1024]
_PER_TURN, _WARM_UP = 100, 10
_EPILOG = """\
what is measured:
  hvd.allreduce    multiring.horovod.torch: a tensor of float32, by name, into a new one; the average
  hvd.allreduce_   the same in place
  named queue      Communicator.named_queue, which it stands on
  communicator     Communicator.allreduce, where all ranks know the order

  Each call is waited for before the next. A turn has 100 of them, and lasts from when the last rank begins to
  when the last rank is done; times are those of one call.
"""


@dataclass(frozen=True)
class NamedRow:
    """One way, and the seconds of a call."""

    bytes: int
    name: str
    sample: Sample


@dataclass(frozen=True, kw_only=True)
class NamedReport(Results):
    """Everything that one run has measured."""

    rows: tuple[NamedRow, ...]

    @property
    def what(self) -> str:
        """As `Results`."""
        return "small allreduces by name"

    def tables(self, *, compact: bool) -> Sequence[Table]:
        """As `Results`; there is no shorter form."""
        columns = ["bytes", "through", "us", "10 %", "90 %"]
        rows = [
            [str(row.bytes), row.name, *(f"{1e6 * each:.1f}" for each in _times(row.sample))]
            for row in self.rows
        ]
        return [Table(columns, rows, columns[1:2], parts=1)]

    def panels(self) -> Sequence[Sequence[Panel]]:
        """As `Results`."""
        found = {row.bytes: [each for each in self.rows if each.bytes == row.bytes] for row in self.rows}
        return [
            [
                Bars(f"{size} B", "us", [(each.name, 1e6 * each.sample.median, "") for each in rows])
                for size, rows in found.items()
            ]
        ]

    def derived(self) -> dict[str, Any]:
        """As `Results`: nothing."""
        return {}


def _times(sample: Sample) -> tuple[float, float, float]:
    return sample.median, sample.low, sample.high


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the benchmark."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "--sizes", type=array_sizes, default=_SIZES, metavar="LIST", help="bytes of the tensors [4,1KiB]"
    )
    parser.add_argument("--turns", type=number_of("turns"), default=50, metavar="N", help="of each way [50]")
    parser.set_defaults(quick_values={"turns": 5})


def run(comm: Communicator, args: argparse.Namespace) -> NamedReport:
    """Measures; called on all ranks; the same report on all."""
    torch.set_num_threads(1)
    hvd.init()
    queue = comm.named_queue("bench")
    meeting = Meeting(comm, args.cores, emulated=args.emulation is not None)
    rows = []
    for size in args.sizes:
        calls = _calls(comm, queue, torch.ones(-(-size // 4)))
        times = [
            [meeting.time_steps(call, _PER_TURN, warm_up=_WARM_UP) for call in calls.values()]
            for _ in rounds(f"tensors of {size} B", args.turns)
        ]
        seconds = durations(comm, times) / _PER_TURN
        rows += [NamedRow(size, name, Sample.of(seconds[:, k])) for k, name in enumerate(calls)]
    hvd.shutdown()
    return NamedReport(**NamedReport.run_fields(comm, args), rows=tuple(rows))


def _calls(comm: Communicator, queue: NamedQueue, x: torch.Tensor) -> dict[str, Callable[[], object]]:
    array = x.numpy()
    return {
        "hvd.allreduce": lambda: hvd.allreduce(x, name="x"),
        "hvd.allreduce_": lambda: hvd.allreduce_(x, name="y"),
        "named queue": lambda: queue.allreduce(array, out=array, op="average", name="z"),
        "communicator": lambda: comm.allreduce(array, out=array, op="average"),
    }

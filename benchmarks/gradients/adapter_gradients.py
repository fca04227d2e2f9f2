"""What an adapter adds to the core's own time for the same bytes, and what a training in step costs."""

from __future__ import annotations

import argparse
import functools
import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from multiring import Communicator
from multiring.benchmarks.contenders import Ordinary
from multiring.benchmarks.gradients.report import AdapterReport
from multiring.benchmarks.gradients.training_speed import measure_training
from multiring.benchmarks.measure import Meeting, durations
from multiring.benchmarks.memory import return_freed_memory
from multiring.benchmarks.progress import rounds
from multiring.commands.frameworks import Framework
from multiring.errors import InternalError
from multiring.models.nets.resnet_spec import resnet

__all__ = ["Reduction", "gradient_shapes", "measure_reduction", "run"]

BATCH, DEPTH, CLASSES = 32, 20, 10
# Steps of the training take about as long as reductions; measured seconds for each turn that is asked for.
TRAINING_SECONDS = 0.5
WARM_UP = 3


class Reduction(Protocol):
    """Gradients of a framework and what averages them: the module of the framework has
    `make_reduction(shapes, comm)`."""

    def run(self, value: float, begin: Callable[[], None]) -> None:
        """Fill all gradients with `value`, where the framework's backward pass leaves them; call `begin`;
        then average them, which is measured. Returns when the framework's optimizer can use them."""

    def check(self, value: float) -> bool:
        """Whether all gradients hold `value`."""

    def close(self) -> None:
        """Let go of what it holds of the communicator."""


def gradient_shapes() -> list[tuple[int, ...]]:
    """Shapes of ResNet-50's 161 gradients, first layer first."""
    return [parameter.shape for parameter in resnet(50, classes=1000, stem="imagenet").parameters()]


def run(comm: Communicator, framework: Framework, module: str, args: argparse.Namespace) -> AdapterReport:
    """Measures; called on all ranks; the same report on all.

    Args:
        comm: All ranks.
        framework: The framework, which computes with one thread.
        module: Has `make_reduction`.
        args: As `Benchmark.run` has them, and `steps`: turns.
    """
    if framework.own_way is not None and framework.own_way.mpi and "mpi" not in args.peers:
        framework = replace(framework, own_way=None)
    spec = resnet(DEPTH, classes=CLASSES, in_channels=3, stem="cifar")
    seconds = TRAINING_SECONDS * args.steps
    # First, since some frameworks want their own way to be set up before they have computed anything.
    training, _ = measure_training(
        framework, comm, spec, batch=BATCH, cores=args.cores, seconds=seconds, limit=True
    )
    shapes = gradient_shapes()
    reduction: Reduction = importlib.import_module(module).make_reduction(shapes, comm)
    try:
        core, adapter = measure_reduction(comm, Meeting(comm, args.cores), reduction, shapes, args.steps)
    finally:
        reduction.close()
    return AdapterReport(
        **AdapterReport.run_fields(comm, args),
        framework=framework.title,
        bytes=4 * sum(int(np.prod(shape)) for shape in shapes),
        core=tuple(core),
        adapter=tuple(adapter),
        training=training,
        left_out=f"{training.own_way}: {training.own_way_missing}" if training.own_way_missing else "",
    )


def measure_reduction(
    comm: Communicator,
    meeting: Meeting,
    reduction: Reduction,
    shapes: Sequence[tuple[int, ...]],
    turns: int,
) -> tuple[list[float], list[float]]:
    """Seconds of an allreduce by the core, and of the adapter's reduction, in each round; on all ranks alike.

    Raises:
        InternalError: A reduction gave a wrong result.
    """
    x, allreduce = Ordinary(comm).prepare(sum(int(np.prod(shape)) for shape in shapes))

    def run_core(begin: Callable[[], None]) -> None:
        begin()
        allreduce()

    times = np.empty((turns, 2, 2), np.int64)
    for turn in (number - WARM_UP for number in rounds("gradients of ResNet-50", WARM_UP + turns)):
        number = float(turn % 64)
        x.fill(number + comm.rank)
        by_core = _timed(meeting, run_core)
        by_adapter = _timed(meeting, functools.partial(reduction.run, number + comm.rank))
        mean = number + (comm.size - 1) / 2
        if not (reduction.check(mean) and bool((x == mean * comm.size).all())):
            raise InternalError(f"a reduction on rank {comm.rank} does not give {mean}, which is the average")
        if turn >= 0:
            times[turn] = by_core, by_adapter
        return_freed_memory()
    seconds = durations(comm, times)
    return seconds[:, 0].tolist(), seconds[:, 1].tolist()


def _timed(meeting: Meeting, run: Callable[[Callable[[], None]], object]) -> tuple[int, int]:
    """When this rank began what is measured, as `run` tells, and when it left, in nanoseconds."""
    begun = 0

    def begin() -> None:
        nonlocal begun
        meeting()
        begun = time.perf_counter_ns()

    run(begin)
    end = time.perf_counter_ns()
    meeting()
    return begun, end

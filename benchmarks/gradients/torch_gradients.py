"""What it costs to keep gradients in step in Torch, beside DistributedDataParallel.

A training step without synchronisation, with multiring's gradient hooks, with hvd.DistributedOptimizer over
multiring, and with Torch's DistributedDataParallel over multiring's process group and over Gloo, in turns in
the same run; with `--fsdp` also with its FSDP2 over both:

- ResNet-50's 161 gradients, 102 MB, from a backward pass that writes them and does nothing else. What a step
  takes longer than without synchronisation is its communication.
- A small training, ResNet-20 on images of 32 x 32 in float32 with plain SGD, whose images per second are set
  against those without synchronisation: the scaling efficiency.

And what it costs to synchronise buffers and to compare the training state, which both are without above.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np
import torch
import torch.distributed as dist

from multiring import Communicator
from multiring.benchmarks.gradients.report import GradientsReport, Memory, StepRow
from multiring.benchmarks.gradients.steps import (
    BATCH,
    KINDS,
    SHARDED,
    GradientsOnly,
    Step,
    gradient_shapes,
    make_step,
    training_model,
)
from multiring.benchmarks.gradients.torch_state import measure_state
from multiring.benchmarks.measure import Meeting, Sample, durations
from multiring.benchmarks.memory import PeakMemory, proportional_bytes, return_freed_memory
from multiring.benchmarks.progress import rounds
from multiring.models.peers.gloo import TorchGroup

__all__ = ["TRAINING_TURN", "WARM_UP", "run"]

# Steps without a meeting in between: in training, ranks wait for each other only where gradients do.
TRAINING_TURN = 5
WARM_UP = 3


def run(comm: Communicator, args: argparse.Namespace) -> GradientsReport:
    """Measures; called on all ranks; the same report on all."""
    torch.set_num_threads(1)
    chosen = KINDS | (SHARDED if args.fsdp else {})
    kinds = list(chosen)
    # The default group is multiring's: what the network between hosts costs is measured for that one alone.
    joined = TorchGroup(comm, "multiring")
    gloo = dist.new_group(backend="gloo")
    meeting = Meeting(comm, args.cores, emulated=args.emulation is not None)
    shapes = gradient_shapes()

    def writing(kind: str) -> Step:
        return make_step(kind, lambda: GradientsOnly(shapes), comm, gloo)

    def training(kind: str) -> Step:
        return make_step(kind, training_model, comm, gloo)

    memory = [_memory(comm, kinds[k], writing) for k in rounds("memory of each kind of step", len(kinds))]
    gradients = _times(comm, meeting, kinds, writing, "gradients of ResNet-50", args.steps, 1)
    trained = _times(comm, meeting, kinds, training, "training of ResNet-20", args.steps, TRAINING_TURN)
    state = measure_state(comm, meeting, args.steps)
    joined.close()
    names = [kind.name for kind in chosen.values()]
    return GradientsReport(
        **GradientsReport.run_fields(comm, args),
        bytes=4 * sum(int(np.prod(shape)) for shape in shapes),
        batch=BATCH,
        gradients=tuple(StepRow(*row) for row in zip(names, gradients, strict=True)),
        training=tuple(StepRow(*row) for row in zip(names, trained, strict=True)),
        memory=dict(zip(names, memory, strict=True)),
        state=state,
    )


def _memory(comm: Communicator, kind: str, make: Callable[[str], Step]) -> Memory:
    """Memory that a kind of step takes with model and gradients, in bytes: of the rank that takes most."""
    gc.collect()
    return_freed_memory()
    comm.barrier()
    before = proportional_bytes()
    with PeakMemory() as peak:
        step = make(kind)
        for _ in range(WARM_UP):
            step()
        comm.barrier()
    held = proportional_bytes() - before
    comm.barrier()  # a peer's share of shared memory changes when a rank lets go of its own
    step.close()
    most = comm.allreduce(np.array([held, peak.bytes - before]), op="max")
    return Memory(int(most[0]), int(most[1]))


def _times(
    comm: Communicator,
    meeting: Meeting,
    kinds: Sequence[str],
    make: Callable[[str], Step],
    what: str,
    turns: int,
    per_turn: int,
) -> list[Sample]:
    """Seconds of a step of each kind; the same on all ranks."""
    with ExitStack() as stack:
        steps = [make(kind) for kind in kinds]
        for step in steps:
            stack.callback(step.close)
            for _ in range(WARM_UP):
                step()
        times = [[_turn(meeting, step, per_turn) for step in steps] for _ in rounds(what, turns)]
        seconds = durations(comm, times) / per_turn
    return [Sample.of(seconds[:, kind]) for kind in range(len(kinds))]


def _turn(meeting: Meeting, step: Step, count: int) -> tuple[int, int]:
    """When this rank began and ended `count` steps, in nanoseconds; a few more come first, unmeasured."""
    times = meeting.time_steps(step, count, warm_up=WARM_UP)
    step.release()
    return_freed_memory()
    return times

"""What keeping ranks in step costs a training, in any framework: through its `Trainer`.

Kinds of step take turns within one run: all ranks in step through multiring; every rank alone, at the same
time, so that they share the machine in the same way; the framework's own way, if it has one; and the limit of
all ways, for which every rank trains alone and waits for the slowest after each step, without exchanging
anything. What else the machine does meets all of them alike, and ratios are taken within a round of turns.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from multiring import Communicator
from multiring.benchmarks.measure import Meeting, Ratio, durations
from multiring.benchmarks.progress import rounds
from multiring.commands.frameworks import Framework, OwnWay
from multiring.models.data.loader import Batch
from multiring.models.frameworks import load_trainer
from multiring.models.nets.resnet_spec import ResNetSpec
from multiring.models.peers import PeerTrainer
from multiring.models.trainers.recipe import Recipe

__all__ = ["ALONE", "LIMIT", "OWN", "TOGETHER", "TrainingSpeed", "measure_training"]

ALONE, LIMIT, TOGETHER, OWN = "alone", "limit", "multiring", "own way"

IMAGE_SIZE = 32
LR = 0.01
# A turn: one step that warms up what the others have cooled down, then as many as fit.
TURN_SECONDS = 0.3
MAX_STEPS = 5
FEWEST_TURNS, MAX_TURNS = 5, 40


@dataclass(frozen=True)
class TrainingSpeed:
    """Seconds of a step, by the kind of step, for each round of turns.

    Attributes:
        ranks: How many.
        batch: Images of a rank in a step.
        steps: Steps of a turn.
        seconds: By kind: "alone", "multiring" and, where they were measured, "limit" and "own way".
        own_way: What the framework's own way is called; None: it has none.
        own_way_missing: Why it was not measured, where there is one.
    """

    ranks: int
    batch: int
    steps: int
    seconds: dict[str, list[float]]
    own_way: str | None = None
    own_way_missing: str | None = None

    def median(self, kind: str) -> float:
        """Seconds of a step."""
        return float(np.median(self.seconds[kind]))

    def images_per_second(self, kind: str) -> float:
        """Of all ranks together."""
        return self.ranks * self.batch / self.median(kind)

    def ratio(self, kind: str, other: str) -> Ratio | None:
        """How many times as long a step of `kind` takes as one of `other`."""
        if kind not in self.seconds or other not in self.seconds:
            return None
        return Ratio.of(self.seconds[kind], self.seconds[other])

    @property
    def efficiency(self) -> Ratio:
        """Time of a step alone over that of one in step: 1 where keeping in step costs nothing."""
        found = self.ratio(ALONE, TOGETHER)
        assert found is not None
        return found

    @property
    def own_efficiency(self) -> Ratio | None:
        """The same for the framework's own way."""
        return self.ratio(ALONE, OWN)

    @property
    def limit(self) -> Ratio | None:
        """The efficiency of a way that took no time: steps last as long as the slowest rank's."""
        return self.ratio(ALONE, LIMIT)

    @property
    def over_own_way(self) -> Ratio | None:
        """How many times as fast as the framework's own way a training is."""
        return self.ratio(OWN, TOGETHER)


def measure_training(
    framework: Framework,
    comm: Communicator,
    spec: ResNetSpec,
    *,
    batch: int,
    cores: int,
    seconds: float,
    limit: bool = False,
) -> tuple[TrainingSpeed, str]:
    """Measure; called on all ranks, each on its processor.

    Args:
        framework: Trains; its own way, if it has one, is measured too.
        comm: All ranks.
        spec: The network.
        batch: Images of a rank.
        cores: Processors that the ranks have together.
        seconds: Time that the measured steps of one kind may take, as far as a few turns need not more.
        limit: Measure the limit too.

    Returns:
        The same figures on all ranks, and the hash of this rank's state after the training in step.
    """
    recipe = Recipe(LR, batch * comm.size, total_steps=1, decay="constant", reference_batch=batch * comm.size)
    own, missing = None, None
    if framework.own_way is not None:
        # First of all: some want to be set up before their framework has computed anything.
        own, missing = _own_way(framework.own_way, spec, recipe, comm)
    together = load_trainer(framework)(spec, recipe, comm, seed=0, sync_bn=False)
    own_group = comm.split(color=comm.rank)
    assert own_group is not None
    alone = load_trainer(framework)(spec, recipe, own_group, seed=0, sync_bn=False)
    shared, single = _batch(comm, spec, batch, comm.size), _batch(comm, spec, batch, 1)
    kinds: dict[str, Callable[[], object]] = {
        ALONE: lambda: alone.step(single, LR),
        TOGETHER: lambda: together.step(shared, LR),
    }
    meeting = Meeting(comm, cores)

    def step_and_wait() -> None:
        alone.step(single, LR)
        meeting()

    if limit:
        kinds[LIMIT] = step_and_wait
    with ExitStack() as stack:
        stack.callback(together.close)
        stack.callback(alone.close)
        if own is not None:
            theirs = own
            stack.callback(theirs.close)
            kinds[OWN] = lambda: theirs.step(shared, LR)
        steps, times = _take_turns(comm, meeting, kinds, seconds)
        fingerprint = together.fingerprint()
    title = None if framework.own_way is None else framework.own_way.title
    return TrainingSpeed(comm.size, batch, steps, times, title, missing), fingerprint


def _own_way(
    own_way: OwnWay, spec: ResNetSpec, recipe: Recipe, comm: Communicator
) -> tuple[PeerTrainer | None, str | None]:
    """Its trainer, or why there is none; the same answer on all ranks."""
    trainer: PeerTrainer | None = None
    error: str | None = None
    if own_way.missing:
        error = f"{' and '.join(own_way.missing)} is not installed"
    else:
        try:
            trainer = importlib.import_module(own_way.module).make_trainer(spec, recipe, comm, seed=0)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    errors = [each for each in comm.allgather_object(error) if each is not None]
    if errors and trainer is not None:
        trainer.close()
    return (None, errors[0]) if errors else (trainer, None)


def _batch(comm: Communicator, spec: ResNetSpec, batch: int, ranks: int) -> Batch:
    generator = np.random.default_rng(comm.rank)
    shape = (batch, spec.in_channels, IMAGE_SIZE, IMAGE_SIZE)
    images = generator.standard_normal(shape, dtype=np.float32)
    return Batch(images, generator.integers(0, spec.classes, size=batch), batch * ranks)


def _take_turns(
    comm: Communicator, meeting: Meeting, kinds: dict[str, Callable[[], object]], seconds: float
) -> tuple[int, dict[str, list[float]]]:
    """Steps of a turn, and by kind the seconds of a step of every turn."""
    slowest = 0.0
    for step in kinds.values():
        step()  # compiles
        begin = time.perf_counter()
        step()
        slowest = max(slowest, time.perf_counter() - begin)
    slowest = float(comm.allreduce(np.array([slowest]), op="max")[0])
    per_turn = int(np.clip(TURN_SECONDS / slowest, 1, MAX_STEPS))
    turns = int(np.clip(seconds / (per_turn * slowest), FEWEST_TURNS, MAX_TURNS))
    times = np.empty((turns, len(kinds), 2), np.int64)
    for turn in rounds("training of ResNet-20", turns):
        # Every other round the other way round, so that none always comes after the same one.
        order = range(len(kinds)) if turn % 2 == 0 else reversed(range(len(kinds)))
        for index in order:
            times[turn, index] = meeting.time_steps(list(kinds.values())[index], per_turn)
    found = durations(comm, times) / per_turn
    return per_turn, {kind: found[:, index].tolist() for index, kind in enumerate(kinds)}

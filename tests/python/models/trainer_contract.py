"""What every framework's trainer has to do: the same tests, with Torch's as the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_limits

from multiring import Communicator
from multiring.models.data.loader import Batch
from multiring.models.errors import CheckpointError
from multiring.models.frameworks import find_framework, load_trainer
from multiring.models.nets.resnet_spec import ResNetSpec, resnet
from multiring.models.trainers.recipe import Recipe
from multiring.models.trainers.trainer import Trainer
from tests.rank_pool import RankPool

Ranks = Callable[[int], RankPool]
Array = np.ndarray[Any, Any]
Outcome = tuple[dict[str, Array], str, float, dict[str, Array]]

SPEC = resnet(8, classes=10, in_channels=1)
# Of float32, relative to the largest value of a tensor; what the regression suite asks for as well.
TOLERANCE = 1e-4
# How each step's global batch is divided: unevenly, and with empty parts.
PARTS = {1: [(12,)] * 2, 2: [(7, 5), (12, 0)], 3: [(5, 0, 7), (1, 2, 9)]}


def recipe(*, nesterov: bool = True) -> Recipe:
    return Recipe(
        0.05, global_batch=12, total_steps=9, nesterov=nesterov, reference_batch=12, weight_decay=1e-2
    )


def whole_batch(step: int, count: int = 12, size: int = 8, channels: int = 1) -> Batch:
    generator = np.random.default_rng(step)
    images = generator.standard_normal((count, channels, size, size)).astype(np.float32)
    return Batch(images, generator.integers(0, 10, count), count)


def part_of(batch: Batch, counts: Sequence[int], rank: int) -> Batch:
    start = sum(counts[:rank])
    chosen = slice(start, start + counts[rank])
    return Batch(batch.images[chosen], batch.labels[chosen], batch.global_count)


def relative(found: Array, expected: Array) -> float:
    assert found.shape == expected.shape
    error = float(np.abs(found - expected).max()) / (float(np.abs(expected).max()) or 1.0)
    assert np.isfinite(error)
    return error


def worst(found: dict[str, Array], expected: dict[str, Array]) -> tuple[float, str]:
    assert found.keys() == expected.keys()
    return max((relative(found[name], expected[name]), name) for name in expected)


def make(framework: str, comm: Communicator, spec: ResNetSpec = SPEC, **options: Any) -> Trainer:
    return load_trainer(find_framework(framework))(spec, options.pop("recipe", recipe()), comm, **options)


def train_in_parts(
    comm: Communicator, framework: str, sync_bn: bool, parts: Sequence[Sequence[int]]
) -> Outcome:
    """Trains on the parts: the state, the fingerprint, this rank's loss, and the state after one step."""
    trainer = make(framework, comm, recipe=recipe(nesterov=False), seed=0, dtype="float64", sync_bn=sync_bn)
    loss, first = 0.0, {}
    for step, counts in enumerate(parts):
        loss += trainer.step(part_of(whole_batch(step), counts, comm.rank), lr=0.05 / (step + 1)).loss
        if step == 0:
            trainer.synchronise()
            first = trainer.state()
    trainer.synchronise()
    result = trainer.state(), trainer.fingerprint(), loss, first
    trainer.close()
    return result


def network_state(state: dict[str, Array]) -> dict[str, Array]:
    """Without what only one framework has, such as its generator."""
    return {n: value for n, value in state.items() if n.startswith(("model/", "optimizer/momentum/"))}


class TrainerContract:
    """The suite; small images, since what is compared is the arithmetic."""

    framework: ClassVar[str]
    # Three, of which a tree is not full, where a rank does not take long to import and to compile.
    size: ClassVar[int] = 2

    @pytest.fixture(autouse=True)
    def one_thread(self) -> Iterator[None]:
        """Small matrices are multiplied faster by one thread than by several that wait for processors."""
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        with threadpool_limits(1):
            yield
        torch.set_num_threads(before)

    def test_scores_and_gradients_are_those_of_torch(self, comm: Communicator) -> None:
        """In float32; see below for float64."""
        spec = resnet(8, classes=10, in_channels=3, stem="imagenet")
        batch = whole_batch(0, size=19, channels=3)
        trainers = [make(name, comm, spec, seed=3) for name in (self.framework, "torch")]
        before = trainers[0].fingerprint()
        found, expected = (trainer.probe(batch) for trainer in trainers)
        assert trainers[0].fingerprint() == before
        assert {value.dtype for value in (found.scores, *found.gradients.values())} == {np.dtype(np.float32)}
        assert relative(found.scores, expected.scores) < TOLERANCE
        assert worst(found.gradients, expected.gradients)[0] < TOLERANCE
        for trainer in trainers:
            trainer.close()

    def test_training_is_that_of_torch_and_a_state_continues_it_bit_for_bit(self, comm: Communicator) -> None:
        mine, theirs, later = (
            make(name, comm, seed=seed, dtype="float64")
            for name, seed in ((self.framework, 1), ("torch", 1), (self.framework, 2))
        )
        state: dict[str, Array] = {}
        for step in range(4):
            if step == 2:
                state = mine.state()
                later.load_state(state)
                assert later.fingerprint() == mine.fingerprint()
            batch, lr = whole_batch(step), 0.1 / (step + 1)
            found, expected = mine.step(batch, lr), theirs.step(batch, lr)
            assert found.loss == pytest.approx(expected.loss, rel=1e-9)
            assert (found.correct, found.count) == (expected.correct, expected.count)
            if step >= 2:
                later.step(batch, lr)
        assert later.fingerprint() == mine.fingerprint()
        found, expected = (trainer.evaluate(whole_batch(9)) for trainer in (mine, theirs))
        assert found.loss == pytest.approx(expected.loss, rel=1e-9)
        states = [network_state(trainer.state()) for trainer in (mine, theirs)]
        # Running statistics and momentum among them.
        assert any(name.endswith("running_var") for name in states[0])
        assert any(name.startswith("optimizer/momentum/") for name in states[0])
        assert worst(states[0], states[1])[0] < 1e-9
        later.load_state(state)
        assert later.fingerprint() != mine.fingerprint()
        other = {"model/head.dense.weight": np.zeros((3, 64), np.float32)}
        with pytest.raises(CheckpointError, match=r"another network: .*dense.weight has shape \(10, 64\)"):
            later.load_state(state | other)
        for trainer in (mine, theirs, later):
            trainer.close()

    def test_ranks_follow_torch_on_one_rank_with_all_the_samples(
        self, comm: Communicator, ranks: Ranks
    ) -> None:
        parts = PARTS[self.size]
        (one, _, loss, _) = train_in_parts(comm, "torch", True, PARTS[1])
        several = ranks(self.size).run(train_in_parts, self.framework, True, parts, timeout=180.0)
        assert len({fingerprint for _, fingerprint, *_ in several}) == 1
        assert sum(part for _, _, part, _ in several) == pytest.approx(loss, rel=1e-9)
        assert worst(network_state(several[0][0]), network_state(one))[0] < 1e-9

    def test_statistics_of_each_rank_are_averaged_and_empty_parts_count_as_zeros(
        self, comm: Communicator, ranks: Ranks
    ) -> None:
        parts = [(12,) + (0,) * (self.size - 1), PARTS[self.size][0]]
        several = ranks(self.size).run(train_in_parts, self.framework, False, parts, timeout=180.0)
        assert len({fingerprint for _, fingerprint, *_ in several}) == 1
        states = [network_state(state) for state, *_ in several]
        assert worst(states[0], states[-1])[0] == 0.0
        one = train_in_parts(comm, "torch", False, PARTS[1][:1])
        found, expected = (
            {name: value for name, value in network_state(first).items() if "running" not in name}
            for *_, first in (several[0], one)
        )
        assert worst(found, expected)[0] < 1e-9

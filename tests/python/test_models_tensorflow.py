"""The ResNet in TensorFlow: the same network as in Torch, and N ranks that train like one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from multiring import Communicator
from multiring.models.errors import CheckpointError
from multiring.models.frameworks import find_framework
from multiring.models.loader import Batch
from multiring.models.recipe import Recipe
from multiring.models.resnet_spec import ResNetSpec, resnet
from tests.rank_pool import RankPool

Array = NDArray[Any]
Ranks = Callable[[int], RankPool]

SAMPLES = 12


def make_batch(step: int, part: slice = slice(None)) -> Batch:
    """A rank's part of a global batch of `SAMPLES` images."""
    draw = np.random.default_rng([5, step])
    images = draw.standard_normal((SAMPLES, 1, 8, 8), dtype=np.float32)
    labels = draw.integers(0, 10, SAMPLES)
    return Batch(images[part], labels[part], SAMPLES)


def spec() -> ResNetSpec:
    return resnet(8, classes=10, in_channels=1)


def make(comm: Communicator, framework: str, dtype: str = "float64", **options: Any) -> Any:
    recipe = Recipe(0.1, global_batch=SAMPLES, total_steps=10, weight_decay=1e-3)
    found = find_framework(framework)
    return found.make_trainer(spec(), recipe, comm, seed=3, dtype=dtype, **options)


def relative(value: Array, wanted: Array) -> float:
    return float(np.abs(value - wanted).max() / np.abs(wanted).max())


def probe_both(comm: Communicator, dtype: str) -> tuple[float, float]:
    """Largest relative differences of scores and of gradients between TensorFlow and Torch."""
    ours, other = (make(comm, name, dtype) for name in ("tensorflow", "torch"))
    before = ours.fingerprint()
    found, wanted = ours.probe(make_batch(0)), other.probe(make_batch(0))
    assert ours.fingerprint() == before
    assert found.gradients.keys() == wanted.gradients.keys()
    assert all(found.gradients[k].shape == wanted.gradients[k].shape for k in wanted.gradients)
    differences = [relative(found.gradients[k], wanted.gradients[k]) for k in wanted.gradients]
    for trainer in (ours, other):
        trainer.close()
    return relative(found.scores, wanted.scores), max(differences)


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("float64", 1e-9)])
def test_scores_and_gradients_are_those_of_torch(ranks: Ranks, dtype: str, bound: float) -> None:
    scores, gradients = ranks(1).run(probe_both, dtype)[0]
    assert scores < bound
    assert gradients < bound


def steps_like_torch(comm: Communicator) -> None:
    ours, other = (make(comm, name) for name in ("tensorflow", "torch"))
    for step in range(4):
        found, wanted = (trainer.step(make_batch(step), 0.1 / (step + 1)) for trainer in (ours, other))
        assert found.loss == pytest.approx(wanted.loss, rel=1e-9)
        assert (found.correct, found.count) == (wanted.correct, wanted.count)
    found, wanted = (trainer.evaluate(make_batch(9)) for trainer in (ours, other))
    assert found.loss == pytest.approx(wanted.loss, rel=1e-9)
    mine, theirs = ours.state(), other.state()
    for name in mine:
        np.testing.assert_allclose(mine[name], theirs[name], rtol=1e-8, atol=1e-11, err_msg=name)


def test_steps_are_those_of_torch(ranks: Ranks) -> None:
    ranks(1).run(steps_like_torch)


def train_parts(comm: Communicator, bounds: list[list[int]]) -> tuple[dict[str, Array], str, list[float]]:
    """Steps in which rank r holds samples from bounds[step][r] on; state, fingerprint and losses."""
    trainer = make(comm, "tensorflow")
    losses = []
    for step, edges in enumerate(bounds):
        part = slice(edges[comm.rank], edges[comm.rank + 1])
        losses.append(trainer.step(make_batch(step, part), 0.1).loss)
    trainer.synchronise()
    state, fingerprint = trainer.state(), trainer.fingerprint()
    trainer.close()
    return state, fingerprint, losses


# Even parts, uneven ones, and a rank without a sample.
PARTS = {
    2: [[0, 6, 12], [0, 1, 12], [0, 12, 12], [0, 5, 12]],
    3: [[0, 4, 8, 12], [0, 0, 7, 12], [0, 3, 3, 12]],
}


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_train_like_one(ranks: Ranks, size: int) -> None:
    steps = PARTS[size]
    alone, _, wanted = ranks(1).run(train_parts, [[0, SAMPLES]] * len(steps))[0]
    results = ranks(size).run(train_parts, steps)
    assert len({fingerprint for _, fingerprint, _ in results}) == 1
    np.testing.assert_allclose(np.sum([losses for _, _, losses in results], 0), wanted, rtol=1e-9)
    for name, value in results[0][0].items():
        np.testing.assert_allclose(value, alone[name], rtol=1e-9, atol=1e-11, err_msg=name)


def without_synchronised_normalisation(comm: Communicator) -> tuple[str, str, str]:
    trainer = make(comm, "tensorflow", sync_bn=False)
    for step, edges in enumerate([[0, 6, 12], [0, 12, 12]]):
        trainer.step(make_batch(step, slice(edges[comm.rank], edges[comm.rank + 1])), 0.1)
    fingerprint = trainer.fingerprint()
    own = trainer.state()["model/stem.bn.running_mean"].tobytes().hex()
    trainer.synchronise()
    return fingerprint, own, trainer.state()["model/stem.bn.running_mean"].tobytes().hex()


def test_ranks_that_normalise_by_themselves_agree_in_everything_else(ranks: Ranks) -> None:
    fingerprints, own, synchronised = zip(*ranks(2).run(without_synchronised_normalisation), strict=True)
    assert len(set(fingerprints)) == 1
    assert len(set(own)) == 2
    assert len(set(synchronised)) == 1


def go_on_from_state(comm: Communicator) -> None:
    first, second = make(comm, "tensorflow", "float32"), make(comm, "tensorflow", "float32")
    first.step(make_batch(0), 0.1)
    second.load_state(first.state())
    assert second.fingerprint() == first.fingerprint()
    for trainer in (first, second):
        trainer.step(make_batch(1), 0.1)
    assert second.fingerprint() == first.fingerprint()
    with pytest.raises(CheckpointError, match="another network"):
        second.load_state({name: value for name, value in first.state().items() if "head" not in name})


def test_training_goes_on_from_a_state(ranks: Ranks) -> None:
    ranks(1).run(go_on_from_state)

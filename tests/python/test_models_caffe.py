"""The ResNet in the Caffe-style solver: like Torch, and many ranks like one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import multiring
from multiring import Communicator
from multiring.errors import UsageError
from multiring.models.loader import Batch
from multiring.models.recipe import Recipe
from multiring.models.resnet_caffe import load_weights, read_weights
from multiring.models.resnet_spec import resnet
from multiring.models.sharding import local_slice
from multiring.models.train_caffe import CaffeTrainer, set_threads
from multiring.models.train_torch import TorchTrainer
from multiring.models.trainer import Trainer
from multiring.models.weights import initial_weights
from tests.rank_pool import RankPool

Ranks = Callable[[int], RankPool]
Array = NDArray[Any]
TOLERANCE = {"float32": 1e-4, "float64": 1e-9}
SPEC = resnet(8, classes=10, in_channels=1)


@pytest.fixture(scope="module")
def comm() -> Any:
    set_threads(1)
    comm = multiring.init()
    yield comm
    multiring.shutdown()


def draw(seed: int, count: int, *, channels: int = 1, size: int = 8) -> tuple[Array, Array]:
    generator = np.random.default_rng(seed)
    images = generator.standard_normal((count, channels, size, size), dtype=np.float32)
    return images, generator.integers(0, 10, size=count)


def difference(found: Array, wanted: Array) -> float:
    """Relative to the largest value."""
    return float(np.abs(found - wanted).max() / max(np.abs(wanted).max(), 1e-30))


def assert_alike(found: dict[str, Array], wanted: dict[str, Array], tolerance: float) -> None:
    assert found.keys() == wanted.keys()
    worst = max((difference(found[name], value), name) for name, value in wanted.items())
    assert worst[0] <= tolerance, worst


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_it_computes_what_torch_does(comm: Communicator, dtype: str, nesterov: bool) -> None:
    recipe = Recipe(0.2, 16, 12, warmup_steps=3, nesterov=nesterov, weight_decay=1e-2)
    caffe = CaffeTrainer(SPEC, recipe, comm, seed=0, dtype=dtype)
    torch = TorchTrainer(SPEC, recipe, comm, seed=0, dtype=dtype)
    batch = Batch(*draw(99, 16), 16)
    before = caffe.fingerprint()
    probes = [trainer.probe(batch) for trainer in (caffe, torch)]
    assert caffe.fingerprint() == before
    assert probes[0].scores.dtype == np.dtype(dtype)
    assert difference(probes[0].scores, probes[1].scores) <= TOLERANCE[dtype]
    assert_alike(probes[0].gradients, probes[1].gradients, TOLERANCE[dtype])
    for step in range(6):  # the learning rate changes in every one of them
        batch = Batch(*draw(step, 16), 16)
        mine, theirs = (trainer.step(batch, recipe.lr(step)) for trainer in (caffe, torch))
        assert mine.loss == pytest.approx(theirs.loss, rel=TOLERANCE[dtype])
        assert (mine.correct, mine.count) == (theirs.correct, theirs.count)
    states = [
        {name: value for name, value in trainer.state().items() if name.startswith(("model/", "optimizer/"))}
        for trainer in (caffe, torch)
    ]
    assert_alike(states[0], states[1], TOLERANCE[dtype])
    assert caffe.evaluate(batch).loss == pytest.approx(torch.evaluate(batch).loss, rel=TOLERANCE[dtype])
    caffe.close()
    torch.close()


def test_a_large_stem_rounds_as_the_specification_does(comm: Communicator) -> None:
    spec = resnet(50, classes=10, in_channels=3)
    recipe = Recipe(0.1, 2, 1)
    batch = Batch(*draw(0, 2, channels=3, size=64), 2)
    probes = [
        kind(spec, recipe, comm, seed=0, dtype="float64", zero_residual=True).probe(batch)
        for kind in (CaffeTrainer, TorchTrainer)
    ]
    assert difference(probes[0].scores, probes[1].scores) <= 1e-9
    assert_alike(probes[0].gradients, probes[1].gradients, 1e-9)


def train(
    comm: Communicator, sizes: list[list[int]], sync_bn: bool = True
) -> tuple[list[float], dict[str, Array], list[str]]:
    """Steps whose global batches have these parts, summed up if this is the only rank."""
    set_threads(1)
    recipe = Recipe(0.05, 8, 20)
    trainer: Trainer = CaffeTrainer(SPEC, recipe, comm, seed=0, dtype="float64", sync_bn=sync_bn)
    losses, prints = [], []
    for step, parts in enumerate(sizes):
        images, labels = draw(step, sum(parts))
        ends = np.cumsum([0, *parts])
        own = slice(ends[comm.rank], ends[comm.rank + 1]) if comm.size > 1 else slice(None)
        sums = trainer.step(Batch(images[own], labels[own], len(labels)), recipe.lr(step))
        total = comm.allreduce(np.array([sums.loss, sums.count]), op="sum")
        losses.append(float(total[0] / total[1]))
        prints.append(trainer.fingerprint())
    trainer.synchronise()
    state = {name: value for name, value in trainer.state().items() if name.startswith(("model/", "opt"))}
    trainer.close()
    return losses, state, prints


@pytest.mark.parametrize("size", [2, 3])
def test_many_ranks_train_like_one(ranks: Ranks, size: int) -> None:
    even = [4] * size
    uneven = [1, *[3] * (size - 1)]
    empty = [5, *[0] * (size - 1)]
    sizes = [even, even, uneven, empty, uneven, even, empty, even]
    losses, state, _ = ranks(1).run(train, sizes)[0]
    results = ranks(size).run(train, sizes)
    for found, weights, prints in results:
        assert prints == results[0][2], "ranks have different bits"
        np.testing.assert_allclose(found, losses, rtol=1e-9)
        assert_alike(weights, state, 1e-9)


def test_without_common_statistics_empty_parts_count_as_zeros(ranks: Ranks) -> None:
    results = ranks(2).run(train, [[3, 3], [4, 0], [3, 3]], sync_bn=False)
    assert results[0][2] == results[1][2]
    assert_alike(results[0][1], results[1][1], 0.0)


def continue_bit_for_bit(comm: Communicator) -> None:
    set_threads(1)
    recipe = Recipe(0.05, 4 * comm.size, 20)

    def steps(trainer: CaffeTrainer, numbers: range) -> None:
        for step in numbers:
            images, labels = draw(step, 4 * comm.size)
            own = local_slice(len(labels), comm.rank, comm.size)
            trainer.step(Batch(images[own], labels[own], len(labels)), recipe.lr(step))

    whole = CaffeTrainer(SPEC, recipe, comm, seed=0)
    steps(whole, range(3))
    state = whole.state()
    steps(whole, range(3, 6))
    other = CaffeTrainer(SPEC, recipe, comm, seed=5)
    other.load_state(state)
    steps(other, range(3, 6))
    assert other.fingerprint() == whole.fingerprint()
    for name, value in whole.state().items():
        assert other.state()[name].tobytes() == value.tobytes(), name
    whole.close()
    other.close()


@pytest.mark.parametrize("size", [1, 2])
def test_a_state_continues_bit_for_bit(ranks: Ranks, size: int) -> None:
    ranks(size).run(continue_bit_for_bit)


def test_weights_are_loaded_by_name_or_not_at_all(comm: Communicator) -> None:
    trainer = CaffeTrainer(SPEC, Recipe(0.1, 4, 1), comm, seed=0)
    net = trainer._net
    weights = initial_weights(SPEC, 7)
    load_weights(net, SPEC, weights)
    for name, value in read_weights(net, SPEC).items():
        np.testing.assert_array_equal(value, weights[name])
    for change, text in (
        ({"head.dense.bias": None}, "lack 1 of .* first head.dense.bias"),
        ({"other": np.zeros(1)}, "hold 1 arrays that the net lacks, first other"),
        ({"stem.conv.weight": np.zeros(3)}, r"stem.conv.weight has shape \(16, 1, 3, 3\) but .* \(3,\)"),
    ):
        bad = {name: value for name, value in {**weights, **change}.items() if value is not None}
        with pytest.raises(UsageError, match=text):
            load_weights(net, SPEC, bad)
    trainer.close()

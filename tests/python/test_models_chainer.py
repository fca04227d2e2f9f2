"""The ResNet in Chainer: the same numbers as in Torch, and on several ranks the same as on one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import multiring.chainer  # isort: skip  # before chainer, which it makes importable

import chainer
import torch
from chainer import functions
from threadpoolctl import threadpool_info, threadpool_limits

import multiring
from multiring import Communicator
from multiring.errors import UsageError
from multiring.models.bench.gradients_chainer import make_reduction
from multiring.models.convolution_chainer import Convolution
from multiring.models.errors import CheckpointError
from multiring.models.loader import Batch
from multiring.models.peers import chainermn_mpi
from multiring.models.recipe import Recipe
from multiring.models.resnet_chainer import ChainerResNet, load_weights, read_weights
from multiring.models.resnet_spec import Stem, resnet
from multiring.models.train_chainer import ChainerTrainer, set_threads
from multiring.models.train_torch import TorchTrainer
from multiring.models.trainer import Trainer
from multiring.models.weights import initial_weights
from tests.rank_pool import RankPool
from tests.support import REPOSITORY

Ranks = Callable[[int], RankPool]
Array = np.ndarray[Any, Any]

SPEC = resnet(8, classes=10, in_channels=1)
TOLERANCE = {"float32": 1e-4, "float64": 1e-9}
# How each step's global batch is divided: evenly, unevenly, with an empty part.
PARTS = {
    1: [(12,)] * 4,
    2: [(6, 6), (7, 5), (12, 0), (1, 11)],
    3: [(4, 4, 4), (5, 0, 7), (1, 2, 9), (0, 0, 12)],
}


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
    error = float(np.abs(found - expected).max()) / (float(np.abs(expected).max()) or 1.0)
    assert np.isfinite(error)
    return error


def worst(found: dict[str, Array], expected: dict[str, Array]) -> tuple[float, str]:
    assert found.keys() == expected.keys()
    return max((relative(found[name], expected[name]), name) for name in expected)


def train_in_parts(
    comm: Communicator, dtype: str, sync_bn: bool = True, parts: Sequence[Sequence[int]] | None = None
) -> tuple[dict[str, Array], str, float]:
    """Trains on the parts; the state, the fingerprint, and the summed loss of this rank."""
    set_threads(1)
    trainer = ChainerTrainer(SPEC, recipe(), comm, seed=0, dtype=dtype, sync_bn=sync_bn)
    loss = 0.0
    for step, counts in enumerate(parts or PARTS[comm.size]):
        loss += trainer.step(part_of(whole_batch(step), counts, comm.rank), lr=0.05 / (step + 1)).loss
    trainer.synchronise()
    result = trainer.state(), trainer.fingerprint(), loss
    trainer.close()
    return result


def reduce_gradients(comm: Communicator) -> bool:
    reduction = make_reduction([(3, 2), (), (1000,), (0,)], comm)
    right = True
    for turn in range(3):
        reduction.write(turn + comm.rank)
        reduction.reduce()
        right = right and reduction.check(turn + (comm.size - 1) / 2) and not reduction.check(-1.0)
    reduction.close()
    return right


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small matrices are multiplied faster by one thread than by several that wait for processors."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with threadpool_limits(1):
        yield
    torch.set_num_threads(before)


@pytest.fixture
def comm() -> Any:
    yield multiring.init()
    multiring.shutdown()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("stem", ["cifar", "imagenet"])
def test_scores_and_gradients_are_those_of_torch(comm: Communicator, stem: Stem, dtype: str) -> None:
    spec, batch = resnet(8, classes=10, in_channels=3, stem=stem), whole_batch(0, size=19, channels=3)
    trainers: list[Trainer] = [
        kind(spec, recipe(), comm, seed=3, dtype=dtype) for kind in (ChainerTrainer, TorchTrainer)
    ]
    before = trainers[0].fingerprint()
    found, expected = (trainer.probe(batch) for trainer in trainers)
    assert trainers[0].fingerprint() == before
    assert found.scores.dtype == dtype
    assert {gradient.dtype for gradient in found.gradients.values()} == {np.dtype(dtype)}
    assert relative(found.scores, expected.scores) < TOLERANCE[dtype]
    assert worst(found.gradients, expected.gradients)[0] < TOLERANCE[dtype]
    for trainer in trainers:
        trainer.close()


@pytest.mark.parametrize("nesterov", [True, False])
def test_training_and_evaluation_are_those_of_torch(comm: Communicator, nesterov: bool) -> None:
    trainers: list[Trainer] = [
        kind(SPEC, recipe(nesterov=nesterov), comm, seed=1, dtype="float64")
        for kind in (ChainerTrainer, TorchTrainer)
    ]
    for step in range(5):
        found, expected = (trainer.step(whole_batch(step), 0.1 / (step + 1)) for trainer in trainers)
        assert found.loss == pytest.approx(expected.loss, rel=1e-9)
        assert (found.correct, found.count) == (expected.correct, expected.count)
    found, expected = (trainer.evaluate(whole_batch(9)) for trainer in trainers)
    assert found.loss == pytest.approx(expected.loss, rel=1e-9)
    states = [trainer.state() for trainer in trainers]
    states[1].pop("rng/torch")
    # Running statistics and momentum among them.
    assert any(name.endswith("running_var") for name in states[0])
    assert any(name.startswith("optimizer/momentum/") for name in states[0])
    assert worst(states[0], states[1])[0] < 1e-9
    for trainer in trainers:
        trainer.close()


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_follow_one_rank_with_all_the_samples(ranks: Ranks, size: int) -> None:
    (one, _, loss) = ranks(1).run(train_in_parts, "float64")[0]
    several = ranks(size).run(train_in_parts, "float64")
    assert len({fingerprint for _, fingerprint, _ in several}) == 1
    assert sum(part for _, _, part in several) == pytest.approx(loss, rel=1e-9)
    assert worst(several[0][0], one)[0] < 1e-9


def test_float32_follows_too(ranks: Ranks) -> None:
    (one, _, _) = ranks(1).run(train_in_parts, "float32")[0]
    several = ranks(2).run(train_in_parts, "float32")
    assert len({fingerprint for _, fingerprint, _ in several}) == 1
    assert {value.dtype for value in several[0][0].values()} == {np.dtype(np.float32)}
    assert worst(several[0][0], one)[0] < 1e-4


def test_statistics_of_each_rank_are_averaged_and_empty_parts_count_as_zeros(ranks: Ranks) -> None:
    several = ranks(2).run(train_in_parts, "float64", False)
    assert len({fingerprint for _, fingerprint, _ in several}) == 1
    assert worst(several[0][0], several[1][0])[0] == 0.0
    one = ranks(1).run(train_in_parts, "float64", False, [(12,)])[0]
    empty = ranks(2).run(train_in_parts, "float64", False, [(12, 0)])[0]
    trained = {name for name in one[0] if "running" not in name}
    assert worst({n: empty[0][n] for n in trained}, {n: one[0][n] for n in trained})[0] < 1e-9


def test_a_state_continues_the_training_bit_for_bit(comm: Communicator) -> None:
    whole, first, second = (ChainerTrainer(SPEC, recipe(), comm, seed=seed) for seed in (0, 0, 1))
    for step in range(4):
        whole.step(whole_batch(step), 0.05)
        (first if step < 2 else second).step(whole_batch(step), 0.05)
        if step == 1:
            second.load_state(first.state())
            assert second.fingerprint() == first.fingerprint()
    assert second.fingerprint() == whole.fingerprint()
    fresh = ChainerTrainer(SPEC, recipe(), comm, seed=0)
    start = fresh.fingerprint()
    second.load_state(fresh.state())
    assert second.fingerprint() == start
    for trainer in (whole, first, second, fresh):
        trainer.close()


def test_states_of_other_networks_are_refused(comm: Communicator) -> None:
    trainer = ChainerTrainer(SPEC, recipe(), comm, seed=0)
    state = trainer.state()
    with pytest.raises(CheckpointError, match=r"another network: .*head.dense.weight has shape \(10, 64\)"):
        trainer.load_state(state | {"model/head.dense.weight": np.zeros((3, 64), np.float32)})
    with pytest.raises(CheckpointError, match="lack 1 of"):
        trainer.load_state({name: state[name] for name in state if name != "model/stem.conv.weight"})
    with pytest.raises(CheckpointError, match="network lacks, first other"):
        trainer.load_state(state | {"model/other": np.zeros(1)})
    trainer.close()


def test_weights_are_what_was_loaded() -> None:
    model = ChainerResNet(SPEC, np.float64)
    weights = initial_weights(SPEC, 5, dtype=np.float64)
    load_weights(model, weights)
    found = read_weights(model)
    assert worst(found, weights)[0] == 0.0
    assert {value.dtype for value in found.values()} == {np.dtype(np.float64)}


@pytest.mark.parametrize(
    ("kernel", "stride", "padding"), [(1, 1, 0), (1, 2, 0), (3, 1, 1), (3, 2, 1), (7, 2, 3)]
)
@pytest.mark.parametrize("extent", [8, 9])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_convolution_is_that_of_torch(
    kernel: int, stride: int, padding: int, extent: int, count: int
) -> None:
    generator = np.random.default_rng(0)
    x = generator.standard_normal((count, 2, extent, extent))
    weight = generator.standard_normal((4, 2, kernel, kernel))
    inputs = chainer.Variable(x), chainer.Parameter(weight)
    (y,) = Convolution(stride, padding).apply(inputs)
    tensors = torch.tensor(x, requires_grad=True), torch.tensor(weight, requires_grad=True)
    expected = torch.nn.functional.conv2d(*tensors, stride=stride, padding=padding)
    np.testing.assert_allclose(y.array, expected.detach().numpy(), atol=1e-12)
    gradient = generator.standard_normal(y.shape)
    functions.sum(y * gradient).backward()
    expected.backward(torch.from_numpy(gradient))
    for variable, tensor in zip(inputs, tensors, strict=True):
        assert tensor.grad is not None
        np.testing.assert_allclose(variable.grad, tensor.grad.numpy(), atol=1e-12)
    assert inputs[1].grad.flags.c_contiguous  # ChainerMN loses the averages of others


def test_threads_are_those_of_numpy() -> None:
    with threadpool_limits(1):
        for count in (2, 1):
            set_threads(count)
            pools = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
            assert {pool["num_threads"] for pool in pools} == {count}


def test_the_bench_reduces_gradients(ranks: Ranks) -> None:
    assert ranks(2).run(reduce_gradients) == [True, True]


def test_the_peer_asks_for_mpirun(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in chainermn_mpi.RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match="start them with mpirun -n RANKS"):
        chainermn_mpi.make_trainer(SPEC, recipe(), comm, seed=0)


PEER = """
import multiring
from multiring.models.peers import chainermn_mpi
from multiring.models.resnet_chainer import read_weights
from multiring.models.train_chainer import ChainerTrainer
from multiring.models.trainer import hash_arrays
from tests.python.test_models_chainer import SPEC, part_of, recipe, whole_batch, worst

comm = multiring.init()
peer = chainermn_mpi.make_trainer(SPEC, recipe(), comm, seed=0, dtype="float64")
own = ChainerTrainer(SPEC, recipe(), comm, seed=0, dtype="float64", sync_bn=False)
for step, counts in enumerate([(6, 6), (7, 5), (12, 0)]):
    part = part_of(whole_batch(step), counts, comm.rank)
    loss = peer.step(part, 0.05)
    assert abs(loss - own.step(part, 0.05).loss) <= 1e-9 * loss
state = {"model/" + name: value for name, value in read_weights(peer.plain).items()}
error = worst(state, {name: value for name, value in own.state().items() if name in state})
assert error[0] < 1e-9, error
print("rank", comm.rank, "agrees")
own.close()
peer.close()
multiring.shutdown()
"""


def test_the_peer_trains_alike_under_mpirun() -> None:
    from shutil import which

    mpirun = which("mpirun")
    if mpirun is None:
        pytest.skip("mpirun is not installed")
    pytest.importorskip("mpi4py")
    allowed = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [mpirun, "-n", "2", sys.executable, "-c", PEER],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=REPOSITORY,
        env=os.environ | allowed,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if "agrees" in line) == [
        "rank 0 agrees",
        "rank 1 agrees",
    ]

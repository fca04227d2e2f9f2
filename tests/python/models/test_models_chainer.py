"""The ResNet in Chainer: the same numbers as in Torch, and on several ranks the same as on one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import multiring.chainer  # noqa: F401  before Chainer

# isort: split
import chainer
import numpy as np
import pytest
import torch
from chainer import functions
from threadpoolctl import threadpool_info, threadpool_limits

from multiring import Communicator
from multiring.benchmarks.gradients.frameworks.chainer import make_reduction
from multiring.errors import UsageError
from multiring.models.nets.convolution_chainer import Convolution
from multiring.models.nets.resnet_chainer import ChainerResNet, load_weights, read_weights
from multiring.models.nets.weights import initial_weights
from multiring.models.peers import chainermn_mpi
from multiring.models.trainers.train_chainer import ChainerTrainer
from tests.python.models.trainer_contract import SPEC, TrainerContract, recipe, worst
from tests.rank_pool import RankPool
from tests.support import REPOSITORY

Ranks = Callable[[int], RankPool]
Array = np.ndarray[Any, Any]


def reduce_gradients(comm: Communicator) -> bool:
    reduction = make_reduction([(3, 2), (), (1000,), (0,)], comm)
    right = True
    for turn in range(3):
        reduction.run(turn + comm.rank, comm.barrier)
        right = right and reduction.check(turn + (comm.size - 1) / 2) and not reduction.check(-1.0)
    reduction.close()
    return right


class TestChainerTrainer(TrainerContract):
    framework = "chainer"
    size = 3


def test_weights_are_what_was_loaded() -> None:
    model = ChainerResNet(SPEC, np.float64)
    weights = initial_weights(SPEC, 5, dtype=np.float64)
    load_weights(model, weights)
    found = read_weights(model)
    assert worst(found, weights)[0] == 0.0
    assert {value.dtype for value in found.values()} == {np.dtype(np.float64)}


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "extent", "count"),
    [(1, 1, 0, 8, 3), (1, 2, 0, 9, 1), (3, 2, 1, 8, 3), (7, 2, 3, 9, 3), (3, 1, 1, 8, 0)],
)
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
        np.testing.assert_allclose(variable.grad, tensor.grad.numpy(), atol=1e-12)
    assert inputs[1].grad.flags.c_contiguous  # ChainerMN loses the averages of others


def test_threads_are_those_of_numpy() -> None:
    with threadpool_limits(1):
        for count in (2, 1):
            ChainerTrainer.set_threads(count)
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
from multiring.models.nets.resnet_chainer import read_weights
from multiring.models.trainers.train_chainer import ChainerTrainer
from multiring.models.trainers.trainer import hash_arrays
from tests.python.models.trainer_contract import SPEC, part_of, recipe, whole_batch, worst

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
    # Where an environment is used without being activated, its programs lie beside its Python.
    places = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    mpirun = shutil.which("mpirun", path=os.pathsep.join(places))
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

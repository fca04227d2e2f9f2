"""The ResNet in Chainer: the same numbers as in Torch, and on several ranks the same as on one."""

from __future__ import annotations

import os
import sys

import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from multiring import Communicator
from multiring.benchmarks import launch
from multiring.errors import UsageError
from multiring.models.peers import chainermn_mpi
from multiring.models.trainers.train_chainer import ChainerTrainer
from tests.python.models.trainer_contract import SPEC, TrainerContract, recipe
from tests.support import REPOSITORY, Job


class TestChainerTrainer(TrainerContract):
    framework = "chainer"
    size = 3


def test_threads_are_those_of_numpy() -> None:
    with threadpool_limits(1):
        for count in (2, 1):
            ChainerTrainer.set_threads(count)
            pools = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
            assert {pool["num_threads"] for pool in pools} == {count}


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
    pytest.importorskip("mpi4py")
    try:
        mpirun = launch.find_mpirun()
    except UsageError as error:
        pytest.skip(str(error))
    env = launch.mpi_environment({"OMP_NUM_THREADS": "1"}, user=os.getuid())
    done = Job(mpirun.command(2, [sys.executable, "-c", PEER]), env, cwd=REPOSITORY).run(120, code=0)
    for rank in range(2):
        assert f"rank {rank} agrees" in done.stdout

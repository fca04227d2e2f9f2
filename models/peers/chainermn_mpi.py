"""ChainerMN's own way: its naive communicator, the one without GPUs, over mpi4py."""

from __future__ import annotations

import os
from typing import Any

import multiring.chainer  # isort: skip  # noqa: F401  # before chainer, which it makes importable

import chainer
import numpy as np
from chainer import functions

from multiring import Communicator
from multiring.errors import UsageError
from multiring.models.data.loader import Batch
from multiring.models.nets.resnet_chainer import ChainerResNet, load_weights
from multiring.models.nets.resnet_spec import ResNetSpec
from multiring.models.nets.weights import initial_weights
from multiring.models.trainers.recipe import Recipe
from multiring.models.trainers.sgd_chainer import Sgd, decay_weights

__all__ = ["ChainerMnTrainer", "make_trainer"]

# What the launchers of Open MPI and of MPICH (and those built on it) tell their processes.
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")


class ChainerMnTrainer:
    """The training of `ChainerTrainer`, its gradients averaged by ChainerMN: one by one, after the backward
    pass.

    Batch normalisation is over each rank's part. A rank without samples contributes gradients of zeros.

    Args:
        spec: The network.
        recipe: Optimizer settings; the learning rate comes with each step.
        comm: The ranks; MPI has to number them alike.
        seed: Seed of the weights, the same on every rank.
        dtype: "float32" or "float64".

    Raises:
        UsageError: The processes were not started by MPI's launcher, or MPI has other ranks than `comm`.
    """

    def __init__(
        self, spec: ResNetSpec, recipe: Recipe, comm: Communicator, *, seed: int, dtype: str = "float32"
    ) -> None:
        communicator = _mpi_communicator(comm)
        self._size = comm.size
        self._dtype = np.dtype(dtype)
        self.plain = ChainerResNet(spec, self._dtype)
        """The network."""
        load_weights(self.plain, initial_weights(spec, seed, dtype=dtype))
        self._optimizer = _multi_node(Sgd(recipe), communicator)
        self._optimizer.setup(self.plain)
        decay_weights(self.plain, recipe.weight_decay)
        # At its first update ChainerMN's optimizer broadcasts the parameters and updates nothing.
        self._optimizer.update()

    def step(self, batch: Batch, lr: float) -> float:
        """Train on one global batch; returns the sum of the losses of this rank's part."""
        self._optimizer.lr = lr
        total = 0.0
        self.plain.cleargrads()
        if len(batch.labels):
            with chainer.using_config("train", True):
                scores = self.plain(batch.images.astype(self._dtype, copy=False))
            losses = functions.softmax_cross_entropy(scores, batch.labels, reduce="no")
            loss = functions.sum(losses) * (self._size / batch.global_count)
            loss.backward()
            total = float(losses.array.sum())
        self._optimizer.update()
        return total

    def close(self) -> None:
        """Nothing to do: MPI ends with the process."""


def make_trainer(
    spec: ResNetSpec, recipe: Recipe, comm: Communicator, *, seed: int, dtype: str = "float32"
) -> ChainerMnTrainer:
    """This rank's trainer; see `ChainerMnTrainer`. Collective."""
    return ChainerMnTrainer(spec, recipe, comm, seed=seed, dtype=dtype)


def _mpi_communicator(comm: Communicator) -> Any:
    if not any(name in os.environ for name in RANK_VARIABLES):
        raise UsageError(
            "ChainerMN's own communicator works over MPI only, and these processes were not started by its "
            "launcher; start them with mpirun -n RANKS"
        )
    import chainermn

    communicator = chainermn.create_communicator("naive")
    if (communicator.rank, communicator.size) != (comm.rank, comm.size):
        raise UsageError(
            f"rank {comm.rank} of {comm.size} is rank {communicator.rank} of {communicator.size} for MPI; "
            "start all processes with one mpirun"
        )
    return communicator


def _multi_node(optimizer: chainer.Optimizer, communicator: Any) -> Any:
    import chainermn

    return chainermn.create_multi_node_optimizer(optimizer, communicator, zero_fill=True)

"""Which framework has a way of its own to train on several processes, and where it is wrapped."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Protocol

from multiring import Communicator
from multiring.models.data.loader import Batch
from multiring.models.nets.resnet_spec import ResNetSpec
from multiring.models.trainers.recipe import Recipe

__all__ = ["PEERS", "Peer", "PeerTrainer"]


class PeerTrainer(Protocol):
    """The same training as a `Trainer`'s, kept in step by the framework itself.

    Its batch normalisation is over each rank's part, as these ways have it by default.
    """

    def step(self, batch: Batch, lr: float) -> object:
        """Train on one global batch, of which this rank holds a part."""

    def close(self) -> None:
        """Let go of processes and connections."""


@dataclass(frozen=True)
class Peer:
    """A framework's own way.

    Attributes:
        title: As in tables and reports.
        module: Has `make_trainer(spec, recipe, comm, *, seed, dtype) -> PeerTrainer`.
        packages: What has to be importable.
        mpi: Whether the ranks have to be started by MPI's own launcher.
    """

    title: str
    module: str
    packages: tuple[str, ...]
    mpi: bool = False

    @property
    def missing(self) -> tuple[str, ...]:
        """What it needs and is not there: packages, or its own module."""
        return tuple(name for name in (*self.packages, self.module) if not _is_installed(name))

    def make_trainer(
        self, spec: ResNetSpec, recipe: Recipe, comm: Communicator, *, seed: int, dtype: str = "float32"
    ) -> PeerTrainer:
        """This rank's trainer. Collective; `comm` only serves to bring the ranks together."""
        make = importlib.import_module(self.module).make_trainer
        trainer: PeerTrainer = make(spec, recipe, comm, seed=seed, dtype=dtype)
        return trainer


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of a name with dots: what stands before the last one
        return False


_PEERS = "multiring.models.peers"
PEERS = {
    "torch": Peer("DDP over Gloo", f"{_PEERS}.torch_ddp", ("torch",)),
    "tensorflow": Peer("MultiWorkerMirroredStrategy", f"{_PEERS}.tensorflow_mwms", ("tensorflow",)),
    "chainer": Peer("ChainerMN over mpi4py", f"{_PEERS}.chainermn_mpi", ("chainermn", "mpi4py"), mpi=True),
}
"""By the framework's name; not every framework has one."""

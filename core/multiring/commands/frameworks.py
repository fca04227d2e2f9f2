"""The table of frameworks, which CI, `multiring env`, the models and the benchmarks read.

Nothing here imports a framework. `multiring.<name>` is a framework's adapter, and `multiring[<name>]` brings
its packages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

__all__ = ["FRAMEWORKS", "Framework", "OwnWay", "not_installed"]


def not_installed(names: Sequence[str]) -> tuple[str, ...]:
    """Those of the packages and modules that cannot be imported."""
    return tuple(name for name in names if not _is_installed(name))


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of a name with dots: what stands before the last one
        return False


@dataclass(frozen=True)
class OwnWay:
    """A framework's own way to train on several processes, to compare with.

    Attributes:
        title: As in tables and reports.
        module: Has `make_trainer(spec, recipe, comm, *, seed, dtype)`, which gives a `PeerTrainer`.
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
        return not_installed((*self.packages, self.module))


@dataclass(frozen=True)
class Framework:
    """A framework.

    Attributes:
        name: As on the command line.
        title: As in tables and reports.
        packages: What has to be importable to train with it.
        module: Of its trainer.
        trainer: Name of the trainer's class in it, which is derived from `Trainer`.
        distributions: Whose versions are shown. The first that is installed is the framework's.
        imports: What only its own adapter may import.
        own_way: Its own way to train on several processes; None: it has none.
    """

    name: str
    title: str
    packages: tuple[str, ...]
    module: str
    trainer: str
    distributions: tuple[str, ...]
    imports: tuple[str, ...]
    own_way: OwnWay | None = None

    @property
    def why_missing(self) -> str | None:
        """What is not installed and how to get it; None: all is there."""
        missing = not_installed(self.packages)
        if not missing:
            return None
        return f"{' and '.join(missing)} is not installed: run pip install 'multiring[{self.name}]'"


_TRAINERS, _PEERS = "multiring.models.trainers.train_", "multiring.models.peers."
_TABLE = (
    Framework(
        "torch",
        "Torch",
        packages=("torch",),
        module=f"{_TRAINERS}torch",
        trainer="TorchTrainer",
        distributions=("torch",),
        imports=("torch",),
        own_way=OwnWay("DDP over Gloo", f"{_PEERS}torch_ddp", ("torch",)),
    ),
    Framework(
        "tensorflow",
        "TensorFlow",
        packages=("tensorflow",),
        module=f"{_TRAINERS}tensorflow",
        trainer="TensorFlowTrainer",
        distributions=("tensorflow", "tensorflow-cpu"),
        imports=("tensorflow", "keras"),
        own_way=OwnWay("MultiWorkerMirroredStrategy", f"{_PEERS}tensorflow_mwms", ("tensorflow",)),
    ),
    Framework(
        "chainer",
        "Chainer",
        packages=("chainer",),
        module=f"{_TRAINERS}chainer",
        trainer="ChainerTrainer",
        distributions=("chainer", "cupy", "cupy-cuda12x", "cupy-cuda13x"),
        imports=("chainer", "chainermn", "cupy"),
        own_way=OwnWay("ChainerMN over mpi4py", f"{_PEERS}chainermn_mpi", ("chainermn", "mpi4py"), mpi=True),
    ),
    Framework(
        "caffe",
        "Caffe-style",
        packages=("torch", "google.protobuf"),
        module=f"{_TRAINERS}caffe",
        trainer="CaffeTrainer",
        distributions=("torch",),
        imports=("caffe",),
    ),
    Framework(
        "jax",
        "JAX",
        packages=("jax", "optax"),
        module=f"{_TRAINERS}jax",
        trainer="JaxTrainer",
        distributions=("jax", "jaxlib"),
        imports=("jax", "jaxlib"),
    ),
    Framework(
        "pytensor",
        "PyTensor",
        packages=("pytensor",),
        module=f"{_TRAINERS}pytensor",
        trainer="PyTensorTrainer",
        distributions=("pytensor",),
        imports=("pytensor",),
    ),
)
FRAMEWORKS = {framework.name: framework for framework in _TABLE}

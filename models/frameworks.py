"""The frameworks that train the ResNet, by name; each is imported only when it is used."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from types import ModuleType

from multiring import Communicator
from multiring.errors import UsageError
from multiring.models.nets.resnet_spec import ResNetSpec
from multiring.models.trainers.recipe import Recipe
from multiring.models.trainers.trainer import Trainer

__all__ = ["FRAMEWORKS", "Framework", "find_framework"]


@dataclass(frozen=True)
class Framework:
    """A framework and where its trainer is.

    Attributes:
        name: As on the command line.
        title: As in tables and reports.
        module: Module with the class `trainer` and the function `set_threads(count)`.
        trainer: Class derived from `Trainer`.
        packages: What has to be importable.
        extra: The extra of the package that brings them.
    """

    name: str
    title: str
    module: str
    trainer: str
    packages: tuple[str, ...]
    extra: str

    @property
    def missing(self) -> tuple[str, ...]:
        """The packages that are not installed."""
        return tuple(name for name in self.packages if not _is_installed(name))

    def load(self) -> ModuleType:
        """The trainer's module.

        Raises:
            UsageError: The framework is not installed; says what to install.
        """
        if self.missing:
            raise UsageError(
                f"--framework {self.name} needs {' and '.join(self.missing)}, which is not installed: run "
                f"pip install 'multiring[{self.extra}]'"
            )
        return importlib.import_module(self.module)

    def set_threads(self, count: int) -> None:
        """Let the framework compute with `count` threads; to be called before it computes anything."""
        self.load().set_threads(count)

    def make_trainer(
        self,
        spec: ResNetSpec,
        recipe: Recipe,
        comm: Communicator,
        *,
        seed: int,
        dtype: str = "float32",
        sync_bn: bool = True,
        zero_residual: bool = False,
    ) -> Trainer:
        """This rank's trainer; the arguments are those of `Trainer`. Collective.

        Raises:
            UsageError: The framework is not installed.
        """
        make = getattr(self.load(), self.trainer)
        trainer: Trainer = make(
            spec, recipe, comm, seed=seed, dtype=dtype, sync_bn=sync_bn, zero_residual=zero_residual
        )
        return trainer


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of a name with dots: what stands before the last one
        return False


_TRAINERS = "multiring.models.trainers"
FRAMEWORKS = {
    framework.name: framework
    for framework in (
        Framework("torch", "Torch", f"{_TRAINERS}.train_torch", "TorchTrainer", ("torch",), "torch"),
        Framework(
            "tensorflow",
            "TensorFlow",
            f"{_TRAINERS}.train_tensorflow",
            "TensorFlowTrainer",
            ("tensorflow",),
            "tensorflow",
        ),
        Framework(
            "chainer", "Chainer", f"{_TRAINERS}.train_chainer", "ChainerTrainer", ("chainer",), "chainer"
        ),
        Framework(
            "caffe",
            "Caffe-style",
            f"{_TRAINERS}.train_caffe",
            "CaffeTrainer",
            ("torch", "google.protobuf"),
            "caffe",
        ),
        Framework("jax", "JAX", f"{_TRAINERS}.train_jax", "JaxTrainer", ("jax", "optax"), "jax"),
        Framework(
            "pytensor",
            "PyTensor",
            f"{_TRAINERS}.train_pytensor",
            "PyTensorTrainer",
            ("pytensor",),
            "pytensor",
        ),
    )
}


def find_framework(name: str) -> Framework:
    """The framework of that name.

    Raises:
        UsageError: There is none; names those that there are.
    """
    if name not in FRAMEWORKS:
        raise UsageError(f"unknown framework {name!r}; choose one of {', '.join(FRAMEWORKS)}")
    return FRAMEWORKS[name]

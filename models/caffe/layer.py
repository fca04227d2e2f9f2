"""What a layer is, and the table of all kinds of them."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from multiring.errors import UsageError
from multiring.models.caffe.blob import Blob, Shape
from multiring.models.caffe.device import CPU
from multiring.models.caffe.fillers import fill
from multiring.models.caffe.prototxt import Location, PrototxtError

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = [
    "LAYERS",
    "Context",
    "ForwardLayer",
    "Gradients",
    "Layer",
    "Tensors",
    "draw_seed",
    "make_layer",
    "process_shard",
    "register",
    "set_random_seed",
    "set_solver_count",
    "set_solver_rank",
    "solver_count",
    "solver_rank",
]

Tensors = Sequence[torch.Tensor]
Gradients = Sequence[torch.Tensor | None]


@dataclass(frozen=True)
class Context:
    """What the layers of a net have in common.

    Attributes:
        phase: `TRAIN` or `TEST`.
        dtype: Of all blobs.
        generator: Source of random numbers.
        device: Where all blobs lie, and their layers compute.
        seed: Seed of what depends on a sample's number rather than on the generator.
        shard: This rank and the number of ranks, for data layers in training.
        comm: Ranks over whose batches BatchNorm normalises; None for this one's alone.
        force_backward: All layers run backward, and all learned blobs get a gradient.
    """

    phase: int
    dtype: torch.dtype
    generator: torch.Generator
    device: torch.device = CPU
    seed: int = 0
    shard: tuple[int, int] = (0, 1)
    comm: Communicator | None = None
    force_backward: bool = False


_generator: torch.Generator | None = None
_shard = (0, 1)


def set_random_seed(seed: int) -> None:
    """Have nets and solvers that are built from now on draw the same numbers in every run. A solver whose
    prototxt has a `random_seed` uses that."""
    global _generator
    _generator = torch.Generator().manual_seed(seed)


def draw_seed() -> int:
    """The seed of a net: the next of a row after `set_random_seed`, otherwise any."""
    if _generator is None:
        return secrets.randbits(31)
    return int(torch.randint(1 << 31, (), generator=_generator))


def set_solver_count(count: int) -> None:
    """Say how many ranks train, for solvers that are built from now on without `shard`."""
    global _shard
    if count < 1:
        raise UsageError(f"set_solver_count takes 1 or more, not {count}")
    _shard = (_shard[0], int(count))


def set_solver_rank(rank: int) -> None:
    """Say which of them this process is; only rank 0 logs and writes snapshots."""
    global _shard
    if rank < 0:
        raise UsageError(f"set_solver_rank takes 0 or more, not {rank}")
    _shard = (int(rank), _shard[1])


def solver_count() -> int:
    """What `set_solver_count` has said."""
    return _shard[1]


def solver_rank() -> int:
    """What `set_solver_rank` has said."""
    return _shard[0]


def process_shard() -> tuple[int, int]:
    """This rank and the number of ranks.

    Raises:
        UsageError: They do not fit.
    """
    if _shard[0] >= _shard[1]:
        raise UsageError(f"solver rank {_shard[0]} of {_shard[1]}: call set_solver_count and set_solver_rank")
    return _shard


class Layer(ABC):
    """One layer. `forward` keeps what `backward` needs.

    Attributes:
        name: Its name.
        type: Its type, "Convolution" for example.
        param: Its `LayerParameter`.
        location: Where it stands in the prototxt.
        blobs: Its learned blobs.
    """

    bottoms: tuple[int, int] = (1, 1)  # how many there may be
    tops: tuple[int, int] = (1, 1)
    is_loss = False
    has_backward = True

    def __init__(self, param: Any, location: Location, context: Context) -> None:
        self.param, self.location, self.context = param, location, context
        self.name, self.type = str(param.name), str(param.type)
        self.blobs: list[Blob] = []
        for count, (least, most), what in (
            (len(param.bottom), self.bottoms, "bottom"),
            (len(param.top), self.tops, "top"),
        ):
            if not least <= count <= most:
                wanted = str(least) if least == most else f"{least} to {most}"
                raise self.error(f"{self.type} takes {wanted} {what} blobs, not {count}")

    def setup(self, bottoms: Sequence[Shape]) -> None:  # noqa: B027  # many layers need none
        """Check the parameters and make the blobs, given the shapes of the bottoms."""

    def infer(self, bottoms: Sequence[Shape]) -> list[Shape]:
        """Shapes of the tops."""
        return [bottoms[0]]

    @abstractmethod
    def forward(self, bottoms: Tensors) -> list[torch.Tensor]:
        """Values of the tops."""

    @abstractmethod
    def backward(self, gradients: Gradients, wanted: Sequence[bool]) -> list[torch.Tensor | None]:
        """Gradients of the bottoms, and those of the blobs added to `blobs[k].gradient`.

        Args:
            gradients: Of the tops; None where nothing below the loss reads it.
            wanted: Per bottom, whether its gradient is used.
        """

    def error(self, text: str, *path: str | int) -> PrototxtError:
        """An error that begins with where a field of the layer stands."""
        return self.location.error(f"layer {self.name!r}: {text}", *path)

    def learns(self, number: int) -> bool:
        """Whether blob `number` gets a gradient."""
        if self.context.force_backward:
            return True
        return number >= len(self.param.param) or self.param.param[number].lr_mult != 0

    def add_blob(self, shape: Shape, *filler: str) -> Blob:
        """Append a learned blob, filled by the filler that the fields `filler` lead to."""
        blob = Blob(shape, self.context.dtype, self.context.device)
        self.blobs.append(blob)
        if filler:
            found = self.param
            for name in filler:
                found = getattr(found, name)
            fill(blob, found, self.location.find(*filler), self.context.generator)
        return blob

    def axis(self, axis: int, shape: Shape, *path: str) -> int:
        """An axis of a shape, counted from the front.

        Raises:
            PrototxtError: There is no such axis.
        """
        if not -len(shape) <= axis < len(shape):
            raise self.error(f"axis {axis} is not one of shape {shape}", *path)
        return axis % len(shape)


class ForwardLayer(Layer):
    """A layer that hands no gradients down."""

    has_backward = False

    def backward(self, gradients: Gradients, wanted: Sequence[bool]) -> list[torch.Tensor | None]:
        return [None] * len(wanted)


LAYERS: dict[str, type[Layer]] = {}
L = TypeVar("L", bound=type[Layer])


def register(name: str) -> Callable[[L], L]:
    """Add a kind of layer to the table."""

    def add(kind: L) -> L:
        LAYERS[name] = kind
        return kind

    return add


def make_layer(param: Any, location: Location, context: Context) -> Layer:
    """A layer of a `LayerParameter`.

    Raises:
        PrototxtError: Its type is not supported.
    """
    if param.type not in LAYERS:
        kinds = ", ".join(sorted(name for name in LAYERS if name != "Split"))
        raise location.error(
            f"layer {param.name!r} has type {param.type!r}, which is not supported; there are {kinds}", "type"
        )
    return LAYERS[param.type](param, location, context)

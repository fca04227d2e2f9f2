"""What the adapter needs of pycaffe, as protocols, and the learned blobs of a net."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

__all__ = ["Array", "Blob", "Net", "Parameter", "Solver", "learned_blobs"]

Array = NDArray[Any]

# The first blobs of these layers are running statistics, which Caffe gives the learning rate 0: they have no
# gradient. A scale and a bias, which layers of some builds have besides, do learn.
STATISTICS = {"BatchNorm": 3}


class Blob(Protocol):
    """A blob of pycaffe. Each access to an array may be a new one, over memory that may have moved.

    Besides, `shape` and `gpu_diff_ptr`, the address of the gradient on a GPU, are used where they are asked
    for (`SolverCallback(on_device=True)`).
    """

    @property
    def data(self) -> Array:
        """The values, writable."""

    @property
    def diff(self) -> Array:
        """The gradient, writable."""


class Net(Protocol):
    """A net of pycaffe.

    Besides, `_layer_names` and `after_backward(callback)` are used where they exist, and `layers[k].type`;
    and `gpu_stream`, of a net that does not work on a GPU's default stream, or on none.
    """

    @property
    def params(self) -> Mapping[str, Sequence[Blob]]:
        """The blobs of every layer that has any, by the layer's name, bottom to top."""


class Solver(Protocol):
    """A solver of pycaffe."""

    @property
    def net(self) -> Any:
        """The net that is trained, a `Net`."""

    @property
    def iter(self) -> int:
        """How many times the weights have been updated."""

    def add_callback(self, on_start: Callable[[], None], on_gradients_ready: Callable[[], None], /) -> None:
        """Have both called in every iteration."""


@dataclass(frozen=True)
class Parameter:
    """A learned blob; one that layers share occurs once, under the name of the first.

    Attributes:
        name: "conv1" where the layer has one blob, else "conv1[0]", "conv1[1]", ...
        layer: Name of the layer.
        number: Its place among the layer's blobs.
        users: Indexes of the layers that add to its gradient; empty where the net does not tell.
        is_statistic: It is a running statistic and has no gradient.
    """

    name: str
    layer: str
    number: int
    users: tuple[int, ...]
    is_statistic: bool


def learned_blobs(net: Net) -> list[Parameter]:
    """The blobs of a net, each memory once, bottom to top."""
    positions: dict[str, list[int]] = {}
    for index, name in enumerate(getattr(net, "_layer_names", ())):
        positions.setdefault(str(name), []).append(index)
    kinds = [str(getattr(layer, "type", "")) for layer in getattr(net, "layers", ())]
    found: dict[object, Parameter] = {}
    for layer, number, name, blob in _all_blobs(net):
        memory = _memory(blob.diff)
        users = tuple(positions.get(layer, ()))
        if memory in found:
            first = found[memory]
            found[memory] = Parameter(
                first.name, first.layer, first.number, (*first.users, *users), first.is_statistic
            )
            continue
        statistic = any(index < len(kinds) and number < STATISTICS.get(kinds[index], 0) for index in users)
        found[memory] = Parameter(name, layer, number, users, statistic)
    return list(found.values())


def _all_blobs(net: Net) -> Iterator[tuple[str, int, str, Blob]]:
    for layer, blobs in net.params.items():
        several = len(blobs) > 1
        for number in range(len(blobs)):
            yield str(layer), number, f"{layer}[{number}]" if several else str(layer), blobs[number]


def _memory(array: Array) -> object:
    """Equal for arrays over the same memory."""
    return array.__array_interface__["data"][0] if array.size else object()

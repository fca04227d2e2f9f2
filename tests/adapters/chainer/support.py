"""What the tests of the Chainer adapter share: a small model, and gradients computed without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import multiring.chainer  # before Chainer

# isort: split
import chainer
from chainer import functions, links

from multiring import Communicator
from tests.adapters.contract import bits, compare, mean
from tests.on_ranks import same_everywhere

Array = NDArray[Any]
SMALL: dict[str, Any] = {"bucket_bytes": 256}


class InBackward(chainer.Function):  # type: ignore[misc]
    """Nothing forward; backward calls a function with its inputs."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def forward(self, inputs: Any) -> Any:
        return inputs

    def backward(self, inputs: Any, gradients: Any) -> Any:
        self._call(*inputs)
        return gradients


class Network(chainer.Chain):
    """Three layers, the last of which may be left without a shape, and one that is used on demand. Its
    backward pass may call a function behind the first layer."""

    def __init__(self, inputs: int | None = 6) -> None:
        super().__init__()
        with self.init_scope():
            self.first = links.Linear(inputs, 8)
            self.middle = links.Linear(8, 8)
            self.last = links.Linear(None if inputs is None else 8, 3)
            self.spare = links.Linear(8, 3)

    def forward(self, x: Any, spare: bool = False, call: Callable[..., None] | None = None) -> Any:
        hidden = functions.tanh(self.first(x))
        hidden = hidden if call is None else InBackward(call)(hidden)
        hidden = functions.tanh(self.middle(hidden))
        return self.last(hidden) + (self.spare(hidden) if spare else 0.0)


def make_model(seed: int = 0, inputs: int | None = 6) -> Network:
    before = np.random.get_state()
    np.random.seed(seed)
    with chainer.using_config("dtype", np.float64):
        model = Network(inputs)
    np.random.set_state(before)
    return model


def make_optimizer(comm: Communicator | None, model: Any, actual: Any = None, **options: Any) -> Any:
    """The multi-node optimizer (SGD with a rate of 0.1 by default) of a model, with small buckets."""
    actual = chainer.optimizers.SGD(0.1) if actual is None else actual
    return multiring.chainer.create_multi_node_optimizer(actual, comm, **SMALL | options).setup(model)


def make_pair(comm: Communicator | None, actual: Any = None, **options: Any) -> tuple[Network, Any]:
    """A model and its optimizer."""
    model = make_model()
    return model, make_optimizer(comm, model, actual, **options)


def draw(seed: int, samples: int = 4) -> Array:
    return np.random.default_rng(seed).standard_normal((samples, 6))


def squares(model: Any, rank: int, **kwargs: Any) -> Any:
    return functions.mean(model(draw(rank), **kwargs) ** 2)


def gradients_of(model: Any) -> dict[str, Array | None]:
    return {name: None if p.grad is None else p.grad.copy() for name, p in model.namedparams()}


def bits_of(model: Any) -> dict[str, bytes]:
    return {name: p.array.tobytes() for name, p in model.namedparams()}


def expected(comm: Communicator, loss: Callable[[Any, int], Any] = squares) -> dict[str, Array]:
    """Gradients of each rank's loss, computed here in turn and averaged, where any rank has one."""
    every = []
    for rank in range(comm.size):
        model = make_model()
        model.cleargrads()
        loss(model, rank).backward()
        every.append({name: one for name, one in gradients_of(model).items() if one is not None})
    return mean(every, comm.size)


def assert_gradients(model: Any, wanted: dict[str, Array], comm: Communicator) -> None:
    found = gradients_of(model)
    compare(found, wanted)
    assert same_everywhere(comm, bits(found))


def assert_same_weights(model: Any, other: Any, rtol: float = 1e-12, atol: float = 0.0) -> None:
    for (name, one), (_, two) in zip(model.namedparams(), other.namedparams(), strict=True):
        np.testing.assert_allclose(one.array, two.array, rtol=rtol, atol=atol, err_msg=name)

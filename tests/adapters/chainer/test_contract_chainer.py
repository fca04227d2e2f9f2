"""The contract of adapters, over Chainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

import multiring.chainer  # before Chainer

# isort: split
import chainer
from chainer import functions

from multiring import Communicator
from tests.adapters.contract import RATE, Adapter, AdapterContract

Array = NDArray[Any]


class _Weights(chainer.Link):
    def __init__(self, weights: Mapping[str, Array]) -> None:
        super().__init__()
        with self.init_scope():
            for name, value in weights.items():
                setattr(self, name, chainer.Parameter(value.copy()))


class ChainerAdapter(Adapter):
    """Gradients are reduced after the backward pass."""

    package = multiring.chainer
    overlap = False

    def __init__(
        self, comm: Communicator, weights: Mapping[str, Array], bucket_bytes: int, **options: Any
    ) -> None:
        self._comm = multiring.chainer.create_communicator(comm)
        self._model = _Weights(weights)
        self._reduction = self._optimizer = multiring.chainer.create_multi_node_optimizer(
            chainer.optimizers.SGD(RATE),
            self._comm,
            bucket_bytes=bucket_bytes,
            **options,
        )
        self._optimizer.setup(self._model)
        self._model.cleargrads()

    def _loss(self, x: Array, y: Array, extra: bool) -> Any:
        model = self._model
        hidden = functions.tanh(
            functions.matmul(x, model.first)
            + functions.broadcast_to(model.offset, (len(x), len(model.offset)))
        )
        output = functions.matmul(hidden, model.second)
        if extra:
            output = output + functions.matmul(hidden, model.extra)
        return functions.sum((output - y) ** 2) / (2 * len(x))

    def backward(self, x: Array, y: Array, *, extra: bool = True, synchronise: bool = True) -> float:
        loss = self._loss(x, y, extra)
        if synchronise and self.overlap:
            self._optimizer.backward(loss)
            return float(loss.array)
        loss.backward()
        if synchronise:
            self._optimizer.synchronize()
        return float(loss.array)

    def gradients(self) -> dict[str, Array | None]:
        found = self._model.namedparams()
        return {name[1:]: None if p.grad is None else p.grad.copy() for name, p in found}

    def zero_grad(self) -> None:
        self._model.cleargrads()

    def step(self, rate: float) -> None:
        self._optimizer.lr = rate
        self._optimizer.update()

    def weights(self) -> dict[str, Array]:
        return {name[1:]: p.array.copy() for name, p in self._model.namedparams()}


class TestChainerOptimizer(AdapterContract):
    adapter = ChainerAdapter


class OverlappingAdapter(ChainerAdapter):
    """Gradients are reduced while the backward pass runs."""

    overlap = True


class TestChainerOverlap(AdapterContract):
    adapter = OverlappingAdapter

"""The contract of adapters, over PyTensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from numpy.typing import NDArray

import multiring.pytensor
from multiring import Communicator
from tests.adapters.contract import Adapter, AdapterContract

Array = NDArray[Any]


class PyTensorAdapter(Adapter):
    """Implements `AdapterUnderTest` with compiled functions.

    A compiled function either computes a gradient or does not, so there is one for each case: with and
    without `extra`, with and without gradients of earlier passes that wait in `pending`. Each is compiled
    when it is first needed; the ranks may run different ones.
    """

    package = multiring.pytensor

    def __init__(
        self, comm: Communicator, weights: Mapping[str, Array], bucket_bytes: int, **options: Any
    ) -> None:
        self._comm = comm
        self._params = {name: pytensor.shared(value.copy(), name=name) for name, value in weights.items()}
        self._pending = {name: pytensor.shared(np.zeros_like(value)) for name, value in weights.items()}
        self._waiting: set[str] = set()
        self._found: dict[str, Array] = {}
        self._compiled: dict[Any, Any] = {}
        self._reduction = multiring.pytensor.DistributedGradients(
            self._params, comm, bucket_bytes=bucket_bytes, **options
        )

    def backward(self, x: Array, y: Array, *, extra: bool = True, synchronise: bool = True) -> float:
        key = (extra, synchronise, frozenset(self._waiting))
        if key not in self._compiled:
            self._compiled[key] = self._compile(extra, synchronise, self._waiting)
        loss, *results = self._compiled[key](x, y)
        if synchronise:
            self._waiting = set()
            *gradients, produced = results
            for name, gradient, exists in zip(self._params, gradients, produced, strict=True):
                if exists:
                    self._found[name] = self._found.get(name, 0.0) + gradient
        else:
            self._waiting |= {name for name in self._params if extra or name != "extra"}
        return float(loss)

    def _compile(self, extra: bool, synchronise: bool, waiting: set[str]) -> Any:
        x, y = pt.matrix("x"), pt.matrix("y")
        p = self._params
        hidden = pt.tanh(x @ p["first"] + p["offset"])
        output = hidden @ p["second"]
        if extra:
            output = output + hidden @ p["extra"]
        loss = ((output - y) ** 2).sum() / (2 * x.shape[0])
        found: list[Any] = pytensor.grad(
            loss, list(p.values()), disconnected_inputs="ignore", return_disconnected="none"
        )
        total: dict[str, Any] = dict(zip(p, found, strict=True))
        for name in waiting:
            pending = self._pending[name]
            total[name] = pending if total[name] is None else pending + total[name]
        if synchronise:
            reduced = self._reduction.reduce(list(total.values()))
            outputs = [loss, *reduced.gradients, reduced.produced]
            updates = [(self._pending[name], pt.zeros_like(self._pending[name])) for name in waiting]
        else:
            outputs = [loss]
            updates = [(self._pending[name], g) for name, g in total.items() if g is not None]
        return pytensor.function([x, y], outputs, updates=updates, mode="FAST_COMPILE")

    def gradients(self) -> dict[str, Array | None]:
        return {name: self._found.get(name) for name in self._params}

    def zero_grad(self) -> None:
        self._found = {}

    def step(self, rate: float) -> None:
        for name, gradient in self._found.items():
            self._params[name].set_value(self._params[name].get_value() - rate * gradient)

    def weights(self) -> dict[str, Array]:
        return {name: param.get_value() for name, param in self._params.items()}

    def broadcast(self, root: int) -> None:
        multiring.pytensor.broadcast_parameters(self._params.values(), root, self._comm)


class TestPyTensorGradients(AdapterContract):
    adapter = PyTensorAdapter

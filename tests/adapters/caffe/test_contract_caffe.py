"""The contract of adapters, over the solver callback on a solver of pycaffe's shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

import multiring.caffe
from multiring import Communicator
from tests.adapters.caffe.support import FakeBlob, FakeLayer, FakeNet, FakeSolver
from tests.adapters.contract import RATE, Adapter, AdapterContract, oracle

Array = NDArray[Any]


class CaffeAdapter(Adapter):
    """A blob of Caffe always has a `.diff`, so "no gradient" means here what Caffe can tell: since the diffs
    were cleared, no rank's backward pass has run the blob's layer (`SolverCallback.produced`)."""

    package = multiring.caffe
    overlap = False

    def __init__(
        self, comm: Communicator, weights: Mapping[str, Array], bucket_bytes: int, **options: Any
    ) -> None:
        self._comm = comm
        layers = {name: FakeLayer("Some", [FakeBlob(value.copy())]) for name, value in weights.items()}
        self._solver = FakeSolver(FakeNet({**layers, "loss": FakeLayer("Loss", [])}), rate=RATE)
        self._model = self._solver.net
        self._reduction = multiring.caffe.SolverCallback(
            self._solver,
            comm,
            overlap=self.overlap,
            bucket_bytes=bucket_bytes,
            **options,
        )
        self._solver.add_callback(*self._reduction)
        self._in_iteration = False
        self._found: set[str] = set()

    def backward(self, x: Array, y: Array, *, extra: bool = True, synchronise: bool = True) -> float:
        if not self._in_iteration:
            self._solver.start()
            self._in_iteration = True
        loss, gradients = oracle(self.weights(), x, y, extra=extra)
        self._solver.net.backward(
            {name: [gradient] for name, gradient in gradients.items()}, skip=() if extra else ("extra",)
        )
        if synchronise:
            self._solver.gradients_ready()
            self._in_iteration = False
            self._found |= self._reduction.produced
        return loss

    def gradients(self) -> dict[str, Array | None]:
        return {
            name: blobs[0].diff.copy() if name in self._found else None
            for name, blobs in self._solver.net.params.items()
        }

    def zero_grad(self) -> None:
        self._solver.net.clear_param_diffs()
        self._found = set()

    def step(self, rate: float) -> None:
        self._solver.update(rate)

    def weights(self) -> dict[str, Array]:
        return {name: blobs[0].data.copy() for name, blobs in self._solver.net.params.items()}


class OverlappingCaffeAdapter(CaffeAdapter):
    overlap = True


class TestCaffeAdapter(AdapterContract):
    adapter = CaffeAdapter


class TestOverlappingCaffeAdapter(AdapterContract):
    adapter = OverlappingCaffeAdapter

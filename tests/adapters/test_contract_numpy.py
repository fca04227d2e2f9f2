"""The contract of adapters, over the reference adapter."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import multiring.numpy
from multiring import Communicator
from numpy.typing import NDArray

from tests.adapters.contract import AdapterContract, oracle

Array = NDArray[Any]


class NumpyAdapter:
    """Implements `AdapterUnderTest` with explicit gradient arrays."""

    def __init__(self, comm: Communicator, weights: Mapping[str, Array], bucket_bytes: int) -> None:
        self._comm = comm
        self._weights = {name: value.copy() for name, value in weights.items()}
        self._found: dict[str, Array] = {}
        self._buckets = multiring.numpy.GradientBuckets(
            self._weights, comm, bucket_bytes=bucket_bytes, first_bucket_bytes=bucket_bytes
        )

    def backward(self, x: Array, y: Array, *, extra: bool = True, synchronise: bool = True) -> float:
        loss, gradients = oracle(self._weights, x, y, extra=extra)
        for name in reversed(list(gradients)):
            (self._buckets.ready if synchronise else self._buckets.add)(name, gradients[name])
        if synchronise:
            self._found = self._buckets.synchronize()
        return loss

    def gradients(self) -> dict[str, Array | None]:
        return {name: self._found[name].copy() if name in self._found else None for name in self._weights}

    def zero_grad(self) -> None:
        self._buckets.zero()
        self._found = {}

    def step(self, rate: float) -> None:
        for name, gradient in self._found.items():
            self._weights[name] -= rate * gradient

    def weights(self) -> dict[str, Array]:
        return {name: value.copy() for name, value in self._weights.items()}

    def broadcast(self, root: int) -> None:
        multiring.numpy.broadcast_parameters(self._weights, root, self._comm)

    def average_metrics(self, metrics: Mapping[str, float], count: float) -> dict[str, float]:
        return multiring.numpy.average_metrics(metrics, count, self._comm)

    def join(self) -> AbstractContextManager[None]:
        return self._buckets.join(self._weights)

    def close(self) -> None:
        self._buckets.close()


class TestNumpyAdapter(AdapterContract):
    adapter = NumpyAdapter

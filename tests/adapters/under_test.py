"""What the adapter of a framework is to the contract: a model whose gradients are averaged over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from multiring import Communicator

__all__ = ["Adapter", "AdapterUnderTest", "Array", "Weights"]

Array = NDArray[np.float64]
Weights = dict[str, Array]


class AdapterUnderTest(Protocol):
    """A model of one framework whose gradients are averaged over ranks."""

    def __init__(
        self, comm: Communicator, weights: Mapping[str, Array], bucket_bytes: int, **options: Any
    ) -> None:
        """Build the model and register it; buckets hold `bucket_bytes`, the first one too. Collective.

        `check_every` in `options` is what all adapters take.
        """

    def backward(self, x: Array, y: Array, *, extra: bool = True, synchronise: bool = True) -> float:
        """Forward and backward; gradients are added to those that there are. Returns the loss.

        With `synchronise` gradients are averaged over ranks when this (or `gradients`) returns; without, they
        stay local until the next call with it.
        """

    def gradients(self) -> dict[str, Array | None]:
        """The gradients, None where there is none."""

    def zero_grad(self) -> None:
        """Forget the gradients."""

    def step(self, rate: float) -> None:
        """weights -= rate * gradients, where there is one."""

    def weights(self) -> Weights:
        """Copies of the weights."""

    def broadcast(self, root: int) -> None:
        """Take over the weights of `root`. Collective."""

    def average_metrics(self, metrics: Mapping[str, float], count: float) -> dict[str, float]:
        """Average over ranks, weighted by count. Collective."""

    def join(self) -> AbstractContextManager[None]:
        """Context of a loop with uneven data."""

    def close(self) -> None:
        """Release everything."""


class Adapter:
    """What most adapters under test have in common.

    Attributes:
        package: The adapter.
        _model: What its `broadcast_parameters` takes.
        _reduction: What joins and closes.
    """

    package: ClassVar[Any]
    _comm: Communicator
    _model: Any
    _reduction: Any

    def broadcast(self, root: int) -> None:
        self.package.broadcast_parameters(self._model, root, self._comm)

    def average_metrics(self, metrics: Mapping[str, float], count: float) -> dict[str, float]:
        averages: dict[str, float] = self.package.average_metrics(metrics, count, comm=self._comm)
        return averages

    def join(self) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = self._reduction.join()
        return context

    def close(self) -> None:
        self._reduction.close()

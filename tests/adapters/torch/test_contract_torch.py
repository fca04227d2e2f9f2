"""The contract of adapters, over Torch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch._dynamo  # optimizers import it at their first step: here once, before ranks are forked
from numpy.typing import NDArray

import multiring.torch
from multiring import Communicator
from tests.adapters.contract import Adapter, AdapterContract

Array = NDArray[Any]


class TorchAdapter(Adapter):
    """Implements `AdapterUnderTest` with gradient hooks."""

    package = multiring.torch

    def __init__(
        self, comm: Communicator, weights: Mapping[str, Array], bucket_bytes: int, **options: Any
    ) -> None:
        self._comm = comm
        self._model = torch.nn.ParameterDict({name: torch.tensor(value) for name, value in weights.items()})
        self._reduction = self._register(bucket_bytes=bucket_bytes, **options)

    def _register(self, **options: Any) -> Any:
        return multiring.torch.register_gradient_hooks(self._model, self._comm, **options)

    def backward(self, x: Array, y: Array, *, extra: bool = True, synchronise: bool = True) -> float:
        model = self._model
        hidden = torch.tanh(torch.from_numpy(x) @ model["first"] + model["offset"])
        output = hidden @ model["second"]
        if extra:
            output = output + hidden @ model["extra"]
        loss = ((output - torch.from_numpy(y)) ** 2).sum() / (2 * len(x))
        with nullcontext() if synchronise else self._reduction.no_sync():
            torch.autograd.backward(loss)
        return float(loss.detach())

    def gradients(self) -> dict[str, Array | None]:
        found = self._model.named_parameters()
        return {name: None if p.grad is None else p.grad.numpy().copy() for name, p in found}

    def zero_grad(self) -> None:
        self._model.zero_grad()

    def step(self, rate: float) -> None:
        torch.optim.SGD(self._model.parameters(), rate).step()

    def weights(self) -> dict[str, Array]:
        return {name: np.array(p.detach().numpy()) for name, p in self._model.named_parameters()}

    def close(self) -> None:
        self._reduction.remove()


class OptimizerAdapter(TorchAdapter):
    """Implements `AdapterUnderTest` with the wrapped optimizer."""

    def _register(self, **options: Any) -> Any:
        self._optimizer = multiring.torch.DistributedOptimizer(
            torch.optim.SGD(self._model.parameters(), 0.0), self._model, self._comm, **options
        )
        return self._optimizer

    def zero_grad(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def step(self, rate: float) -> None:
        self._optimizer.param_groups[0]["lr"] = rate
        self._optimizer.step()


class TestTorchHooks(AdapterContract):
    adapter = TorchAdapter


class TestTorchOptimizer(AdapterContract):
    adapter = OptimizerAdapter

"""The gradients of a Torch model, reduced by the gradient hooks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import multiring.torch
from multiring import Communicator

__all__ = ["Reduction", "make_reduction"]


class _Written(torch.autograd.Function):
    """Nothing forward; backward a gradient that has been written before."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, written: dict[int, torch.Tensor], index: int) -> torch.Tensor:
        ctx.written, ctx.index = written, index
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        # The last reference: what is not shared is taken over as the gradient, without a copy.
        return ctx.written.pop(ctx.index), None, None


class Reduction:
    """Gradients that arrive in a backward pass, last layer first, and are averaged by the hooks meanwhile.

    Args:
        shapes: Of the parameters, first layer first.
        comm: The ranks.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], comm: Communicator) -> None:
        model = torch.nn.Module()
        for index, shape in enumerate(shapes):
            model.register_parameter(f"weight{index}", torch.nn.Parameter(torch.zeros(shape)))
        self._weights = list(model.parameters())
        self._hooks = multiring.torch.register_gradient_hooks(model, comm=comm)
        self._written: dict[int, torch.Tensor] = {}
        self._scalar = torch.zeros(())

    def write(self, value: float) -> None:
        """Write gradients full of `value`, each in memory of its own, for the next backward pass."""
        for index, weight in enumerate(self._weights):
            weight.grad = None
            self._written[index] = torch.full(weight.shape, value)
        parts = [
            _Written.apply(weight, self._written, index)  # type: ignore[no-untyped-call]
            for index, weight in enumerate(self._weights)
        ]
        self._scalar = torch.stack(parts).sum()

    def reduce(self) -> None:
        """The backward pass, which ends with gradients that are averages over the ranks."""
        torch.autograd.backward(self._scalar)

    def check(self, value: float) -> bool:
        """Whether every gradient is full of `value`."""
        return all(weight.grad is not None and bool((weight.grad == value).all()) for weight in self._weights)

    def close(self) -> None:
        """Takes the hooks off."""
        self._hooks.remove()


def make_reduction(shapes: Sequence[tuple[int, ...]], comm: Communicator) -> Reduction:
    """Parameters of these shapes, float32, and what reduces their gradients. Collective."""
    return Reduction(shapes, comm)

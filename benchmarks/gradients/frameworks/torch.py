"""The gradients of a Torch model, reduced by the gradient hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import multiring.torch
from multiring import Communicator

__all__ = ["Reduction", "make_reduction"]


class _Written(torch.autograd.Function):
    """Nothing forward; backward the gradients that have been written before."""

    @staticmethod
    def forward(ctx: Any, written: list[torch.Tensor], *weights: torch.Tensor) -> torch.Tensor:
        ctx.written = written
        return weights[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        found = (None, *ctx.written)
        # The last references but these: what is not shared is taken over as the gradient, without a copy.
        ctx.written.clear()
        return found


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
        self._hooks = multiring.torch.register_gradient_hooks(model, comm=comm, check_every=0)

    def run(self, value: float, begin: Callable[[], None]) -> None:
        """Write gradients full of `value`, each in its own memory; run a backward pass that returns them."""
        for weight in self._weights:
            weight.grad = None
        written = [torch.full(weight.shape, value) for weight in self._weights]
        loss = _Written.apply(written, *self._weights)  # type: ignore[no-untyped-call]
        begin()
        torch.autograd.backward(loss)

    def check(self, value: float) -> bool:
        """Whether every gradient is full of `value`."""
        return all(weight.grad is not None and bool((weight.grad == value).all()) for weight in self._weights)

    def close(self) -> None:
        """Takes the hooks off."""
        self._hooks.remove()


def make_reduction(shapes: Sequence[tuple[int, ...]], comm: Communicator) -> Reduction:
    """Parameters of these shapes, float32, and what reduces their gradients. Collective."""
    return Reduction(shapes, comm)

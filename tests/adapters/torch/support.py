"""What the tests of the Torch adapter share: a small model, and gradients computed without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from multiring import Communicator
from tests.on_ranks import same_everywhere

__all__ = [
    "SMALL",
    "assert_gradients",
    "assert_same_weights",
    "check_steps",
    "draw",
    "expected",
    "explode",
    "gradients_of",
    "make_model",
    "squares",
]

SMALL: dict[str, Any] = {"bucket_bytes": 256, "first_bucket_bytes": 64}


def make_model(seed: int = 0, inputs: int = 6) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)]
    return nn.Sequential(*layers).double()


def draw(seed: int, samples: int = 4) -> Tensor:
    return torch.randn(samples, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gradients_of(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


Loss = Callable[[Any, int], Tensor]


def expected(comm: Communicator, loss: Loss, make: Callable[[], nn.Module] = make_model) -> list[Any]:
    """Gradients of each rank's loss, computed here in turn and averaged; None where no rank has one."""
    every = []
    for rank in range(comm.size):
        model = make()
        torch.autograd.backward(loss(model, rank))
        every.append(gradients_of(model))
    return [
        None if all(g is None for g in gs) else sum(g for g in gs if g is not None) / comm.size
        for gs in zip(*every, strict=True)
    ]


def assert_gradients(model: nn.Module, wanted: list[Any], comm: Communicator) -> None:
    found = gradients_of(model)
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    assert same_everywhere(comm, [None if g is None else g.numpy().tobytes() for g in found])


def check_steps(model: nn.Module, loss: Loss, wanted: list[Any], comm: Communicator, steps: int = 2) -> None:
    """Backward passes of this rank's loss give the wanted gradients."""
    for _ in range(steps):
        model.zero_grad()
        torch.autograd.backward(loss(model, comm.rank))
        assert_gradients(model, wanted, comm)


def assert_same_weights(model: nn.Module, reference: nn.Module, rtol: float = 1e-10) -> None:
    pairs = list(model.parameters()), list(reference.parameters())
    torch.testing.assert_close(*pairs, rtol=rtol, atol=rtol / 100)


class _Explode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ArithmeticError("the loss has exploded")


def explode(x: Tensor) -> Tensor:
    """`x`, whose backward pass raises an ArithmeticError."""
    found: Tensor = _Explode.apply(x)  # type: ignore[no-untyped-call]
    return found


def squares(model: nn.Module, rank: int) -> Tensor:
    return (model(draw(rank)) ** 2).mean()

"""What the tests of the Torch adapter share: a small model, and gradients computed without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from multiring import Communicator
from tests.rank_pool import RankPool

__all__ = ["SMALL", "Pool", "assert_gradients", "draw", "expected", "gradients_of", "make_model", "squares"]

Pool = Callable[[int], RankPool]
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
    bits = comm.allgather_object([None if g is None else g.numpy().tobytes() for g in found])
    assert all(other == bits[0] for other in bits)


def squares(model: nn.Module, rank: int) -> Tensor:
    return (model(draw(rank)) ** 2).mean()

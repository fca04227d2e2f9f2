"""What the tests of the Torch adapter share: a small model, and gradients computed without it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multiring.torch
from multiring import Communicator
from multiring.torch import DistributedOptimizer, GradientHooks
from tests.on_ranks import same_everywhere

SMALL: dict[str, Any] = {"bucket_bytes": 256}
Loss = Callable[[Any, int], Tensor]
EXCHANGE_API = "__dlpack_c_exchange_api__"
both_ways = pytest.mark.parametrize("is_offered", [True, False])


def make_model(seed: int = 0, inputs: int = 6) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)]
    return nn.Sequential(*layers).double()


def register(model: nn.Module, comm: Communicator, **options: Any) -> GradientHooks:
    """Gradient hooks with several buckets."""
    return multiring.torch.register_gradient_hooks(model, comm, **(SMALL | options))


def wrap(
    optimizer: torch.optim.Optimizer, model: nn.Module | None, comm: Communicator, **options: Any
) -> DistributedOptimizer:
    """A wrapped optimizer with several buckets."""
    return DistributedOptimizer(optimizer, model, comm, **(SMALL | options))


def make_hooked(comm: Communicator, **options: Any) -> tuple[Any, GradientHooks]:
    """A model and its gradient hooks, which live as long as it does."""
    model = make_model()
    return model, register(model, comm, **options)


def make_wrapped(
    comm: Communicator, rate: float = 0.1, **options: Any
) -> tuple[nn.Sequential, DistributedOptimizer]:
    """A model and its wrapped optimizer."""
    model = make_model()
    return model, wrap(torch.optim.SGD(model.parameters(), rate), model, comm, **options)


def draw(seed: int, samples: int = 4) -> Tensor:
    return torch.randn(samples, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def squares(model: nn.Module, rank: int) -> Tensor:
    return (model(draw(rank)) ** 2).mean()


def backward(model: nn.Module, rank: int, loss: Loss = squares, *, keep: bool = False) -> None:
    """Gradients of `loss` in place of those before, or, with `keep`, in the same tensors."""
    model.zero_grad(set_to_none=not keep)
    torch.autograd.backward(loss(model, rank))


def update(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """A step with the gradients of `loss`."""
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    optimizer.step()


def step_with(optimizer: torch.optim.Optimizer, gradients: list[Any]) -> None:
    """A step of an optimizer of one process with these gradients."""
    for parameter, gradient in zip(optimizer.param_groups[0]["params"], gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()


def bits(tensors: Iterable[Tensor | None]) -> list[bytes | None]:
    return [None if t is None else t.detach().contiguous().numpy().tobytes() for t in tensors]


def gradients_of(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


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
    assert same_everywhere(comm, bits(found))


def check_steps(model: nn.Module, loss: Loss, wanted: list[Any], comm: Communicator, steps: int = 2) -> None:
    """Backward passes of this rank's loss give the wanted gradients."""
    for _ in range(steps):
        backward(model, comm.rank, loss)
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


@contextmanager
def exchange_api(is_offered: bool) -> Iterator[None]:
    """With what Torch describes tensors by, or as with a Torch before 2.10."""
    if is_offered:
        yield
        return
    kept = torch.Tensor.__dict__.get(EXCHANGE_API)
    if kept is not None:
        delattr(torch.Tensor, EXCHANGE_API)
    try:
        yield
    finally:
        if kept is not None:
            setattr(torch.Tensor, EXCHANGE_API, kept)

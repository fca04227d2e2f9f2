"""Gradients that the program gives itself, so that no hook sees them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from multiring.errors import MismatchError, UsageError
from torch.optim.optimizer import register_optimizer_step_pre_hook

__all__ = ["check_not_given", "exchange_replaced", "unwatch", "watch"]


if TYPE_CHECKING:
    from multiring import Communicator


class _Watcher(Protocol):
    def check_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step."""


_watchers: weakref.WeakSet[Any] = weakref.WeakSet()
_hook: torch.utils.hooks.RemovableHandle | None = None


def watch(watcher: _Watcher) -> None:
    """Have `watcher.check_step` called before each step of any optimizer."""
    global _hook
    if _hook is None:
        _hook = register_optimizer_step_pre_hook(_ask)
    _watchers.add(watcher)


def unwatch(watcher: _Watcher) -> None:
    """Not any more. May be called for others too."""
    _watchers.discard(watcher)


def _ask(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for watcher in list(_watchers):
        watcher.check_step(optimizer)


def check_not_given(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor], rank: int
) -> None:
    """Raise UsageError if the optimizer would step with a gradient of these parameters that is not zero."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name, gradient = names.get(id(parameter)), parameter.grad
            if name is not None and gradient is not None and bool(gradient.detach().to_dense().any()):
                raise UsageError(
                    f"rank {rank}: the optimizer steps with a gradient of '{name}' that is not reduced: the "
                    "program has put it there itself, and no backward pass has called the gradient hooks; "
                    "call synchronize() of the hooks before step(), or wrap the optimizer in a "
                    "DistributedOptimizer",
                    rank=rank,
                    tensor=name,
                )


def exchange_replaced(comm: Communicator, own: dict[int, int], names: Sequence[str]) -> list[dict[int, int]]:
    """Checksums, by number, of the gradients that each rank has put in the place of reduced ones. Collective,
    though only a rank that has some calls it.

    Raises:
        MismatchError: Some rank has none, and does not.
    """
    try:
        return comm.allgather_object(own, name="gradients replaced by the program")
    except MismatchError as error:
        name = names[next(iter(own))]
        raise MismatchError(
            f"{error}; on rank {comm.rank} the program has put another gradient of '{name}' into p.grad "
            "after the reduction, and on some other rank it has not: let all ranks do so (with zeros, if "
            "need be), or put gradients there before backward()",
            rank=comm.rank,
            tensor=name,
        ) from error

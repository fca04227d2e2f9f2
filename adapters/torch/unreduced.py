"""Gradients that the program gives itself, so that no hook sees them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from multiring.errors import MismatchError
from torch.optim.optimizer import register_optimizer_step_pre_hook

__all__ = ["exchange_replaced", "given_gradients", "unwatch", "watch"]


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


def given_gradients(optimizer: torch.optim.Optimizer, parameters: dict[str, torch.Tensor]) -> Iterator[str]:
    """Names of those parameters with which the optimizer would step by a gradient that is not zero."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name, gradient = names.get(id(parameter)), parameter.grad
            if name is not None and gradient is not None and bool(gradient.detach().to_dense().any()):
                yield name


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

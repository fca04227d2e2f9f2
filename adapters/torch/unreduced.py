"""Gradients that the program gives itself, so that no hook sees them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import multiring
import torch
from multiring.errors import MismatchError, UsageError
from multiring.torch.copies import is_hooked
from multiring.torch.state_broadcast import plain_name
from torch.optim.optimizer import register_optimizer_step_pre_hook

__all__ = ["check_hooked", "check_not_given", "exchange_replaced", "note_round", "unwatch", "watch"]


if TYPE_CHECKING:
    from multiring import Communicator


class _Watcher(Protocol):
    def check_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step."""


_watchers: weakref.WeakSet[Any] = weakref.WeakSet()
_hook: torch.utils.hooks.RemovableHandle | None = None

# Shapes of the parameters of models that were dropped before any of their gradients was reduced, until the
# next model has hooks or is trained; and what notes that a model is dropped.
_dropped: list[list[torch.Size]] = []
_unused: weakref.WeakKeyDictionary[Any, weakref.finalize[Any, Any]] = weakref.WeakKeyDictionary()


def watch(watcher: _Watcher, parameters: Iterable[torch.Tensor]) -> None:
    """Have `watcher.check_step` called before each step of any optimizer.

    Args:
        watcher: The hooks of a model.
        parameters: Its parameters.
    """
    global _hook
    if _hook is None:
        _hook = register_optimizer_step_pre_hook(_ask)
    _watchers.add(watcher)
    _dropped.clear()
    shapes = sorted(parameter.shape for parameter in parameters)
    _unused[watcher] = note = weakref.finalize(watcher, _dropped.append, shapes)
    note.atexit = False


def note_round(watcher: _Watcher) -> None:
    """Note that the hooks have reduced gradients."""
    _dropped.clear()
    if (note := _unused.pop(watcher, None)) is not None:
        note.detach()


def unwatch(watcher: _Watcher) -> None:
    """Stop calling `watcher.check_step`. It may be called for other objects too."""
    _watchers.discard(watcher)
    note_round(watcher)


def _ask(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for watcher in list(_watchers):
        watcher.check_step(optimizer)
    if _dropped and multiring.is_initialized() and multiring.size() > 1:
        shapes = sorted(parameter.shape for _, parameter in _unhooked(optimizer))
        if shapes in _dropped:
            _dropped.clear()
            raise _never_reduced(optimizer, multiring.rank())


def check_not_given(optimizer: torch.optim.Optimizer, names: Mapping[int, str], rank: int) -> None:
    """Raise UsageError if the optimizer would step with a gradient of these parameters that is not zero.

    Args:
        optimizer: The optimizer that is about to step.
        names: Names of parameters by their identity.
        rank: This rank.
    """
    for group in optimizer.param_groups if names else ():
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


def check_hooked(
    optimizer: torch.optim.Optimizer,
    module: torch.nn.Module | None,
    hooked: Iterable[torch.Tensor | None],
    rank: int,
    *,
    is_unused: bool,
) -> None:
    """Raise UsageError if the optimizer would step with gradients of parameters that the model has got after
    hooks were registered. What belongs to no model with hooks may be trained by each rank on its own.

    Args:
        optimizer: The optimizer that is about to step.
        module: The model with hooks.
        hooked: Its parameters with hooks.
        rank: This rank.
        is_unused: Whether no gradient of the model was reduced, and none of the parameters with hooks is
            trained: then the optimizer trains what the hooks were meant for.
    """
    names: dict[int, str] | None = None
    for _, parameter in _unhooked(optimizer, hooked):
        if names is None:
            named = () if module is None else module.named_parameters()
            names = {id(own): plain_name(name) for name, own in named}
        if (name := names.get(id(parameter))) is not None:
            raise UsageError(
                f"rank {rank}: the optimizer steps with a gradient of '{name}' that is not reduced: the "
                "parameter was not part of the model when gradient hooks were registered; remove() them and "
                "register them again after a change of the model",
                rank=rank,
                tensor=name,
            )
        if is_unused:
            raise _never_reduced(optimizer, rank)


def _never_reduced(optimizer: torch.optim.Optimizer, rank: int) -> UsageError:
    number, parameter = next(_unhooked(optimizer))
    return UsageError(
        f"rank {rank}: the optimizer steps with gradients that are not reduced, the first one that of its "
        f"parameter {number}, of shape {tuple(parameter.shape)}: gradient hooks were registered on a model "
        "that is not trained; register them on the one that is, when it has all its parameters"
    )


def _unhooked(
    optimizer: torch.optim.Optimizer, hooked: Iterable[torch.Tensor | None] = ()
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the parameters, with their numbers, that have no hooks and would be changed by a step. Those of
    `hooked` are known to have hooks, which saves the time to look."""
    known = set(map(id, hooked))
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in enumerate(parameters):
        if id(parameter) in known or (gradient := parameter.grad) is None or is_hooked(parameter):
            continue
        if bool(gradient.detach().to_dense().any()):
            yield number, parameter


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

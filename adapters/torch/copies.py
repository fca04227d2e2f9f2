"""Copies of a model with gradient hooks: they have none, and say so when they are trained."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any, TypeVar

import multiring
import torch
from multiring import _core
from multiring.errors import UsageError

__all__ = ["NO_HOOK", "ModelGuard", "forget_copy", "is_hooked", "local_copy"]

Module = TypeVar("Module", bound=torch.nn.Module)

# How a hook of a module is pickled: as a call that takes anything and does nothing.
NO_HOOK: tuple[Any, ...] = (getattr, (nullcontext(), "__exit__"))


def is_hooked(parameter: torch.Tensor) -> bool:
    """Whether the parameter has a gradient hook."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return any(map(_core.is_arrival_hook, hooks.values()))


class _Guard:
    """Hook of a module with hooked parameters, called when its state has been loaded.

    `copy.deepcopy` of the module copies this along with the parameters, whose own hooks Torch leaves behind:
    that is how the copies get hooks that tell. A pickle of the module is one without hooks, and needs no
    multiring to be loaded.
    """

    def __init__(self, rank: int, parameters: list[torch.Tensor]) -> None:
        self._rank, self._parameters = rank, parameters

    def __call__(self, module: torch.nn.Module, _: object) -> None:
        now = [parameter for parameter in module._parameters.values() if parameter is not None]
        kept, before = set(map(id, now)), set(map(id, self._parameters))
        # Parameters may have moved, as pruning moves them, or have given way to others with hooks.
        if before - kept and any(id(one) not in before and not is_hooked(one) for one in now):
            raise UsageError(
                f"rank {self._rank}: load_state_dict(assign=True) has put other parameters into the model, "
                "whose gradients are not reduced; load without assign=True, or load before registering "
                "gradient hooks (or the DistributedOptimizer): remove() them and register them again"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> _Nothing:
        return _mark_copy(copy.deepcopy(self._parameters, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return NO_HOOK


class _CopyHook:
    """Hook of a parameter of a copy."""

    def __call__(self, parameter: torch.Tensor) -> None:
        if multiring.is_initialized() and multiring.size() > 1:
            raise UsageError(
                f"rank {multiring.rank()}: a copy of a model with gradient hooks is trained (a parameter of "
                f"shape {tuple(parameter.shape)}), and has no hooks itself: its gradients are not reduced. "
                "Register hooks on the copy, or make it by multiring.torch.local_copy(model) if its "
                "gradients are to stay local"
            )


class _Nothing:
    """In the place of a guard in a copy."""

    def __init__(self, parameters: list[torch.Tensor] | None = None) -> None:
        self._parameters = parameters or []

    def __call__(self, *_: object) -> None:
        """The state of a copy was loaded."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Nothing:
        return _mark_copy(copy.deepcopy(self._parameters, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return NO_HOOK


def _mark_copy(parameters: list[torch.Tensor]) -> _Nothing:
    for parameter in parameters:
        required = parameter.requires_grad
        parameter.requires_grad_(True)  # torch takes hooks on no others
        parameter.register_post_accumulate_grad_hook(_CopyHook())
        parameter.requires_grad_(required)
    return _Nothing(parameters)


class ModelGuard:
    """The guards of a model with gradient hooks."""

    def __init__(self, module: torch.nn.Module, rank: int, hooked: Iterable[torch.Tensor]) -> None:
        known = {id(parameter) for parameter in hooked}
        self._handles = []
        for part in module.modules():
            own: list[torch.Tensor] = [
                parameter for parameter in part._parameters.values() if parameter is not None
            ]
            if any(id(parameter) in known for parameter in own):
                handle = part.register_load_state_dict_post_hook(_Guard(rank, own))
                self._handles.append(handle)

    def remove(self) -> None:
        """Copies that are made from now on are plain ones."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def forget_copy(parameters: Iterable[torch.Tensor]) -> None:
    """These parameters, of a copy perhaps, may be trained."""
    for parameter in parameters:
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        for key in [key for key, hook in hooks.items() if isinstance(hook, _CopyHook)]:
            del hooks[key]


def local_copy(model: Module) -> Module:
    """A deep copy of a model with gradient hooks whose own gradients stay local, for inner loops (MAML) and
    the like. `copy.deepcopy` does for copies that are not trained at all."""
    duplicate = copy.deepcopy(model)
    forget_copy(duplicate.parameters())
    for part in duplicate.modules():
        hooks = part._load_state_dict_post_hooks
        for key in [key for key, hook in hooks.items() if isinstance(hook, _Nothing)]:
            del hooks[key]
    return duplicate

"""The loss over ranks for optimizers that look at it: its value, and a function that gives it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
from multiring.jax.arguments import as_arrays
from multiring.jax.trees import Reduction, named_leaves, reduce_arrays

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["over_ranks"]


def over_ranks(comm: Communicator, extra: dict[str, Any], options: Reduction) -> dict[str, Any]:
    """Return the arguments of an update beside gradients, state and parameters, those of them reduced over
    ranks that describe the loss: `value`, `grad` and `value_fn`, as line searches and optax.lbfgs take them.

    Args:
        comm: Ranks that train together.
        extra: The arguments by their names.
        options: How gradients are reduced, and these with them.
    """
    found = {name: extra[name] for name in ("value", "grad") if extra.get(name) is not None}
    if found:
        found = _reduced(comm, found, options, "loss")
    if callable(function := extra.get("value_fn")):
        found["value_fn"] = _function_over_ranks(comm, function, options)
    return extra | found


def _function_over_ranks(
    comm: Communicator, function: Callable[..., Any], options: Reduction
) -> Callable[..., Any]:
    """Return the function, whose value and gradient are those of all ranks."""

    @functools.wraps(function)
    def value_fn(params: Any, *args: Any, **kwargs: Any) -> Any:
        return value_of(params, args, kwargs)

    @jax.custom_vjp
    def value_of(params: Any, args: Any, kwargs: Any) -> Any:
        return _reduced(comm, function(params, *args, **kwargs), options, "value_fn")

    def forward(params: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        value, pullback = jax.vjp(lambda given: function(given, *args, **kwargs), params)
        return _reduced(comm, value, options, "value_fn"), pullback

    def backward(pullback: Any, cotangent: Any) -> tuple[Any, None, None]:
        return _reduced(comm, pullback(cotangent)[0], options, "gradient of value_fn"), None, None

    value_of.defvjp(forward, backward)
    return value_fn


def _reduced(comm: Communicator, tree: Any, options: Reduction, what: str) -> Any:
    names, leaves, structure = named_leaves(tree)
    how = replace(options, name=f"{options.name}: {what}")
    return structure.unflatten(reduce_arrays(comm, as_arrays(comm, leaves, names), names, how))

"""An optax optimizer whose gradients are averaged over ranks."""

from __future__ import annotations

import itertools
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from multiring.errors import UsageError
from multiring.gradients.model_check import check_same
from multiring.gradients.options import BucketKeywords
from multiring.jax.arguments import resolve
from multiring.jax.gradient_functions import gradient_options, reduce_gradients, reduce_partial
from multiring.jax.line_search import over_ranks
from multiring.jax.state_check import check_leaves
from multiring.jax.trees import named_leaves
from multiring.reductions import explain_arguments

if TYPE_CHECKING:
    from multiring import Communicator

try:
    import optax
except ImportError as _error:
    raise ImportError("multiring.jax.distribute needs optax: pip install 'multiring[jax]'") from _error

__all__ = ["DistributedState", "distribute"]


_counters = itertools.count(1)  # each optimizer begins with its first step


class DistributedState(NamedTuple):
    """State of an optimizer that reduces every k-th time.

    Attributes:
        inner: State of the wrapped optimizer.
        held: Gradients that `sums` holds. int32, shape ().
        sums: Sums of this rank's gradients.
        active: Whether this rank had data for one of them. Boolean, shape ().
    """

    inner: Any
    held: jax.Array
    sums: Any
    active: jax.Array


@explain_arguments
def distribute(
    optimizer: Any,
    *,
    comm: Communicator | None = None,
    every_k: int = 1,
    name: str | None = None,
    check_every: int | None = None,
    **options: Unpack[BucketKeywords],
) -> Any:
    """Wrap an optax optimizer: its `update` takes this rank's gradients and applies those of all ranks.

    `init` compares the parameters over the ranks and is collective, unless it runs inside of a compiled
    function. The state is that of the wrapped optimizer as it is where `every_k` is 1.

    Args:
        optimizer: Any optax gradient transformation.
        comm: Ranks that train together; the world by default.
        every_k: Reduce and update every k-th time; in between gradients are added up on this rank and updates
            are zero. What the optimizer gets is the sum of the k gradients: divide the loss by k for
            the mean.
        name: First word of the buckets' names, see `allreduce`.
        check_every: Steps between two comparisons of parameters and optimizer state over ranks; see
            `multiring.ReducerOptions`.
        options: How to reduce: `op`, `average`, `bucket_bytes`, `prescale` and
            `postscale`, as in `multiring.ReducerOptions`.

    Returns:
        An `optax.GradientTransformationExtraArgs`. Its `update` also takes `active`, a boolean: a rank
        without data passes False and any gradients; see `average_partial_gradients`. All ranks pass it,
        or none. Of the k gradients of a rank those count that came with True, and the rank counts as active
        if there is one. What it is told of the loss (`value`, `grad`, `value_fn`, for optax.lbfgs and line
        searches) is reduced as the gradients are.

    Raises:
        UsageError: An option is out of range.
    """
    if getattr(optimizer.update, "reduces_gradients", False):
        raise UsageError("the optimizer is wrapped by multiring.jax.distribute already; wrap it once")
    wrapped = optax.with_extra_args_support(optimizer)
    if every_k < 1:
        raise UsageError(f"every_k is {every_k}; pass 1 or more")
    settings = name, options, check_every
    gradient_options(resolve(comm), *settings)  # an error is to be raised here
    counter = next(_counters)

    def init(params: Any) -> Any:
        group = resolve(comm)
        inner = wrapped.init(params)
        entries = _describe(params)
        if entries is not None:
            # The line that calls differs between steps.
            reduction = replace(gradient_options(group, *settings), site=None)
            compared = "options", repr((asdict(reduction), every_k))
            check_same(group, [*entries, compared], "parameters of the model")
            kind = "optimizer state", str(jax.tree.structure(inner))
            check_same(group, [*(_describe(inner) or []), kind], "state of the optimizer")
        if every_k == 1:
            return inner
        sums = jax.tree.map(jnp.zeros_like, params)
        return DistributedState(inner, jnp.zeros((), jnp.int32), sums, jnp.zeros((), bool))

    def apply(updates: Any, state: Any, params: Any, active: Any, extra: dict[str, Any]) -> tuple[Any, Any]:
        group = resolve(comm)
        reduction = gradient_options(group, *settings)
        training = {"parameters": params, "state": state}
        if active is None:
            matched = {"ordered": reduction.ordered, "site": reduction.site, "counter": counter}
            check_leaves(group, training, reduction.check_every, name=f"{reduction.name}: state", **matched)
            reduced = reduce_gradients(group, updates, reduction)
            extra = over_ranks(group, extra, reduction)
        else:
            reduced, _ = reduce_partial(
                group, updates, updates if params is None else params, active, reduction, training
            )
        result: tuple[Any, Any] = wrapped.update(reduced, state, params, **extra)
        return result

    def update(
        updates: Any, state: Any, params: Any = None, *, active: Any = None, **extra: Any
    ) -> tuple[Any, Any]:
        if {"value", "value_fn"} & extra.keys() and (every_k > 1 or active is not None):
            raise UsageError(
                "value= or value_fn= in an update with every_k > 1 or active=: there is no loss that the "
                "reduced gradients belong to; leave those out, or give the optimizer no value"
            )
        if every_k == 1:
            return apply(updates, state, params, active, extra)
        counts = jnp.asarray(active is None or active, bool)
        sums = jax.tree.map(lambda held, new: held + jnp.where(counts, new, 0), state.sums, updates)
        held, any_active = state.held + 1, state.active | counts

        def now() -> tuple[Any, Any, Any]:
            given = None if active is None else any_active
            return *apply(sums, state.inner, params, given, extra), jax.tree.map(jnp.zeros_like, sums)

        def later() -> tuple[Any, Any, Any]:
            return jax.tree.map(jnp.zeros_like, sums), state.inner, sums

        # Ranks count alike, so they take the same branch.
        changes, inner, rest = jax.lax.cond(held == every_k, now, later)
        return changes, DistributedState(inner, held % every_k, rest, any_active & (held < every_k))

    update.reduces_gradients = True  # type: ignore[attr-defined]
    return optax.GradientTransformationExtraArgs(init, update)


def _describe(tree: Any) -> list[tuple[str, str]] | None:
    """Names, dtypes and shapes of the leaves; None where a function is traced."""
    names, leaves, _ = named_leaves(tree)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return None
    return [(n, f"{jnp.result_type(x).name} {jnp.shape(x)}") for n, x in zip(names, leaves, strict=True)]

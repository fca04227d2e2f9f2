"""Gradients averaged over ranks, as pure functions of pytrees."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np

import jax
import jax.numpy as jnp
from multiring.errors import UsageError
from multiring.gradients.options import BucketKeywords, check_interval, check_options
from multiring.gradients.participation import answer_rounds, own_flags
from multiring.jax.arguments import as_arrays, resolve
from multiring.jax.collectives import allreduce
from multiring.jax.state_broadcast import broadcast_parameters
from multiring.jax.state_check import check_leaves, check_state
from multiring.jax.trees import Reduction, bucket_name, named, named_leaves, reduce_arrays
from multiring.reductions import explain_arguments

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = [
    "Participation",
    "average_gradients",
    "average_partial_gradients",
    "batch_weight",
    "gradient_options",
    "join",
    "reduce_gradients",
    "value_and_grad",
]


class Participation(NamedTuple):
    """Who took part in a reduction; the same on every rank.

    Attributes:
        produced: A tree of the parameters' structure: whether any rank had this gradient. Booleans,
            shape ().
        active: Whether each rank had data. Booleans of shape (ranks,).
    """

    produced: Any
    active: jax.Array

    def present(self, gradients: Any) -> Any:
        """The gradients, None where no rank had one. Not inside of a compiled function."""
        return jax.tree.map(lambda value, there: value if there else None, gradients, self.produced)


def gradient_options(
    comm: Communicator, name: str | None, keywords: BucketKeywords, check_every: int | None = 0
) -> Reduction:
    """The options of a reduction of gradients; UsageError if they make no sense. 0: no state is compared."""
    interval = check_interval(comm.rank, check_every)
    options = Reduction.of(keywords, check_every=interval, **named(name, "gradients"))
    check_options(comm.rank, options)
    return options


@explain_arguments
def average_gradients(
    gradients: Any,
    *,
    comm: Communicator | None = None,
    name: str | None = None,
    **options: Unpack[BucketKeywords],
) -> Any:
    """Average a pytree of gradients over ranks; inside or outside of a compiled function.

    Args:
        gradients: The same structure, shapes and dtypes on all ranks. Where a leaf is None there is no
            gradient, on all ranks; `average_partial_gradients` lets ranks differ in that.
        comm: Ranks that take part; the world by default.
        name: First word of the buckets' names; see `allreduce`.
        options: How to reduce: `op`, `average`, `bucket_bytes`, `prescale` and
            `postscale`, as in `multiring.ReducerOptions`.

    Returns:
        A tree of the same structure, with the same bits on every rank.

    Raises:
        UsageError: An array cannot travel, or `op` is another.
        JaxRuntimeError: The communication failed; see `allreduce`.
    """
    comm = resolve(comm)
    return reduce_gradients(comm, gradients, gradient_options(comm, name, options))


def reduce_gradients(comm: Communicator, gradients: Any, options: Reduction) -> Any:
    """Reduce a pytree in which None stands for no gradient on any rank."""
    names, leaves, structure = named_leaves(gradients)
    _refuse_reduced(comm, leaves, names)
    reduced = reduce_arrays(comm, as_arrays(comm, leaves, names), names, options)
    _note_reduced(comm, reduced)
    return structure.unflatten(reduced)


# Reduced gradients that the program holds, by communicator and id: what must not be reduced again.
_reduced: WeakKeyDictionary[Communicator, WeakValueDictionary[int, Any]] = WeakKeyDictionary()


def _note_reduced(comm: Communicator, arrays: Sequence[Any]) -> None:
    if comm.size > 1:
        _reduced.setdefault(comm, WeakValueDictionary()).update({id(array): array for array in arrays})


def _refuse_reduced(comm: Communicator, arrays: Sequence[Any], names: Sequence[str]) -> None:
    known: Mapping[int, Any] = _reduced.get(comm, {})
    for array, name in zip(arrays, names, strict=True):
        if array is not None and known.get(id(array)) is array:
            raise UsageError(
                f"rank {comm.rank}: the gradient of '{name}' has been reduced over these ranks already, and "
                "would be once more; pass what jax.grad gives to distribute's update, or averaged gradients "
                "to an optimizer that is not wrapped"
            )


@explain_arguments
def average_partial_gradients(
    gradients: Any,
    like: Any,
    active: Any = True,
    *,
    comm: Communicator | None = None,
    name: str | None = None,
    check_every: int | None = None,
    **options: Unpack[BucketKeywords],
) -> tuple[Any, Participation]:
    """Average gradients that some ranks may lack, in part or altogether.

    A gradient that a rank lacks counts as zeros. Averages divide by the number of active ranks.

    Args:
        gradients: A tree of the structure of `like` with None where this rank has no gradient.
        like: The parameters, or arrays of the same structure, shapes and dtypes.
        active: Whether this rank has data: a boolean, or a boolean array of shape (). What an inactive rank
            passes as gradients does not count.

    `check_every` is that of `distribute`: here the ranks only answer those that compare. The other arguments
    are those of `average_gradients`.

    Returns:
        A tree of the structure of `like`, zeros where no rank had a gradient, and who took part.
    """
    comm = resolve(comm)
    reduction = gradient_options(comm, name, options, check_every)
    return reduce_partial(comm, gradients, like, active, reduction)


def reduce_partial(
    comm: Communicator, gradients: Any, like: Any, active: Any, options: Reduction, state: Any = None
) -> tuple[Any, Participation]:
    """See `average_partial_gradients`. `state` is compared every so many steps."""
    check_leaves(comm, state, options.check_every, name=f"{options.name}: state", ordered=options.ordered)
    names, models, structure = named_leaves(like)
    present = structure.flatten_up_to(gradients)
    active = jnp.asarray(active, bool)
    _refuse_reduced(comm, present, names)
    parts = [
        jnp.zeros(jnp.shape(model), jnp.result_type(model))
        if part is None
        else jnp.where(active, part, jnp.zeros((), jnp.result_type(part)))
        for part, model in zip(present, models, strict=True)
    ]
    flags = own_flags([part is not None for part in present], comm.rank, comm.size) & active
    # A rank without data answers from another place, in `join`.
    options = dataclasses.replace(options, site=None)
    telling = Reduction(op="sum", name=f"{options.name}: participation", ordered=options.ordered)
    label = ["who has one"]
    totals = reduce_arrays(comm, [flags.astype(jnp.int32)], label, telling)[0]
    produced, joined = totals[: len(names)] > 0, totals[len(names) :] > 0
    parts = as_arrays(comm, parts, names)
    sums = reduce_arrays(comm, parts, names, options, follows=bucket_name(telling, 0, label))
    if options.op == "average" and comm.size > 1:
        # The core divided by the number of all ranks.
        count = jnp.sum(joined)
        whole = (count == comm.size) | (count == 0)
        sums = [
            jnp.where(whole, total, total * (comm.size / jnp.maximum(count, 1)).astype(total.dtype))
            for total in sums
        ]
    _note_reduced(comm, sums)
    return structure.unflatten(sums), Participation(structure.unflatten(list(produced)), joined)


def join(like: Any, *, comm: Communicator | None = None, **options: Any) -> Any:
    """Answer the reductions of ranks that still have data, until no rank has. Collective.

    For loops of `average_partial_gradients` (or of `distribute`'s `update(..., active=True)`) that are
    shorter on some ranks: each rank calls this behind its loop. Nothing else may be sent inside of
    such a loop.

        for batch in batches:  # fewer on some ranks
            params, state = step(params, state, batch)
        params, state = multiring.jax.join(params, state=state)

    Args:
        like: The parameters.
        comm: Ranks that take part; the world by default.
        options: Those of `average_partial_gradients`, the same as in the loop; and `state`, another tree to
            take over.

    Returns:
        The parameters of a rank that had data to the end; with `state`, a pair of both.
    """
    comm = resolve(comm)
    state = options.pop("state", None)
    if comm.size > 1:
        last = answer_rounds(comm, lambda: _answer(like, comm, tuple(options.items())))
        like, state = broadcast_parameters((like, state), last, comm=comm)
    return like if state is None else (like, state)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _answer(like: Any, comm: Communicator, options: tuple[tuple[str, Any], ...]) -> jax.Array:
    """Take part in one reduction without data; tells who has some."""
    nothing = jax.tree.map(lambda value: None, like)
    return average_partial_gradients(nothing, like, False, comm=comm, **dict(options))[1].active


def value_and_grad(
    function: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    *,
    comm: Communicator | None = None,
    check_every: int | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """`jax.value_and_grad` whose gradients are averaged over ranks; the value is this rank's own.

    Args:
        function: What to differentiate.
        argnums: As in JAX.
        has_aux: As in JAX.
        comm: Ranks that take part; the world by default.
        check_every: Compare what is differentiated, the parameters, over ranks every so many calls; see
            `check_state`.
        options: Those of `average_gradients`.
    """
    local = jax.value_and_grad(function, argnums=argnums, has_aux=has_aux)

    def averaged(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        positions = (argnums,) if isinstance(argnums, int) else argnums
        named_check = {"name": f"{options['name']}: state"} if options.get("name") else {}
        check_state([args[position] for position in positions], every=check_every, comm=comm, **named_check)
        value, gradients = local(*args, **kwargs)
        return value, average_gradients(gradients, comm=comm, **options)

    return averaged


def batch_weight(count: Any, *, comm: Communicator | None = None, name: str | None = None) -> jax.Array:
    """What to multiply the mean loss of a batch with where batches differ in size over ranks. Collective.

    Gradients are averaged over ranks, not over samples. With `loss * batch_weight(len(batch))` the average
    over ranks is the mean over the samples of all ranks. Inside or outside of a compiled function; the weight
    has no derivative.

    Args:
        count: Number of samples of this rank's batch, or another weight: 0 or more, of the same dtype on all
            ranks. A traced array, such as the sum of a mask, needs no compilation for each count.
        comm: Ranks that train together; the world by default.
        name: See `allreduce`.

    Returns:
        count * size / (sum of the counts of all ranks), shape (); 0 where no rank has a sample.
    """
    comm = resolve(comm)
    if isinstance(count, int | float) and not 0 <= count < math.inf:
        raise UsageError(f"rank {comm.rank}: count is {count}; pass the number of samples, 0 or more")
    (mine,) = as_arrays(comm, [count], ["count"])
    mine = jax.lax.stop_gradient(mine)
    total = allreduce(mine, comm=comm, name=name)
    kind = jnp.promote_types(jnp.result_type(mine.dtype, float), jnp.float32)
    weight = mine.astype(kind) * comm.size / jnp.maximum(total, float(np.finfo(kind).tiny)).astype(kind)
    return jnp.where(total > 0, weight, 0)

"""How a training script gets averaged gradients into its updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import pytensor
from multiring.derived import resolve
from multiring.errors import UsageError
from multiring.pytensor.distributed_gradients import DistributedGradients
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Variable
from pytensor.graph.replace import graph_replace

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["distribute_updates", "grad"]

Updates = TypeVar("Updates", bound="Mapping[Any, Any] | Sequence[tuple[Any, Any]]")


def grad(
    cost: Variable,
    params: Sequence[SharedVariable],
    comm: Communicator | None = None,
    *,
    disconnected_inputs: str = "raise",
    consider_constant: Sequence[Variable] | None = None,
    gradients: DistributedGradients | None = None,
    **options: Any,
) -> list[Variable]:
    """`pytensor.grad`, averaged over the ranks. Collective, and so is each call of a function that uses it.

    Args:
        cost: Scalar: the mean loss over this rank's part of the batch.
        params: Shared variables, in the same order on every rank.
        comm: Ranks that train together; the world by default.
        disconnected_inputs: As for `pytensor.grad`. With "ignore" and "warn" a parameter that the cost does
            not depend on has no gradient on this rank; that counts as zeros.
        consider_constant: As for `pytensor.grad`.
        gradients: Where the gradients are reduced, if the program needs the object for `join` or has several
            functions; made here by default.
        **options: Of `DistributedGradients`.

    Returns:
        For each parameter its averaged gradient.

    Raises:
        UsageError: See `DistributedGradients`.
        MismatchError: The ranks have different parameters or options.
    """
    found = pytensor.grad(
        cost,
        list(params),
        consider_constant=consider_constant,
        disconnected_inputs=disconnected_inputs,
        return_disconnected="none",
    )
    target = DistributedGradients(params, comm, **options) if gradients is None else gradients
    return target.reduce(found).gradients


def distribute_updates(
    updates: Updates,
    params: Sequence[SharedVariable],
    gradients: Sequence[Variable],
    comm: Communicator | None = None,
    *,
    via: DistributedGradients | None = None,
    **options: Any,
) -> Updates:
    """The updates of a training function, with averaged gradients in place of this rank's own. Collective.

        grads = pytensor.grad(cost, params)
        updates = adam(params, grads)
        updates = multiring.pytensor.distribute_updates(updates, params, grads)
        train = pytensor.function([x, y], cost, updates=updates)

    Everything in the updates that was computed from a gradient is computed from the averaged one: momentum,
    clipping, norms. What was computed otherwise (running statistics) stays as it is. The variables in
    `gradients` themselves are not changed: an output of the function that shows one shows this rank's.

    Args:
        updates: What `pytensor.function` takes: pairs of a shared variable and its new value, or a mapping.
        params: The parameters, in the same order on every rank.
        gradients: Their gradients: the very variables that the updates were built from.
        comm: Ranks that train together; the world by default.
        via: Where the gradients are reduced, if the program needs the object for `join`; made here by
            default.
        **options: Of `DistributedGradients`.

    Returns:
        Updates of the kind that was passed (a dict for a mapping).

    Raises:
        UsageError: The updates do not depend on one of the gradients; see also `DistributedGradients`.
        MismatchError: The ranks have different parameters or options.
    """
    rank = (resolve(comm)).rank
    pairs: list[tuple[Any, Any]] = list(updates.items() if isinstance(updates, Mapping) else updates)
    target = DistributedGradients(params, comm, **options) if via is None else via
    reduced = target.reduce(gradients).gradients
    # One variable may be the gradient of several parameters, as in a sum of them: their averages are equal.
    replacements = dict(zip(gradients, reduced, strict=True))
    symbolic = [value for _, value in pairs if isinstance(value, Variable)]
    try:
        replaced = iter(graph_replace(symbolic, replacements, strict=True))
    except ValueError as error:
        unused = _unused(symbolic, params, gradients)
        raise UsageError(
            f"rank {rank}: the updates do not depend on the gradient of {unused}; pass the variables that "
            "they were built from (a second call of pytensor.grad makes others)"
        ) from error
    target.watch([shared for shared, value in pairs if _depends(value, gradients)])
    new = [(target, next(replaced) if isinstance(value, Variable) else value) for target, value in pairs]
    return cast("Updates", dict(new) if isinstance(updates, Mapping) else new)


def _depends(value: Any, gradients: Sequence[Variable]) -> bool:
    from pytensor.graph.traversal import ancestors

    return isinstance(value, Variable) and not set(gradients).isdisjoint(ancestors([value]))


def _unused(
    values: Sequence[Variable], params: Sequence[SharedVariable], gradients: Sequence[Variable]
) -> str:
    from pytensor.graph.traversal import ancestors

    reached = set(ancestors(values))
    names = [p.name or f"shared[{k}]" for k, p in enumerate(params) if gradients[k] not in reached]
    return ", ".join(f"'{name}'" for name in names) or "some parameter"

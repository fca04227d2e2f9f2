"""Collectives on arrays and trees of them: outside and inside of jit, grad, vmap and scan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Unpack

import jax
import jax.numpy as jnp
from multiring.errors import UsageError
from multiring.jax.arguments import as_arrays, as_factors, call_site, check_op, resolve
from multiring.jax.library import number_of
from multiring.jax.primitive import Bucket, Collective, block_rows, run
from multiring.jax.trees import Reduction, named, named_leaves, reduce_arrays
from multiring.reductions import ScaleKeywords, explain_arguments
from multiring.types import ReduceOpName

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["allgather", "allreduce", "alltoall", "broadcast", "reducescatter"]


@explain_arguments
def allreduce(
    x: Any,
    op: ReduceOpName = "sum",
    *,
    comm: Communicator | None = None,
    name: str | None = None,
    **scale: Unpack[ScaleKeywords],
) -> Any:
    """Reduce an array, or those of a tree, element by element over all ranks; every rank gets the result.

    The gradient of a sum or an average is the sum or the average of the ranks' gradients.

    Args:
        x: Array of the same shape and dtype on all ranks, or a pytree of such arrays, as in `jax.lax.psum`.
            Of a tree all arrays travel together; a list is a tree. None is no array.
        op: "sum", "average" (integers truncate toward zero), "min", "max", "product", or of integers and bool
            "bitwise_and", "bitwise_or" or "bitwise_xor".
        comm: Ranks that take part; the world by default.
        name: What the ranks' calls are matched by, and messages call it. Without one a call is matched by its
            place in the program, and all ranks have to make such calls in one order. Needed where several
            threads of a process use collectives, and where calls that belong together are written in
            different places.
        scale: `prescale`, a factor for each input before the reduction, and `postscale`, one for the result.

    Returns:
        An array of the shape and dtype of `x`, or a tree of the same structure.

    Raises:
        UsageError: An array cannot travel, or there is no such reduction.
        JaxRuntimeError: The communication failed; the message is that of the exceptions of `multiring`
            (`multiring.jax.raise_errors` gives those themselves).
    """
    comm = resolve(comm)
    check_op(comm, op)
    names, leaves, structure = named_leaves(x)
    if jax.tree_util.all_leaves([x]):
        return _run_one("allreduce", x, comm, name, op=op, **as_factors(scale))
    options = Reduction(op=op, **as_factors(scale), **named(name, "allreduce"))
    return structure.unflatten(reduce_arrays(comm, as_arrays(comm, leaves, names), names, options))


@explain_arguments
def broadcast(x: Any, root: int = 0, *, comm: Communicator | None = None, name: str | None = None) -> Any:
    """Give every rank the array of rank `root`, or a tree of arrays.

    The gradient arrives, summed over the ranks, on `root`; it is zero elsewhere.

    Args:
        x: Array of the same shape and dtype on all ranks, or a tree of such arrays (see `allreduce`); values
            count on `root` only.
        root: Rank that has the data.
        comm: Ranks that take part; the world by default.
        name: See `allreduce`.
    """
    comm = resolve(comm)
    if not 0 <= root < comm.size:
        raise UsageError(f"rank {comm.rank}: root is {root}; pass a rank from 0 to {comm.size - 1}")
    names, leaves, structure = named_leaves(x)
    if jax.tree_util.all_leaves([x]):
        return _run_one("broadcast", x, comm, name, root=root)
    options = Reduction(**named(name, "broadcast"))
    return structure.unflatten(reduce_arrays(comm, as_arrays(comm, leaves, names), names, options, root=root))


def allgather(
    x: Any, lengths: Sequence[int] | None = None, *, comm: Communicator | None = None, name: str | None = None
) -> Any:
    """Join the arrays of all ranks along axis 0, in the order of the ranks.

    Args:
        x: Array; a zero-dimensional one counts as one row. Or a tree of arrays, each of which is joined.
        lengths: Rows of each rank, if they differ: shapes have to be known when a program is compiled.
        comm: Ranks that take part; the world by default.
        name: See `allreduce`.

    Returns:
        Array of shape `(sum of lengths, *x.shape[1:])`, or a tree of them.

    Raises:
        UsageError: `lengths` does not fit this rank's array. If it does not fit another rank's, all get a
            mismatch.
    """
    comm = resolve(comm)
    return _of_each(x, name, lambda leaf, own: _allgather(leaf, lengths, comm, own))


def _allgather(x: Any, lengths: Sequence[int] | None, comm: Communicator, name: str | None) -> jax.Array:
    (x,) = as_arrays(comm, [x], [name or "allgather"])
    x = jnp.atleast_1d(x)
    received = (x.shape[0],) * comm.size if lengths is None else tuple(int(length) for length in lengths)
    if len(received) != comm.size or received[comm.rank] != x.shape[0]:
        raise UsageError(
            f"rank {comm.rank}: lengths are {received}; expected {comm.size} numbers, this rank's being "
            f"{x.shape[0]}"
        )
    return _run_one("allgather", x, comm, name, received=received)


@explain_arguments
def reducescatter(
    x: Any,
    op: ReduceOpName = "sum",
    *,
    comm: Communicator | None = None,
    name: str | None = None,
    **scale: Unpack[ScaleKeywords],
) -> Any:
    """Reduce an array over all ranks; rank i gets block i of the result along axis 0.

    Axis 0 is split as `numpy.array_split` does: the first `len(x) % size` blocks are one row longer.

    Args:
        x: Array of at least one dimension, of the same shape and dtype on all ranks, or a tree of them.

    The other arguments are those of `allreduce`.
    """
    comm = resolve(comm)
    check_op(comm, op)

    def scatter(leaf: Any, own: str | None) -> jax.Array:
        _check_rows(comm, leaf, "reducescatter")
        return _run_one("reduce_scatter", leaf, comm, own, op=op, **as_factors(scale))

    return _of_each(x, name, scatter)


def alltoall(
    x: Any,
    splits: Sequence[int] | None = None,
    received: Sequence[int] | None = None,
    *,
    comm: Communicator | None = None,
    name: str | None = None,
) -> Any:
    """Send block i of an array to rank i; every rank joins what it receives along axis 0.

    Args:
        x: Array of at least one dimension, or a tree of them.
        splits: Rows for each rank. Without them axis 0 is split as `numpy.array_split` does, and all ranks
            have to pass the same shape.
        received: Rows from each rank; to be given with `splits`, since shapes have to be known when a
            program is compiled.
        comm: Ranks that take part; the world by default.
        name: See `allreduce`.

    Raises:
        UsageError: The numbers of rows do not fit. If they do not fit another rank's, all get a mismatch.
    """
    comm = resolve(comm)
    return _of_each(x, name, lambda leaf, own: _alltoall(leaf, splits, received, comm, own))


def _alltoall(
    x: Any,
    splits: Sequence[int] | None,
    received: Sequence[int] | None,
    comm: Communicator,
    name: str | None,
) -> jax.Array:
    _check_rows(comm, x, "alltoall")
    rows = jnp.shape(x)[0]
    if (splits is None) != (received is None):
        raise UsageError(f"rank {comm.rank}: alltoall needs both splits and received, or neither")
    sent = block_rows(rows, comm.size) if splits is None else tuple(int(count) for count in splits)
    got = (sent[comm.rank],) * comm.size if received is None else tuple(int(count) for count in received)
    if len(sent) != comm.size or len(got) != comm.size or sum(sent) != rows or min(*sent, *got) < 0:
        raise UsageError(
            f"rank {comm.rank}: splits are {sent} and received {got}; expected {comm.size} numbers each, "
            f"splits adding up to {rows}"
        )
    return _run_one("alltoall", x, comm, name, sent=sent, received=got)


def _of_each(tree: Any, name: str | None, collective: Callable[[Any, str | None], jax.Array]) -> Any:
    """A collective of rows on each array of a tree, under a name of its own if it has one."""
    names, leaves, structure = named_leaves(tree)
    if jax.tree_util.all_leaves([tree]):
        return collective(tree, name)
    owns = [None if name is None else f"{name}: {own}" for own in names]
    return structure.unflatten([collective(*each) for each in zip(leaves, owns, strict=True)])


def _check_rows(comm: Communicator, x: Any, what: str) -> None:
    if jnp.ndim(x) == 0:
        raise UsageError(f"rank {comm.rank}: {what} takes arrays of at least one dimension")


def _run_one(kind: str, x: Any, comm: Communicator, name: str | None, **options: Any) -> jax.Array:
    label = kind if name is None else name
    arrays = as_arrays(comm, [x], [label])
    call = Collective(
        *(kind, number_of(comm, name or ""), comm.rank, comm.size, (Bucket(label, (0,), (label,)),)),
        ordered=name is None,
        site=call_site() if name is None else None,
        owned=name or "",
        **options,
    )
    result: jax.Array = run(call, arrays)[0]
    return result

"""State from one rank to all, outside of compiled functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import jax
import jax.numpy as jnp
from multiring.errors import UsageError
from multiring.jax.arguments import resolve
from multiring.jax.internals import with_weak_type
from multiring.jax.trees import named_leaves
from multiring.reductions import explain_arguments
from multiring.state.broadcast import broadcast_arrays, check_root

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["broadcast_parameters"]


@explain_arguments
def broadcast_parameters(tree: Any, root: int = 0, *, comm: Communicator | None = None) -> Any:
    """Give every rank the pytree of rank `root`: parameters, optimizer state, a train state. Collective.

    Args:
        tree: The same structure, shapes and dtypes on all ranks; random keys (`jax.random.key`), NumPy arrays
            and Python's numbers included.
        root: Rank that has the data.
        comm: Ranks that take part; the world by default.

    Returns:
        A tree of the same structure, with arrays of JAX and the weak types of `root`'s; on `root` the tree
        itself.

    Raises:
        UsageError: `root` is not a rank, a leaf is no array or number, or this is called inside of a compiled
            function.
        MismatchError: The ranks pass different trees.
    """
    comm = resolve(comm)
    check_root(comm, root)
    names, leaves, structure = named_leaves(tree)
    copies = [_copy(comm, name, leaf) for name, leaf in zip(names, leaves, strict=True)]
    # Not compared: a root that has read a checkpoint lacks the weak types that others have.
    weak = np.array([getattr(leaf, "weak_type", False) for leaf in leaves], np.uint8)
    arrays = {f"{k}: {name}": copy for k, (name, copy) in enumerate(zip(names, copies, strict=True))}
    broadcast_arrays(comm, arrays | {"weak types": weak}, root)
    if comm.rank == root or comm.size == 1:
        return tree
    return structure.unflatten([_like(*each) for each in zip(leaves, copies, weak, strict=True)])


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _copy(comm: Communicator, name: str, leaf: Any) -> np.ndarray[Any, Any]:
    """A writable copy in host memory."""
    if isinstance(leaf, jax.core.Tracer):
        raise UsageError(
            f"rank {comm.rank}: broadcast_parameters takes values, but '{name}' is being traced; call it "
            "outside of jit, or use multiring.jax.broadcast"
        )
    copy = np.array(jax.random.key_data(leaf) if _is_key(leaf) else leaf, order="C")
    if copy.dtype == object:
        raise UsageError(
            f"rank {comm.rank}: '{name}' is a {type(leaf).__name__}, neither an array nor a number; use "
            "broadcast_object for it"
        )
    return copy


def _like(leaf: Any, copy: np.ndarray[Any, Any], weak_type: bool) -> Any:
    if _is_key(leaf):
        return _placed(jax.random.wrap_key_data(jnp.asarray(copy), impl=jax.random.key_impl(leaf)), leaf)
    if isinstance(leaf, np.ndarray | np.generic):
        return copy if isinstance(leaf, np.ndarray) else copy[()]
    if isinstance(leaf, bool | int | float | complex):
        return type(leaf)(copy[()])
    return with_weak_type(_placed(jnp.asarray(copy), leaf), bool(weak_type))


def _placed(made: jax.Array, leaf: Any) -> jax.Array:
    """On the device of a leaf, if the program has chosen that."""
    return jax.device_put(made, leaf.sharding) if getattr(leaf, "committed", False) else made

"""Collectives inside compiled functions, matched by name, and differentiable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from multiring.derived import resolve
from multiring.errors import UsageError
from multiring.pytensor.collective_ops import Allgather, Allreduce, Broadcast
from multiring.state.broadcast import check_root
from multiring.types import ReduceOpName
from pytensor.graph.basic import Variable
from pytensor.tensor.type import TensorType

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["allgather", "allreduce", "broadcast", "grouped_allreduce"]


def allreduce(
    x: Variable, name: str, *, op: ReduceOpName = "sum", comm: Communicator | None = None
) -> Variable:
    """Reduce an array over the ranks where a function computes it.

    The gradient of a sum is the sum of the ranks' gradients, that of an average their average: what every
    rank gets is the derivative of all ranks' costs together. Building a graph with a reduction for the first
    time on a communicator is collective; running the function is, each time.

    Args:
        x: Tensor variable of any dtype that the core reduces, of the same shape on every rank.
        name: What the peers call it: reductions are matched by it. Unique within a function.
        op: "sum", "average", "min", "max", "product", or of integers and bool "bitwise_and", "bitwise_or" or
            "bitwise_xor". Only the first two have a gradient.
        comm: The ranks; the world by default.

    Returns:
        A variable of the same type.

    Raises:
        UsageError: Not a tensor.
    """
    return grouped_allreduce([x], name, op=op, comm=comm)[0]


def grouped_allreduce(
    tensors: Sequence[Variable], name: str, *, op: ReduceOpName = "sum", comm: Communicator | None = None
) -> list[Variable]:
    """Reduce several arrays over the ranks at once: all are on their way before the first is waited for.

    Args:
        tensors: Tensor variables; shapes and dtypes may differ between them, but not between ranks.
        name: What the peers call the group.
        op: As for `allreduce`.
        comm: The ranks; the world by default.

    Returns:
        Variables of the same types.

    Raises:
        UsageError: Not a tensor.
    """
    made = [_as_tensor(tensor, name) for tensor in tensors]
    if not made:
        return []
    found: list[Variable] = Allreduce(name, len(made), _world(comm), op)(*made, return_list=True)
    return found[:-1]


def broadcast(x: Variable, name: str, *, root: int = 0, comm: Communicator | None = None) -> Variable:
    """`root`'s value of an array, where a function computes it.

    The gradient at the root is the sum of all ranks' gradients, and zeros elsewhere.

    Args:
        x: Tensor variable, of the same shape on every rank.
        name: What messages call it; compared over ranks.
        root: Rank whose value everyone gets.
        comm: The ranks; the world by default.

    Raises:
        UsageError: Not a tensor, or `root` is not a rank.
    """
    group = _world(comm)
    check_root(group, root)
    found: list[Variable] = Broadcast(name, group, root)(_as_tensor(x, name), return_list=True)
    return found[0]


def allgather(x: Variable, name: str, *, comm: Communicator | None = None) -> Variable:
    """The ranks' arrays joined along the first axis, in the order of the ranks.

    The gradient is this rank's part of the sum of all ranks' gradients.

    Args:
        x: Tensor variable of shape (rows, ...); the number of rows may differ between ranks, and be 0.
        name: What messages call it; compared over ranks.
        comm: The ranks; the world by default.

    Returns:
        Variable of shape (all rows, ...).

    Raises:
        UsageError: Not a tensor, or one without axes.
    """
    tensor = _as_tensor(x, name)
    if tensor.type.ndim == 0:
        raise UsageError(f"'{name}' is a number; allgather joins arrays along their first axis")
    found: list[Variable] = Allgather(name, _world(comm))(tensor, return_list=True)
    return found[0]


def _world(comm: Communicator | None) -> Communicator:
    return resolve(comm)


def _as_tensor(x: Variable, name: str) -> Variable:
    if not isinstance(getattr(x, "type", None), TensorType):
        raise UsageError(f"'{name}' is {x!r}; collectives in a graph take tensor variables")
    return x

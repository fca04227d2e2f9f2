"""What every face checks before it submits, and how each kind of operation is submitted to a queue."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from multiring.horovod.exceptions import HorovodInternalError
from multiring.horovod.operations import Start
from multiring.horovod.process_sets import ProcessSet, global_process_set
from multiring.horovod.reduce_ops import op_name, resolve_op
from multiring.horovod.request import Request

__all__ = [
    "barrier",
    "check_differentiable",
    "check_reducescatter",
    "check_rows",
    "checked_counts",
    "is_power_of_2",
    "join",
    "names_of",
    "reduction",
    "start_allgather",
    "start_allreduce",
    "start_alltoall",
    "start_barrier",
    "start_broadcast",
    "start_reducescatter",
]


def names_of(base: str, count: int, is_group: bool) -> list[str]:
    """Names of the operations of one call."""
    return [f"{base}_{k + 1}of{count}" for k in range(count)] if is_group else [base]


def is_power_of_2(number: int) -> bool:
    """Whether Adasum can combine the tensors of so many ranks."""
    return number > 0 and number & (number - 1) == 0


def reduction(
    op: int | None, average: bool | None, scale: tuple[float, float], process_set: ProcessSet
) -> tuple[str, float, float]:
    """Name of the reduction, and its factors.

    Raises:
        ValueError: There is no such reduction.
        NotImplementedError: Adasum over these ranks.
    """
    name = op_name(resolve_op(op, average))
    size = process_set.operations().size
    if name == "adasum":
        if process_set.process_set_id != 0:
            raise NotImplementedError("Adasum does not support non-global process sets.")
        if not is_power_of_2(size):
            raise NotImplementedError(f"Running Adasum with non-power of 2 ranks ({size}) is not supported.")
    return name, float(scale[0]), float(scale[1])


def checked_counts(splits: Iterable[Any] | None, shape: Sequence[int], size: int) -> list[int]:
    """Rows for each rank of an alltoall.

    Raises:
        ValueError: The splits are no integers, do not add up to dimension 0 or are not one for each rank;
            without them, dimension 0 is no multiple of the number of ranks.
    """
    rows = shape[0] if len(shape) else 0
    if splits is None:
        if rows % size or not len(shape):
            raise ValueError(
                f"alltoall without splits: dimension 0 has {rows} rows, which do not divide by {size} ranks"
            )
        return [rows // size] * size
    try:
        counts = [operator.index(count) for count in splits]
    except TypeError:
        raise ValueError(f"alltoall: splits {splits}; expected integers") from None
    if len(counts) != size or min(counts) < 0 or sum(counts) != rows:
        raise ValueError(f"alltoall: splits {counts} of {rows} rows for {size} ranks do not fit")
    return counts


def check_rows(dims: Sequence[int], name: str) -> None:
    """Raises HorovodInternalError where one of the tensors of an allgather has no dimensions."""
    if not all(dims):
        raise HorovodInternalError(f"Rank zero tried to allgather a rank-zero tensor (tensor '{name}').")


def check_differentiable(op: str) -> None:
    """Raise NotImplementedError where the gradient of a reduction depends on which rank had the result."""
    if op in ("min", "max", "product"):
        raise NotImplementedError(
            f"the gradient of an allreduce with op={op}: only hvd.Sum, hvd.Average and hvd.Adasum have one"
        )


def check_reducescatter(op: str, dims: Sequence[int]) -> None:
    """Raises HorovodInternalError where a reducescatter is asked for what there is not."""
    if op == "adasum":
        raise HorovodInternalError("Reducescatter does not support Adasum.")
    if not all(dims):
        raise HorovodInternalError("Reducescatter: a tensor without dimensions cannot be scattered.")


def start_allreduce(tensor: Any, target: Any, request: Request) -> Start:
    """Reduces `tensor` into `target`. By Adasum: gathers all of them."""
    if request.op == "adasum":
        return start_allgather((tensor * request.prescale).reshape(1, -1), request)

    def start(queue: Any) -> Any:
        op, scale = request.reduction(queue.size)
        return queue.allreduce_async(
            tensor, out=target, op=op, name=request.name, asked=request.asked, **scale
        )

    return start


def start_allgather(tensor: Any, request: Request) -> Start:
    """Joins the tensors of all ranks."""
    return lambda queue: queue.allgather_async(tensor, name=request.name, asked=request.asked)


def start_broadcast(source: Any, target: Any, root: int, request: Request) -> Start:
    """Writes that of the rank `root` of the set to `target`."""
    return lambda queue: queue.broadcast_async(
        source, root, name=request.name, out=target, asked=request.asked
    )


def start_alltoall(source: Any, counts: Sequence[int], request: Request) -> Start:
    """Sends so many rows to each rank."""
    return lambda queue: queue.alltoall_async(source, counts, name=request.name, asked=request.asked)


def start_reducescatter(tensor: Any, request: Request, target: Any = None) -> Start:
    """Reduces, and gives each rank its rows; in `target`, if there is one."""

    def start(queue: Any) -> Any:
        op, scale = request.reduction(queue.size)
        return queue.reduce_scatter_async(
            tensor, op=op, out=target, name=request.name, asked=request.asked, **scale
        )

    return start


def start_barrier(request: Request) -> Start:
    """Waits for all ranks."""
    return lambda queue: queue.barrier_async(name=request.name, asked=request.asked)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when all ranks have called it."""
    operations = process_set.operations()
    request = Request("barrier", operations.auto_name())
    operations.wait(operations.submit(request, start_barrier(request)))


def join(device: int = -1) -> int:
    """Contributes zeros to the allreduces of the other ranks until all have joined; averages go on dividing
    by the number of all ranks.

    Args:
        device: Ignored: the zeros are on the host, wherever the tensors of other ranks are.

    Returns:
        The rank that was the last to join.

    Raises:
        HorovodInternalError: A rank is lost or late.
    """
    return global_process_set.operations().join()

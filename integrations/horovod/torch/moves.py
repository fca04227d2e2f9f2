"""The other collectives that give a handle. Their arguments are checked before anything is submitted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from multiring.horovod.operations import Operations
from multiring.horovod.process_sets import ProcessSet, global_process_set
from multiring.horovod.reduce_ops import Average, op_name
from multiring.horovod.request import Request
from multiring.horovod.started import Started, submit_all
from multiring.horovod.submissions import (
    check_reducescatter,
    check_rows,
    checked_counts,
    names_of,
    start_allgather,
    start_alltoall,
    start_broadcast,
    start_reducescatter,
)
from multiring.horovod.torch.checks import (
    MOVED,
    REDUCED,
    changed,
    checked,
    described,
    dtype_name,
    ordered,
)
from multiring.horovod.torch.handles import handle_of
from multiring.torch.streams import used_here

__all__ = [
    "allgather_async",
    "alltoall_async",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather_async",
    "grouped_reducescatter_async",
    "reducescatter_async",
]

Tensor = torch.Tensor


def _gather(tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet, is_group: bool) -> int:
    operations = process_set.operations()
    inputs = [checked(tensor, MOVED) for tensor in tensors]
    base = name or operations.auto_name()
    names = names_of(base, len(inputs), is_group)
    group = f"{len(inputs)} tensors" if is_group else ""
    parts = []
    for tensor, each in zip(inputs, names, strict=True):
        request = Request("allgather", each, dtype_name(tensor), tuple(tensor.shape), group=group)
        parts.append((request, ordered(tensor, start_allgather(tensor, request))))

    def finish(results: list[Any]) -> Any:
        check_rows([tensor.dim() for tensor in inputs], base)
        return results if is_group else results[0]

    return handle_of(submit_all(operations, parts, finish))


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Joins the tensors of all ranks along dimension 0, in which they may differ."""
    return _gather([tensor], name, process_set, False)


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """`allgather_async` of several tensors; the result is a list."""
    return _gather(list(tensors), name, process_set, True)


def _broadcast(
    tensor: Tensor, in_place: bool, root_rank: int, name: str | None, process_set: ProcessSet
) -> int:
    operations, root = process_set.operations(), process_set.root(root_rank)
    source = checked(tensor, MOVED)
    target = source if in_place else torch.empty_like(source)
    shape, name = tuple(source.shape), name or operations.auto_name()
    request = Request("broadcast", name, dtype_name(source), shape, root=root_rank)
    pending = operations.submit(request, ordered(source, start_broadcast(source, target, root, request)))
    return handle_of(
        Started(operations, [pending], lambda _: changed(tensor) if in_place else used_here(target))
    )


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """A new tensor with the values of rank `root_rank` of the job, on all ranks.

    Raises:
        ValueError: As `allreduce_async`; `root_rank` is not in the process set.
    """
    return _broadcast(tensor, False, root_rank, name, process_set)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """`broadcast_async`, in place."""
    return _broadcast(tensor, True, root_rank, name, process_set)


def alltoall_async(
    tensor: Tensor,
    splits: Sequence[int] | Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Sends rows of dimension 0 to each rank: as many as `splits` says, or equally many.

    The result is a pair: what was received, and the rows from each rank (int32, where `splits` is).

    Raises:
        ValueError: The splits do not add up to dimension 0 or are not one for each rank; without them,
            dimension 0 is no multiple of the number of ranks.
    """
    operations = process_set.operations()
    source = checked(tensor, MOVED)
    # As numbers first: of a tensor on a device, one by one would be a synchronisation each.
    asked = splits.tolist() if isinstance(splits, Tensor) else splits
    counts = checked_counts(asked, source.shape, operations.size)
    name = name or operations.auto_name()
    request = Request("alltoall", name, dtype_name(source), tuple(source.shape))

    def finish(results: list[Any]) -> tuple[Tensor, Tensor]:
        received, numbers = results[0]
        where = splits.device if isinstance(splits, Tensor) else "cpu"
        return received, torch.from_numpy(numbers).to(where, torch.int32)

    pending = operations.submit(request, ordered(source, start_alltoall(source, counts, request)))
    return handle_of(Started(operations, [pending], finish))


def _reduce_scatter(
    tensors: Sequence[Tensor],
    name: str | None,
    asked: tuple[str, float, float],
    process_set: ProcessSet,
    is_group: bool,
) -> int:
    operations = process_set.operations()
    inputs = [checked(tensor, REDUCED) for tensor in tensors]
    check_reducescatter(asked[0], [tensor.dim() for tensor in inputs])
    base = name or operations.auto_name()
    names = names_of(base, len(inputs), is_group)
    group = described(inputs) if is_group else ""
    parts = []
    for tensor, each in zip(inputs, names, strict=True):
        shape, dtype = tuple(tensor.shape), dtype_name(tensor)
        request = Request("reducescatter", each, dtype, shape, *asked, group=group)
        start = start_reducescatter(tensor, request, _room_for_share(tensor, operations))
        parts.append((request, ordered(tensor, start)))

    def finish(results: list[Any]) -> Any:
        shares = [used_here(result) for result in results]
        return shares if is_group else shares[0]

    return handle_of(submit_all(operations, parts, finish))


def _room_for_share(tensor: Tensor, operations: Operations) -> Tensor | None:
    """Memory for this rank's rows of a tensor on a device, of Torch's pool: the core would take it beside
    that. None: the tensor is on the host."""
    if not tensor.is_cuda:
        return None
    rows, left = divmod(tensor.shape[0], operations.size)
    return tensor.new_empty(rows + (operations.rank < left), *tensor.shape[1:])


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Reduces a tensor over all ranks; each gets a share of dimension 0, the first ones one row more.

    Raises:
        ValueError: As `allreduce_async`.
        HorovodInternalError: The tensor has no dimensions, or `op` is Adasum.
    """
    asked = op_name(op), float(prescale_factor), float(postscale_factor)
    return _reduce_scatter([tensor], name, asked, process_set, False)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """`reducescatter_async` of several tensors; the result is a list."""
    asked = op_name(op), float(prescale_factor), float(postscale_factor)
    return _reduce_scatter(list(tensors), name, asked, process_set, True)

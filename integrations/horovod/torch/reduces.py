"""Allreduces that give a handle. Their arguments are checked before anything is submitted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from multiring.horovod.adasum import adasum
from multiring.horovod.process_sets import ProcessSet, global_process_set
from multiring.horovod.reduce_ops import Average, op_name
from multiring.horovod.request import Request, reduction_request
from multiring.horovod.started import submit_all
from multiring.horovod.submissions import names_of, reduction, start_allgather, start_allreduce
from multiring.horovod.torch.checks import (
    MOVED,
    REDUCED,
    changed,
    checked,
    described,
    dtype_name,
    late,
    ordered,
    settle,
)
from multiring.horovod.torch.handles import handle_of, result_of
from multiring.torch.streams import used_here

__all__ = [
    "allreduce_async",
    "allreduce_async_",
    "allreduce_gradients",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "sparse_allreduce_async",
    "start_sparse_allreduce",
]

Tensor = torch.Tensor


def _allreduce(
    tensors: Sequence[Tensor],
    targets: Sequence[Tensor] | None,
    name: str | None,
    asked: tuple[str, float, float],
    process_set: ProcessSet,
    is_group: bool,
    titles: Sequence[str] = (),
) -> int:
    """Submits one allreduce, or a group of them; `targets` None: into new tensors. The ranks compare the
    titles of a group's tensors."""
    operations = process_set.operations()
    inputs = [checked(tensor, REDUCED) for tensor in tensors]
    if asked[0] == "adasum" and not all(tensor.is_floating_point() for tensor in inputs):
        raise ValueError("Adasum needs floating-point tensors.")
    outputs = [torch.empty_like(tensor) for tensor in inputs] if targets is None else inputs
    if asked[0] == "adasum":
        settle(inputs, process_set)
    base = name or operations.auto_name()
    names = names_of(base, len(inputs), is_group)
    group = " of ".join(filter(None, [described(inputs), ", ".join(titles)])) if is_group else ""
    parts = []
    for tensor, output, each in zip(inputs, outputs, names, strict=True):
        request = reduction_request(each, dtype_name(tensor), tuple(tensor.shape), asked, group)
        parts.append((request, ordered(tensor, start_allreduce(tensor, output, request))))

    def finish(results: list[Any]) -> Any:
        if asked[0] == "adasum":
            if targets is not None:
                settle(outputs, process_set, is_written=True)
            for result, output in zip(results, outputs, strict=True):
                rows = result.reshape(operations.size, -1)
                whole = torch.from_numpy(adasum(rows.double().cpu().numpy()))
                output.copy_((whole * asked[2]).reshape(output.shape))
        done = (
            [used_here(each) for each in outputs] if targets is None else [changed(each) for each in targets]
        )
        return done if is_group else done[0]

    started = submit_all(operations, parts, finish)
    if asked[0] == "adasum":
        late.add(outputs, started.wait, lambda: started.is_finished)
    return handle_of(started)


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Reduces a tensor over all ranks into a new one; the average by default.

    Raises:
        ValueError: The tensor is not contiguous, of another dtype than int32, int64, float16, bfloat16,
            float32 and float64, or neither on the CPU nor on a CUDA device; an operation of this name is in
            flight.
    """
    asked = reduction(op, average, (prescale_factor, postscale_factor), process_set)
    return _allreduce([tensor], None, name, asked, process_set, False)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """`allreduce_async`, in place."""
    asked = reduction(op, average, (prescale_factor, postscale_factor), process_set)
    return _allreduce([tensor], [tensor], name, asked, process_set, False)


def allreduce_gradients(
    tensors: Sequence[Tensor],
    titles: Sequence[str],
    op: int,
    scale: tuple[float, float],
    process_set: ProcessSet,
) -> int:
    """Start `allreduce_async_` of one gradient, or `grouped_allreduce_async_` of several.

    The first title is the operation's name; ranks whose groups have other titles fail.
    """
    asked = reduction(op, None, scale, process_set)
    return _allreduce(tensors, tensors, titles[0], asked, process_set, len(tensors) > 1, titles)


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """`allreduce_async` of several tensors, all of which fail together; the result is a list."""
    asked = reduction(op, average, (prescale_factor, postscale_factor), process_set)
    return _allreduce(list(tensors), None, name, asked, process_set, True)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """`grouped_allreduce_async`, in place."""
    asked = reduction(op, average, (prescale_factor, postscale_factor), process_set)
    return _allreduce(list(tensors), list(tensors), name, asked, process_set, True)


def sparse_allreduce_async(
    tensor: Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Reduces a sparse tensor by one allgather of its values with their indices.

    Returns:
        A function that waits and gives the sparse result, coalesced.

    Raises:
        ValueError: `op` is neither Sum nor Average.
    """
    return start_sparse_allreduce(tensor, name, op, process_set)[1]


def start_sparse_allreduce(
    tensor: Tensor, name: str | None, op: int, process_set: ProcessSet
) -> tuple[int, Callable[[], Tensor]]:
    """The handle of what `sparse_allreduce_async` submits, and its result."""
    if op_name(op) not in ("sum", "average"):
        raise ValueError(f"a sparse allreduce with op {op_name(op)}; expected hvd.Sum or hvd.Average")
    operations = process_set.operations()
    settle([tensor], process_set)
    tensor = tensor.coalesce()
    indices, values = tensor.indices().t().contiguous(), checked(tensor.values().contiguous(), MOVED)
    # One operation, of the name that a dense tensor would have: where another rank's is dense, it fails as a
    # whole.
    request = Request(
        *("allgather", name or operations.auto_name(), dtype_name(values), tuple(values.shape)),
        group=f"values of a sparse tensor of shape {list(tensor.shape)}",
    )
    parts = [_bytes_of_rows(indices), _bytes_of_rows(values)]
    sent = torch.cat(parts, dim=1)
    width = parts[0].shape[1]
    divisor = operations.size if op == Average else 1

    def finish(results: list[Any]) -> Tensor:
        gathered = used_here(results[0])
        found = _rows_of_bytes(gathered[:, width:], values)
        rows = found / divisor if divisor > 1 else found
        where = _rows_of_bytes(gathered[:, :width], indices).t()
        return torch.sparse_coo_tensor(where, rows, tensor.shape, check_invariants=False).coalesce()

    start = ordered(sent, start_allgather(sent, request))
    handle = handle_of(submit_all(operations, [(request, start)], finish))
    return handle, lambda: result_of(handle)


def _bytes_of_rows(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, those of each row along dimension 0 as a row."""
    width = math.prod(tensor.shape[1:]) * tensor.element_size()
    flat = tensor.as_strided(
        (tensor.numel(),), (1,)
    )  # a view may have another stride where it has one element
    return flat.view(torch.uint8).view(tensor.shape[0], width)


def _rows_of_bytes(found: Tensor, like: Tensor) -> Tensor:
    """Return the tensor whose rows have these bytes, of the dtype and the shape of rows of `like`."""
    count = found.shape[0]
    return (
        found.clone(memory_format=torch.contiguous_format)
        .view(-1)
        .view(like.dtype)
        .view(count, *like.shape[1:])
    )

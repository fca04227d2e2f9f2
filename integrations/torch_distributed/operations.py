"""What each function of a process group asks of the communicator: tensors in, operations under way out.

Operations that the communicator has not are made of others. Those have a name that says what was asked:
ranks compare names before data moves, so one that asks for something else is noticed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from multiring import errors
from multiring.communicator import Communicator
from multiring.errors import UsageError
from multiring.torch_distributed.reductions import Reduction, reduction_of
from multiring.torch_distributed.sparse import allreduce_sparse
from multiring.torch_distributed.tensors import (
    as_numbers,
    as_payload,
    copy_apart,
    joined,
    name_of_bytes,
    require_count,
    room_like,
)
from multiring.torch_distributed.work import Part

__all__ = [
    "allgather",
    "allgather_single",
    "allreduce",
    "alltoall",
    "alltoall_single",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "scatter",
]

Tensor = torch.Tensor


def allreduce(
    comm: Communicator, tensor: Tensor, op: Any, what: str = "allreduce", name: str | None = None
) -> Part:
    """Reduces a tensor over all ranks, in place.

    Args:
        comm: The ranks.
        tensor: It.
        op: How.
        what: The function that was called, for messages.
        name: Of the operation, where ranks have to agree on more than the tensor and `op`.
    """
    if tensor.layout != torch.strided:
        return allreduce_sparse(comm, tensor, op, name or what)
    reduction, numbers = reduction_of(op, tensor, what), as_numbers(tensor, what)
    return Part(comm.allreduce_async(numbers, reduction.op, numbers, name, reduction.prescale))


def reduce(comm: Communicator, tensor: Tensor, op: Any, root: int) -> Part:
    """Reduces a tensor over all ranks; that of `root` gets the result, the others stay as they are."""
    _require_rank(comm, root, "reduce")
    own = tensor if comm.rank == root else tensor.detach().clone()
    return allreduce(comm, own, op, "reduce", f"reduce to rank {root}")


def broadcast(comm: Communicator, tensor: Tensor, root: int) -> Part:
    """Gives every rank the tensor of `root`."""
    payload = as_payload(tensor, "broadcast")
    return Part(comm.broadcast_async(payload, root, payload, name_of_bytes(tensor)))


def allgather(comm: Communicator, outputs: Sequence[Tensor], tensor: Tensor) -> Part:
    """Gives every rank the tensors of all. Each rank's may have another number of elements; then all ranks
    know them from their `outputs`."""
    what, size = "allgather", comm.size
    require_count(outputs, size, what)
    source, targets = as_payload(tensor, what), [as_payload(output, what) for output in outputs]
    counts = [target.numel() for target in targets]
    _require_same_dtype([source, *targets], what)
    if counts[comm.rank] != source.numel():
        raise UsageError(
            f"{what}: rank {comm.rank} gives {source.numel()} elements, and its list of outputs has "
            f"{counts[comm.rank]} for it"
        )
    if len(set(counts)) > 1:
        # The name is compared before data moves, and with it what each rank expects of the others.
        asked = f"{tensor.dtype} elements of the ranks: {counts}"
        pending = comm.allgather_async(source.reshape(-1), room_like(source, sum(counts)), asked)
        return Part(pending, lambda gathered: copy_apart(gathered, targets))
    flat = joined(targets)
    rows, name = source.reshape(1, counts[0]), name_of_bytes(tensor)
    if flat is not None:
        return Part(comm.allgather_async(_apart_from(flat, rows), flat.view(size, counts[0]), name))
    pending = comm.allgather_async(rows, room_like(rows, size, counts[0]), name)
    return Part(pending, lambda gathered: copy_apart(gathered.reshape(-1), targets))


def allgather_single(comm: Communicator, output: Tensor, tensor: Tensor) -> Part:
    """Joins the tensors of all ranks, which have equally many elements, in one tensor."""
    what = "all_gather_single"
    source, target = as_payload(tensor, what), as_payload(output, what)
    _require_same_dtype([source, target], what)
    if target.numel() != comm.size * source.numel():
        raise UsageError(
            f"{what}: the output has {target.numel()} elements; expected {comm.size} ranks x {source.numel()}"
        )
    rows, name = source.reshape(1, source.numel()), name_of_bytes(tensor)
    if target.is_contiguous():
        whole = target.view(comm.size, source.numel())
        return Part(comm.allgather_async(_apart_from(target, rows), whole, name))
    room = room_like(rows, comm.size, source.numel())
    return Part(comm.allgather_async(rows, room, name), lambda gathered: _set(target, gathered))


def reduce_scatter(comm: Communicator, output: Tensor, inputs: Sequence[Tensor], op: Any) -> Part:
    """Reduces a list of tensors over all ranks; rank i gets the i-th. They may differ in size."""
    what = "reduce_scatter"
    require_count(inputs, comm.size, what)
    numbers = [as_numbers(tensor, what) for tensor in inputs]
    target = as_numbers(output, what)
    _require_same_dtype([target, *numbers], what)
    counts = [each.numel() for each in numbers]
    if counts[comm.rank] != target.numel():
        raise UsageError(
            f"{what}: the output of rank {comm.rank} has {target.numel()} elements, and the inputs have "
            f"{counts[comm.rank]} for it"
        )
    flat = joined(numbers)
    if flat is None:
        flat = torch.cat([each.reshape(-1) for each in numbers])
    reduction = reduction_of(op, inputs[0], what)
    if len(set(counts)) == 1:
        return _reduce_scatter_rows(comm, target, flat.view(comm.size, counts[0]), reduction)
    # Blocks of any size: as an allreduce, in memory of its own.
    begin, scratch = sum(counts[: comm.rank]), flat.clone()
    whole = allreduce(comm, scratch, op, what, f"{what} of {counts} elements")

    def finish(result: Any) -> None:
        if whole.finish is not None:
            whole.finish(result)
        _set(target, scratch[begin : begin + target.numel()])

    return Part(whole.pending, finish)


def reduce_scatter_single(comm: Communicator, output: Tensor, tensor: Tensor, op: Any) -> Part:
    """Reduces a tensor over all ranks; rank i gets the i-th of equally large blocks."""
    what = "reduce_scatter_single"
    source, target = as_numbers(tensor, what), as_numbers(output, what)
    _require_same_dtype([source, target], what)
    if source.numel() != comm.size * target.numel():
        raise UsageError(
            f"{what}: the input has {source.numel()} elements; expected {comm.size} ranks x {target.numel()}"
        )
    rows = source.reshape(comm.size, target.numel())
    return _reduce_scatter_rows(comm, target, rows, reduction_of(op, tensor, what))


def _reduce_scatter_rows(comm: Communicator, target: Tensor, rows: Tensor, reduction: Reduction) -> Part:
    if target.is_contiguous() and not _overlap(rows, target):
        block = target.view(1, target.numel())
        return Part(comm.reduce_scatter_async(rows, reduction.op, block, prescale=reduction.prescale))
    room = room_like(rows, 1, target.numel())
    pending = comm.reduce_scatter_async(rows, reduction.op, room, prescale=reduction.prescale)
    return Part(pending, lambda block: _set(target, block))


def alltoall_single(
    comm: Communicator, output: Tensor, tensor: Tensor, sizes: Sequence[int], rows: Sequence[int]
) -> Part:
    """Sends blocks of rows of a tensor to the ranks; each joins what it receives.

    Args:
        comm: The ranks.
        output: For the rows that are received.
        tensor: With the rows to be sent.
        sizes: Rows from each rank; empty: equally many.
        rows: Rows for each rank; empty: equally many.
    """
    what = "all_to_all_single"
    source, target = as_payload(tensor, what), as_payload(output, what)
    _require_same_dtype([source, target], what)
    received = _split_sizes(target, sizes, comm.size, f"{what}: output")
    sent = _split_sizes(source, rows, comm.size, f"{what}: input")
    # In elements, as torch counts them: rows of the input need not have the shape of those of the output.
    return _exchanged(comm, what, _named(tensor), source.reshape(-1), sent, [target], received)


def _split_sizes(tensor: Tensor, sizes: Sequence[int], size: int, what: str) -> list[int]:
    """Elements that go to each rank, or come from it."""
    if tensor.dim() == 0:
        raise UsageError(f"{what} has no dimension to split")
    rows, row = tensor.shape[0], math.prod(tensor.shape[1:])
    if not sizes:
        if rows % size:
            raise UsageError(
                f"{what} has {rows} rows, which {size} ranks cannot share equally: pass split sizes"
            )
        return [rows // size * row] * size
    if len(sizes) != size or sum(sizes) != rows:
        raise UsageError(
            f"{what} has {rows} rows; its split sizes {list(sizes)} have to be {size} that add up to it"
        )
    return [int(each) * row for each in sizes]


def alltoall(comm: Communicator, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Part:
    """Sends the i-th tensor to rank i, and receives the i-th output from it."""
    what = "all_to_all"
    require_count(outputs, comm.size, what)
    require_count(inputs, comm.size, what)
    sources = [as_payload(tensor, what) for tensor in inputs]
    targets = [as_payload(output, what) for output in outputs]
    _require_same_dtype([*sources, *targets], what)
    flat = joined(sources)
    if flat is None:
        flat = torch.cat([each.reshape(-1) for each in sources])
    sent, received = ([each.numel() for each in tensors] for tensors in (sources, targets))
    return _exchanged(comm, what, _named(inputs[0]), flat, sent, targets, received)


def _exchanged(
    comm: Communicator,
    what: str,
    name: str,
    flat: Tensor,
    sent: Sequence[int],
    targets: Sequence[Tensor],
    expected: Sequence[int],
) -> Part:
    """An exchange of elements: `sent[i]` of `flat` go to rank i, and `expected[i]` are to come from it."""

    def finish(result: Any) -> None:
        received, counts = result
        if counts.tolist() != list(expected):
            raise _mismatch(comm, what, counts.tolist(), list(expected))
        copy_apart(received, targets)

    return Part(comm.alltoall_async(flat, sent, name), finish)


def _named(tensor: Tensor) -> str:
    """The same for all functions that exchange elements."""
    return " of ".join(filter(None, ["all_to_all", name_of_bytes(tensor)]))


def gather(comm: Communicator, outputs: Sequence[Tensor], tensor: Tensor, root: int) -> Part:
    """Brings the tensors of all ranks, equally large, to `root`."""
    what = "gather"
    source = as_payload(tensor, what)
    rows, name = source.reshape(1, source.numel()), name_of_bytes(tensor)
    if comm.rank != root:
        return Part(comm.gather_async(rows, root, name))
    require_count(outputs, comm.size, what)
    targets = [as_payload(output, what) for output in outputs]
    _require_same_dtype([source, *targets], what)
    if any(target.numel() != source.numel() for target in targets):
        counts = [target.numel() for target in targets]
        raise UsageError(f"{what}: outputs of {counts} elements; expected {source.numel()} in each")
    return Part(comm.gather_async(rows, root, name), lambda got: copy_apart(got.reshape(-1), targets))


def scatter(comm: Communicator, output: Tensor, inputs: Sequence[Tensor], root: int) -> Part:
    """Gives rank i the i-th of the tensors of `root`, which are equally large."""
    what = "scatter"
    target = as_payload(output, what)
    # The communicator lets the root alone decide on sizes: here, ranks know what they expect.
    name = f"{what} of {target.numel()} elements of {output.dtype} to each rank"
    rows = None
    if comm.rank == root:
        require_count(inputs, comm.size, what)
        sources = [as_payload(tensor, what) for tensor in inputs]
        _require_same_dtype([target, *sources], what)
        if any(source.numel() != target.numel() for source in sources):
            counts = [source.numel() for source in sources]
            raise UsageError(f"{what}: inputs of {counts} elements; expected {target.numel()} in each")
        flat = joined(sources)
        rows = torch.cat([each.reshape(-1) for each in sources]) if flat is None else flat
        rows = rows.view(comm.size, target.numel())

    def finish(block: Any) -> None:
        got = torch.from_numpy(block) if isinstance(block, np.ndarray) else block
        if target.dtype == torch.bfloat16 and got.dtype == torch.uint16:
            got = got.view(torch.bfloat16)  # NumPy has no name for it
        _set(target, got)

    return Part(comm.scatter_async(rows, root, name), finish)


def _mismatch(comm: Communicator, what: str, sent: object, expected: object) -> errors.MismatchError:
    """What to raise where this rank alone sees that ranks disagree; the others are told by an abort."""
    here = f"{what} on rank {comm.rank} ({comm.host})"
    text = f"{here}: the ranks sent {sent} elements where it expects {expected}"
    comm.abort(text)
    return errors.MismatchError(text, rank=comm.rank, host=comm.host, operation=what)


def _require_rank(comm: Communicator, rank: int, what: str) -> None:
    if not 0 <= rank < comm.size:
        raise UsageError(f"{what}: there is no rank {rank} in this group of {comm.size}")


def _set(target: Tensor, values: Tensor) -> None:
    target.copy_(values.view(target.shape))


def _apart_from(target: Tensor, source: Tensor) -> Tensor:
    """The source, or a copy if it is a part of the target, as FSDP passes it."""
    return source.clone() if _overlap(source, target) else source


def _overlap(one: Tensor, other: Tensor) -> bool:
    begin, other_begin = one.data_ptr(), other.data_ptr()
    end, other_end = begin + one.nbytes, other_begin + other.nbytes
    return begin < other_end and other_begin < end


def _require_same_dtype(tensors: Sequence[Tensor], what: str) -> None:
    kinds = {tensor.dtype for tensor in tensors}
    if len(kinds) > 1:
        raise UsageError(
            f"{what}: all tensors have to be of one dtype, and there are {', '.join(map(str, kinds))}"
        )

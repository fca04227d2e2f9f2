"""What each function of a process group asks of the communicator: tensors in, operations under way out.

Operations that the communicator has not are made of others. Those have a name that says what was asked:
ranks compare names before data moves, so one that asks for something else is noticed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from multiring.array_lists import Arrays
from multiring.communicator import Communicator
from multiring.errors import UsageError
from multiring.reductions import NativeReduction, native_reduction
from multiring.torch_distributed.reductions import Reduction, reduction_of
from multiring.torch_distributed.sparse import allreduce_sparse
from multiring.torch_distributed.tensors import (
    as_numbers,
    as_payload,
    copy_apart,
    joined,
    name_of_bytes,
    require_count,
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
    """Reduce a tensor over all ranks, in place.

    Args:
        comm: The ranks.
        tensor: The tensor of this rank.
        op: The reduction.
        what: The function that was called, for messages.
        name: Name of the operation, where ranks have to agree on more than the tensor and `op`.
    """
    if tensor.layout != torch.strided:
        return allreduce_sparse(comm, tensor, op, name or what)
    reduction, numbers = reduction_of(op, tensor, what), as_numbers(tensor, what)
    return Part(comm.allreduce_async(numbers, reduction.op, numbers, name, reduction.prescale))


def reduce(comm: Communicator, tensor: Tensor, op: Any, root: int) -> Part:
    """Reduce a tensor over all ranks; that of `root` gets the result, the others stay as they are."""
    _require_rank(comm, root, "reduce")
    name = f"reduce to rank {root}"
    if comm.rank == root:
        return allreduce(comm, tensor, op, "reduce", name)
    if tensor.layout != torch.strided:
        return allreduce(comm, tensor.detach().clone(), op, "reduce", name)
    reduction, numbers = reduction_of(op, tensor, "reduce"), as_numbers(tensor, "reduce")
    unused = torch.empty(numbers.shape, dtype=numbers.dtype, device=numbers.device)
    return Part(comm.allreduce_async(numbers, reduction.op, unused, name, reduction.prescale))


def broadcast(comm: Communicator, tensor: Tensor, root: int) -> Part:
    """Give every rank the tensor of `root`."""
    payload = as_payload(tensor, "broadcast")
    return Part(comm.broadcast_async(payload, root, payload, name_of_bytes(tensor)))


def allgather(comm: Communicator, outputs: Sequence[Tensor], tensor: Tensor) -> Part:
    """Give every rank the tensors of all. Each rank's may have another number of elements; then all ranks
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
        name: str | None = f"{tensor.dtype} elements of the ranks: {counts}"
        return _start(comm, "ALLGATHER", [source], targets, [source.numel()], name=name)
    name = name_of_bytes(tensor)
    return _start(comm, "ALLGATHER", [source], targets, [1, source.numel()], name=name)


def allgather_single(comm: Communicator, output: Tensor, tensor: Tensor) -> Part:
    """Join the tensors of all ranks, which have equally many elements, in one tensor."""
    what = "all_gather_single"
    source, target = as_payload(tensor, what), as_payload(output, what)
    _require_same_dtype([source, target], what)
    if target.numel() != comm.size * source.numel():
        raise UsageError(
            f"{what}: the output has {target.numel()} elements; expected {comm.size} ranks x {source.numel()}"
        )
    name = name_of_bytes(tensor)
    return _start(comm, "ALLGATHER", [source], [target], [1, source.numel()], name=name)


def reduce_scatter(comm: Communicator, output: Tensor, inputs: Sequence[Tensor], op: Any) -> Part:
    """Reduce a list of tensors over all ranks; rank i gets the i-th. They may differ in size."""
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
    reduction = _native(reduction_of(op, inputs[0], what))
    if len(set(counts)) == 1:
        shape = [comm.size, counts[0]]
        return _start(comm, "REDUCE_SCATTER", numbers, [target], shape, reduction=reduction)
    # Blocks of any size: as an allreduce, of which the other ranks' blocks are not used.
    results = [target if rank == comm.rank else torch.empty_like(each) for rank, each in enumerate(numbers)]
    name = f"{what} of {counts} elements"
    return _start(comm, "ALLREDUCE", numbers, results, [sum(counts)], name=name, reduction=reduction)


def reduce_scatter_single(comm: Communicator, output: Tensor, tensor: Tensor, op: Any) -> Part:
    """Reduce a tensor over all ranks; rank i gets the i-th of equally large blocks."""
    what = "reduce_scatter_single"
    source, target = as_numbers(tensor, what), as_numbers(output, what)
    _require_same_dtype([source, target], what)
    if source.numel() != comm.size * target.numel():
        raise UsageError(
            f"{what}: the input has {source.numel()} elements; expected {comm.size} ranks x {target.numel()}"
        )
    reduction, shape = _native(reduction_of(op, tensor, what)), [comm.size, target.numel()]
    return _start(comm, "REDUCE_SCATTER", [source], [target], shape, reduction=reduction)


def _native(reduction: Reduction) -> NativeReduction:
    return native_reduction(reduction.op, reduction.prescale, 1.0)


def _start(
    comm: Communicator,
    kind: str,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    shape: Sequence[int],
    **how: Any,
) -> Part:
    """Submit a collective of several tensors, see `Collectives.arrays_async`.

    In host memory the core reads and writes them where they lie. On a device it takes one contiguous tensor:
    others are joined before, and get their parts of the result when the operation is waited for.
    """
    whole = joined(inputs)
    sources = list(inputs) if whole is None else [whole.view(tuple(shape))]
    whole = joined(outputs)
    targets = list(outputs) if whole is None else [whole]
    finish = None
    if any(tensor.is_cuda for tensor in (*inputs, *outputs)):
        if len(sources) > 1 or not all(source.is_contiguous() for source in sources):
            sources = [torch.cat([source.reshape(-1) for source in sources]).view(tuple(shape))]
        if len(targets) > 1 or not all(target.is_contiguous() for target in targets):
            count = sum(target.numel() for target in outputs)
            room = torch.empty((count,), dtype=outputs[0].dtype, device=outputs[0].device)
            targets = [room]
            finish = lambda _: copy_apart(room, outputs)  # noqa: E731
    is_copied = any(_overlap(source, target) for source in sources for target in targets)
    if is_copied and sources[0].is_cuda:
        sources, is_copied = [sources[0].clone()], False
    arrays = Arrays(sources, targets, shape, is_copied)
    return Part(comm.arrays_async(kind, arrays, **how), finish)


def alltoall_single(
    comm: Communicator, output: Tensor, tensor: Tensor, sizes: Sequence[int], rows: Sequence[int]
) -> Part:
    """Send blocks of rows of a tensor to the ranks; each joins what it receives.

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
    return _exchanged(comm, _named(tensor), [source], sent, [target], received)


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
    """Send the i-th tensor to rank i, and receive the i-th output from it."""
    what = "all_to_all"
    require_count(outputs, comm.size, what)
    require_count(inputs, comm.size, what)
    sources = [as_payload(tensor, what) for tensor in inputs]
    targets = [as_payload(output, what) for output in outputs]
    _require_same_dtype([*sources, *targets], what)
    sent, received = ([each.numel() for each in tensors] for tensors in (sources, targets))
    return _exchanged(comm, _named(inputs[0]), sources, sent, targets, received)


def _exchanged(
    comm: Communicator,
    name: str,
    sources: Sequence[Tensor],
    sent: Sequence[int],
    targets: Sequence[Tensor],
    expected: Sequence[int],
) -> Part:
    """Exchange elements: `sent[i]` of the sources go to rank i, and `expected[i]` have to come from it.

    They are counted in elements, as torch does: rows of the input need not have the shape of those of the
    output.
    """
    return _start(comm, "ALLTOALL", sources, targets, [sum(sent)], name=name, splits=sent, expected=expected)


def _named(tensor: Tensor) -> str:
    """Return the name of an exchange of elements, the same for all functions that exchange them."""
    return " of ".join(filter(None, ["all_to_all", name_of_bytes(tensor)]))


def gather(comm: Communicator, outputs: Sequence[Tensor], tensor: Tensor, root: int) -> Part:
    """Bring the tensors of all ranks, equally large, to `root`."""
    what = "gather"
    source, targets = as_payload(tensor, what), [as_payload(output, what) for output in outputs]
    if comm.rank == root:
        require_count(outputs, comm.size, what)
        _require_same_dtype([source, *targets], what)
        if any(target.numel() != source.numel() for target in targets):
            counts = [target.numel() for target in targets]
            raise UsageError(f"{what}: outputs of {counts} elements; expected {source.numel()} in each")
    shape = [1, source.numel()]
    return _start(comm, "GATHER", [source], targets, shape, root=root, name=name_of_bytes(tensor))


def scatter(comm: Communicator, output: Tensor, inputs: Sequence[Tensor], root: int) -> Part:
    """Give rank i the i-th of the tensors of `root`, which are equally large."""
    what = "scatter"
    target, sources = as_payload(output, what), [as_payload(tensor, what) for tensor in inputs]
    # The communicator lets the root alone decide on sizes: here, ranks know what they expect.
    name = f"{what} of {target.numel()} elements of {output.dtype} to each rank"
    if comm.rank == root:
        require_count(inputs, comm.size, what)
        _require_same_dtype([target, *sources], what)
        if any(source.numel() != target.numel() for source in sources):
            counts = [source.numel() for source in sources]
            raise UsageError(f"{what}: inputs of {counts} elements; expected {target.numel()} in each")
    return _start(comm, "SCATTER", sources, [target], [comm.size, target.numel()], root=root, name=name)


def _require_rank(comm: Communicator, rank: int, what: str) -> None:
    if not 0 <= rank < comm.size:
        raise UsageError(f"{what}: there is no rank {rank} in this group of {comm.size}")


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

"""Collectives that wait for their result, with gradients where there are any to go through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from multiring.horovod.process_sets import ProcessSet, global_process_set
from multiring.horovod.reduce_ops import Average, Sum, op_name, resolve_op
from multiring.horovod.submissions import check_differentiable
from multiring.horovod.torch import moves, reduces
from multiring.horovod.torch.checks import settle
from multiring.horovod.torch.compression import Compression, Compressor
from multiring.horovod.torch.handles import synchronize

__all__ = [
    "allgather",
    "allreduce",
    "allreduce_",
    "alltoall",
    "broadcast",
    "broadcast_",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_reducescatter",
    "reducescatter",
]

Tensor = torch.Tensor
Scale = tuple[float, float]


class _Allreduce(torch.autograd.Function):
    """Forward and backward are the same allreduce."""

    @staticmethod
    def forward(
        ctx: Any, name: str | None, op: int, scale: Scale, process_set: ProcessSet, *tensors: Tensor
    ) -> Any:
        ctx.rest = op, scale, process_set
        return tuple(_reduced(tensors, name, op, scale, process_set))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        op, scale, process_set = ctx.rest
        check_differentiable(op_name(op))
        inputs = [gradient.contiguous() for gradient in gradients]
        return None, None, None, None, *_Allreduce.apply(None, op, scale, process_set, *inputs)  # type: ignore[no-untyped-call]


def _reduced(
    tensors: Sequence[Tensor], name: str | None, op: int, scale: Scale, process_set: ProcessSet
) -> list[Tensor]:
    if len(tensors) == 1:
        handle = reduces.allreduce_async(tensors[0], None, name, op, *scale, process_set)
        return [synchronize(handle)]
    handle = reduces.grouped_allreduce_async(tensors, None, name, op, *scale, process_set)
    reduced: list[Tensor] = synchronize(handle)
    return reduced


def _compressed(
    tensors: Sequence[Tensor], compression: type[Compressor], process_set: ProcessSet
) -> list[tuple[Tensor, Any]]:
    """Compress tensors as they are when the operations before have ended."""
    if compression is not Compression.none:
        settle(tensors, process_set)
    return [compression.compress(tensor) for tensor in tensors]


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduces a tensor over all ranks into a new one; the average by default. Differentiable.

    Raises:
        ValueError: As `allreduce_async`.
        HorovodInternalError: The ranks ask for different things, or a rank is lost or late.
    """
    compressed, context = _compressed([torch.as_tensor(tensor)], compression, process_set)[0]
    scale = prescale_factor, postscale_factor
    if not (compressed.requires_grad and torch.is_grad_enabled()):  # autograd takes longer than all the rest
        handle = reduces.allreduce_async(compressed, average, name, op, *scale, process_set)
        return compression.decompress(synchronize(handle), context)
    (reduced,) = _Allreduce.apply(name, resolve_op(op, average), scale, process_set, compressed)  # type: ignore[no-untyped-call]
    return compression.decompress(reduced, context)


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """`allreduce` of several tensors, all of which fail together. Differentiable."""
    pairs = _compressed([torch.as_tensor(tensor) for tensor in tensors], compression, process_set)
    if not pairs:
        return []
    scale = prescale_factor, postscale_factor
    inputs = [compressed for compressed, _ in pairs]
    reduced = _Allreduce.apply(name, resolve_op(op, average), scale, process_set, *inputs)  # type: ignore[no-untyped-call]
    return [compression.decompress(each, ctx) for each, (_, ctx) in zip(reduced, pairs, strict=True)]


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """`allreduce`, in place and not differentiable."""
    scale = prescale_factor, postscale_factor
    reduced: Tensor = synchronize(reduces.allreduce_async_(tensor, average, name, op, *scale, process_set))
    return reduced


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """`grouped_allreduce`, in place and not differentiable."""
    scale = prescale_factor, postscale_factor
    handle = reduces.grouped_allreduce_async_(tensors, average, name, op, *scale, process_set)
    reduced: list[Tensor] = synchronize(handle)
    return reduced


class _Allgather(torch.autograd.Function):
    """Backward: this rank's rows of the averaged gradient."""

    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: Tensor) -> Any:
        ctx.rows, ctx.process_set = (
            [tensor.shape[0] if tensor.dim() else 1 for tensor in tensors],
            process_set,
        )
        if len(tensors) == 1:
            return (synchronize(moves.allgather_async(tensors[0], name, process_set)),)
        return tuple(synchronize(moves.grouped_allgather_async(tensors, name, process_set)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        process_set: ProcessSet = ctx.process_set
        operations = process_set.operations()
        counts = allgather(torch.tensor([ctx.rows], device="cpu"), process_set=process_set)
        mine = []
        for k, gradient in enumerate(gradients):
            reduced = allreduce(gradient.contiguous(), op=Average, process_set=process_set)
            parts = torch.split(reduced, counts[:, k].tolist())
            mine.append(parts[operations.rank])
        return None, None, *mine


def allgather(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Joins the tensors of all ranks along dimension 0, in which they may differ. Differentiable."""
    (gathered,) = _Allgather.apply(name, process_set, torch.as_tensor(tensor))  # type: ignore[no-untyped-call]
    joined: Tensor = gathered
    return joined


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """`allgather` of several tensors. Differentiable."""
    if not tensors:
        return []
    return list(_Allgather.apply(name, process_set, *tensors))  # type: ignore[no-untyped-call]


class _Broadcast(torch.autograd.Function):
    """Backward: the averaged gradient on the root, zeros elsewhere."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Any:
        ctx.root, ctx.process_set = process_set.root(root_rank), process_set
        return synchronize(moves.broadcast_async(tensor, root_rank, name, process_set))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        process_set: ProcessSet = ctx.process_set
        reduced = allreduce(gradients[0].contiguous(), op=Average, process_set=process_set)
        own = process_set.operations().rank
        return reduced if own == ctx.root else torch.zeros_like(reduced), None, None, None


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """A new tensor with the values of rank `root_rank` of the job, on all ranks. Differentiable."""
    received: Tensor = _Broadcast.apply(torch.as_tensor(tensor), root_rank, name, process_set)  # type: ignore[no-untyped-call]
    return received


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """`broadcast`, in place and not differentiable."""
    received: Tensor = synchronize(moves.broadcast_async_(tensor, root_rank, name, process_set))
    return received


class _Alltoall(torch.autograd.Function):
    """Backward: the gradients go back where the rows came from."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> Any:
        received, counts = synchronize(moves.alltoall_async(tensor, splits, name, process_set))
        ctx.counts, ctx.process_set = counts, process_set
        ctx.mark_non_differentiable(counts)
        return received, counts

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient, _ = alltoall(gradients[0].contiguous(), ctx.counts, process_set=ctx.process_set)
        return gradient, None, None, None


def alltoall(
    tensor: Tensor,
    splits: Sequence[int] | Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends rows of dimension 0 to each rank: as many as `splits` says, or equally many. Differentiable.

    Returns:
        What was received; with `splits` given, a pair of that and the rows from each rank (int32).
    """
    received, counts = _Alltoall.apply(torch.as_tensor(tensor), splits, name, process_set)  # type: ignore[no-untyped-call]
    return received if splits is None else (received, counts)


class _Reducescatter(torch.autograd.Function):
    """Backward: an allgather, scaled as the forward pass was; times the number of ranks after a sum."""

    @staticmethod
    def forward(
        ctx: Any, name: str | None, op: int, scale: Scale, process_set: ProcessSet, *tensors: Tensor
    ) -> Any:
        ctx.rest = op, scale, process_set
        if len(tensors) == 1:
            handle = moves.reducescatter_async(tensors[0], name, op, process_set, *scale)
            return (synchronize(handle),)
        return tuple(synchronize(moves.grouped_reducescatter_async(tensors, name, op, process_set, *scale)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        op, scale, process_set = ctx.rest
        factor = scale[0] * scale[1] * (process_set.operations().size if op == Sum else 1)
        inputs = [gradient.contiguous() for gradient in gradients]
        gathered = grouped_allgather(inputs, process_set=process_set)
        return None, None, None, None, *(each * factor for each in gathered)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduces a tensor over all ranks; each gets a share of dimension 0, the first ones one row more.
    Differentiable.

    Raises:
        ValueError: As `allreduce_async`.
        HorovodInternalError: As `allreduce`; the tensor has no dimensions, or `op` is Adasum.
    """
    tensors = [torch.as_tensor(tensor)]
    scale = prescale_factor, postscale_factor
    return grouped_reducescatter(tensors, name, compression, op, process_set, *scale)[0]


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """`reducescatter` of several tensors. Differentiable."""
    if not tensors:
        return []
    pairs = _compressed(tensors, compression, process_set)
    scale = prescale_factor, postscale_factor
    inputs = [compressed for compressed, _ in pairs]
    shares = _Reducescatter.apply(name, op, scale, process_set, *inputs)  # type: ignore[no-untyped-call]
    return [compression.decompress(each, ctx) for each, (_, ctx) in zip(shares, pairs, strict=True)]

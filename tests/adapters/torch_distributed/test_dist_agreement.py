"""Ranks that ask for different things: all of them are told, and the group is broken."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import multiring
from multiring import Communicator
from tests.adapters.torch_distributed.support import with_world
from tests.on_ranks import refuses

R = dist.ReduceOp
Call = Callable[[Any], object]


def _ones(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def _reduce(op: Any, group: Any) -> None:
    dist.all_reduce(_ones(4), op, group=group)


def _reduce_to(root: int, op: Any, group: Any) -> None:
    dist.reduce(_ones(4), root, op, group=group)


def _reduce_parts(counts: list[int], op: Any, group: Any) -> None:
    output = _ones(counts[dist.get_rank(group)])
    dist.reduce_scatter(output, [_ones(count) for count in counts], op, group=group)


def _reduce_sparse(op: Any, group: Any) -> None:
    dist.all_reduce(torch.ones(2).to_sparse(), op, group=group)


def _scatter(size: int, dtype: torch.dtype, group: Any) -> None:
    rows = [_ones(size, dtype=dtype)] * 2 if dist.get_rank(group) == 0 else None
    dist.scatter(_ones(size, dtype=dtype), rows, 0, group=group)


def _broadcast(dtype: torch.dtype, group: Any) -> None:
    dist.broadcast(torch.ones(4).to(dtype), 0, group=group)


def _gather(group: Any) -> None:
    dist.all_gather([_ones(4), _ones(4)], _ones(4), group=group)


def _exchange(group: Any) -> None:
    dist.all_to_all_single(_ones(2, 2), _ones(2, 2), group=group)


# What rank 0 asks for, what rank 1 does, and what both are told.
DIFFERENT: list[tuple[Call, Call, str]] = [
    (partial(_reduce, R.BAND), partial(_reduce, R.BOR), "bitwise_and.*bitwise_or"),
    (partial(_reduce, R.BAND), _gather, "bitwise_and"),
    (partial(_reduce_to, 0, R.SUM), partial(_reduce_to, 1, R.SUM), "reduce to rank 0.*reduce to rank 1"),
    (partial(_reduce_to, 0, R.BOR), partial(_reduce_to, 1, R.BOR), "reduce to rank 0.*reduce to rank 1"),
    (partial(_reduce_to, 0, R.SUM), partial(_reduce, R.SUM), "reduce to rank 0"),
    (partial(_reduce_parts, [2, 2], R.BXOR), _exchange, "all_to_all.*reduce_scatter.*bitwise_xor"),
    (partial(_reduce_parts, [1, 2], R.SUM), partial(_reduce_parts, [2, 1], R.SUM), r"\[1, 2\].*\[2, 1\]"),
    (partial(_reduce_sparse, R.SUM), partial(_reduce_sparse, R.AVG), "average.*sum"),
    (partial(_scatter, 2, torch.int32), partial(_scatter, 3, torch.int32), "2 elements.*3 elements"),
    (partial(_scatter, 2, torch.int32), partial(_scatter, 2, torch.float32), "int32.*float32|float32.*int32"),
    (partial(_broadcast, torch.float8_e5m2), partial(_broadcast, torch.float8_e4m3fn), "e4m3fn.*e5m2"),
]


@with_world(2)
def test_functions_that_differ(comm: Communicator) -> None:
    for calls in DIFFERENT:
        *_, text = calls
        group = dist.new_group()
        refuses(multiring.MismatchError, text, calls[comm.rank], group)  # type: ignore[arg-type]
        refuses(RuntimeError, "first error", dist.barrier, group)
        dist.destroy_process_group(group)


def _exchange_rows(group: Any) -> None:
    """Rank 1 expects more rows of rank 0 than it sends, and fewer of its own."""
    sizes = [1, 3] if dist.get_rank(group) == 0 else [3, 1]
    dist.all_to_all_single(_ones(4, 2), _ones(4, 2), sizes, [2, 2], group=group)


def _exchange_lists(group: Any) -> None:
    outputs = [_ones(1), _ones(2)] if dist.get_rank(group) == 0 else [_ones(2), _ones(2)]
    dist.all_to_all(outputs, [_ones(1), _ones(1)], group=group)


def _exchange_wide_rows(group: Any) -> None:
    """Rows of rank 1 are as many, and wider."""
    width = 2 + dist.get_rank(group)
    dist.all_to_all_single(_ones(2, width), _ones(2, width), group=group)


@with_world(2)
def test_sizes_that_only_the_receiver_knows(comm: Communicator) -> None:
    for call in (_exchange_rows, _exchange_lists, _exchange_wide_rows):
        group = dist.new_group()
        refuses(RuntimeError, "the ranks sent .* elements where it expects", call, group)
        refuses(RuntimeError, "the ranks sent .* elements where it expects", dist.barrier, group)
        dist.destroy_process_group(group)
    # One rank alone is wrong: the other one has what it wanted, and is told by its next operation.
    group = dist.new_group()
    output = _ones(2) if comm.rank == 0 else _ones(3)
    sizes = [1, 1] if comm.rank == 0 else [1, 2]
    try:
        dist.all_to_all_single(output, _ones(2), sizes, [1, 1], group=group)
        is_told = False
    except RuntimeError:
        is_told = True
    assert is_told or comm.rank == 0
    refuses(RuntimeError, "the ranks sent", dist.barrier, group)

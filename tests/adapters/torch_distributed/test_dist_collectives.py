"""Every collective of torch.distributed over multiring, against what NumPy or plain tensors give."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from multiring import Communicator
from multiring.errors import MismatchError, UsageError
from tests.adapters.torch_distributed.support import numbers, with_world, world
from tests.on_ranks import all_raise, refuses

R = dist.ReduceOp
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]
MOVED = [torch.bool, *INTEGERS, *FLOATS, *COMPLEX, *UNSIGNED, torch.float8_e5m2]
BITWISE = {R.BAND: np.bitwise_and, R.BOR: np.bitwise_or, R.BXOR: np.bitwise_xor}
SHAPE = (5, 3)


def _expected(op: Any, dtype: torch.dtype, size: int, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    """The reduction of `numbers` in float64, int64 or complex128, where all of it is exact."""
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    rows = np.stack([numbers(shape, rank, dtype).to(wide).numpy() for rank in range(size)])
    functions: dict[Any, Callable[[Any], Any]] = {
        R.SUM: lambda x: x.sum(0),
        R.AVG: lambda x: _average(x.sum(0), size),
        R.PRODUCT: lambda x: x.prod(0),
        R.MIN: lambda x: x.min(0),
        R.MAX: lambda x: x.max(0),
        **{op: function.reduce for op, function in BITWISE.items()},
    }
    function = next(function for known, function in functions.items() if known == op)
    return torch.from_numpy(np.asarray(function(rows))).to(dtype)


def _average(total: Any, size: int) -> Any:
    if total.dtype == np.complex128:  # each part by itself: NumPy divides by a complex number
        return (total.view(np.float64) / size).view(np.complex128)
    return np.trunc(total / size) if total.dtype == np.int64 else total / size


def _legal(dtype: torch.dtype) -> list[Any]:
    if dtype.is_complex:
        return [R.SUM, R.AVG]
    if dtype == torch.bool:
        return [R.SUM, R.PRODUCT, R.MIN, R.MAX, *BITWISE]
    return [R.SUM, R.AVG, R.PRODUCT, R.MIN, R.MAX, *([] if dtype.is_floating_point else BITWISE)]


@with_world(3)
def test_every_reduction_of_every_dtype(comm: Communicator) -> None:
    for dtype in [torch.bool, *INTEGERS, *FLOATS, *COMPLEX]:
        for op in _legal(dtype):
            tensor = numbers(SHAPE, comm.rank, dtype)
            dist.all_reduce(tensor, op)
            wanted = _expected(op, dtype, comm.size)
            assert torch.equal(tensor, wanted), f"{dtype} {op}: {tensor} is not {wanted}"


@with_world(3)
def test_premultiplied_sums(comm: Communicator) -> None:
    for dtype in [*FLOATS, *COMPLEX]:
        tensor = numbers(SHAPE, comm.rank, dtype)
        dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.5))
        assert torch.equal(tensor, _expected(R.SUM, dtype, comm.size) / 2)
    tensor = numbers(SHAPE, comm.rank, torch.int32)
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.5))  # each input is truncated
    assert torch.equal(tensor, sum((numbers(SHAPE, r).double() / 2).trunc() for r in range(3)).int())  # type: ignore[union-attr]
    factor = torch.tensor([0.25])
    output, rows = torch.empty(3), numbers((9,), comm.rank)
    dist.reduce_scatter_single(output, rows, dist._make_nccl_premul_sum(factor))
    assert torch.equal(output, _expected(R.SUM, torch.float32, 3, (9,)).chunk(3)[comm.rank] / 4)


@with_world(3)
def test_reductions_to_a_root_and_scattered(comm: Communicator) -> None:
    for dtype in (torch.float32, torch.int32, torch.complex64):
        for op in _legal(dtype):
            tensor = numbers(SHAPE, comm.rank, dtype)
            dist.reduce(tensor, 1, op)
            wanted = _expected(op, dtype, 3)
            assert torch.equal(tensor, wanted if comm.rank == 1 else numbers(SHAPE, comm.rank, dtype)), (
                f"{dtype} {op}"
            )
            whole = _expected(op, dtype, 3, (6, 2))
            output, rows = torch.empty(2, 2, dtype=dtype), numbers((6, 2), comm.rank, dtype)
            for inputs in (list(rows.chunk(3)), [each.clone() for each in rows.chunk(3)], rows):
                scatter: Any = dist.reduce_scatter if isinstance(inputs, list) else dist.reduce_scatter_single
                scatter(output.zero_(), inputs, op)
                assert torch.equal(output, whole.chunk(3)[comm.rank]), f"{dtype} {op}"


@with_world(3)
def test_parts_of_different_sizes(comm: Communicator) -> None:
    counts = [4, 1, 2]
    outputs = [torch.empty(count) for count in counts]
    dist.all_gather(outputs, numbers((counts[comm.rank],), comm.rank))
    for rank, output in enumerate(outputs):
        assert torch.equal(output, numbers((counts[rank],), rank))
    inputs = list(numbers((7,), comm.rank).split(counts))
    output = torch.empty(counts[comm.rank])
    dist.reduce_scatter(output, inputs)
    assert torch.equal(output, _expected(R.SUM, torch.float32, 3, (7,)).split(counts)[comm.rank])
    outputs = [torch.empty(counts[comm.rank]) for _ in counts]
    dist.all_to_all(outputs, inputs)
    for rank, output in enumerate(outputs):
        assert torch.equal(output, numbers((7,), rank).split(counts)[comm.rank])
    # Rank r sends r + to + 1 rows of two to rank `to`.
    sent = [comm.rank + to + 1 for to in range(3)]
    expected = torch.cat(
        [torch.full((source + comm.rank + 1, 2), 10 * source + comm.rank) for source in range(3)]
    )
    tensor = torch.cat([torch.full((rows, 2), 10 * comm.rank + to) for to, rows in enumerate(sent)])
    output = torch.empty_like(expected)
    dist.all_to_all_single(output, tensor, sent, sent)
    assert torch.equal(output, expected)


@with_world(1, 3)
def test_what_only_moves_keeps_every_dtype(comm: Communicator) -> None:
    size, last = comm.size, comm.size - 1

    def value(dtype: torch.dtype, rank: int, shape: tuple[int, ...] = (2, 3)) -> torch.Tensor:
        kind = torch.float32 if dtype == torch.float8_e5m2 else dtype
        return numbers(shape, rank, kind).to(dtype)

    def same(one: torch.Tensor, other: torch.Tensor) -> bool:
        return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))

    for dtype in MOVED:
        mine = partial(value, dtype)
        tensor = mine(comm.rank)
        dist.broadcast(tensor, last)
        assert same(tensor, mine(last)), dtype
        outputs = [torch.empty(2, 3, dtype=dtype) for _ in range(size)]
        dist.all_gather(outputs, mine(comm.rank))
        assert all(same(output, mine(rank)) for rank, output in enumerate(outputs)), dtype
        single = torch.empty(2 * size, 3, dtype=dtype)
        dist.all_gather_single(single, mine(comm.rank))
        assert all(same(block, mine(rank)) for rank, block in enumerate(single.chunk(size))), dtype
        gathered = [torch.empty(2, 3, dtype=dtype) for _ in range(size)] if comm.rank == last else None
        dist.gather(mine(comm.rank), gathered, dst=last)
        assert gathered is None or all(same(output, mine(rank)) for rank, output in enumerate(gathered)), (
            dtype
        )
        output = torch.empty(2, 3, dtype=dtype)
        dist.scatter(
            output, [mine(10 + rank) for rank in range(size)] if comm.rank == last else None, src=last
        )
        assert same(output, mine(10 + comm.rank)), dtype
        if comm.rank == 0 and size > 1:
            dist.send(mine(20), last, tag=1)
        elif comm.rank == last and size > 1:
            dist.recv(output, 0, tag=1)
            assert same(output, mine(20)), dtype
        rows = torch.empty(size, 3, dtype=dtype)
        dist.all_to_all_single(rows, mine(comm.rank, (size, 3)))
        for rank, row in enumerate(rows):
            assert same(row, mine(rank, (size, 3))[comm.rank]), dtype


@with_world()
def test_memory_that_is_not_contiguous(comm: Communicator) -> None:
    tensor = numbers((3, 4), comm.rank).t()
    dist.all_reduce(tensor)
    assert torch.equal(tensor, _expected(R.SUM, torch.float32, 2, (3, 4)).t())
    tensor = torch.zeros(4, 3)[:, ::2]
    if comm.rank == 1:
        tensor.copy_(numbers((4, 2), 1))
    dist.broadcast(tensor, 1)
    assert torch.equal(tensor, numbers((4, 2), 1))
    output = torch.zeros(3, 4).t()
    dist.all_gather_single(output, numbers((3, 2), comm.rank).t().contiguous())
    assert torch.equal(output, torch.cat([numbers((3, 2), rank).t() for rank in range(2)]))
    half = torch.zeros(3, 4).t()[:2]
    dist.reduce_scatter_single(half, numbers((4, 3), comm.rank))
    assert torch.equal(half, _expected(R.SUM, torch.float32, 2, (4, 3)).chunk(2)[comm.rank])


@with_world()
def test_results_for_negated_and_conjugated_views(comm: Communicator) -> None:
    """Their memory holds other numbers than their elements."""
    group = dist.group.WORLD

    def view() -> tuple[torch.Tensor, torch.Tensor]:
        memory = torch.complex(torch.zeros(4), numbers((4,), comm.rank))
        return memory, memory.conj().imag

    total = _expected(R.SUM, torch.float32, 2, (4,))
    memory, tensor = view()
    assert tensor.is_neg()
    dist.all_reduce(tensor)
    assert torch.equal(tensor, -total)
    assert torch.equal(memory.imag, total)
    _, tensor = view()
    dist.broadcast(tensor, 1)
    assert torch.equal(tensor, -numbers((4,), 1))
    outputs = [view()[1], view()[1]]
    dist.all_gather(outputs, view()[1])
    assert torch.equal(torch.stack(outputs), -torch.stack([numbers((4,), rank) for rank in range(2)]))
    _, tensor = view()
    if comm.rank == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(tensor, 0)
        assert torch.equal(tensor, -numbers((4,), 0))
    tensor = numbers((4,), comm.rank, torch.complex64).conj()
    group.allreduce([tensor]).wait()  # type: ignore[union-attr]
    assert tensor.is_conj()
    assert torch.equal(
        tensor.resolve_conj(), _expected(R.SUM, torch.complex64, 2, (4,)).conj().resolve_conj()
    )


@with_world()
def test_an_output_that_is_part_of_the_input(comm: Communicator) -> None:
    whole = numbers((4, 3), comm.rank)
    dist.reduce_scatter_single(whole.chunk(2)[comm.rank], whole)
    wanted = _expected(R.SUM, torch.float32, 2, (4, 3)).chunk(2)[comm.rank]
    assert torch.equal(whole.chunk(2)[comm.rank], wanted)
    whole = torch.zeros(4, 3)
    whole.chunk(2)[comm.rank].copy_(numbers((2, 3), comm.rank))
    dist.all_gather_single(whole, whole.chunk(2)[comm.rank])
    assert torch.equal(whole, torch.cat([numbers((2, 3), rank) for rank in range(2)]))


@with_world(1, 2)
def test_no_elements(comm: Communicator) -> None:
    nothing, size = torch.empty(0, 3), comm.size
    dist.all_reduce(nothing)
    dist.broadcast(nothing, 0)
    dist.reduce(nothing, 0)
    dist.all_gather([torch.empty(0, 3) for _ in range(size)], nothing)
    dist.all_gather_single(torch.empty(0, 3), nothing)
    dist.reduce_scatter(torch.empty(0, 3), [torch.empty(0, 3) for _ in range(size)])
    dist.reduce_scatter_single(torch.empty(0, 3), nothing)
    dist.all_to_all_single(torch.empty(0, 3), nothing)
    dist.all_to_all([torch.empty(0) for _ in range(size)], [torch.empty(0) for _ in range(size)])
    dist.gather(nothing, [torch.empty(0, 3) for _ in range(size)] if comm.rank == 0 else None)
    dist.scatter(nothing, [torch.empty(0, 3) for _ in range(size)] if comm.rank == 0 else None)
    scalar = torch.tensor(1.0 + comm.rank)
    dist.all_reduce(scalar)
    assert scalar == sum(range(1, size + 1))


@with_world(3)
def test_objects(comm: Communicator) -> None:
    every = [{"rank": r, "text": "x" * 100 * r} for r in range(3)]
    found: list[Any] = [None] * 3
    dist.all_gather_object(found, every[comm.rank])
    assert found == every
    found = [None] * 3
    dist.gather_object(every[comm.rank], found if comm.rank == 2 else None, dst=2)
    assert found == (every if comm.rank == 2 else [None] * 3)
    listed = ["a", {"b": 1}] if comm.rank == 1 else [None, None]
    dist.broadcast_object_list(listed, src=1)
    assert listed == ["a", {"b": 1}]
    output: list[Any] = [None]
    dist.scatter_object_list(output, ["p", "q", ("r", 3)] if comm.rank == 0 else None, src=0)
    assert output == [["p", "q", ("r", 3)][comm.rank]]
    if comm.rank == 0:
        dist.send_object_list([1, "two"], dst=2)
    elif comm.rank == 2:
        received: list[Any] = [None, None]
        assert dist.recv_object_list(received, src=0) == 0
        assert received == [1, "two"]


_WRONG: dict[str, tuple[str, Callable[[], object]]] = {
    "float8": ("arithmetic", lambda: dist.all_reduce(torch.zeros(2, dtype=torch.float8_e5m2))),
    "bits of floats": ("bitwise and", lambda: dist.all_reduce(torch.zeros(2), R.BAND)),
    "product of complex": (
        "SUM, AVG or PREMUL_SUM",
        lambda: dist.reduce(torch.zeros(2, dtype=torch.complex64), 0, R.PRODUCT),
    ),
    "lists": ("list of 2 tensors", lambda: dist.all_gather([torch.zeros(2)], torch.zeros(2))),
    "output size": ("2 ranks x 2", lambda: dist.all_gather_single(torch.zeros(3), torch.zeros(2))),
    "input size": ("2 ranks x 3", lambda: dist.reduce_scatter_single(torch.zeros(3), torch.zeros(5))),
    "rows": ("cannot share equally", lambda: dist.all_to_all_single(torch.zeros(3), torch.zeros(3))),
    "splits": (
        "split sizes",
        lambda: dist.all_to_all_single(torch.zeros(3), torch.zeros(3), [1, 1], [1, 2]),
    ),
    "dtypes": (
        "one dtype",
        lambda: dist.reduce_scatter_single(torch.zeros(1), torch.zeros(2, dtype=torch.int32)),
    ),
    "sparse": ("sparse", lambda: dist.broadcast(torch.zeros(2).to_sparse(), 0)),
    "shared elements": (
        "elements of the output share memory",
        lambda: dist.all_reduce(torch.zeros(1).expand(3)),
    ),
    "shared rows": (
        "elements of the output share memory",
        lambda: dist.all_gather_single(torch.zeros(2, 1).expand(2, 3), torch.zeros(3)),
    ),
    "two tensors": (
        "takes one tensor",
        lambda: dist.group.WORLD.allreduce([torch.zeros(2), torch.zeros(2)]),  # type: ignore[union-attr]
    ),
    "two lists": (
        "takes one list",
        lambda: dist.group.WORLD.allgather([[torch.zeros(2)] * 2] * 2, [torch.zeros(2)]),  # type: ignore[union-attr]
    ),
    "rank": ("no rank 2", lambda: dist.group.WORLD.send([torch.zeros(2)], 2, 0)),  # type: ignore[union-attr]
    "device": ("no backend for xpu", lambda: dist.group.WORLD._get_backend(torch.device("xpu"))),  # type: ignore[union-attr]
    "no timeout": ("above 0", lambda: distributed_c10d._set_pg_timeout(timedelta(0))),
    "meta": (
        r"on meta: .* takes tensors of cpu and cuda; pass tensor\.cpu\(\)",
        lambda: dist.all_reduce(torch.zeros(2, device="meta")),
    ),
    "sparse on a device": (
        "sparse tensor on meta",
        lambda: dist.all_reduce(
            torch.sparse_coo_tensor(torch.zeros(1, 0).long(), torch.zeros(0), (2,), device="meta")
        ),
    ),
}


@all_raise(UsageError, what={name: text for name, (text, _) in _WRONG.items()})
def test_what_is_refused_names_itself_and_leaves_the_group_usable(comm: Communicator, what: str) -> None:
    with world(comm):
        with pytest.raises(UsageError, match=r"\[process group '0', rank \d\]") as caught:
            _WRONG[what][1]()
        assert isinstance(caught.value, RuntimeError)
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, torch.full((2,), 2.0))
        raise caught.value


@with_world(3)
def test_sparse_tensors_are_added_up(comm: Communicator) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.complex64):
        averages = [] if dtype == torch.int64 else [(R.AVG, comm.size)]
        for op, factor in ((R.SUM, 1), *averages):
            every = [_sparse(rank, dtype) for rank in range(comm.size)]
            tensor = every[comm.rank]
            expected = sum(each.to_dense() for each in every) / factor
            work = dist.all_reduce(tensor, op, async_op=True)
            work.wait()
            assert torch.equal(tensor.to_dense(), expected.to(dtype))
    refuses(UsageError, "takes SUM or AVG", dist.all_reduce, _sparse(0, torch.float32), R.MAX)
    refuses(UsageError, "sparse_csr", dist.all_reduce, torch.eye(3).to_sparse_csr())
    with pytest.raises(MismatchError, match=r"shape \(4, 2\)"):
        dist.all_reduce(torch.sparse_coo_tensor([[0]], [[1.0, 2.0]], (4 + comm.rank // 2, 2)))


def _sparse(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of shape (5, 2) with `rank` rows, of which one index comes twice."""
    rows = torch.arange(rank) + 1
    rows = torch.cat([rows, rows[:1]])
    return torch.sparse_coo_tensor(rows[None], numbers((len(rows), 2), rank, dtype), (5, 2))

"""Collectives over shapes, layouts, splits, groups and orders that hypothesis chooses.

Examples are the same in every run; give `--hypothesis-seed=random` and raise `max_examples` to look for more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from multiring import Communicator
from tests.python.collectives.array_kinds import assert_same_bits
from tests.python.collectives.oracle import DTYPES, OPS, Bits, Reduction, blocks, random_bits
from tests.rank_pool import RankPool

Pools = Callable[[int], RankPool]

# No deadline: the machine may be busy. The fixture gives the same pools to all examples on purpose.
examples = settings(
    deadline=None,
    max_examples=60,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

sizes = st.sampled_from([1, 2, 3, 4])
dtypes = st.sampled_from([dtype for dtype in DTYPES if dtype not in ("bfloat16", "bool")])
seeds = st.integers(0, 1000)
tails = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@dataclass(frozen=True)
class Layout:
    """How an array lies in memory: axes in another order, with steps, beginning somewhere."""

    order: tuple[int, ...]
    steps: tuple[int, ...]
    offset: int

    def place(self, bits: Bits) -> Bits:
        """An array of these values laid out so."""
        inverse = np.argsort(self.order)
        extents = [bits.shape[axis] * abs(step) for axis, step in zip(self.order, self.steps, strict=True)]
        memory = np.zeros(self.offset + int(np.prod(extents, dtype=int)), bits.dtype)
        wide = memory[self.offset :].reshape(extents)
        view = wide[(*(slice(None, None, step) for step in self.steps), ...)].transpose(inverse)
        view[...] = bits
        return view


@st.composite
def layouts(draw: st.DrawFn, dims: int) -> Layout:
    steps = st.sampled_from([1, 1, 1, 2, -1, -3])
    return Layout(
        tuple(draw(st.permutations(range(dims)))),
        tuple(draw(steps) for _ in range(dims)),
        draw(st.integers(0, 3)),
    )


@st.composite
def shapes_with_layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], Layout, Layout]:
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    return shape, draw(layouts(len(shape))), draw(layouts(len(shape)))


def check_layouts(
    comm: Communicator, seed: int, dtype: str, op: str, shape: tuple[int, ...], into: Layout, out: Layout
) -> None:
    inputs = [random_bits(seed + rank, shape, dtype) for rank in range(comm.size)]
    wanted = Reduction(op).apply(inputs, dtype)
    x = into.place(inputs[comm.rank])
    target = out.place(np.zeros_like(wanted))
    assert_same_bits(comm.allreduce(x, op), wanted)
    assert comm.allreduce(x, op, out=target) is target
    assert_same_bits(target, wanted)
    assert_same_bits(comm.broadcast(x, comm.size - 1, out=target), inputs[-1])
    assert_same_bits(comm.allreduce_async(x, op, out=target).wait(), wanted)
    if shape:
        joined = out.place(np.zeros((shape[0] * comm.size, *shape[1:]), inputs[0].dtype))
        assert_same_bits(comm.allgather(x, out=joined), np.concatenate(inputs))
        block = blocks(wanted, comm.size)[comm.rank]
        assert_same_bits(comm.reduce_scatter(x, op, out=out.place(np.zeros_like(block))), block)
    assert_same_bits(x, inputs[comm.rank])
    assert comm.allreduce(x, op, out=x) is x
    assert_same_bits(x, wanted)


@given(sizes, seeds, dtypes, st.sampled_from(OPS), shapes_with_layouts())
@examples
def test_layouts(ranks: Pools, size: int, seed: int, dtype: str, op: str, shapes: Any) -> None:
    ranks(size).run(check_layouts, seed, dtype, op, *shapes)


def check_rows(comm: Communicator, rows: Sequence[int], tail: tuple[int, ...], dtype: str, root: int) -> None:
    inputs = [random_bits(rank, (count, *tail), dtype) for rank, count in enumerate(rows)]
    x = inputs[comm.rank]
    assert_same_bits(comm.allgather(x), np.concatenate(inputs))
    gathered = comm.gather(x, root)
    assert (gathered is None) == (comm.rank != root)
    if gathered is not None:
        assert_same_bits(gathered, np.concatenate(inputs))
    assert_same_bits(comm.scatter(x, root), blocks(inputs[root], comm.size)[comm.rank])
    wanted = np.concatenate([blocks(bits, comm.size)[comm.rank] for bits in inputs])
    assert_same_bits(comm.alltoall(x), wanted)


@given(st.data(), sizes, tails, dtypes)
@examples
def test_unequal_rows(
    ranks: Pools, data: st.DataObject, size: int, tail: tuple[int, ...], dtype: str
) -> None:
    rows = data.draw(st.lists(st.integers(0, 9), min_size=size, max_size=size))
    ranks(size).run(check_rows, rows, tail, dtype, data.draw(st.integers(0, size - 1)))


def check_splits(comm: Communicator, table: Sequence[Sequence[int]], tail: tuple[int, ...]) -> None:
    inputs = [random_bits(rank, (sum(splits), *tail), "float32") for rank, splits in enumerate(table)]
    pieces = [np.split(bits, np.cumsum(splits)[:-1]) for bits, splits in zip(inputs, table, strict=True)]
    joined, received = comm.alltoall(inputs[comm.rank], table[comm.rank])
    assert_same_bits(joined, np.concatenate([theirs[comm.rank] for theirs in pieces]))
    assert received.tolist() == [splits[comm.rank] for splits in table]


@given(st.data(), sizes, tails)
@examples
def test_alltoall_splits(ranks: Pools, data: st.DataObject, size: int, tail: tuple[int, ...]) -> None:
    splits = st.lists(st.integers(0, 5), min_size=size, max_size=size)
    table = data.draw(st.lists(splits, min_size=size, max_size=size))
    ranks(size).run(check_splits, table, tail)


@dataclass(frozen=True)
class Step:
    """One operation of a program: asynchronous or not, waited for at once or at the end."""

    name: str
    count: int
    asynchronous: bool
    priority: int


steps = st.builds(
    Step,
    st.sampled_from(["allreduce", "allgather", "broadcast", "reduce_scatter", "alltoall"]),
    st.sampled_from([0, 1, 5, 300, 300, 20_000, 280_000]),
    st.booleans(),
    st.integers(-2, 2),
)


def _wanted(step: Step, inputs: list[Bits], rank: int) -> Bits:
    total = Reduction().apply(inputs, "float32")
    return {
        "allreduce": lambda: total,
        "allgather": lambda: np.concatenate(inputs),
        "broadcast": lambda: inputs[0],
        "reduce_scatter": lambda: blocks(total, len(inputs))[rank],
        "alltoall": lambda: np.concatenate([blocks(bits, len(inputs))[rank] for bits in inputs]),
    }[step.name]()


def check_program(comm: Communicator, program: Sequence[Step]) -> None:
    pending = []
    for number, step in enumerate(program):
        values = np.arange(step.count, dtype=np.float32) + number
        inputs = [np.sin(values, dtype=np.float32) * (rank + 1) for rank in range(comm.size)]
        wanted = _wanted(step, inputs, comm.rank)
        if step.asynchronous:
            work = getattr(comm, f"{step.name}_async")(inputs[comm.rank], priority=step.priority)
            pending.append((work, wanted))
        else:
            assert_same_bits(getattr(comm, step.name)(inputs[comm.rank]), wanted)
            assert all(work.done() for work, _ in pending)  # what came before is complete
    for work, wanted in pending:
        assert_same_bits(work.wait(), wanted)


@given(sizes, st.lists(steps, max_size=12))
@examples
def test_programs(ranks: Pools, size: int, program: list[Step]) -> None:
    ranks(size).run(check_program, program)


def check_split(comm: Communicator, colors: Sequence[int | None], keys: Sequence[int]) -> None:
    group = comm.split(colors[comm.rank], keys[comm.rank])
    members = [rank for rank in range(comm.size) if colors[rank] == colors[comm.rank]]
    members.sort(key=lambda rank: keys[rank])
    if colors[comm.rank] is None:
        assert group is None
        return
    assert group is not None
    assert (group.size, group.rank) == (len(members), members.index(comm.rank))
    assert group.allgather(np.array([comm.rank])).tolist() == members
    group.close()


@given(st.data(), sizes)
@examples
def test_split(ranks: Pools, data: st.DataObject, size: int) -> None:
    color = st.one_of(st.none(), st.integers(0, 2), st.just(2**40))
    colors = data.draw(st.lists(color, min_size=size, max_size=size))
    keys = data.draw(st.lists(st.integers(-5, 5), min_size=size, max_size=size))
    ranks(size).run(check_split, colors, keys)


@pytest.mark.parametrize("dims", [1, 3])
def test_layout_places(dims: int) -> None:
    bits = random_bits(1, (2, 3, 4)[:dims], "int32")
    view = Layout(tuple(reversed(range(dims))), (2, -1, 1)[:dims], 1).place(bits)
    np.testing.assert_array_equal(view, bits)
    assert not view.flags.c_contiguous

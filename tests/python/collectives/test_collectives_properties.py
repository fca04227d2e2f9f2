"""Collectives over shapes, layouts, splits, groups and orders that hypothesis chooses.

Examples are the same in every run; give `--hypothesis-seed=random` and raise `max_examples` to look for more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
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

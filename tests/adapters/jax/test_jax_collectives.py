"""Collectives of the JAX adapter: eager, compiled, differentiated, batched, in loops."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import multiring.jax as mj
from multiring import Communicator
from multiring.errors import UsageError
from tests.on_ranks import on_ranks

jax.config.update("jax_enable_x64", True)


def values(rank: int, shape: tuple[int, ...] = (2, 3)) -> Any:
    return np.random.default_rng(rank).integers(1, 9, shape)


def of_all(comm: Communicator, shape: tuple[int, ...] = (2, 3)) -> Any:
    return np.stack([values(rank, shape) for rank in range(comm.size)])


@on_ranks(3)
def test_allreduce_of_all_dtypes_and_reductions(comm: Communicator) -> None:
    wanted, mine = of_all(comm).sum(0), jnp.asarray(values(comm.rank))
    integers = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
    floats = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
    reductions = {"min": np.min, "max": np.max, "product": np.prod}

    @jax.jit  # one program, since each takes a while to compile
    def everything(x: Any) -> Any:
        sums = [mj.allreduce(x.astype(dtype)) for dtype in integers]
        scaled = [mj.allreduce(x.astype(dtype), prescale=2.0, postscale=0.25) for dtype in floats]
        return sums, scaled, [mj.allreduce(x, op) for op in reductions]

    sums, scaled, others = everything(mine)
    assert [found.dtype for found in (*sums, *scaled)] == [jnp.dtype(name) for name in (*integers, *floats)]
    for found in sums:
        np.testing.assert_array_equal(found, wanted)
    for found in scaled:
        np.testing.assert_array_equal(found.astype("complex128"), wanted / 2)
    for found, function in zip(others, reductions.values(), strict=True):
        np.testing.assert_array_equal(found, function(of_all(comm), axis=0))
    np.testing.assert_array_equal(mj.allreduce(comm.rank, "average"), (comm.size - 1) // 2)
    np.testing.assert_array_equal(mj.allreduce(values(comm.rank)), wanted)


def test_odd_shapes(comm: Communicator) -> None:
    shapes = ((), (0,), (3, 0, 2), (1,), (7,), (1, 2, 1, 2, 1, 2, 1, 2, 1, 2), (100003,))
    xs = [np.full(shape, comm.rank + 1.0) for shape in shapes]
    for shape, found in zip(shapes, jax.jit(lambda xs: [mj.allreduce(x) for x in xs])(xs), strict=True):
        assert found.shape == shape
        np.testing.assert_array_equal(found, comm.size * (comm.size + 1) / 2)
    assert mj.allreduce(xs[1]).shape == (0,)
    transposed = jnp.asarray(values(comm.rank)).T
    np.testing.assert_array_equal(mj.allreduce(transposed), of_all(comm).sum(0).T)


@on_ranks(1, 3)
def test_collectives_of_rows(comm: Communicator) -> None:
    rank, size = comm.rank, comm.size
    rows = [np.full((r + 1, 2), float(r)) for r in range(size)]
    lengths = [r + 1 for r in range(size)]
    np.testing.assert_array_equal(mj.allgather(rows[rank], lengths), np.concatenate(rows))
    np.testing.assert_array_equal(mj.allgather(rank), np.arange(size))
    np.testing.assert_array_equal(mj.broadcast(values(rank), size - 1), values(size - 1))
    total = of_all(comm, (5, 2)).sum(0)
    blocks = np.array_split(total, size)
    np.testing.assert_array_equal(mj.reducescatter(values(rank, (5, 2))), blocks[rank])
    sent = of_all(comm, (5,))
    got = np.concatenate([np.array_split(other, size)[rank] for other in sent])
    np.testing.assert_array_equal(jax.jit(mj.alltoall)(values(rank, (5,))), got)
    # Everything to rank 0.
    splits = [3] + [0] * (size - 1)
    received = [3] * size if rank == 0 else [0] * size
    found = mj.alltoall(jnp.full(3, rank), splits, received)
    np.testing.assert_array_equal(found, np.repeat(np.arange(size), 3) if rank == 0 else [])


@on_ranks(3)
@pytest.mark.parametrize("factor", [1.0, 1.0 + 2.0j], ids=["real", "complex"])
def test_gradients_are_those_of_one_process(comm: Communicator, factor: complex) -> None:
    """Against a function of all ranks' inputs that adds up what each rank computes of its result."""
    rank, size = comm.rank, comm.size
    weights = [np.random.default_rng(10 + r).standard_normal(40) for r in range(size)]
    inputs = [factor * np.random.default_rng(r).standard_normal((5, 2)) for r in range(size)]
    blocks = partial(jnp.array_split, indices_or_sections=size)

    def after(results: list[Any]) -> Any:
        return sum(
            jnp.sum(jnp.sin(y).real.ravel() * w[: y.size]) for y, w in zip(results, weights, strict=True)
        )

    def exchanged(xs: list[Any]) -> list[Any]:
        return [jnp.concatenate(parts) for parts in zip(*map(blocks, xs), strict=True)]

    tripled = partial(mj.allreduce, op="average", prescale=3.0)
    cases: dict[str, tuple[Callable[[Any], Any], Callable[[list[Any]], list[Any]]]] = {
        "sum": (mj.allreduce, lambda xs: [sum(xs)] * size),
        "average": (tripled, lambda xs: [3 * sum(xs) / size] * size),
        "broadcast": (partial(mj.broadcast, root=size - 1), lambda xs: [xs[-1]] * size),
        "allgather": (mj.allgather, lambda xs: [jnp.concatenate(xs)] * size),
        "scatter": (partial(mj.reducescatter, op="average"), lambda xs: blocks(sum(xs) / size)),
        "alltoall": (mj.alltoall, exchanged),
    }

    def loss(ours: Callable[[Any], Any], x: Any) -> Any:
        y = ours(x)
        return jnp.sum(jnp.sin(y).real.ravel() * weights[rank][: y.size])

    found = jax.jit(lambda x: [jax.grad(partial(loss, ours))(x) for ours, _ in cases.values()])(inputs[rank])
    wanted = jax.jit(
        lambda xs: [jax.grad(lambda xs, f=theirs: after(f(xs)))(xs)[rank] for _, theirs in cases.values()]
    )(inputs)
    for name, one, other in zip(cases, found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-14, err_msg=name)
    moved = jax.jit(lambda x: [jax.jvp(ours, (x,), (x,)) for ours, _ in cases.values()])(inputs[rank])
    for name, (value, tangent) in zip(cases, moved, strict=True):  # they are linear
        np.testing.assert_allclose(tangent, value, rtol=1e-12, err_msg=name)


@on_ranks(3)
def test_gradient_of_an_unequal_allgather(comm: Communicator) -> None:
    lengths = [r + 1 for r in range(comm.size)]
    x = jnp.ones((comm.rank + 1, 2))
    gradient = jax.grad(lambda x: (mj.allgather(x, lengths) * (comm.rank + 1)).sum())(x)
    np.testing.assert_array_equal(gradient, np.full(x.shape, sum(range(1, comm.size + 1))))


def test_a_maximum_has_no_gradient(comm: Communicator) -> None:
    with pytest.raises(UsageError, match="allreduce 'worst' with op 'max' has no derivative"):
        jax.grad(lambda x: mj.allreduce(x, "max", name="worst").sum())(jnp.ones(2))
    stopped = jax.grad(lambda x: mj.allreduce(jax.lax.stop_gradient(x), "max").sum() + x.sum())(jnp.ones(2))
    np.testing.assert_array_equal(stopped, 1.0)


@pytest.mark.full
def test_vmap(comm: Communicator) -> None:
    x = jnp.asarray(values(comm.rank, (4, 3, 2)))
    total = of_all(comm, (4, 3, 2)).sum(0)
    for axis, out in product(range(3), range(3)):
        mapped = jax.jit(jax.vmap(mj.allreduce, in_axes=axis, out_axes=out))(x)
        np.testing.assert_array_equal(mapped, np.moveaxis(total, axis, out))
    for function in (mj.allgather, mj.reducescatter, mj.alltoall):
        mapped = jax.vmap(function, in_axes=2, out_axes=2)(x)
        each = [function(x[:, :, k]) for k in range(2)]
        np.testing.assert_array_equal(mapped, jnp.stack(each, 2))
    twice = jax.vmap(jax.vmap(lambda a, b: mj.allreduce(a) * b, (0, None)), (0, 0))(x, jnp.arange(4))
    np.testing.assert_array_equal(twice, total * np.arange(4)[:, None, None])


@pytest.mark.full
@on_ranks(3)
def test_loops_and_branches(comm: Communicator) -> None:
    """Each execution of a name meets the peers' same execution, also where a rank is slower."""

    def body(carry: Any, x: Any) -> Any:
        total = mj.allreduce(carry * x + comm.rank)
        return total, mj.allreduce(x, "max")

    def alone(carry: Any, x: Any) -> Any:
        return sum(carry * x + rank for rank in range(comm.size)), x

    xs = jnp.linspace(0.1, 0.4, 7)
    found = jax.jit(lambda c, xs: jax.lax.scan(body, c, xs))(1.0, xs)
    wanted = jax.lax.scan(alone, 1.0, xs)
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-12)
    np.testing.assert_array_equal(found[1], wanted[1])

    gradient = jax.grad(lambda c: jax.lax.scan(body, c, xs)[0])(1.0)
    np.testing.assert_allclose(gradient, np.prod(np.asarray(xs) * comm.size), rtol=1e-12)

    counted = jax.lax.fori_loop(0, 5, lambda _, x: mj.allreduce(x), jnp.ones(3))
    np.testing.assert_array_equal(counted, comm.size**5)
    chosen = jax.jit(lambda flag, x: jax.lax.cond(flag, mj.allreduce, lambda x: x, x))
    np.testing.assert_array_equal(chosen(True, jnp.ones(2)), comm.size)
    np.testing.assert_array_equal(chosen(False, jnp.ones(2)), 1)
    again = jax.grad(jax.checkpoint(lambda x: jnp.sin(mj.allreduce(x)).sum()))(jnp.zeros(2))
    np.testing.assert_array_equal(again, comm.size)


@on_ranks(3)
def test_calls_of_one_name_keep_their_order(comm: Communicator) -> None:
    """XLA is free to swap the two calls of `total`; ranks must not meet the wrong one."""
    total = jax.jit(mj.allreduce)

    @jax.jit
    def both(a: Any, b: Any) -> Any:
        # The ranks' programs differ: their schedules may, too.
        padding = jnp.arange(1000 * (comm.rank + 1)).sum()
        return total(a * padding / padding), total(b), [total(a + k) for k in range(6)]

    first, second, more = both(jnp.full(4, 1.0 + comm.rank), jnp.full(4, 100.0))
    np.testing.assert_array_equal(first, sum(range(1, comm.size + 1)))
    np.testing.assert_array_equal(second, 100 * comm.size)
    for k, found in enumerate(more):
        np.testing.assert_array_equal(found, sum(range(1, comm.size + 1)) + k * comm.size)


def test_an_unused_result_takes_part_all_the_same(comm: Communicator) -> None:
    """Rank 0 looks at no result, but the others need its part."""

    @jax.jit
    def step(x: Any) -> Any:
        total = mj.allreduce(x)
        return x if comm.rank == 0 else total

    np.testing.assert_array_equal(step(jnp.ones(3)), 1 if comm.rank == 0 else comm.size)


@pytest.mark.full
@pytest.mark.parametrize(("comm", "bucket_bytes"), [(1, 1), (3, 100)], indirect=["comm"])
def test_trees(comm: Communicator, bucket_bytes: int) -> None:
    tree = {
        "weights": [jnp.full((3, k), 1.0 * k) for k in range(5)],
        "halves": (jnp.ones(4, "bfloat16"), jnp.ones((2, 2), "float16")),
        "counts": jnp.arange(3),
        "nothing": None,
        "same": jnp.float32(1),
    }
    sizes = {"bucket_bytes": bucket_bytes}
    found = jax.jit(lambda t: mj.grouped_allreduce(t, **sizes))(tree)
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(tree), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_array_equal(one.astype("float64"), other.astype("float64") * comm.size)
    gradient = jax.grad(lambda ws: jnp.sum(mj.grouped_allreduce(ws)[4] ** 2))(tree["weights"])
    np.testing.assert_array_equal(gradient[4], 8.0 * comm.size**2)
    assert mj.grouped_allreduce({}) == {}


@pytest.mark.full
@on_ranks(3)
def test_collectives_take_trees(comm: Communicator) -> None:
    rank, size = comm.rank, comm.size
    tree = {"w": jnp.full((2, 3), rank + 1.0), "b": (jnp.int32(rank), None, np.full(4, rank, "float16"))}
    same = partial(jax.tree.map, np.testing.assert_array_equal)
    sums = jax.tree.map(lambda leaf: sum(leaf - rank + r for r in range(size)), tree)
    same(mj.allreduce(tree), sums)
    same(jax.jit(mj.allreduce)(tree), sums)
    same(jax.jit(lambda t: mj.allreduce(t, "max", name="largest"))(tree), mj.allreduce(tree, "max"))
    same(mj.allreduce([1, 2.0]), [size, 2.0 * size])  # of jax.lax.psum, too, a list is a tree
    assert mj.allreduce({}) == {}
    root = jax.tree.map(lambda leaf: leaf - rank + size - 1, tree)
    same(mj.broadcast(tree, size - 1), root)
    same(jax.jit(lambda t: mj.broadcast(t, size - 1, name="all"))(tree), root)

    rows = {"x": jnp.full((2, 2), rank), "y": [jnp.full(2, rank)]}
    joined = jax.tree.map(lambda leaf: np.concatenate([leaf - rank + r for r in range(size)]), rows)
    same(jax.jit(mj.allgather)(rows), joined)
    same(mj.allgather(rows, [2] * size, name="rows"), joined)
    wide = jax.tree.map(lambda leaf: jnp.tile(leaf, [size] + [1] * (leaf.ndim - 1)), rows)
    same(jax.jit(mj.alltoall)(wide), joined)
    same(mj.alltoall(wide, [2] * size, [2] * size, name="to all"), joined)
    same(mj.reducescatter(wide, "max", name="mine"), jax.tree.map(lambda leaf: leaf * 0 + size - 1, rows))


@on_ranks(3)
def test_groups(comm: Communicator) -> None:
    half = comm.split(comm.rank % 2)
    np.testing.assert_array_equal(mj.allreduce(jnp.ones(2), comm=half), half.size)
    np.testing.assert_array_equal(jax.jit(lambda x: mj.allreduce(mj.allreduce(x, comm=half)))(1.0), 5.0)


def test_arguments_stay_as_they_are(comm: Communicator) -> None:
    """Arguments that are still needed are not overwritten, whatever XLA does in place."""
    kept = jnp.arange(1000.0)
    wanted = np.arange(1000.0)
    found, other = jax.jit(lambda x: (mj.allreduce(x), mj.allreduce(x) + x))(kept)
    np.testing.assert_array_equal(kept, wanted)
    np.testing.assert_array_equal(found, wanted * comm.size)
    np.testing.assert_array_equal(other, wanted * (comm.size + 1))
    given = jax.jit(mj.allreduce, donate_argnums=0)(jnp.arange(1000.0))
    np.testing.assert_array_equal(given, wanted * comm.size)

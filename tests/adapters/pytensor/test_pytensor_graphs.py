"""Collectives inside compiled functions: values, gradients, and what rewrites and linkers do to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.compile.mode import Mode, get_mode
from pytensor.gradient import NullTypeGradError, pushforward
from pytensor.graph.replace import clone_replace, vectorize_graph

import multiring.pytensor
from multiring import Communicator
from multiring.errors import UsageError
from multiring.pytensor import allgather, allreduce, broadcast, grouped_allreduce
from tests.adapters.pytensor.support import Array, collectives_in, fast_run, scheduled
from tests.on_ranks import Pool, on_ranks

MODES = ["fast_run", "py"]


def mode_of(name: str) -> Any:
    return {"fast_run": fast_run(), "py": Mode("py", None)}[name]


def rows(rank: int) -> Array:
    """Rank r has r rows: rank 0 has none."""
    return np.random.default_rng(rank).standard_normal((rank, 2))


def square(rank: int) -> Array:
    return np.random.default_rng([1, rank]).standard_normal((2, 3))


@on_ranks(1, 3)
@pytest.mark.parametrize("mode", MODES)
def test_values_and_gradients(comm: Communicator, mode: str) -> None:
    x, k, r = pt.matrix("x"), pt.matrix("k"), pt.matrix("r")
    root = comm.size - 1
    total, average = allreduce(x, "total"), allreduce(x * 2, "average", op="average")
    first, second = grouped_allreduce([x**2, k], "group")
    sent, joined = broadcast(x, "sent", root=root), allgather(r, "joined")
    cost = ((total + average) * k).sum() + (first * x).sum() + (sent**2).sum() + (joined**3).sum()
    gradients = pytensor.grad(cost, [x, r])
    extremes = [allreduce(x, name, op=name) for name in ("min", "max", "product")]
    outputs = [total, average, first, second, sent, joined, *extremes, *gradients]
    f = pytensor.function([x, k, r], outputs, mode=mode_of(mode))

    xs = np.array([square(rank) for rank in range(comm.size)])
    ks = np.array([square(rank + 10) for rank in range(comm.size)])
    every = np.concatenate([rows(rank) for rank in range(comm.size)])
    expected = [xs.sum(0), 2 * xs.mean(0), (xs**2).sum(0), ks.sum(0), xs[root], every]
    expected += [xs.min(0), xs.max(0), xs.prod(0)]
    # d/dx of first * x, where first is the sum of all ranks' squares.
    gradient = ks.sum(0) + 2 * ks.mean(0) + (xs**2).sum(0) + 2 * xs[comm.rank] * xs.sum(0)
    if comm.rank == root:
        gradient = gradient + 2 * comm.size * xs[root]
    expected += [gradient, 3 * comm.size * rows(comm.rank) ** 2]
    for _ in range(2):
        found = f(square(comm.rank), square(comm.rank + 10), rows(comm.rank))
        for value, wanted in zip(found, expected, strict=True):
            assert value.shape == wanted.shape
            np.testing.assert_allclose(value, wanted, rtol=1e-13, atol=1e-14)
    assert (xs[comm.rank] == square(comm.rank)).all()


def numba_mode(comm: Communicator) -> None:
    x = pt.vector("x")
    params = [pytensor.shared(np.arange(3.0), name="w")]
    gradients = multiring.pytensor.DistributedGradients(params, comm)
    reduced = gradients.reduce([allreduce(x, "x") * 2]).gradients[0]
    f = pytensor.function([x], reduced, mode="NUMBA")
    for step in range(2):
        np.testing.assert_array_equal(f(np.full(3, comm.rank + step)), 2 * (1 + 2 * step))
    with pytest.raises(UsageError, match=r"the gradient of 'w' has shape \(4,\)"):
        f(np.zeros(4))
    gradients.close()


def test_numba_mode(ranks: Pool) -> None:
    """The default mode of PyTensor; a small function, since Numba takes long to compile."""
    ranks(2).run(numba_mode, timeout=240.0)


def independent_operations(comm: Communicator, seed: int, steps: int) -> list[bytes]:
    """Reductions of gradients and of other things that depend on each other in every possible way."""
    x = pt.vector("x")
    params = [pytensor.shared(np.zeros(4), name=f"p{k}") for k in range(3)]
    first = multiring.pytensor.DistributedGradients(params[:2], comm, bucket_bytes=8)
    second = multiring.pytensor.DistributedGradients(params[2:], comm)
    parts = [allreduce(x * k, f"part{k}") for k in range(4)]
    later = [allreduce(parts[k] + parts[k + 1], f"later{k}", op="average") for k in (0, 2)]
    gathered = allgather(x[: 1 + comm.rank], "gathered").sum()
    cost = (later[0] * later[1] * broadcast(x, "x")).sum() + gathered**2
    grads = first.reduce([pytensor.grad(cost, x), x * gathered]).gradients
    grads += second.reduce([later[1]]).gradients
    mode = scheduled(100 * seed + comm.rank) if seed else [fast_run(), "FAST_COMPILE"][comm.rank % 2]
    f = pytensor.function([x], [cost, *grads], mode=mode)
    assert len(collectives_in(f)) > 12
    found: list[bytes] = []
    for step in range(steps):
        found += [value.tobytes() for value in f(np.arange(4.0) + comm.rank + step)]
    first.close()
    second.close()
    return found[1 : 1 + len(grads)]


@on_ranks(3)
def test_any_order_of_the_nodes_ends(comm: Communicator) -> Any:
    """Each rank runs the nodes of the same function in a random order of its own."""
    runs = [independent_operations(comm, seed, 2) for seed in range(1, 5)]
    assert all(run == runs[0] for run in runs)
    return runs[0]


@on_ranks(3)
def test_ranks_in_different_modes(comm: Communicator) -> Any:
    return independent_operations(comm, 0, 2)


@on_ranks(3)
def test_forward_mode(comm: Communicator) -> None:
    x, v = pt.vector("x"), pt.vector("v")
    y = allreduce(x**2, "y", op="average") + broadcast(x, "root")
    tangent = pushforward(y, x, v)
    f = pytensor.function([x, v], tangent, mode="FAST_COMPILE")
    xs, vs = np.arange(comm.size) + 1.0, np.arange(comm.size) - 3.0
    found = f(xs[[comm.rank]], vs[[comm.rank]])
    np.testing.assert_allclose(found, [(2 * xs * vs).mean() + vs[0]], rtol=1e-14)


def normalise(x: Any, reduce_sum: Any) -> Any:
    """Batch normalisation as the documentation shows it."""
    sums = reduce_sum(pt.concatenate([x.sum(axis=0), pt.ones(1) * x.shape[0]]), "mean")
    count, mean = sums[-1], sums[:-1] / sums[-1]
    variance = reduce_sum(((x - mean) ** 2).sum(axis=0), "variance") / count
    return (x - mean) / pt.sqrt(variance + 1e-5)


@on_ranks(3)
def test_synchronised_normalisation(comm: Communicator) -> None:
    """Of parts of 0, 1, 2, ... rows, against one process with all rows."""
    x, k = pt.matrix("x"), pt.matrix("k")
    results = []
    for reduce_sum in (lambda value, name: value, allreduce):
        y = normalise(pt.tanh(normalise(x, reduce_sum)), reduce_sum)
        gradient = pytensor.grad((y * k).sum(), x)
        results.append(pytensor.function([x, k], [y, gradient], mode="FAST_COMPILE"))
    alone, together = results
    every = np.concatenate([rows(rank) for rank in range(comm.size)])
    weights = np.random.default_rng(5).standard_normal(every.shape)
    start = sum(range(comm.rank))
    mine = slice(start, start + comm.rank)
    for found, wanted in zip(together(every[mine], weights[mine]), alone(every, weights), strict=True):
        np.testing.assert_allclose(found, wanted[mine], rtol=1e-11, atol=1e-13)


def test_rewrites(comm: Communicator) -> None:
    x = pt.vector("x")
    same = [allreduce(x, "a"), allreduce(x, "b")]
    f = pytensor.function([x], same, mode=fast_run())
    assert len(collectives_in(f)) == 2, "two reductions of one array were merged"
    constant = allreduce(pt.constant(np.ones(2)), "constant")
    f = pytensor.function([], constant, mode=fast_run())
    np.testing.assert_array_equal(f(), comm.size)
    f = pytensor.function([x], same[0].shape, mode=fast_run())
    assert not collectives_in(f), "the shape is known without a reduction"
    # Into its input where nobody else needs that, and into new memory where somebody does.
    alone = pytensor.function([x], allreduce(x * 3, "alone"), mode=fast_run())
    needed = x * 3
    shown = pytensor.function([x], [allreduce(needed, "shown"), needed], mode=fast_run())
    for function, in_place in [(alone, True), (shown, False), (f, False)]:
        ops = [node.op for node in function.maker.fgraph.toposort()]
        assert any(op.destroy_map for op in ops if str(op).startswith("multiring.")) == in_place
    mine = np.arange(2.0)
    np.testing.assert_array_equal(alone(mine), 3 * comm.size * np.arange(2.0))
    total, kept = shown(mine)
    np.testing.assert_array_equal(total, 3 * comm.size * np.arange(2.0))
    np.testing.assert_array_equal(kept, 3 * np.arange(2.0))
    np.testing.assert_array_equal(mine, np.arange(2.0))


@on_ranks(1)
def test_refusals(comm: Communicator) -> None:
    x = pt.vector("x")
    y = allreduce(x, "y")
    with pytest.raises(UsageError, match="'n' is a number"):
        allgather(pt.scalar(), "n")
    with pytest.raises(UsageError, match="take tensor variables"):
        allreduce(np.zeros(3), "array")
    with pytest.raises(UsageError, match="root is 7"):
        broadcast(x, "x", root=7)
    with pytest.raises(NullTypeGradError, match="max has none"):
        pytensor.grad(allreduce(x, "m", op="max").sum(), x)
    with pytest.raises(UsageError, match="would communicate once for each element"):
        vectorize_graph(y, {x: pt.matrix()})
    with pytest.raises(UsageError, match=r"allreduce\{y\} runs as Python code"):
        pytensor.function([x], y, mode="JAX")
    with pytest.raises(UsageError, match="compiled without the rewrite 'multiring_order'"):
        pytensor.function([x], y, mode=get_mode("FAST_COMPILE").excluding("multiring_order"))
    twice = [y, clone_replace(y, {x: x + 1})]
    with pytest.raises(UsageError, match=r"allreduce\{y\} occurs twice"):
        pytensor.function([x], twice, mode="FAST_COMPILE")
    table = pt.matrix("table")
    looped = pytensor.scan(lambda row: allreduce(row, "row"), sequences=[table], return_updates=False)
    with pytest.raises(UsageError, match=r"allreduce\{row\} is inside"):
        pytensor.function([table], looped, mode="FAST_COMPILE")

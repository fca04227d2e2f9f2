"""Collectives inside compiled functions: values, gradients, and what rewrites and linkers do to them;
and gradients that are reduced in the memory that a function computed them in."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.compile.mode import Mode, get_mode
from pytensor.gradient import NullTypeGradError, pushforward
from pytensor.graph.replace import clone_replace, vectorize_graph
from pytensor.link.vm import VMLinker
from pytensor.raise_op import Assert

import multiring.pytensor
from multiring import Communicator
from multiring.errors import UsageError
from multiring.pytensor import DistributedGradients, allgather, allreduce, broadcast, grouped_allreduce
from multiring.pytensor.gradient_ops import origins
from tests.adapters.pytensor.support import SMALL, Array, collectives_in, fast_run, scheduled
from tests.on_ranks import Pool, on_ranks, refuses

MODES = {"fast_run": fast_run, "py": lambda: Mode("py", None)}


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
    f = pytensor.function([x, k, r], outputs, mode=MODES[mode]())

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
    refuses(UsageError, r"the gradient of 'w' is float64 \(4,\)", f, np.zeros(4))


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
    return found[1 : 1 + len(grads)]


@on_ranks(3)
def test_any_order_of_the_nodes_ends(comm: Communicator) -> Any:
    """Each rank runs the nodes of the same function in a random order of its own, or in another mode."""
    runs = [independent_operations(comm, seed, 2) for seed in range(5)]
    assert all(run == runs[0] for run in runs)
    return runs[0]


@on_ranks(3)
def test_forward_mode(comm: Communicator) -> None:
    x, v = pt.vector("x"), pt.vector("v")
    y = allreduce(x**2, "y", op="average") + broadcast(x, "root")
    tangent = pushforward(y, x, v)
    f = pytensor.function([x, v], tangent, mode="FAST_COMPILE")
    xs, vs = np.arange(comm.size) + 1.0, np.arange(comm.size) - 3.0
    found = f(xs[[comm.rank]], vs[[comm.rank]])
    np.testing.assert_allclose(found, [(2 * xs * vs).mean() + vs[0]], rtol=1e-14)


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


@on_ranks(3)
def test_reductions_of_one_name_keep_their_order(comm: Communicator) -> None:
    """Reductions of one name in one function, reached at different times, do not swap."""
    x, work = pt.vector("x"), pt.matrix("work")
    late = x + pt.sum(work @ work @ work)
    first = allreduce(late, "total", comm=comm)
    second = allreduce(100 * x, "total", comm=comm)
    function = pytensor.function([x, work], [second, first], mode="FAST_COMPILE")
    for slow in range(comm.size + 1):
        found = function(np.ones(3), np.zeros([1 + 300 * (comm.rank == slow)] * 2))
        np.testing.assert_array_equal(found[0], 100 * comm.size)
        np.testing.assert_array_equal(found[1], comm.size)


def one_name_in_two_threads(comm: Communicator) -> None:
    group = comm.split(0)
    x = pt.vector("x")
    total = allreduce(x, "total", comm=group)
    functions = [pytensor.function([x], k * total, mode="FAST_COMPILE") for k in range(2)]
    both = threading.Barrier(2)

    def call(function: Any) -> Any:
        both.wait()
        return function(np.ones(3))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(call, functions))


def test_a_name_belongs_to_one_thread(ranks: Pool) -> None:
    errors = ranks(2).run_expecting_errors(one_name_in_two_threads)
    assert any("'total' was called from thread" in str(error) for error in errors), errors
    assert all(isinstance(error, Exception) for error in errors)


@on_ranks(1)
def test_refusals(comm: Communicator) -> None:
    x = pt.vector("x")
    y = allreduce(x, "y")
    table = pt.matrix("table")
    looped = pytensor.scan(lambda row: allreduce(row, "row"), sequences=[table], return_updates=False)
    fast = get_mode("FAST_COMPILE")
    for text, call in {
        "'n' is a number": lambda: allgather(pt.scalar(), "n"),
        "take tensor variables": lambda: allreduce(np.zeros(3), "array"),
        "root is 7": lambda: broadcast(x, "x", root=7),
        "would communicate once for each element": lambda: vectorize_graph(y, {x: pt.matrix()}),
        r"allreduce\{y\} runs as Python code": lambda: pytensor.function([x], y, mode="JAX"),
        "compiled without the rewrite 'multiring_order'": lambda: pytensor.function(
            [x], y, mode=fast.excluding("multiring_order")
        ),
        r"allreduce\{y\} occurs twice": lambda: pytensor.function(
            [x], [y, clone_replace(y, {x: x + 1})], mode=fast
        ),
        r"allreduce\{row\} is inside": lambda: pytensor.function([table], looped, mode=fast),
    }.items():
        refuses(UsageError, text, call)
    refuses(NullTypeGradError, "max has none", pytensor.grad, allreduce(x, "m", op="max").sum(), x)


SHAPE = (3, 4)
X = pt.matrix("x", shape=SHAPE)


def parameters(count: int) -> list[pytensor.compile.sharedvalue.SharedVariable]:
    return [pytensor.shared(np.zeros(SHAPE), name=f"p{k}", shape=SHAPE) for k in range(count)]


def averages_of(comm: Communicator, found: list[Any], **options: Any) -> list[Any]:
    """The averages of these gradients, each of a parameter of its own."""
    gradients = DistributedGradients(parameters(len(found)), comm, **options)
    return gradients.reduce(found).gradients


def matrix(rank: int, step: int = 0) -> np.ndarray:
    return np.random.default_rng([rank, step]).normal(size=SHAPE)


def mean(size: int, step: int = 0, of: Any = np.array) -> np.ndarray:
    """The average of a function of the ranks' matrices."""
    return sum(of(matrix(rank, step)) for rank in range(size)) / size


@pytest.mark.parametrize("seed", range(3))
def test_other_readers_of_a_gradient_run_before(comm: Communicator, seed: int) -> None:
    """Every other reader of a gradient sees this rank's, whatever the order in which the nodes run."""
    local = pt.exp(X)
    averages = averages_of(comm, [local, local * 3], **SMALL)
    f = pytensor.function([X], [*averages, local.sum(), averages[0] - averages[1]], mode=scheduled(seed))
    assert any(name.startswith("multiring.ready_in_place") for name in collectives_in(f))
    for step in range(3):
        first, second, total, difference = f(np.log(np.abs(matrix(comm.rank, step))))
        wanted = mean(comm.size, step, np.abs)
        np.testing.assert_allclose(first, wanted, rtol=1e-13)
        np.testing.assert_allclose(second, wanted * 3, rtol=1e-13)
        np.testing.assert_allclose(total, np.abs(matrix(comm.rank, step)).sum(), rtol=1e-13)
        np.testing.assert_allclose(difference, wanted * -2, rtol=1e-13)


def test_memory_that_is_not_the_functions_own_is_left_alone(comm: Communicator) -> None:
    """Inputs, shared variables, constants and what is the gradient of two parameters are left alone."""
    constant, doubled = pt.constant(np.full(SHAPE, comm.rank + 1.0)), X * 2
    state = pytensor.shared(matrix(comm.rank), name="state", shape=SHAPE)
    transposed = pt.exp(pt.matrix("y", shape=SHAPE[::-1]))
    found = [X, constant, state, doubled, doubled, transposed.T]
    averages = averages_of(comm, found)
    f = pytensor.function([X, transposed.owner.inputs[0]], averages, mode=fast_run())
    value, other = matrix(comm.rank), np.log(np.abs(matrix(comm.rank))).T.copy()
    before = value.copy()
    results = [f(value, other) for _ in range(2)]
    np.testing.assert_array_equal(value, before)
    np.testing.assert_array_equal(state.get_value(), before)
    np.testing.assert_array_equal(constant.data, np.full(SHAPE, comm.rank + 1.0))
    average, absolute = mean(comm.size), mean(comm.size, of=np.abs)
    wanted = [average, np.full(SHAPE, (comm.size + 1) / 2), average, average * 2, average * 2, absolute]
    for result in results:
        for got, right in zip(result, wanted, strict=True):
            np.testing.assert_allclose(got, right, rtol=1e-13)


def test_updates_read_averages_where_they_lie(comm: Communicator) -> None:
    """Nothing is copied between a gradient and the new parameter."""
    (param,) = parameters(1)
    gradients = DistributedGradients([param], comm)
    (average,) = gradients.reduce([pt.exp(X)]).gradients
    f = pytensor.function([X], [], updates=[(param, param - 0.5 * average)], mode=fast_run())
    assert not any("DeepCopy" in str(node.op) for node in f.maker.fgraph.apply_nodes)
    wanted = np.zeros(SHAPE)
    for step in range(3):
        f(np.log(np.abs(matrix(comm.rank, step))))
        wanted -= 0.5 * mean(comm.size, step, np.abs)
    np.testing.assert_allclose(param.get_value(), wanted, rtol=1e-13)


def mode_of(name: str) -> Any:
    """fast_run, with the linker's garbage collection or without, and a mode in which nothing is in place."""
    if name == "FAST_COMPILE":
        return name
    return Mode(VMLinker(use_cloop=True, c_thunks=False, allow_gc=name == "gc"), "fast_run")


@pytest.mark.parametrize("mode", ["gc", "no gc", "FAST_COMPILE"])
def test_a_failed_step_does_not_write_into_the_next(comm: Communicator, mode: str) -> None:
    """What a failed call has left under way ends before the next one writes the same memory."""
    limit = pt.scalar("limit")
    checked = Assert("the loss has exploded")(X, (limit > X).all())
    gradients = DistributedGradients(parameters(3), comm, **SMALL)
    averages = gradients.reduce([checked * 2, pt.exp(X), pt.sin(X)]).gradients
    f = pytensor.function([X, limit], averages, mode=mode_of(mode))
    for step in range(6):
        value = matrix(comm.rank, step)
        if step % 2:
            refuses(AssertionError, "exploded", f, value, -9.0)
            continue
        for got, function in zip(f(value, 9.0), (lambda v: v * 2, np.exp, np.sin), strict=True):
            np.testing.assert_allclose(got, mean(comm.size, step, function), rtol=1e-13)
    gradients.close()


@pytest.mark.parametrize("mode", ["gc", "no gc"])
def test_reduced_memory_is_not_used_again(comm: Communicator, mode: str) -> None:
    """No linker, nor a copy of a function, writes again what a reduction may still be under way in."""
    turned = pytensor.shared(np.zeros(SHAPE[::-1]), name="turned", shape=SHAPE[::-1])
    gradients = DistributedGradients([*parameters(1), turned], comm)
    averages = gradients.reduce([pt.sin(X), pt.exp(X * 2).T]).gradients
    f = pytensor.function([X], averages, mode=mode_of(mode))
    for function in (f, f.copy()):
        function(np.ones(SHAPE))
        ready = [node for node in function.vm.nodes if "ready_in_place" in str(node.op)]
        assert ready
        for node in ready:
            for made in origins(node.inputs[0]):
                assert function.vm.storage_map[made][0] is None


def test_shared_variables_are_not_reduced_where_they_are(comm: Communicator) -> None:
    """A shared variable that the function updates is reduced in a copy."""
    total = pytensor.shared(matrix(comm.rank), name="total", shape=SHAPE)
    averages = averages_of(comm, [total, total + X])
    f = pytensor.function([X], averages, updates=[(total, 0 * total)], mode=fast_run())
    first, second = f(np.ones(SHAPE))
    np.testing.assert_allclose(first, mean(comm.size), rtol=1e-13)
    np.testing.assert_allclose(second, mean(comm.size) + 1, rtol=1e-13)
    assert not total.get_value().any()
    for node in f.vm.nodes:
        if "ready_in_place" in str(node.op):
            assert list(origins(node.inputs[0]))[-1].owner is not None

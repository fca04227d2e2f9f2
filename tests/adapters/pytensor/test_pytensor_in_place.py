"""Gradients that are reduced in the memory that a PyTensor function computed them in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.compile.mode import Mode
from pytensor.link.vm import VMLinker
from pytensor.raise_op import Assert

from multiring import Communicator
from multiring.pytensor import DistributedGradients
from multiring.pytensor.gradient_ops import origins
from tests.adapters.pytensor.support import SMALL, collectives_in, fast_run, scheduled

SHAPE = (3, 4)


def parameters(count: int) -> list[pytensor.compile.sharedvalue.SharedVariable]:
    return [pytensor.shared(np.zeros(SHAPE), name=f"p{k}", shape=SHAPE) for k in range(count)]


def matrix(rank: int, step: int = 0) -> np.ndarray:
    return np.random.default_rng([rank, step]).normal(size=SHAPE)


def mean(size: int, step: int = 0, of: Any = np.array) -> np.ndarray:
    """The average of a function of the ranks' matrices."""
    return sum(of(matrix(rank, step)) for rank in range(size)) / size


@pytest.mark.parametrize("seed", range(3))
def test_whoever_else_reads_a_gradient_runs_before(comm: Communicator, seed: int) -> None:
    """Every other reader of a gradient sees this rank's, whatever the order in which the nodes run."""
    x = pt.matrix("x", shape=SHAPE)
    local = pt.exp(x)
    gradients = DistributedGradients(parameters(2), comm, **SMALL)
    averages = gradients.reduce([local, local * 3]).gradients
    f = pytensor.function([x], [*averages, local.sum(), averages[0] - averages[1]], mode=scheduled(seed))
    assert any(name.startswith("multiring.ready_in_place") for name in collectives_in(f))
    for step in range(3):
        first, second, total, difference = f(np.log(np.abs(matrix(comm.rank, step))))
        wanted = mean(comm.size, step, np.abs)
        np.testing.assert_allclose(first, wanted, rtol=1e-13)
        np.testing.assert_allclose(second, wanted * 3, rtol=1e-13)
        np.testing.assert_allclose(total, np.abs(matrix(comm.rank, step)).sum(), rtol=1e-13)
        np.testing.assert_allclose(difference, wanted * -2, rtol=1e-13)
    gradients.close()


def test_memory_that_is_not_the_functions_own_is_left_alone(comm: Communicator) -> None:
    """Inputs, shared variables, constants and what is the gradient of two parameters are left alone."""
    x = pt.matrix("x", shape=SHAPE)
    params = parameters(6)
    constant, doubled = pt.constant(np.full(SHAPE, comm.rank + 1.0)), x * 2
    state = pytensor.shared(matrix(comm.rank), name="state", shape=SHAPE)
    transposed = pt.exp(pt.matrix("y", shape=SHAPE[::-1]))
    gradients = DistributedGradients(params, comm)
    found = [x, constant, state, doubled, doubled, transposed.T]
    averages = gradients.reduce(found).gradients
    f = pytensor.function([x, transposed.owner.inputs[0]], averages, mode=fast_run())
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
    gradients.close()


def test_updates_read_averages_where_they_lie(comm: Communicator) -> None:
    """Nothing is copied between a gradient and the new parameter."""
    x = pt.matrix("x", shape=SHAPE)
    (param,) = parameters(1)
    gradients = DistributedGradients([param], comm)
    (average,) = gradients.reduce([pt.exp(x)]).gradients
    f = pytensor.function([x], [], updates=[(param, param - 0.5 * average)], mode=fast_run())
    assert not any("DeepCopy" in str(node.op) for node in f.maker.fgraph.apply_nodes)
    wanted = np.zeros(SHAPE)
    for step in range(3):
        f(np.log(np.abs(matrix(comm.rank, step))))
        wanted -= 0.5 * mean(comm.size, step, np.abs)
    np.testing.assert_allclose(param.get_value(), wanted, rtol=1e-13)
    gradients.close()


def mode_of(name: str) -> Any:
    """fast_run, with the linker's garbage collection or without, and a mode in which nothing is in place."""
    if name == "FAST_COMPILE":
        return name
    return Mode(VMLinker(use_cloop=True, c_thunks=False, allow_gc=name == "gc"), "fast_run")


@pytest.mark.parametrize("mode", ["gc", "no gc", "FAST_COMPILE"])
def test_a_failed_step_does_not_write_into_the_next(comm: Communicator, mode: str) -> None:
    """What a failed call has left under way ends before the next one writes the same memory."""
    x, limit = pt.matrix("x", shape=SHAPE), pt.scalar("limit")
    params = parameters(3)
    gradients = DistributedGradients(params, comm, **SMALL)
    checked = Assert("the loss has exploded")(x, (x < limit).all())
    averages = gradients.reduce([checked * 2, pt.exp(x), pt.sin(x)]).gradients
    f = pytensor.function([x, limit], averages, mode=mode_of(mode))
    for step in range(6):
        value = matrix(comm.rank, step)
        if step % 2:
            with pytest.raises(AssertionError, match="exploded"):
                f(value, -9.0)
            continue
        for got, function in zip(f(value, 9.0), (lambda v: v * 2, np.exp, np.sin), strict=True):
            np.testing.assert_allclose(got, mean(comm.size, step, function), rtol=1e-13)
    gradients.close()


@pytest.mark.parametrize("mode", ["gc", "no gc"])
def test_reduced_memory_is_not_used_again(comm: Communicator, mode: str) -> None:
    """No linker, nor a copy of a function, writes again what a reduction may still be under way in."""
    x = pt.matrix("x", shape=SHAPE)
    turned = pytensor.shared(np.zeros(SHAPE[::-1]), name="turned", shape=SHAPE[::-1])
    gradients = DistributedGradients([*parameters(1), turned], comm)
    averages = gradients.reduce([pt.sin(x), pt.exp(x * 2).T]).gradients
    f = pytensor.function([x], averages, mode=mode_of(mode))
    for function in (f, f.copy()):
        function(np.ones(SHAPE))
        ready = [node for node in function.vm.nodes if "ready_in_place" in str(node.op)]
        assert ready
        for node in ready:
            for made in origins(node.inputs[0]):
                assert function.vm.storage_map[made][0] is None
    gradients.close()


def test_shared_variables_are_not_reduced_where_they_are(comm: Communicator) -> None:
    """A shared variable that the function updates is reduced in a copy."""
    total = pytensor.shared(matrix(comm.rank), name="total", shape=SHAPE)
    x = pt.matrix("x", shape=SHAPE)
    gradients = DistributedGradients(parameters(2), comm)
    averages = gradients.reduce([total, total + x]).gradients
    f = pytensor.function([x], averages, updates=[(total, 0 * total)], mode=fast_run())
    first, second = f(np.ones(SHAPE))
    np.testing.assert_allclose(first, mean(comm.size), rtol=1e-13)
    np.testing.assert_allclose(second, mean(comm.size) + 1, rtol=1e-13)
    assert not total.get_value().any()
    for node in f.vm.nodes:
        if "ready_in_place" in str(node.op):
            assert list(origins(node.inputs[0]))[-1].owner is not None
    gradients.close()

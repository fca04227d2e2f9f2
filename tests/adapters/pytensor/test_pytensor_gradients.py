"""Gradients reduced inside compiled functions: what a training script sees of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.gradient import NullTypeGradError

import multiring.pytensor
from multiring import Communicator, TopK
from multiring.errors import MismatchError, UsageError
from multiring.pytensor import DistributedGradients, broadcast_parameters, distribute_updates, grad
from tests.adapters.pytensor.support import SMALL, Array, collectives_in, data, fast_run, linear, shared
from tests.on_ranks import all_raise, on_ranks, refuses
from tests.support import run_python


def oracle(x: Array, w: Array, b: Array) -> tuple[Array, Array]:
    error = 2 * (x @ w + b) / len(x)
    return x.T @ error, error.sum()


@pytest.mark.parametrize(
    ("comm", "as_dict", "options"), [(2, True, {}), (3, False, {"compression": TopK(1.0)})], indirect=["comm"]
)
def test_distribute_updates(comm: Communicator, as_dict: bool, options: dict[str, Any]) -> None:
    """A training function with an optimizer of its own, clipping, and something that is no gradient;
    and a compression that sends everything."""
    x, cost, (w, b) = linear()
    vw, vb, seen = shared(vw=np.zeros(3), vb=np.zeros(()), seen=np.zeros(()))
    gw, gb = gradients = pytensor.grad(cost, [w, b])
    new_w, new_b = 0.9 * vw + pt.clip(gw, -0.5, 0.5), 0.9 * vb + gb
    updates: Any = [(vw, new_w), (vb, new_b), (w, w - 0.1 * new_w), (b, b - 0.1 * new_b), (seen, seen + 1)]
    if as_dict:
        updates = dict(updates)
    distributed = distribute_updates(updates, [w, b], gradients, comm, **SMALL, **options)
    assert type(distributed) is type(updates)
    train = pytensor.function([x], [cost, gb], updates=distributed, mode=fast_run())
    weights, offset, speed_w, speed_b = np.arange(3.0), np.float64(1.0), np.zeros(3), np.float64(0.0)
    for step in range(4):
        found = [oracle(data(rank, step), weights, offset) for rank in range(comm.size)]
        _, own = train(data(comm.rank, step))
        np.testing.assert_allclose(own, found[comm.rank][1], rtol=1e-12)
        mean_w, mean_b = (sum(parts) / comm.size for parts in zip(*found, strict=True))
        speed_w, speed_b = 0.9 * speed_w + np.clip(mean_w, -0.5, 0.5), 0.9 * speed_b + mean_b
        weights, offset = weights - 0.1 * speed_w, offset - 0.1 * speed_b
        for variable, wanted in [(w, weights), (b, offset), (vw, speed_w), (vb, speed_b), (seen, step + 1)]:
            np.testing.assert_allclose(variable.get_value(), wanted, rtol=1e-12)


@pytest.mark.parametrize("mode", ["fast_run", "FAST_COMPILE"])
def test_results_are_not_overwritten(comm: Communicator, mode: str) -> None:
    """The next call overwrites the buckets, but nothing that has come out of the function."""
    x, cost, (w, b) = linear()
    kept = shared(kept=np.zeros(3))[0]
    gradients = DistributedGradients([w, b], comm)
    gw, gb = gradients.reduce(pytensor.grad(cost, [w, b])).gradients
    chosen = fast_run() if mode == "fast_run" else mode
    f = pytensor.function([x], [gw, gb, gw * 2], updates=[(kept, gw)], mode=chosen)
    first = f(data(comm.rank))
    before = [value.copy() for value in first]
    held = kept.get_value(borrow=True)
    f(data(comm.rank, 1))
    for value, wanted in zip([*first, held], [*before, before[0]], strict=True):
        np.testing.assert_array_equal(value, wanted)
    assert (kept.get_value() != held).all()


def test_gradients_leave_while_others_are_computed(comm: Communicator) -> None:
    """The gradient of the last layer is ready before that of the first has been computed."""
    x = pt.matrix("x")
    layers = shared(**{f"layer{k}": np.eye(3) for k in range(4)})
    y = x
    for layer in layers:
        y = pt.tanh(y @ layer)
    reduced = grad((y**2).mean(), layers, comm)
    for mode, ready in ((fast_run(), "multiring.ready_in_place"), ("FAST_COMPILE", "multiring.ready")):
        f = pytensor.function([x], reduced, mode=mode)
        nodes = [str(node.op) for node in f.maker.fgraph.toposort()]
        order = [name for name in nodes if name.startswith("multiring.ready")]
        assert order == [f"{ready}{{layer{k}}}" for k in (3, 2, 1, 0)]
        between = nodes[nodes.index(order[0]) : nodes.index(order[-1])]
        assert sum("dot" in name.lower() for name in between) >= 5, "the backward pass was over"


def test_parameters_without_gradient(comm: Communicator) -> None:
    """One of them, by `grad`, and all of them. On some ranks: the contract."""
    x, cost, params = linear()
    params += shared(unused=np.ones(2))
    gradients = DistributedGradients(params, comm)
    reduced = grad(cost, params, gradients=gradients, disconnected_inputs="ignore")
    nothing = gradients.reduce([None] * 3)
    step = pytensor.function([x], reduced, mode="FAST_COMPILE")
    np.testing.assert_array_equal(step(data(0))[2], np.zeros(2))
    value, exists = pytensor.function([], [nothing.gradients[0], nothing.produced], mode="FAST_COMPILE")()
    assert not value.any()
    assert not exists.any()


@on_ranks(3)
def test_dtypes_and_scales(comm: Communicator) -> None:
    params = shared(
        half=np.zeros(3, np.float16), single=np.zeros((2, 2), np.float32), none=np.zeros((0, 4)), number=0.5
    )
    gradients = DistributedGradients({p.name: p for p in params}, comm, average=False, postscale=0.5)
    x = pt.scalar("x")
    strided = pt.as_tensor(np.arange(8, dtype=np.float32).reshape(2, 4))[:, ::2] * x.astype("float32")
    given = [pt.full((3,), x).astype("float16"), strided, pt.zeros((0, 4)), x * 2]
    reduced = gradients.reduce(given).gradients
    assert [g.type.dtype for g in reduced] == ["float16", "float32", "float64", "float64"]
    found = pytensor.function([x], reduced, mode=fast_run())(comm.rank + 1.0)
    total = 0.5 * sum(range(comm.size + 1))
    np.testing.assert_array_equal(found[0], np.full(3, total, np.float16))
    np.testing.assert_array_equal(found[1], np.float32(total) * np.array([[0, 2], [4, 6]], np.float32))
    assert found[2].shape == (0, 4)
    assert found[3] == 2 * total


def test_two_models(comm: Communicator) -> None:
    """A function that trains one model, one that trains the other, and one that trains both."""
    x, cost, params = linear()
    y, other_cost, other_params = linear()
    first, second = DistributedGradients(params, comm), DistributedGradients(other_params, comm)
    one = first.reduce(pytensor.grad(cost, params)).gradients
    two = second.reduce(pytensor.grad(other_cost, other_params)).gradients
    both = pytensor.function([x, y], [*one, *two], mode="FAST_COMPILE")
    single = pytensor.function([x], one, mode="FAST_COMPILE")
    assert len(collectives_in(both)) == 8  # begin, two times ready and the end, for each
    values = both(data(comm.rank), data(comm.rank, 1))
    np.testing.assert_array_equal(values[0], single(data(comm.rank))[0])
    np.testing.assert_array_equal(values[2], single(data(comm.rank, 1))[0])
    again = first.reduce(pytensor.grad(cost, params)).gradients
    with pytest.raises(UsageError, match=r"gradients\{w and 1 more\} occurs twice"):
        pytensor.function([x], [*one, *again], mode="FAST_COMPILE")
    first.close()
    refuses(UsageError, "is closed; build and compile it anew", single, data(comm.rank))
    second.close()


def test_refused(comm: Communicator) -> None:
    x, cost, (w, b) = linear()
    gw, gb = pytensor.grad(cost, [w, b])
    gradients = DistributedGradients([w, b], comm)
    averaged = grad(cost, [w, b], comm)
    updates = [(p, p - 0.1 * g) for p, g in zip((w, b), averaged, strict=True)]
    integers, same = shared(i=np.zeros(2, np.int64)), [w, *shared(w=np.zeros(1))]
    for text, call in {
        "no parameters": lambda: DistributedGradients([], comm),
        "item 0 is x; pass shared variables": lambda: DistributedGradients([x], comm),
        "dtype int64 cannot be reduced": lambda: DistributedGradients(integers, comm),
        "two shared variables are called 'w'": lambda: DistributedGradients(same, comm),
        "1 gradients for 2 parameters": lambda: gradients.reduce([gw]),
        "the gradient of 'b' is .*, but the parameter is float64": lambda: gradients.reduce([gw, gw]),
        "do not depend on the gradient of 'b'; pass the variables": lambda: distribute_updates(
            [(w, w - gw)], [w, b], [gw, gb], comm
        ),
        "the gradient of 'w' has been reduced over these ranks already": lambda: distribute_updates(
            updates, [w, b], averaged, comm
        ),
    }.items():
        refuses(UsageError, text, call)
    with pytest.raises(NullTypeGradError, match="Derivatives of averaged gradients"):
        pytensor.grad(gradients.reduce([gw, gb]).gradients[0].sum(), w)


@all_raise(MismatchError, "'statistics'", r"\[3\]", r"\[4\]")
def test_a_mismatch_inside_a_function(comm: Communicator) -> None:
    """The second step adds other things up on rank 1: same name, another shape."""
    own = comm.split(0)  # its error breaks what hangs off it, and the tests share `comm`
    x = pt.vector("x")
    total = multiring.pytensor.allreduce(x, "statistics", comm=own).sum()
    reduced = DistributedGradients(shared(p=0.0), own).reduce([total]).gradients
    f = pytensor.function([x], reduced, mode=fast_run())
    for step in range(2):
        f(np.ones(3 + step * comm.rank))


def test_state_of_all_kinds(comm: Communicator) -> None:
    def make(rank: int) -> list[Any]:
        draw = np.random.default_rng(rank)
        values = {"bool": draw.random(5) > 0.5, "number": np.array(draw.random()), "none": np.zeros((0, 2))}
        values["rows"] = draw.integers(0, 9, (4, 6)).T
        return [*shared(**values), pytensor.shared(draw, name="generator"), pytensor.shared(draw.random(2))]

    state, wanted = make(comm.rank), make(1)
    broadcast_parameters(state, 1, comm)
    for variable, other in zip(state, wanted, strict=True):
        if variable.name == "generator":
            assert variable.get_value().random() == other.get_value().random()
        else:
            value = variable.get_value()
            assert value.dtype == other.get_value().dtype
            np.testing.assert_array_equal(value, other.get_value())
    assert multiring.pytensor.broadcast_object(comm.rank, 1) == 1
    names = ["a", "b"] if comm.rank else ["a", "c"]
    refuses(MismatchError, "'c'", broadcast_parameters, shared(**dict.fromkeys(names, 0.0)), 0, comm)


@pytest.mark.full
@pytest.mark.parametrize(("every", "drift_at", "found_at"), [(4, 8, 8), (0, 1, 0)])
def test_velocities_that_differ(comm: Communicator, every: int, drift_at: int, found_at: int) -> None:
    """The state of rank 1 changes before one step."""
    x, cost, params = linear()
    velocities = shared(vw=np.zeros(3), vb=0.0)
    grads = pytensor.grad(cost, params)
    new = [0.9 * v + g for v, g in zip(velocities, grads, strict=True)]
    updates = [*zip(velocities, new, strict=True)]
    updates += [(p, p - 0.1 * v) for p, v in zip(params, new, strict=True)]
    updates = distribute_updates(updates, params, grads, comm, check_every=every)
    train = pytensor.function([x], cost, updates=updates, mode="FAST_COMPILE")
    for number in range(1, 9):
        if number == drift_at and comm.rank == 1:
            velocities[1].set_value(np.nextafter(velocities[1].get_value(), np.inf))
        if number == found_at:
            with pytest.raises(MismatchError, match=f"state at step {number}.* vb' float64.*on rank 1"):
                train(data(comm.rank, number))
            return
        train(data(comm.rank, number))


@pytest.mark.full
@on_ranks(3)
def test_buffers_and_weights_of_ranks(comm: Communicator) -> None:
    mean = pytensor.shared(np.full(2, float(comm.rank)), name="mean")
    count = pytensor.shared(np.array(comm.rank + 3), name="count")
    multiring.pytensor.sync_buffers([mean, count], "average", comm)
    np.testing.assert_array_equal(mean.get_value(), np.full(2, (comm.size - 1) / 2))
    assert count.get_value() == 3
    with pytest.raises(UsageError, match="accepted: broadcast, average, local"):
        multiring.pytensor.sync_buffers([mean], "max", comm)  # type: ignore[arg-type]
    counts = [3, 0, 5]
    x, cost, params = linear()
    weight = pt.scalar("weight")
    rows = np.concatenate([data(rank, 0, count) for rank, count in enumerate(counts)])
    mine = data(comm.rank, 0, max(counts[comm.rank], 1))
    found = pytensor.function([x, weight], grad(cost * weight, params, comm), mode="FAST_COMPILE")
    wanted = pytensor.function([x], pytensor.grad(cost, params), mode="FAST_COMPILE")
    scale = multiring.pytensor.batch_weight(counts[comm.rank], comm)
    for one, other in zip(found(mine, scale), wanted(rows), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)


@pytest.mark.full
def test_no_other_framework_is_imported() -> None:
    """Numba is imported only for a function in its mode: that takes seconds."""
    code = "import sys, multiring.pytensor; print(sorted({'numba', 'jax', 'torch'} & set(sys.modules)))"
    assert run_python(code).stdout.strip() == "[]"

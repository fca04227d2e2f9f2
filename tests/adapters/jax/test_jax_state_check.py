"""Training state that differs between ranks is an error in JAX; buffers and weights of ranks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multiring.jax as mj
from multiring import Communicator
from multiring.errors import MismatchError, UsageError
from multiring.state.check import scope_at
from tests.adapters.jax.support import Tree, agree, data, errors_break_the_queue, loss, start, training_step
from tests.on_ranks import Pool, all_raise, on_ranks


def last_bit(tree: Tree, name: str) -> Tree:
    """The same with the last bit of one number changed."""
    leaf = tree["layer"][name]
    changed = leaf.at[(0,) * leaf.ndim].set(jnp.nextafter(leaf[(0,) * leaf.ndim], jnp.inf))
    return {"layer": {**tree["layer"], name: changed}}


@pytest.mark.parametrize(("every", "drift_at", "found_at"), [(4, 8, 8), (0, 1, 0)])
def test_optimizer_state_that_differs(comm: Communicator, every: int, drift_at: int, found_at: int) -> None:
    """Rank 1's optimizer state changes before one step, whose arguments are donated where it is compared."""
    optimizer = mj.distribute(optax.adam(0.1), check_every=every)
    params = start()
    state = optimizer.init(params)
    step = jax.jit(training_step(optimizer), donate_argnums=(0, 1) if every else ())
    for number in range(1, 10):
        if number == drift_at and comm.rank == 1:
            state = (state[0]._replace(nu=last_bit(state[0].nu, "weight")), *state[1:])
        if number == found_at:
            found = f"training state at step {number}: .*nu.layer.weight'"
            with pytest.raises(MismatchError, match=found), mj.raise_errors():
                jax.block_until_ready(step(params, state, data(number, comm.rank)))
            return
        params, state = step(params, state, data(number, comm.rank))


@all_raise(MismatchError, what={"optimizers": "state of the optimizer", "options": "'options'"})
def test_init_compares(comm: Communicator, what: str) -> None:
    other = optax.adam(0.1) if comm.rank and what == "optimizers" else optax.sgd(0.1, momentum=0.9)
    mj.distribute(other, every_k=1 + comm.rank if what == "options" else 1).init(start())


@all_raise(MismatchError, "at step 2: 'parameters.layer.", "same hyperparameters on every rank")
def test_learning_rates_that_differ_show_in_the_second_step(comm: Communicator) -> None:
    optimizer = mj.distribute(optax.sgd(0.1 * (1 + comm.rank)))
    params = start()
    state = optimizer.init(params)
    with errors_break_the_queue(comm):
        for number in range(3):
            params, state = training_step(optimizer)(params, state, data(number, comm.rank))
            jax.block_until_ready(params)


def test_the_check_in_transformations(comm: Communicator) -> None:
    """In a loop, a derivative, a batch and a recomputation; steps are counted as they run."""
    x = start()

    def step(params: Tree, number: Any) -> Any:
        drift = jnp.where((number == 4) & (comm.rank == 1), 1.0, 0.0)
        params = jax.tree.map(lambda leaf: leaf + drift, params)
        mj.check_state(params, every=5)
        return params, None

    loop = jax.jit(lambda params, count: jax.lax.scan(step, params, jnp.arange(count)), static_argnums=1)
    jax.block_until_ready(loop(x, 4))
    with pytest.raises(MismatchError, match=r"at step 9|at step 10"), mj.raise_errors():
        jax.block_until_ready(loop(x, 6))

    @jax.checkpoint
    def checked(scale: Any) -> Any:
        mj.check_state({"scale": scale}, every=1)
        return scale**2

    for _ in range(3):
        np.testing.assert_allclose(jax.jit(jax.grad(checked))(3.0), 6.0)
        np.testing.assert_allclose(jax.jit(jax.vmap(checked))(jnp.arange(3.0)), [0, 1, 4])
    mixed = {"key": jax.random.key(1), "number": 3, "text": "a", "complex": jnp.ones(2, jnp.complex64)}
    mj.check_state({**mixed, "small": jnp.ones(2, jnp.float8_e4m3fn)}, every=1)


def test_value_and_grad_compares_what_it_differentiates(comm: Communicator) -> None:
    step = jax.jit(mj.value_and_grad(loss, check_every=2))
    params = start()
    jax.block_until_ready(step(params, data(0, comm.rank)))
    with pytest.raises(MismatchError, match="at step 2: '0.layer.weight'"), mj.raise_errors():
        params = last_bit(params, "weight") if comm.rank == 0 else params
        jax.block_until_ready(step(params, data(1, comm.rank)))
    with pytest.raises(UsageError, match="check_every is -1"):
        mj.check_state(params, every=-1)


def uneven_with_drift(comm: Communicator) -> None:
    optimizer = mj.distribute(optax.sgd(0.1, momentum=0.9), check_every=1)
    params = start()
    state = optimizer.init(params)
    step = jax.jit(training_step(optimizer, active=True))
    try:
        with mj.raise_errors():
            for number in range(2 + 2 * comm.rank):
                if number == 3 and comm.rank == 2:
                    params = last_bit(params, "bias")
                params, state = step(params, state, data(number, comm.rank))
            mj.join(params, state=state, check_every=1)
    finally:
        comm.abort("done")


def test_the_check_with_uneven_data(ranks: Pool) -> None:
    """Ranks without data answer the comparisons of the others, which go on finding what differs."""
    for rank, error in enumerate(ranks(3).run_expecting_errors(uneven_with_drift)):
        assert isinstance(error, MismatchError), error
        assert "on rank 1" in str(error)
        assert "on rank 2" in str(error)
        assert "rank 0," not in str(error)  # it has no data any more
        assert ("entry 0" if rank == 0 else "'parameters.layer.bias' has checksum") in str(error)


@on_ranks(3)
def test_buffers_are_those_of_one_rank_or_averages(comm: Communicator) -> None:
    tree = {
        "mean": jnp.full(3, float(comm.rank)),
        "steps": jnp.asarray(comm.rank + 5),
        "half": jnp.ones(2, "bfloat16"),
    }
    for sync in (mj.sync_buffers, jax.jit(mj.sync_buffers, static_argnums=1)):
        found = sync(tree, "average")
        np.testing.assert_array_equal(found["mean"], np.mean(range(comm.size)))
        assert found["steps"] == 5
        assert found["half"].dtype == jnp.bfloat16
        found = sync(tree, "broadcast")
        np.testing.assert_array_equal(found["mean"], 0.0)
        assert found["steps"] == 5
        np.testing.assert_array_equal(sync(tree, "local")["mean"], tree["mean"])
    np.testing.assert_array_equal(mj.sync_buffers(tree, root=comm.size - 1)["mean"], comm.size - 1)
    slope = jax.grad(lambda x: (mj.sync_buffers({"a": x}, "average")["a"] * x).sum())(tree["mean"])
    np.testing.assert_array_equal(slope, np.mean(range(comm.size)))
    with pytest.raises(UsageError, match="accepted: broadcast, average, local"):
        mj.sync_buffers(tree, "max")


@on_ranks(3)
def test_weighted_gradients_are_those_of_all_samples(comm: Communicator) -> None:
    """Of one process; a rank has none."""
    counts = [3, 0, 5]
    whole = jnp.concatenate([data(0, rank, count) for rank, count in enumerate(counts)])
    wanted = jax.grad(loss)(start(), whole)
    count = counts[comm.rank]
    filled = jnp.zeros((5, 4)).at[:count].set(data(0, comm.rank, count))
    mask = jnp.arange(5) < count

    def mean(params: Tree, x: Any, mask: Any) -> Any:
        each = jax.vmap(loss, (None, 0))(params, x[:, None])
        return jnp.where(mask, each, 0).sum() / jnp.maximum(mask.sum(), 1) * mj.batch_weight(mask.sum())

    found = jax.jit(lambda *args: mj.average_gradients(jax.grad(mean)(*args)))(start(), filled, mask)
    agree(found, wanted)
    np.testing.assert_allclose(mj.batch_weight(count), count * comm.size / sum(counts), rtol=1e-15)
    assert mj.batch_weight(0) == 0
    with pytest.raises(UsageError, match="count is -1"):
        mj.batch_weight(-1)


def test_gradients_that_are_reduced_twice_are_refused(comm: Communicator) -> None:
    params = start()
    optimizer = mj.distribute(optax.sgd(0.1), check_every=0)
    state = optimizer.init(params)
    with pytest.raises(UsageError, match="'layer.bias' has been reduced over these ranks already"):
        jax.jit(lambda x: optimizer.update(mj.value_and_grad(loss)(params, x)[1], state, params))(data(0, 0))
    averaged = mj.average_gradients(params)
    with pytest.raises(UsageError, match="reduced over these ranks already"):
        optimizer.update(averaged, state, params)
    with pytest.raises(UsageError, match="reduced over these ranks already"):
        mj.average_partial_gradients(averaged, params)
    with pytest.raises(UsageError, match="wrapped by multiring.jax.distribute already"):
        mj.distribute(optimizer)
    group = comm.split(0)
    mj.average_gradients(averaged, comm=group)  # in two steps over two groups: within hosts, between them


@pytest.mark.parametrize(
    ("what", "since", "found"), [("array", 3, 4), ("array", 9, 16), ("array", 65, 100), ("number", 9, 10)]
)
def test_steps_that_compare(comm: Communicator, what: str, since: int, found: int) -> None:
    check = jax.jit(lambda tree: mj.check_state(tree, every=100) or tree)
    assert scope_at(found, 100).name == ("EVERYTHING" if what == "array" else "NUMBERS")
    with pytest.raises(MismatchError, match=f"at step {found}: '{what}'"), errors_break_the_queue(comm):
        for step in range(1, found + 1):
            tree = {"array": jnp.zeros(3), "number": jnp.zeros(())}
            tree[what] += float(comm.rank if step >= since else 0)
            jax.block_until_ready(check(tree))

"""Training with JAX: optimizers, gradients, state and batch normalisation over ranks, against one process."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multiring.jax as mj
from multiring import Communicator
from multiring.benchmarks.gradients.frameworks.jax import make_reduction
from multiring.errors import UsageError
from tests.adapters.jax.support import TIGHT, Tree, agree, data, hashes_agree, loss, start, training_step
from tests.on_ranks import on_ranks


@pytest.mark.parametrize(("comm", "every_k"), [(1, 1), (3, 3)], indirect=["comm"])
def test_an_optimizer_trains_like_one_process(comm: Communicator, every_k: int) -> None:
    """The same as one process with the batches of all ranks; in between, parts of a batch are added up."""
    inner = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1))
    optimizer = mj.distribute(inner, every_k=every_k, bucket_bytes=8)
    params = expected = start()
    state, reference = optimizer.init(params), inner.init(params)
    step = jax.jit(training_step(optimizer))

    @jax.jit
    def alone(params: Tree, state: Any, batches: Any) -> Any:
        gradients = [jax.grad(loss)(params, x) for mine in batches for x in mine]
        mean = jax.tree.map(lambda *each: sum(each) / comm.size, *gradients)
        changes, state = inner.update(mean, state, params)
        return optax.apply_updates(params, changes), state

    for number in range(3):
        parts = range(number * every_k, (number + 1) * every_k)
        for part in parts:
            agree(params, expected)
            params, state = step(params, state, data(part, comm.rank))
        batches = [[data(part, rank) for part in parts] for rank in range(comm.size)]
        expected, reference = alone(expected, reference, batches)
        agree(params, expected)
    hashes_agree(comm, params)
    if every_k == 1:
        assert jax.tree.structure(state) == jax.tree.structure(reference)


SLOW = {"layer": {"weight": "slow", "bias": "fixed"}}
WRAPPERS: dict[str, Any] = {
    "MultiSteps": lambda inner, wrap: optax.MultiSteps(wrap(inner), 2, accumulator_dtype=jnp.float64),
    "conditionally_mask": lambda inner, wrap: optax.conditionally_mask(
        wrap(inner), lambda step: step % 3 != 1
    ),
    "multi_transform": lambda inner, wrap: optax.multi_transform(
        {"slow": wrap(inner), "fixed": optax.set_to_zero()}, SLOW
    ),
    "inject_hyperparams": lambda _, wrap: optax.inject_hyperparams(lambda rate: wrap(optax.adam(rate)))(
        rate=optax.exponential_decay(0.1, 2, 0.5)
    ),
    "apply_if_finite": lambda inner, wrap: optax.apply_if_finite(wrap(inner), 9),
}


@on_ranks(3)
@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_of_optax_on_both_sides(comm: Communicator, name: str) -> None:
    """Inside and outside of `distribute`, in a loop of steps, like one process with the batches of all ranks.

    Where gradients of some ranks are not finite, `apply_if_finite` outside skips the step on these alone.
    """
    make, wrap = WRAPPERS[name], partial(mj.distribute, check_every=1)
    batches = np.array([[data(step, rank) for rank in range(comm.size)] for step in range(6)])
    optimizers = [wrap(make(optax.adam(0.1), lambda inner: inner))]
    if name == "apply_if_finite":
        batches[2, 1] = batches[4, 0] = np.nan
    else:
        optimizers.append(make(optax.adam(0.1), wrap))

    def train(optimizer: Any, batches: Any) -> Any:
        def step(carry: Any, batch: Any) -> Any:
            each = [jax.grad(loss)(carry[0], x) for x in batch]
            mean = jax.tree.map(lambda *each: sum(each) / len(each), *each)
            changes, state = optimizer.update(mean, carry[1], carry[0])
            return (optax.apply_updates(carry[0], changes), state), None

        begin = start(), optimizer.init(start())
        return jax.jit(lambda carry: jax.lax.scan(step, carry, batches)[0][0])(begin)

    expected = train(make(optax.adam(0.1), lambda inner: inner), batches)
    for optimizer in optimizers:
        agree(train(optimizer, batches[:, [comm.rank]]), expected)


SEARCHES = {
    "lbfgs": lambda: optax.lbfgs(),
    "backtracking": lambda: optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(10)),
    "polyak": lambda: optax.polyak_sgd(1.0),
}


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("name", SEARCHES)
def test_optimizers_that_look_at_the_loss(comm: Communicator, name: str, compiled: bool) -> None:
    """As one process with the data of all ranks: value, gradient and function of the loss are everyone's."""
    x = np.random.default_rng(0).standard_normal((12, 5)).astype(np.float32)
    y = np.tanh(x @ np.arange(5.0, dtype=np.float32))

    def train(rows: slice, optimizer: Any) -> Any:
        def of(weight: Any) -> Any:
            return jnp.mean((jnp.tanh(x[rows] @ weight) - y[rows]) ** 2)

        def step(weight: Any, state: Any) -> Any:
            value, gradient = jax.value_and_grad(of)(weight)
            changes, state = optimizer.update(
                gradient, state, weight, value=value, grad=gradient, value_fn=of
            )
            return optax.apply_updates(weight, changes), state

        run = jax.jit(step) if compiled else step
        weight = jnp.full(5, 0.1)
        state = optimizer.init(weight)
        for _ in range(4):
            weight, state = run(weight, state)
        return weight

    width = len(x) // comm.size
    mine = slice(comm.rank * width, (comm.rank + 1) * width)
    found = train(mine, mj.distribute(SEARCHES[name](), comm=comm, check_every=1))
    np.testing.assert_allclose(found, train(slice(None), SEARCHES[name]()), rtol=1e-3)
    hashes_agree(comm, found)


def test_a_loss_of_several_steps_is_refused(comm: Communicator) -> None:
    optimizer = mj.distribute(optax.sgd(0.1), comm=comm, every_k=2)
    weight = jnp.ones(2)
    with pytest.raises(UsageError, match="there is no loss that the reduced gradients belong to"):
        optimizer.update(weight, optimizer.init(weight), weight, value=1.0)


def test_buckets_leave_during_the_backward_pass_and_are_not_copied(comm: Communicator) -> None:
    """By the compiled training step, in the order in which XLA runs it."""
    optimizer = mj.distribute(optax.sgd(0.1), bucket_bytes=1 << 12)
    params = {f"layer{k}": jnp.ones((32, 32)) for k in range(5)}
    state = optimizer.init(params)

    def deep(params: Tree, x: Any) -> Any:
        for weight in params.values():
            x = jnp.tanh(x @ weight)
        return x.sum()

    step = jax.jit(training_step(optimizer, deep), donate_argnums=(0, 1))
    text = step.lower(params, state, jnp.ones((4, 32))).compile().as_text().partition("ENTRY")[2]
    calls = re.findall(r'custom_call_target="multiring_(start|done)"| (dot|copy)\(', text)
    order = [first or second for first, second in calls]
    assert order.count("start") == order.count("done") == 5
    assert "copy" not in order
    assert "dot" in order[order.index("start") :], "every bucket has waited for the whole backward pass"
    assert "start" not in order[order.index("done") :], "a bucket has waited for another one"


def test_helpers(comm: Communicator) -> None:
    """value_and_grad and average_gradients; None is no gradient; scales and sums."""
    params = start()
    every = [jax.value_and_grad(loss)(params, data(0, rank)) for rank in range(comm.size)]
    mean = jax.tree.map(lambda *each: sum(each) / comm.size, *[gradients for _, gradients in every])
    value, gradients = jax.jit(mj.value_and_grad(loss, name="first"))(params, data(0, comm.rank))
    np.testing.assert_allclose(value, every[comm.rank][0], **TIGHT)
    agree(gradients, mean)
    holes = {"a": every[comm.rank][1], "b": None}
    found = mj.average_gradients(holes, op="sum", postscale=0.5)
    assert found["b"] is None
    agree(found["a"], jax.tree.map(lambda x: x * comm.size / 2, mean))
    hashes_agree(comm, found)


@on_ranks(3)
def test_uneven_data_with_an_optimizer(comm: Communicator) -> None:
    """Rank r has r + 1 batches; parameters and state end equal, with averages over those that had data, which
    are compared in every step."""
    inner = optax.sgd(0.1, momentum=0.9)
    optimizer = mj.distribute(inner, check_every=1)
    params = expected = start()
    state, reference = optimizer.init(params), inner.init(params)
    step = jax.jit(training_step(optimizer, active=True))
    for number in range(comm.rank + 1):
        params, state = step(params, state, data(number, comm.rank))
    params, state = mj.join(params, state=state, check_every=1)
    for number in range(comm.size):
        each = [jax.grad(loss)(expected, data(number, rank)) for rank in range(comm.size) if number <= rank]
        mean = jax.tree.map(lambda *gs: sum(gs) / len(gs), *each)
        changes, reference = inner.update(mean, reference, expected)
        expected = optax.apply_updates(expected, changes)
    agree((params, state), (expected, reference))
    hashes_agree(comm, (params, state))


# By round and rank; three gradients in each round, of which rank 1 has the first two in the first round.
PARTS = [["---", "xx-", "xxx"], ["x--", "---", "-x-"], ["--x", "---", "---"], ["---", "---", "---"]]


@on_ranks(3)
@pytest.mark.parametrize("rounds", [PARTS, [["-", "x", "x"], ["-", "-", "-"]]], ids=["three", "one"])
def test_inactive_parts_of_a_step_do_not_count(comm: Communicator, rounds: list[list[str]]) -> None:
    """Of k gradients those count that came with data; a rank counts if one of them did."""
    every_k = len(rounds[0][0])
    optimizer = mj.distribute(optax.sgd(1.0), every_k=every_k)
    params = {"a": jnp.zeros(2)}
    state = optimizer.init(params)
    update = jax.jit(lambda g, state, active: optimizer.update(g, state, params, active=active))
    for number, flags in enumerate(rounds):
        for k, flag in enumerate(flags[comm.rank]):
            value = 10.0 * number + 2.0**comm.rank + k if flag == "x" else jnp.nan
            changes, state = update({"a": jnp.full(2, value)}, state, flag == "x")
            if k < every_k - 1:
                np.testing.assert_array_equal(changes["a"], 0)
        sums = [
            sum(10.0 * number + 2.0**rank + k for k, flag in enumerate(line) if flag == "x")
            for rank, line in enumerate(flags)
            if "x" in line
        ]
        np.testing.assert_allclose(changes["a"], -np.mean(sums) if sums else 0.0, **TIGHT)


def test_state_of_all_kinds(comm: Communicator) -> None:
    def make(rank: int) -> Tree:
        draw = np.random.default_rng(rank)
        return {
            "key": jax.random.key(rank),
            "old key": jax.random.PRNGKey(rank),
            "half": jnp.asarray(draw.standard_normal(3), jnp.bfloat16),
            "numpy": draw.integers(0, 9, (2, 2))[:, ::-1],
            "flags": jnp.asarray([rank == 0, True]),
            "empty": jnp.zeros((0, 2)),
            "numbers": (rank, rank / 2, bool(rank)),
            "optimizer": optax.adam(0.1).init({"w": jnp.full(2, rank)}),
        }

    found, wanted = mj.broadcast_parameters(make(comm.rank), 1), make(1)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert type(one) is type(other)
        if jnp.issubdtype(getattr(other, "dtype", None), jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        np.testing.assert_array_equal(one, other)
    assert mj.broadcast_object({"rank": comm.rank}, 1) == {"rank": 1}
    assert mj.average_metrics({"loss": jnp.float32(comm.rank)}, comm.rank) == {"loss": 1.0}


@pytest.mark.parametrize(
    ("comm", "parts", "axis"),
    [(1, [3], 2), (3, [4, 0, 1], 1), (3, [0, 2, 0], 2)],
    indirect=["comm"],
)
def test_batch_normalisation_over_ranks(comm: Communicator, parts: list[int], axis: int) -> None:
    """Values, gradients and statistics are those of one process with all batches; some may be empty."""
    draw = np.random.default_rng(3)
    scale, offset = jnp.asarray(draw.standard_normal((2, 3)))
    whole, targets = np.moveaxis(draw.standard_normal((2, sum(parts), 2, 3)), 3, axis + 1)
    whole += 1e4
    end = int(np.sum(parts[: comm.rank + 1]))
    mine = slice(end - parts[comm.rank], end)

    def alone(x: Any, scale: Any, offset: Any) -> Any:
        last = jnp.moveaxis(x, axis, 2)
        mean, variance = last.mean((0, 1)), last.var((0, 1))
        y = (last - mean) / jnp.sqrt(variance + 1e-5) * scale + offset
        return jnp.sum(jnp.moveaxis(y, 2, axis) * targets), (y, mean, variance)

    def ours(x: Any, scale: Any, offset: Any) -> Any:
        y, found = mj.sync_batch_norm(x, scale, offset, axis=axis)
        return jnp.sum(y * targets[mine]), (jnp.moveaxis(y, axis, 2), found)

    wanted, (y, mean, variance) = jax.jit(jax.grad(alone, (0, 1, 2), has_aux=True))(whole, scale, offset)
    gradients, (result, found) = jax.jit(jax.grad(ours, (0, 1, 2), has_aux=True))(whole[mine], scale, offset)
    loose = {"rtol": 1e-8, "atol": 1e-9}  # the offset of 1e4 costs four digits, on both sides
    np.testing.assert_allclose(result, y[mine], **loose)
    np.testing.assert_allclose(gradients[0], wanted[0][mine], **loose)
    for one, other in zip(gradients[1:], wanted[1:], strict=True):
        np.testing.assert_allclose(mj.allreduce(one), other, **loose)
    np.testing.assert_allclose(found.mean, mean, rtol=1e-14)
    np.testing.assert_allclose(found.variance, variance, rtol=1e-10)
    filled = jnp.concatenate([jnp.asarray(whole[mine]), jnp.full((2, *whole.shape[1:]), jnp.nan)])
    masked = mj.batch_statistics(filled, axis=axis, mask=jnp.arange(len(filled)) < parts[comm.rank])
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-10), masked, found)
    count = sum(parts) * 2
    assert found.samples == count
    np.testing.assert_allclose(found.unbiased_variance, variance * count / (count - 1), rtol=1e-10)
    hashes_agree(comm, found)


@on_ranks(1, 2)
def test_what_the_benchmark_measures_makes_averages(comm: Communicator) -> None:
    reduction = make_reduction([(3, 4), (5,), (), (0, 2)], comm)
    for step in range(2):
        reduction.run(comm.rank + step, comm.barrier)
        assert reduction.check((comm.size - 1) / 2 + step)
        assert not reduction.check(-1.0)
    reduction.close()

"""Training with JAX: optimizers, gradients, state and batch normalisation over ranks, against one process."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multiring.jax as mj
from multiring import Communicator
from multiring.errors import MismatchError
from tests.on_ranks import all_raise, on_ranks, same_everywhere

Tree = dict[str, Any]

jax.config.update("jax_enable_x64", True)

TIGHT = {"rtol": 1e-12, "atol": 1e-14}


def start() -> Tree:
    draw = np.random.default_rng(0)
    return {"weight": jnp.asarray(draw.standard_normal((4, 3))), "bias": jnp.zeros(3)}


def data(step: int, rank: int, samples: int = 2) -> Any:
    return jnp.asarray(np.random.default_rng([step, rank]).standard_normal((samples, 4)))


def loss(params: Tree, x: Any) -> Any:
    return jnp.square(jnp.tanh(x @ params["weight"] + params["bias"]) - 1).sum() / len(x)


def agree(found: Any, wanted: Any) -> None:
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, **TIGHT), found, wanted)


def hashes_agree(comm: Communicator, tree: Any) -> None:
    assert same_everywhere(comm, [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)])


@pytest.mark.parametrize(("comm", "every_k"), [(1, 1), (3, 3)], indirect=["comm"])
def test_an_optimizer_trains_like_one_process(comm: Communicator, every_k: int) -> None:
    """The same as one process with the batches of all ranks; in between, parts of a batch are added up."""
    inner = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1))
    optimizer = mj.distribute(inner, every_k=every_k, bucket_bytes=8, first_bucket_bytes=8)
    params = expected = start()
    state, reference = optimizer.init(params), inner.init(params)

    @jax.jit
    def step(params: Tree, state: Any, x: Any) -> Any:
        changes, state = optimizer.update(jax.grad(loss)(params, x), state, params)
        return optax.apply_updates(params, changes), state

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


def test_buckets_leave_during_the_backward_pass_and_are_not_copied(comm: Communicator) -> None:
    """By the compiled training step, in the order in which XLA runs it."""
    optimizer = mj.distribute(optax.sgd(0.1), bucket_bytes=1 << 12, first_bucket_bytes=1 << 10)
    params = {f"layer{k}": jnp.ones((32, 32)) for k in range(5)}
    state = optimizer.init(params)

    def deep(params: Tree, x: Any) -> Any:
        for weight in params.values():
            x = jnp.tanh(x @ weight)
        return x.sum()

    def step(params: Tree, state: Any, x: Any) -> Any:
        changes, state = optimizer.update(jax.grad(deep)(params, x), state, params)
        return optax.apply_updates(params, changes), state

    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, jnp.ones((4, 32))).compile()
    text: str = compiled.as_text()
    calls = re.findall(
        r'custom_call_target="multiring_(start|done)"| (dot|copy)\(', text[text.index("ENTRY") :]
    )
    order = [first or second for first, second in calls]
    assert order.count("start") == order.count("done") == 5
    assert "copy" not in order
    assert "dot" in order[order.index("start") :], "every bucket has waited for the whole backward pass"
    assert "start" not in order[order.index("done") :], "a bucket has waited for another one"


@all_raise(MismatchError, "'options'")
def test_init_compares_the_options(comm: Communicator) -> None:
    mj.distribute(optax.sgd(0.1), every_k=1 + comm.rank).init(start())


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
    """Rank r has r + 1 batches; parameters and state end equal, with averages over those that had data."""
    inner = optax.sgd(0.1, momentum=0.9)
    optimizer = mj.distribute(inner)
    params = expected = start()
    state, reference = optimizer.init(params), inner.init(params)

    @jax.jit
    def step(params: Tree, state: Any, x: Any) -> Any:
        changes, state = optimizer.update(jax.grad(loss)(params, x), state, params, active=True)
        return optax.apply_updates(params, changes), state

    for number in range(comm.rank + 1):
        params, state = step(params, state, data(number, comm.rank))
    params, state = mj.join(params, state=state)
    for number in range(comm.size):
        each = [jax.grad(loss)(expected, data(number, rank)) for rank in range(comm.size) if number <= rank]
        mean = jax.tree.map(lambda *gs: sum(gs) / len(gs), *each)
        changes, reference = inner.update(mean, reference, expected)
        expected = optax.apply_updates(expected, changes)
    agree((params, state), (expected, reference))
    hashes_agree(comm, (params, state))


@on_ranks(3)
def test_inactive_ranks_do_not_count(comm: Communicator) -> None:
    """A rank without data may as well pass False, and anything as gradients."""
    optimizer = mj.distribute(optax.sgd(1.0))
    params = {"a": jnp.zeros(2)}
    state = optimizer.init(params)
    update = jax.jit(lambda g, active: optimizer.update(g, state, params, active=active)[0])
    junk = jnp.full(2, jnp.nan if comm.rank == 0 else float(comm.rank))
    changes = update({"a": junk}, comm.rank != 0)
    np.testing.assert_allclose(changes["a"], -np.mean(range(1, comm.size)), **TIGHT)
    np.testing.assert_array_equal(update({"a": junk}, False)["a"], 0)


@on_ranks(3)
def test_inactive_parts_of_a_step_do_not_count(comm: Communicator) -> None:
    """Of k gradients those count that came with data; a rank counts if one of them did."""
    optimizer = mj.distribute(optax.sgd(1.0), every_k=3)
    params = {"a": jnp.zeros(2)}
    state = optimizer.init(params)
    update = jax.jit(lambda g, state, active: optimizer.update(g, state, params, active=active))
    # By rank: none in the first round, the first two of three, all; then others.
    rounds = [["---", "xx-", "xxx"], ["x--", "---", "-x-"], ["--x", "---", "---"], ["---", "---", "---"]]
    for number, flags in enumerate(rounds):
        mine = [flag == "x" for flag in flags[comm.rank]]
        for k, active in enumerate(mine):
            value = 10.0 * number + 2.0**comm.rank + k if active else jnp.nan
            changes, state = update({"a": jnp.full(2, value)}, state, active)
            if k < 2:
                np.testing.assert_array_equal(changes["a"], 0)
        sums = [
            sum(10.0 * number + 2.0**rank + k for k in range(3) if line[k] == "x")
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
    metrics = mj.average_metrics({"loss": jnp.float32(comm.rank)}, comm.rank)
    assert metrics == {"loss": pytest.approx(1.0)}


@pytest.mark.parametrize(
    ("comm", "parts", "axis"),
    [(1, [3], 2), (3, [4, 0, 1], 1), (3, [0, 2, 0], 2)],
    indirect=["comm"],
)
def test_batch_normalisation_over_ranks(comm: Communicator, parts: list[int], axis: int) -> None:
    """Values, gradients and statistics are those of one process with all batches; some may be empty."""
    draw = np.random.default_rng(3)
    scale, offset = jnp.asarray(draw.standard_normal(3)), jnp.asarray(draw.standard_normal(3))
    whole = draw.standard_normal((sum(parts), 2, 3)) + 1e4
    targets = draw.standard_normal(whole.shape)
    whole, targets = np.moveaxis(whole, 2, axis), np.moveaxis(targets, 2, axis)
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

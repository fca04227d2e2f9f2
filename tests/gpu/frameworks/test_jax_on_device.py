"""JAX on a device: programs with collectives, training that is what one process would do."""

from __future__ import annotations

import importlib
import os
from typing import Any

import numpy as np
import pytest

from multiring import Communicator, MismatchError
from tests.on_ranks import on_ranks

# Ranks of the tests share a device, of which JAX else takes three quarters at once.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def _modules() -> tuple[Any, Any]:
    return importlib.import_module("jax"), importlib.import_module("multiring.jax")


def _is_there(array: Any) -> bool:
    return {device.platform for device in array.devices()} == {"gpu"}


def _late(jax: Any, x: Any) -> Any:
    """The same values, which take the device some milliseconds."""
    # Of the values, so that it is neither shared by several calls nor moved out of a loop.
    wait = jax.numpy.ones((1500, 1500), x.dtype) + 0 * x.sum()
    for _ in range(20):
        wait = jax.numpy.sin(wait @ wait) / 1500
    return x + 0 * wait.sum()


@on_ranks(1, 2, 3)
def test_jax_collectives_are_those_of_the_host(comm: Communicator) -> None:
    jax, mj = _modules()
    rank, size = comm.rank, comm.size
    for rows in (0, 7, 100_003):
        given = [np.random.default_rng(r).standard_normal((rows, 3)).astype(np.float32) for r in range(size)]
        parts = [np.array_split(x, size) for x in given]
        lengths = [len(part) for part in parts[0]]

        @jax.jit
        def everything(x: Any, own: Any, lengths: list[int] = lengths) -> Any:
            x = _late(jax, x)
            first = mj.allreduce({"a": x, "b": x * 2}, "average")
            rows = mj.allgather(_late(jax, own), lengths), mj.reducescatter(x)
            exchanged = mj.alltoall(x, lengths, [lengths[comm.rank]] * comm.size)
            # x is used again: nothing of it may have been overwritten.
            return first, rows, exchanged, mj.broadcast(x, comm.size - 1), x * 1

        found = everything(given[rank], parts[rank][rank])
        assert all(map(_is_there, jax.tree.leaves(found)))
        first, (joined, block), exchanged, last, x = jax.device_get(found)
        total = comm.allreduce(given[rank])  # on the host: the same bits
        mean = comm.allreduce(given[rank], "average")
        np.testing.assert_array_equal(first["a"], mean)
        np.testing.assert_array_equal(first["b"], 2 * mean)
        np.testing.assert_array_equal(joined, np.concatenate([parts[r][r] for r in range(size)]))
        np.testing.assert_array_equal(block, np.array_split(total, size)[rank])
        np.testing.assert_array_equal(exchanged, np.concatenate([part[rank] for part in parts]))
        np.testing.assert_array_equal(last, given[-1])
        np.testing.assert_array_equal(x, given[rank])


@on_ranks(2)
def test_jax_loops_and_branches(comm: Communicator) -> None:
    jax, mj = _modules()

    @jax.jit
    def program(x: Any) -> Any:
        total = jax.lax.fori_loop(0, 20, lambda _, y: mj.allreduce(_late(jax, y), "average") + 1, x)
        return jax.lax.cond(total[0] > 0, mj.allreduce, lambda y: y, total)

    found = jax.device_get(program(jax.numpy.full(1000, float(comm.rank))))
    np.testing.assert_array_equal(found, np.full(1000, 41.0, np.float32))


@on_ranks(1, 2)
def test_jax_training_is_that_of_one_process(comm: Communicator) -> None:
    jax, mj = _modules()
    optax = pytest.importorskip("optax")
    rank, size = comm.rank, comm.size
    draw = np.random.default_rng(0)
    data = draw.standard_normal((8, 12, 5)).astype(np.float32)
    start = {"w": draw.standard_normal((5, 300)).astype(np.float32), "b": np.zeros(300, np.float32)}

    def loss(params: Any, x: Any) -> Any:
        return jax.numpy.square(jax.numpy.tanh(x @ params["w"] + params["b"]) - 0.5).mean()

    def trained(optimizer: Any, batches: Any, params: Any) -> Any:
        params, state = jax.tree.map(jax.numpy.asarray, params), None
        state = optimizer.init(params)

        def step(params: Any, state: Any, x: Any) -> Any:
            updates, state = optimizer.update(jax.grad(loss)(params, x), state, params)
            return optax.apply_updates(params, updates), state

        compiled = jax.jit(step, donate_argnums=(0, 1))
        for x in batches:
            params, state = compiled(params, state, x)
        assert all(map(_is_there, jax.tree.leaves(params)))
        return jax.device_get(params)

    alone = trained(optax.adam(0.1), data, start)
    mine = jax.tree.map(lambda leaf: leaf + rank, start)
    params = mj.broadcast_parameters(jax.tree.map(jax.numpy.asarray, mine))
    assert all(map(_is_there, jax.tree.leaves(params)))
    optimizer = mj.distribute(optax.adam(0.1), check_every=2)  # so the state is compared, too
    together = trained(optimizer, data[:, rank::size], params)
    for name, expected in alone.items():
        np.testing.assert_allclose(together[name], expected, rtol=2e-3, atol=2e-4)
    hashed = comm.allgather(np.frombuffer(together["w"].tobytes(), np.uint8))
    assert len({block.tobytes() for block in np.array_split(hashed, size)}) == 1


@on_ranks(2)
def test_jax_errors_name_what_failed(comm: Communicator) -> None:
    jax, mj = _modules()
    group = comm.split(0)
    assert group is not None
    shape = 4 + comm.rank
    with pytest.raises(MismatchError), mj.raise_errors():
        jax.block_until_ready(
            jax.jit(lambda x: mj.allreduce(x, name="w", comm=group))(jax.numpy.ones(shape, "float32"))
        )
    np.testing.assert_array_equal(mj.allreduce(jax.numpy.ones(3, "float32"), comm=comm), 2 * np.ones(3))

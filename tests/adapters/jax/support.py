"""What the tests of the JAX adapter share: a model and how it is trained, and what follows an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import multiring
import multiring.jax as mj
from multiring import Communicator
from tests.on_ranks import same_everywhere

Tree = dict[str, Any]
TIGHT = {"rtol": 1e-12, "atol": 1e-14}

jax.config.update("jax_enable_x64", True)


def start() -> Tree:
    weight = np.random.default_rng(0).standard_normal((4, 3))
    return {"layer": {"weight": jnp.asarray(weight), "bias": jnp.zeros(3)}}


def data(step: int, rank: int, samples: int = 2) -> Any:
    return jnp.asarray(np.random.default_rng([step, rank]).standard_normal((samples, 4)))


def loss(params: Tree, x: Any) -> Any:
    layer = params["layer"]
    return jnp.square(jnp.tanh(x @ layer["weight"] + layer["bias"]) - 1).sum() / len(x)


def training_step(optimizer: Any, function: Callable[..., Any] = loss, **options: Any) -> Callable[..., Any]:
    """To be compiled. `options` are those of the optimizer's update."""

    def step(params: Tree, state: Any, x: Any) -> Any:
        changes, state = optimizer.update(jax.grad(function)(params, x), state, params, **options)
        return optax.apply_updates(params, changes), state

    return step


def agree(found: Any, wanted: Any) -> None:
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, **TIGHT), found, wanted)


def hashes_agree(comm: Communicator, tree: Any) -> None:
    assert same_everywhere(comm, [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)])


@contextmanager
def errors_break_the_queue(comm: Communicator) -> Iterator[None]:
    """What comes after starts in a new world, with a new queue."""
    try:
        with mj.raise_errors():
            yield
    finally:
        comm.barrier()
        multiring.shutdown()

"""The contract of adapters, over JAX."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray

import multiring.jax
from multiring import Communicator
from tests.adapters.contract import Adapter, AdapterContract

Array = NDArray[Any]
Tree = dict[str, Any]

jax.config.update("jax_enable_x64", True)


def loss_of(used: Tree, x: jax.Array, y: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x @ used["first"] + used["offset"])
    output = hidden @ used["second"]
    if "extra" in used:
        output = output + hidden @ used["extra"]
    return ((output - y) ** 2).sum() / (2 * len(x))


local_gradients = jax.jit(jax.value_and_grad(loss_of))


@partial(jax.jit, static_argnames=("comm", "bucket_bytes", "check_every"))
def averaged_gradients(
    gradients: Tree, params: Tree, comm: Communicator, bucket_bytes: int, check_every: int
) -> Any:
    if check_every:
        multiring.jax.check_state(params, every=check_every, comm=comm)
    return multiring.jax.average_partial_gradients(gradients, params, comm=comm, bucket_bytes=bucket_bytes)


def add(one: Any, other: Any) -> Any:
    return one if other is None else other if one is None else one + other


class JaxAdapter(Adapter):
    """Implements `AdapterUnderTest` with pure functions; the state of a training loop is kept here."""

    package = multiring.jax

    def __init__(
        self, comm: Communicator, weights: Mapping[str, Array], bucket_bytes: int, check_every: int = 0
    ) -> None:
        self._comm, self._bucket_bytes, self._check_every = comm, bucket_bytes, check_every
        self._params = {name: jnp.asarray(value) for name, value in weights.items()}
        multiring.jax.distribute(optax.identity(), comm=comm).init(self._params)  # compares the models
        self.zero_grad()

    def backward(self, x: Array, y: Array, *, extra: bool = True, synchronise: bool = True) -> float:
        used = {name: value for name, value in self._params.items() if extra or name != "extra"}
        loss, gradients = local_gradients(used, x, y)
        self._local = {name: add(mine, gradients.get(name)) for name, mine in self._local.items()}
        if synchronise:
            with multiring.jax.raise_errors():
                averages, who = jax.block_until_ready(
                    averaged_gradients(
                        self._local, self._params, self._comm, self._bucket_bytes, self._check_every
                    )
                )
            present = who.present(averages)
            self._averaged = {name: add(mine, present[name]) for name, mine in self._averaged.items()}
            self._local = dict.fromkeys(self._params)
        return float(loss)

    def gradients(self) -> dict[str, Array | None]:
        return {name: None if value is None else np.array(value) for name, value in self._averaged.items()}

    def zero_grad(self) -> None:
        self._local: Tree = dict.fromkeys(self._params)
        self._averaged: Tree = dict.fromkeys(self._params)

    def step(self, rate: float) -> None:
        for name, gradient in self._averaged.items():
            if gradient is not None:
                self._params[name] = self._params[name] - rate * gradient

    def weights(self) -> dict[str, Array]:
        return {name: np.array(value) for name, value in self._params.items()}

    def broadcast(self, root: int) -> None:
        self._params = multiring.jax.broadcast_parameters(self._params, root, comm=self._comm)

    @contextmanager
    def join(self) -> Iterator[None]:
        yield
        options = {"bucket_bytes": self._bucket_bytes}
        self._params = multiring.jax.join(self._params, comm=self._comm, **options)

    def close(self) -> None:
        """Nothing is held."""


class TestJaxAdapter(AdapterContract):
    adapter = JaxAdapter

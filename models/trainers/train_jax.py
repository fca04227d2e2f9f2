"""The training step in JAX."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax

import multiring.jax
from multiring.errors import UsageError
from multiring.models.data.loader import Batch
from multiring.models.errors import CheckpointError
from multiring.models.nets.resnet_jax import (
    Arrays,
    apply_resnet,
    load_weights,
    local_statistics,
    read_weights,
)
from multiring.models.nets.weights import to_channels_last
from multiring.models.trainers.trainer import MODEL, MOMENTUM, Probe, Sums, Trainer

__all__ = ["JaxTrainer"]

Array = npt.NDArray[Any]
State = tuple[Arrays, Arrays, Any]  # parameters, running statistics, state of the optimizer


class JaxTrainer(Trainer):
    """A ResNet under stochastic gradient descent, in compiled functions.

    Another size of the batch would be another program, which takes seconds to compile. So a smaller batch, as
    the last one of an epoch, is filled up, and a mask says which samples count. A dtype of "float64" turns on
    `jax_enable_x64` for the process.
    """

    @staticmethod
    def set_threads(count: int) -> None:
        """Let XLA compute with `count` threads; to be called before JAX computes anything."""
        os.environ["NPROC"] = str(count)  # read when the CPU client is made
        if count == 1:
            flags = os.environ.get("XLA_FLAGS", "")
            os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_multi_thread_eigen=false".strip()

    def _build(self, weights: dict[str, Array], dtype: str, seed: int) -> None:
        if dtype == "float64":
            jax.config.update("jax_enable_x64", True)
        self._dtype = np.dtype(dtype)
        decays = {parameter.name: parameter.decays for parameter in self._spec.parameters()}
        self._optimizer = multiring.jax.distribute(
            optax.chain(
                optax.add_decayed_weights(self._recipe.weight_decay, mask=decays),
                optax.trace(self._recipe.momentum, nesterov=self._recipe.nesterov),
            ),
            comm=self._comm,
        )
        parameters, running = load_weights(self._spec, weights, self._dtype)
        parameters, running = multiring.jax.broadcast_parameters((parameters, running), comm=self._comm)
        self._state: State = (parameters, running, self._optimizer.init(parameters))
        self._rows = {"train": 1, "evaluate": 1}
        self._train = jax.jit(self._update, donate_argnums=0)
        self._score = jax.jit(self._scores)

    def step(self, batch: Batch, lr: float) -> Sums:
        """Train on one global batch; see `Trainer.step`."""
        # Averaged over ranks this is the sum over the global batch divided by its samples, for any split.
        scale = np.array(self._comm.size / batch.global_count, self._dtype)
        with multiring.jax.raise_errors():
            self._state, found = self._train(
                self._state, *self._filled(batch, "train"), scale, np.array(lr, self._dtype)
            )
            return _sums(found, len(batch.labels))

    def evaluate(self, batch: Batch) -> Sums:
        """Score a batch; see `Trainer.evaluate`."""
        parameters, running, _ = self._state
        return _sums(self._score(parameters, running, *self._filled(batch, "evaluate")), len(batch.labels))

    def probe(self, batch: Batch) -> Probe:
        """Scores and gradients of a batch; see `Trainer.probe`."""
        if self._comm.size > 1:
            raise UsageError(f"rank {self._comm.rank}: a probe needs a trainer of a single rank")
        parameters, running, _ = self._state
        scale = np.array(1 / len(batch.labels), self._dtype)
        derive = jax.jit(jax.grad(self._loss, has_aux=True))
        gradients, (scores, *_) = derive(parameters, running, *self._filled(batch, "train"), scale)
        return Probe(np.array(scores)[: len(batch.labels)], read_weights(gradients))

    def _average_statistics(self) -> None:
        parameters, running, optimizer = self._state
        averaged = multiring.jax.grouped_allreduce(
            running, "average", comm=self._comm, name="running statistics"
        )
        self._state = parameters, averaged, optimizer

    def state(self) -> dict[str, Array]:
        """Copies of model and momentum; see `Trainer.state`."""
        parameters, running, optimizer = self._state
        named = {MODEL: {**parameters, **running}, MOMENTUM: _momentum(optimizer)}
        return {
            prefix + name: value
            for prefix, arrays in named.items()
            for name, value in read_weights(arrays).items()
        }

    def _load(self, weights: Mapping[str, Array], state: Mapping[str, Array]) -> None:
        parameters, running = load_weights(self._spec, weights, self._dtype)
        momentum = {}
        for name, value in parameters.items():
            stored = state.get(MOMENTUM + name)
            old = np.zeros(value.shape) if stored is None else to_channels_last(stored)
            if old.shape != value.shape:
                raise CheckpointError(f"the checkpoint's momentum of {name} has another shape")
            momentum[name] = jnp.array(old, self._dtype)
        optimizer = self._optimizer.init(parameters)
        self._state = parameters, running, optax.tree_utils.tree_set(optimizer, trace=momentum)

    def close(self) -> None:
        """Nothing is held of the communicator."""

    def _loss(
        self, parameters: Arrays, running: Arrays, images: jax.Array, labels: jax.Array, scale: jax.Array
    ) -> tuple[jax.Array, Any]:
        """The loss that is differentiated; scores, running statistics, and sums over the samples."""
        mask = labels >= 0

        def statistics(x: jax.Array, name: str) -> multiring.jax.BatchStatistics:
            if not self._sync_bn:
                return local_statistics(x, mask)
            return multiring.jax.batch_statistics(x, mask=mask, comm=self._comm, name=f"{name} statistics")

        scores, running = apply_resnet(self._spec, parameters, running, images, statistics)
        sums = _score_sums(scores, labels)
        return sums[0] * scale, (scores, running, sums)

    def _update(
        self, state: State, images: jax.Array, labels: jax.Array, scale: jax.Array, lr: jax.Array
    ) -> tuple[State, Any]:
        parameters, running, optimizer = state
        gradients, (_, running, sums) = jax.grad(self._loss, has_aux=True)(
            parameters, running, images, labels, scale
        )
        changes, optimizer = self._optimizer.update(gradients, optimizer, parameters)
        parameters = jax.tree.map(lambda value, change: value - lr * change, parameters, changes)
        return (parameters, running, optimizer), sums

    def _scores(
        self, parameters: Arrays, running: Arrays, images: jax.Array, labels: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        return _score_sums(apply_resnet(self._spec, parameters, running, images)[0], labels)

    def _filled(self, batch: Batch, kind: str) -> tuple[Array, Array]:
        """Images and labels, filled up to the most samples so far; labels of what was added are -1."""
        rows = self._rows[kind] = max(self._rows[kind], len(batch.labels))
        images = np.zeros((rows, *batch.images.shape[1:]), self._dtype)
        labels = np.full(rows, -1, np.int32)
        images[: len(batch.labels)], labels[: len(batch.labels)] = batch.images, batch.labels
        return images, labels


def _momentum(optimizer: Any) -> Arrays:
    momentum: Arrays = optax.tree_utils.tree_get(optimizer, "trace")
    return momentum


def _score_sums(scores: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sum of the samples' losses, and how many are right."""
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, jnp.maximum(labels, 0))
    return jnp.where(labels >= 0, losses, 0).sum(), (scores.argmax(1) == labels).sum()


def _sums(found: tuple[Any, Any], count: int) -> Sums:
    total, correct = found
    return Sums(float(total), int(correct), count)

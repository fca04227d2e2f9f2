"""The training step in Chainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import multiring.chainer  # isort: skip  # before chainer, which it makes importable

import chainer
import numpy as np
import numpy.typing as npt
from chainer import functions

from multiring.models.data.loader import Batch
from multiring.models.nets.resnet_chainer import (
    ChainerResNet,
    load_weights,
    read_weights,
    running_statistics,
    trained_parameters,
)
from multiring.models.trainers.sgd_chainer import VELOCITY, Sgd, decay_weights
from multiring.models.trainers.trainer import MODEL, MOMENTUM, Probe, Sums, Trainer

__all__ = ["ChainerTrainer"]

Array = npt.NDArray[Any]


class ChainerTrainer(Trainer):
    """A ResNet under stochastic gradient descent, its gradients averaged by a multi-node optimizer."""

    @staticmethod
    def set_threads(count: int) -> None:
        """Let NumPy's matrix products, on which Chainer computes, run on `count` threads."""
        from threadpoolctl import threadpool_limits

        threadpool_limits(count)

    def _build(self, weights: dict[str, Array], dtype: str, seed: int) -> None:
        self._dtype = np.dtype(dtype)
        self._model = model = ChainerResNet(self._spec, self._dtype)
        load_weights(model, weights)
        if self._sync_bn:
            multiring.chainer.convert_sync_batch_normalization(model, self._comm)
        self._parameters = trained_parameters(model)
        multiring.chainer.broadcast_parameters(model, comm=self._comm)
        self._communicator = multiring.chainer.create_communicator(self._comm)
        # The trainer averages statistics itself, where ranks have their own.
        self._optimizer = multiring.chainer.create_multi_node_optimizer(
            Sgd(self._recipe), self._communicator, buffers="local"
        )
        self._optimizer.setup(model)
        decay_weights(model, self._recipe.weight_decay)

    def step(self, batch: Batch, lr: float) -> Sums:
        """Train on one global batch; see `Trainer.step`."""
        self._optimizer.lr = lr
        seen: list[Sums] = []
        self._optimizer.update(self._loss, batch, seen)
        return seen[0]

    def evaluate(self, batch: Batch) -> Sums:
        """Score a batch; see `Trainer.evaluate`."""
        with chainer.using_config("train", False), chainer.no_backprop_mode():
            scores = self._model(self._images(batch))
            return _sums(scores, batch.labels, _summed_loss(scores, batch.labels))

    def probe(self, batch: Batch) -> Probe:
        """Scores and gradients of a batch; see `Trainer.probe`."""
        arrays = read_weights(self._model)
        gradients = {name: parameter.grad for name, parameter in self._parameters.items()}
        self._model.cleargrads()
        with chainer.using_config("train", True):
            scores = self._model(self._images(batch))
            functions.softmax_cross_entropy(scores, batch.labels).backward()
        found = {name: np.array(parameter.grad) for name, parameter in self._parameters.items()}
        load_weights(self._model, arrays)
        for name, parameter in self._parameters.items():
            parameter.grad = gradients[name]
        return Probe(np.array(scores.array), found)

    def _average_statistics(self) -> None:
        self._average(running_statistics(self._model))

    def state(self) -> dict[str, Array]:
        """Copies of model and momentum; see `Trainer.state`. Nothing here draws random numbers."""
        state = {MODEL + name: value for name, value in read_weights(self._model).items()}
        for name, parameter in self._parameters.items():
            if parameter.update_rule.state is not None:
                state[MOMENTUM + name] = parameter.update_rule.state[VELOCITY].copy()
        return state

    def _load(self, weights: Mapping[str, Array], state: Mapping[str, Array]) -> None:
        load_weights(self._model, weights)
        for name, parameter in self._parameters.items():
            velocity = state.get(MOMENTUM + name)
            parameter.update_rule.set_velocity(None if velocity is None else velocity.astype(self._dtype))

    def close(self) -> None:
        """Release the buckets."""
        self._optimizer.close()
        self._communicator.finalize()

    def _loss(self, batch: Batch, seen: list[Sums]) -> chainer.Variable:
        """Averaged over ranks this is the mean over the global batch, for any split; appends to `seen`."""
        if len(batch.labels) == 0 and not self._sync_bn:
            # Nothing to compute and nothing that the others wait for but the gradients: contribute zeros.
            seen.append(Sums())
            return sum(functions.sum(parameter) * 0.0 for parameter in self._parameters.values())
        with chainer.using_config("train", True):
            scores = self._model(self._images(batch))
        loss = _summed_loss(scores, batch.labels)
        seen.append(_sums(scores, batch.labels, loss))
        return loss * (self._comm.size / batch.global_count)

    def _images(self, batch: Batch) -> Array:
        return batch.images.astype(self._dtype, copy=False)


def _summed_loss(scores: chainer.Variable, labels: Array) -> chainer.Variable:
    if len(labels) == 0:  # Chainer's cross entropy cannot do without samples
        return functions.sum(scores)
    return functions.sum(functions.softmax_cross_entropy(scores, labels, reduce="no"))


def _sums(scores: chainer.Variable, labels: Array, loss: chainer.Variable) -> Sums:
    correct = int((scores.array.argmax(axis=1) == labels).sum())
    return Sums(float(loss.array), correct, len(labels))

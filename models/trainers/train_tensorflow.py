"""The training step in TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

import multiring.tensorflow
from multiring.models.data.loader import Batch
from multiring.models.nets.resnet_tensorflow import TensorFlowResNet, load_weights, read_weights
from multiring.models.nets.weights import to_channels_first, to_channels_last
from multiring.models.trainers.trainer import MODEL, MOMENTUM, Probe, Sums, Trainer

__all__ = ["TensorFlowTrainer"]

Array = npt.NDArray[Any]
Tensor = Any

DTYPES = {"float32": tf.float32, "float64": tf.float64}


class TensorFlowTrainer(Trainer):
    """A ResNet under stochastic gradient descent in one traced function, its gradients averaged over the
    ranks.
    """

    @staticmethod
    def set_threads(count: int) -> None:
        """Let TensorFlow compute with `count` threads."""
        tf.config.threading.set_intra_op_parallelism_threads(count)
        tf.config.threading.set_inter_op_parallelism_threads(max(count, 1))

    def _build(self, weights: dict[str, Array], dtype: str, seed: int) -> None:
        self._dtype = DTYPES[dtype]
        self._model = model = TensorFlowResNet(self._spec, self._dtype, self._comm if self._sync_bn else None)
        load_weights(model, weights)
        self._decays = [parameter.decays for parameter in self._spec.parameters()]
        self._momentum = {
            name: tf.Variable(tf.zeros_like(variable), trainable=False)
            for name, variable in model.parameters.items()
        }
        multiring.tensorflow.broadcast_variables(model.parameters | model.statistics, comm=self._comm)
        # As XLA cannot run the collectives, it is kept off whatever the environment says.
        self._step = tf.function(self._train, autograph=False, reduce_retracing=True, jit_compile=False)
        # Traced by itself, so that the network knows that there are no images.
        self._step_empty = tf.function(self._train, autograph=False, jit_compile=False)
        self._step_without = tf.function(self._train_without, autograph=False, jit_compile=False)
        self._score = tf.function(
            self._scores_and_sums, autograph=False, reduce_retracing=True, jit_compile=False
        )

    def step(self, batch: Batch, lr: float) -> Sums:
        """Train on one global batch; see `Trainer.step`."""
        rate = tf.constant(lr, self._dtype)
        if len(batch.labels) == 0 and not self._sync_bn:
            # Nothing to compute and nothing that the others wait for but the gradients: contribute zeros.
            self._step_without(rate)
            return Sums()
        images, labels = self._tensors(batch)
        share = tf.constant(self._comm.size / batch.global_count, self._dtype)
        run = self._step if len(batch.labels) else self._step_empty
        loss, correct = run(images, labels, share, rate)
        return Sums(float(loss), int(correct), len(batch.labels))

    def evaluate(self, batch: Batch) -> Sums:
        """Score a batch; see `Trainer.evaluate`."""
        images, labels = self._tensors(batch)
        loss, correct = self._score(images, labels)
        return Sums(float(loss), int(correct), len(batch.labels))

    def probe(self, batch: Batch) -> Probe:
        """Scores and gradients of a batch; see `Trainer.probe`."""
        images, labels = self._tensors(batch)
        statistics = {name: variable.numpy() for name, variable in self._model.statistics.items()}
        with tf.GradientTape() as tape:
            scores = self._model(images, training=True)
            loss = tf.reduce_mean(_losses(scores, labels))
        gradients = tape.gradient(loss, self._model.parameters)
        for name, value in statistics.items():
            self._model.statistics[name].assign(value)
        return Probe(scores.numpy(), {name: to_channels_first(g.numpy()) for name, g in gradients.items()})

    def _average_statistics(self) -> None:
        variables = list(self._model.statistics.values())
        averages = multiring.tensorflow.grouped_allreduce(
            variables, "average", name="running statistics", comm=self._comm
        )
        for variable, average in zip(variables, averages, strict=True):
            variable.assign(average)

    def state(self) -> dict[str, Array]:
        """Copies of model and momentum; see `Trainer.state`."""
        state = {MODEL + name: value for name, value in read_weights(self._model).items()}
        for name, variable in self._momentum.items():
            state[MOMENTUM + name] = to_channels_first(variable.numpy())
        return state

    def _load(self, weights: Mapping[str, Array], state: Mapping[str, Array]) -> None:
        load_weights(self._model, weights)
        for name, variable in self._momentum.items():
            momentum = state.get(MOMENTUM + name)
            # Without momentum (a checkpoint of before the first step) it starts from zero.
            value = np.zeros(variable.shape) if momentum is None else to_channels_last(momentum)
            variable.assign(tf.cast(value, variable.dtype))

    def close(self) -> None:
        """Nothing is held of the communicator that does not end with it."""

    def _tensors(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return tf.constant(batch.images, self._dtype), tf.constant(batch.labels)

    def _train(self, images: Tensor, labels: Tensor, share: Tensor, lr: Tensor) -> tuple[Tensor, Tensor]:
        parameters = list(self._model.parameters.values())
        with tf.GradientTape() as tape:
            scores = self._model(images, training=True)
            loss = tf.reduce_sum(_losses(scores, labels))
            # Averaged over ranks this is the sum over the global batch divided by its samples, for any split.
            scaled = loss * share
        tape = multiring.tensorflow.DistributedGradientTape(tape, self._comm)
        self._update(tape.gradient(scaled, parameters), lr)
        return loss, _correct(scores, labels)

    def _train_without(self, lr: Tensor) -> None:
        parameters = list(self._model.parameters.values())
        tape = multiring.tensorflow.DistributedGradientTape(tf.GradientTape(), self._comm)
        zeros = [tf.zeros_like(variable) for variable in parameters]
        self._update(tape.reduction(parameters).reduce(zeros), lr)

    def _update(self, gradients: Sequence[Tensor], lr: Tensor) -> None:
        for variable, momentum, gradient, decays in zip(
            self._model.parameters.values(), self._momentum.values(), gradients, self._decays, strict=True
        ):
            if decays and self._recipe.weight_decay:
                gradient = gradient + self._recipe.weight_decay * variable
            momentum.assign(self._recipe.momentum * momentum + gradient)
            step = gradient + self._recipe.momentum * momentum if self._recipe.nesterov else momentum
            variable.assign_sub(lr * step)

    def _scores_and_sums(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        scores = self._model(images, training=False)
        return tf.reduce_sum(_losses(scores, labels)), _correct(scores, labels)


def _losses(scores: Tensor, labels: Tensor) -> Tensor:
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores)


def _correct(scores: Tensor, labels: Tensor) -> Tensor:
    return tf.math.count_nonzero(tf.argmax(scores, 1) == labels)

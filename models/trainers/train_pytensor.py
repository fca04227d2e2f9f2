"""The training step in PyTensor."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytensor
import pytensor.tensor as pt
from pytensor.compile.mode import Mode
from pytensor.graph.rewriting.basic import in2out
from pytensor.graph.rewriting.db import RewriteDatabaseQuery

import multiring.pytensor
from multiring.models.data.loader import Batch
from multiring.models.nets.patches_pytensor import stretch_by_views
from multiring.models.nets.resnet_pytensor import PyTensorResNet
from multiring.models.trainers.trainer import MODEL, MOMENTUM, Probe, Sums, Trainer

__all__ = ["PyTensorTrainer"]

Array = npt.NDArray[Any]
Variable: TypeAlias = Any

# NumPy computes everything, nothing is compiled to C: on ResNet-8 a step takes about as long as with C code,
# which takes minutes to compile (and which every rank would compile at once). Of PyTensor's rewrites only
# those that every mode needs are made: others would join products into ones of many factors, which NumPy has
# no loop for.
_MODE = Mode(linker="vm", optimizer=RewriteDatabaseQuery(include=["minimum_compile"])).register(
    (in2out(stretch_by_views), 1.5)
)


class PyTensorTrainer(Trainer):
    """A ResNet under stochastic gradient descent, in compiled functions that reduce the gradients."""

    @staticmethod
    def set_threads(count: int) -> None:
        """Let NumPy's linear algebra compute with `count` threads; has to come before NumPy's first use, as
        when the launcher sets it."""
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ[name] = str(count)

    def _build(self, weights: dict[str, Array], dtype: str, seed: int) -> None:
        self._dtype = dtype

        def reduce_sum(value: Variable, name: str) -> Variable:
            return multiring.pytensor.allreduce(value, name, comm=self._comm)

        self._model = PyTensorResNet(self._spec, weights, dtype, reduce_sum if self._sync_bn else None)
        self._momenta = {
            name: pytensor.shared(np.zeros_like(value.get_value(borrow=True)), name=f"momentum of {name}")
            for name, value in self._model.parameters.items()
        }
        state = [*self._model.parameters.values(), *self._model.statistics.values()]
        multiring.pytensor.broadcast_parameters(state, comm=self._comm)
        self._gradients = multiring.pytensor.DistributedGradients(self._model.parameters, self._comm)
        self._train = self._compile_training()
        self._evaluate: Any = None

    def step(self, batch: Batch, lr: float) -> Sums:
        """Train on one global batch; see `Trainer.step`."""
        scale = self._comm.size / batch.global_count
        scalars = (np.asarray(value, self._dtype) for value in (scale, lr))
        loss, correct = self._train(*self._arrays(batch), *scalars)
        return Sums(float(loss), int(correct), len(batch.labels))

    def evaluate(self, batch: Batch) -> Sums:
        """Score a batch; see `Trainer.evaluate`."""
        if self._evaluate is None:
            images, labels, scores, _ = self._graph(training=False)
            outputs = [_loss(scores, labels), _correct(scores, labels)]
            self._evaluate = _function([images, labels], outputs)
        loss, correct = self._evaluate(*self._arrays(batch))
        return Sums(float(loss), int(correct), len(batch.labels))

    def probe(self, batch: Batch) -> Probe:
        """Scores and gradients of a batch; see `Trainer.probe`."""
        images, labels, scores, _ = self._graph(training=True)
        cost = _loss(scores, labels) / pt.cast(labels.shape[0], self._dtype)
        gradients = pytensor.grad(cost, list(self._model.parameters.values()))
        found, *arrays = _function([images, labels], [scores, *gradients])(*self._arrays(batch))
        names = self._model.parameters
        named = {n: self._model.to_specified(n, a) for n, a in zip(names, arrays, strict=True)}
        return Probe(found, named)

    def _average_statistics(self) -> None:
        values = [value.get_value() for value in self._model.statistics.values()]
        self._average(values)
        for variable, value in zip(self._model.statistics.values(), values, strict=True):
            variable.set_value(value)

    def state(self) -> dict[str, Array]:
        """Copies of model and momentum; see `Trainer.state`."""
        state = {MODEL + name: value for name, value in self._model.read().items()}
        for name, momentum in self._momenta.items():
            state[MOMENTUM + name] = self._model.to_specified(name, momentum.get_value())
        return state

    def _load(self, weights: Mapping[str, Array], state: Mapping[str, Array]) -> None:
        self._model.load(weights)
        for name, momentum in self._momenta.items():
            found = state.get(MOMENTUM + name)
            if found is None:
                found = np.zeros_like(weights[name])
            momentum.set_value(self._model.from_specified(name, found))

    def close(self) -> None:
        """Release the buckets."""
        self._gradients.close()

    def _compile_training(self) -> Any:
        images, labels, scores, moved = self._graph(training=True)
        scale, lr = (pt.scalar(name, dtype=self._dtype) for name in ("scale", "lr"))
        loss = _loss(scores, labels)
        parameters = self._model.parameters
        gradients = pytensor.grad(loss * scale, list(parameters.values()))
        reduced = self._gradients.reduce(gradients).gradients
        updates: list[tuple[Any, Variable]] = []
        for name, gradient in zip(parameters, reduced, strict=True):
            updates += self._descend(name, gradient, lr)
        updates += [(self._model.statistics[name], value) for name, value in moved.items()]
        return _function([images, labels, scale, lr], [loss, _correct(scores, labels)], updates)

    def _descend(self, name: str, gradient: Variable, lr: Variable) -> list[tuple[Any, Variable]]:
        """Stochastic gradient descent as torch.optim.SGD defines it."""
        weight, velocity = self._model.parameters[name], self._momenta[name]
        number = np.dtype(self._dtype).type
        if self._model.decays(name):
            gradient = gradient + number(self._recipe.weight_decay) * weight
        momentum = number(self._recipe.momentum)
        moved = momentum * velocity + gradient
        direction = gradient + momentum * moved if self._recipe.nesterov else moved
        return [(velocity, moved), (weight, weight - lr * direction)]

    def _graph(self, *, training: bool) -> tuple[Variable, Variable, Variable, dict[str, Variable]]:
        images, labels = pt.tensor4("images", dtype=self._dtype), pt.lvector("labels")
        scores, moved = self._model.scores(images, training=training)
        return images, labels, scores, moved

    def _arrays(self, batch: Batch) -> tuple[Array, Array]:
        images = np.ascontiguousarray(batch.images.transpose(0, 2, 3, 1), dtype=self._dtype)
        return images, batch.labels


def _loss(scores: Variable, labels: Variable) -> Variable:
    """Sum of the cross entropies."""
    shifted = scores - pytensor.gradient.zero_grad(scores.max(axis=1, keepdims=True))
    logarithms = pt.log(pt.exp(shifted).sum(axis=1))
    return (logarithms - shifted[pt.arange(labels.shape[0]), labels]).sum()


def _correct(scores: Variable, labels: Variable) -> Variable:
    return pt.eq(scores.argmax(axis=1), labels).sum()


def _function(
    inputs: list[Variable], outputs: list[Variable], updates: list[tuple[Any, Variable]] | None = None
) -> Any:
    with pytensor.config.change_flags(cxx=""):
        return pytensor.function(inputs, outputs, updates=updates or [], mode=_MODE)

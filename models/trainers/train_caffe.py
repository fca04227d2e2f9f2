"""The training step of the Caffe-style solver."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import multiring.caffe
from multiring.models.caffe import Net, Solver
from multiring.models.caffe.updates import Rule
from multiring.models.data.loader import Batch
from multiring.models.errors import CheckpointError
from multiring.models.nets.layers import BatchNorm
from multiring.models.nets.resnet_caffe import DATA, LABEL, LOSS, load_weights, read_weights, train_val
from multiring.models.nets.resnet_spec import ResNetSpec
from multiring.models.trainers.recipe import Recipe
from multiring.models.trainers.trainer import MODEL, MOMENTUM, Probe, Sums, Trainer

__all__ = ["CaffeTrainer"]

Array = npt.NDArray[Any]
STATISTICS, ITERATION = "solver/statistics/", "solver/iter"


class _PlainMomentum(Rule):
    """Momentum without the learning rate in it: v = m * v + g; the step is rate * (g + m * v) or rate * v.

    Caffe's own rule puts the rate into the history, so a change of the rate takes effect over several steps.
    Where the rate is constant both are the same.
    """

    nesterov = False

    def step(self, number: int, gradient: torch.Tensor, rate: float, iteration: int) -> None:
        history = self.history[number].tensor
        history.mul_(self._momentum).add_(gradient)
        if self.nesterov:
            gradient.add_(history, alpha=self._momentum).mul_(rate)
        else:
            torch.mul(history, rate, out=gradient)


class _RecipeSolver(Solver):
    """A solver whose learning rate is set before each iteration.

    Attributes:
        rate: The learning rate.
    """

    rate = 0.0

    def learning_rate(self) -> float:
        return self.rate

    def make_rule(self) -> Rule:
        rule = _PlainMomentum(self.param, self.net.learnable)
        rule.nesterov = self.param.type == "Nesterov"
        return rule


class CaffeTrainer(Trainer):
    """A ResNet under the Caffe-style solver, its gradients averaged over the ranks by a solver callback."""

    @staticmethod
    def set_threads(count: int) -> None:
        """Let the solver compute with `count` threads."""
        torch.set_num_threads(count)

    def _build(self, weights: dict[str, Array], dtype: str, seed: int) -> None:
        with tempfile.TemporaryDirectory() as directory:
            path = _write_files(Path(directory), self._spec, self._recipe)
            self._solver = _RecipeSolver(
                path, dtype=dtype, sync_batch_norm_comm=self._comm if self._sync_bn else None
            )
        load_weights(self._net, self._spec, weights)
        # The trainer averages statistics itself, where ranks have their own.
        self._callback = multiring.caffe.SolverCallback(
            self._solver, self._comm, overlap=True, iter_size=1, buffers="local"
        )
        self._solver.add_callback(*self._callback)

    @property
    def _net(self) -> Net:
        return self._solver.net

    def step(self, batch: Batch, lr: float) -> Sums:
        """Train on one global batch; see `Trainer.step`."""
        self._solver.rate = lr
        _feed(self._net, batch)
        # The loss is a sum; averaged over ranks this is the global sum divided by its samples, for any split.
        self._net.blobs[LOSS].diff[...] = self._comm.size / batch.global_count
        self._solver.step(1)
        return self._sums(self._net, batch)

    def evaluate(self, batch: Batch) -> Sums:
        """Score a batch; see `Trainer.evaluate`."""
        net = self._solver.test_nets[0]
        _feed(net, batch)
        net.forward()
        return self._sums(net, batch)

    def probe(self, batch: Batch) -> Probe:
        """Scores and gradients of a batch; see `Trainer.probe`."""
        statistics = {name: value.copy() for name, value in self._statistics().items()}
        _feed(self._net, batch)
        self._net.blobs[LOSS].diff[...] = 1 / len(batch.labels)
        self._net.clear_param_diffs()
        self._net.forward()
        self._net.backward()
        for name, value in self._statistics().items():
            value[...] = statistics[name]
        scores = self._net.blobs[self._spec.output].data.copy()
        return Probe(scores, read_weights(self._net, self._spec, gradients=True))

    def _average_statistics(self) -> None:
        self._average(list(self._statistics().values()))

    def state(self) -> dict[str, Array]:
        """Copies of model, momentum and iteration; see `Trainer.state`.

        The sums from which running statistics come are there as well, since a quotient does not give them
        back bit for bit.
        """
        state = {MODEL + name: value for name, value in read_weights(self._net, self._spec).items()}
        for name, value in self._momentum().items():
            state[MOMENTUM + name] = value.copy()
        for name, value in self._statistics().items():
            state[STATISTICS + name] = value.copy()
        state[ITERATION] = np.array(self._solver.iter, dtype=np.int64)
        return state

    def _load(self, weights: Mapping[str, Array], state: Mapping[str, Array]) -> None:
        load_weights(self._net, self._spec, weights)
        for prefix, arrays in ((MOMENTUM, self._momentum()), (STATISTICS, self._statistics())):
            for name, value in arrays.items():
                if prefix + name not in state:
                    raise CheckpointError(f"the checkpoint lacks {prefix}{name}; it is of another framework")
                value[...] = state[prefix + name]
        self._solver.iter = int(state[ITERATION])

    def _statistics_names(self) -> set[str]:
        return super()._statistics_names() | {STATISTICS + name for name in self._statistics()}

    def close(self) -> None:
        """Release the callback's buckets."""
        self._callback.close()

    def _statistics(self) -> dict[str, Array]:
        """The blobs of the BatchNorm layers, by layer and number."""
        return {
            f"{layer.name}[{number}]": blob.data
            for layer in self._spec.layers
            if isinstance(layer, BatchNorm)
            for number, blob in enumerate(self._net.params[layer.name])
        }

    def _momentum(self) -> dict[str, Array]:
        """The solver's history of all blobs that learn, by the specification's names."""
        found = {}
        for learnable, history in zip(self._net.learnable, self._solver.rule.history, strict=True):
            if learnable.lr_mult:
                layer, _, number = learnable.name.removesuffix("]").rpartition("[")
                kind = "bias" if int(number) else "weight"
                found[f"{layer.removesuffix('.scale')}.{kind}"] = history.data
        return found

    def _sums(self, net: Net, batch: Batch) -> Sums:
        if not len(batch.labels):
            return Sums()
        scores = net.blobs[self._spec.output].data
        correct = int((scores.argmax(axis=1) == batch.labels).sum())
        return Sums(float(net.blobs[LOSS].data), correct, len(batch.labels))


def _write_files(directory: Path, spec: ResNetSpec, recipe: Recipe) -> Path:
    """The prototxt files of a training whose data the program feeds; the solver's path."""
    shape = f"shape {{ dim: 1 dim: {spec.in_channels} dim: 32 dim: 32 }}"
    data = (
        f'layer {{ name: "{DATA}" type: "Input" top: "{DATA}" top: "{LABEL}" '
        f"input_param {{ {shape} shape {{ dim: 1 }} }} }}"
    )
    text = train_val(spec, name=f"ResNet-{spec.depth}", data=data, normalization="NONE")
    (directory / "train_val.prototxt").write_text(text)
    solver = directory / "solver.prototxt"
    solver.write_text(
        f'net: "{directory / "train_val.prototxt"}"\n'
        f'type: "{"Nesterov" if recipe.nesterov else "SGD"}"\n'
        f'base_lr: {recipe.peak_lr!r}\nlr_policy: "fixed"\nmomentum: {recipe.momentum!r}\n'
        f"weight_decay: {recipe.weight_decay!r}\nmax_iter: {recipe.total_steps}\n"
        "test_iter: 1\ntest_interval: 2147483647\ntest_initialization: false\nrandom_seed: 0\n"
        "snapshot_after_train: false\nsolver_mode: CPU\n"
    )
    return solver


def _feed(net: Net, batch: Batch) -> None:
    net.blobs[DATA].reshape(*batch.images.shape)
    net.blobs[DATA].data[...] = batch.images
    net.blobs[LABEL].reshape(*batch.labels.shape)
    net.blobs[LABEL].data[...] = batch.labels

"""The training step in Torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt
import torch
from torch.nn import functional

import multiring.torch
from multiring.models.data.loader import Batch
from multiring.models.nets.resnet_torch import TorchResNet, load_weights, read_weights
from multiring.models.trainers.trainer import MODEL, MOMENTUM, Probe, Sums, Trainer

__all__ = ["TorchTrainer"]

Array = npt.NDArray[Any]

DTYPES = {"float32": torch.float32, "float64": torch.float64}
GENERATOR = "rng/torch"


class TorchTrainer(Trainer):
    """A ResNet under stochastic gradient descent, its gradients averaged over the ranks by hooks."""

    @staticmethod
    def set_threads(count: int) -> None:
        """Let Torch compute with `count` threads."""
        torch.set_num_threads(count)

    def _build(self, weights: dict[str, Array], dtype: str, seed: int) -> None:
        torch.manual_seed(seed)
        self._dtype = DTYPES[dtype]
        self._model = model = TorchResNet(self._spec, self._dtype)
        load_weights(model, weights)
        if self._sync_bn:
            multiring.torch.convert_sync_batchnorm(model, comm=self._comm)
        multiring.torch.broadcast_parameters(model, root=0, comm=self._comm)
        self._hooks = multiring.torch.register_gradient_hooks(
            model,
            comm=self._comm,
            buffers="local",  # averaged before an evaluation
        )
        named = dict(model.named_parameters())
        decaying = [named[parameter.name] for parameter in self._spec.parameters() if parameter.decays]
        others = [named[parameter.name] for parameter in self._spec.parameters() if not parameter.decays]
        self._optimizer = torch.optim.SGD(
            [
                {"params": decaying, "weight_decay": self._recipe.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=self._recipe.peak_lr,
            momentum=self._recipe.momentum,
            nesterov=self._recipe.nesterov,
        )

    def step(self, batch: Batch, lr: float) -> Sums:
        """Train on one global batch; see `Trainer.step`."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.zero_grad()
        self._model.train()
        images, labels = self._tensors(batch)
        if len(labels) == 0 and not self._sync_bn:
            # Nothing to compute and nothing that the others wait for but the gradients: contribute zeros.
            nothing = torch.stack([parameter.sum() for parameter in self._model.parameters()]).sum() * 0.0
            torch.autograd.backward(nothing)
            self._optimizer.step()
            return Sums()
        scores = self._model(images)
        loss = functional.cross_entropy(scores, labels, reduction="sum")
        # Averaged over ranks this is the sum over the global batch divided by its samples, for any split.
        torch.autograd.backward(loss * (self._comm.size / batch.global_count))
        self._optimizer.step()
        return _sums(scores, labels, loss)

    def evaluate(self, batch: Batch) -> Sums:
        """Score a batch; see `Trainer.evaluate`."""
        self._model.eval()
        images, labels = self._tensors(batch)
        with torch.no_grad():
            scores = self._model(images)
            return _sums(scores, labels, functional.cross_entropy(scores, labels, reduction="sum"))

    def probe(self, batch: Batch) -> Probe:
        """Scores and gradients of a batch; see `Trainer.probe`."""
        images, labels = self._tensors(batch)
        statistics = {name: buffer.clone() for name, buffer in self._model.named_buffers()}
        self._model.train()
        scores = self._model(images)
        names, parameters = zip(*self._model.named_parameters(), strict=True)
        gradients = torch.autograd.grad(functional.cross_entropy(scores, labels), parameters)
        for name, buffer in self._model.named_buffers():
            buffer.copy_(statistics[name])
        found = {name: gradient.numpy() for name, gradient in zip(names, gradients, strict=True)}
        return Probe(scores.detach().numpy(), found)

    def _average_statistics(self) -> None:
        self._average([self._model.get_buffer(name).numpy() for name in self._spec.state_shapes()])

    def state(self) -> dict[str, Array]:
        """Copies of model, momentum and generator; see `Trainer.state`."""
        state = {MODEL + name: value for name, value in read_weights(self._model).items()}
        for name, parameter in self._model.named_parameters():
            momentum = self._optimizer.state[parameter].get("momentum_buffer")
            if momentum is not None:
                state[MOMENTUM + name] = momentum.detach().cpu().numpy().copy()
        state[GENERATOR] = torch.get_rng_state().numpy().copy()
        return state

    def _load(self, weights: Mapping[str, Array], state: Mapping[str, Array]) -> None:
        load_weights(self._model, weights)
        for name, parameter in self._model.named_parameters():
            self._optimizer.state[parameter].clear()
            if (momentum := state.get(MOMENTUM + name)) is not None:
                tensor = torch.from_numpy(momentum.copy()).to(parameter.device, parameter.dtype)
                self._optimizer.state[parameter]["momentum_buffer"] = tensor
        torch.set_rng_state(torch.from_numpy(state[GENERATOR].copy()))

    def close(self) -> None:
        """Take the hooks off the network."""
        self._hooks.remove()

    def _tensors(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(batch.images).to(self._dtype), torch.from_numpy(batch.labels)


def _sums(scores: torch.Tensor, labels: torch.Tensor, loss: torch.Tensor) -> Sums:
    correct = int((scores.detach().argmax(dim=1) == labels).sum())
    return Sums(float(loss.detach()), correct, len(labels))

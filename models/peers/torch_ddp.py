"""Torch's own way: DistributedDataParallel over Gloo."""

from __future__ import annotations

import warnings

import torch
from torch import distributed
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from multiring import Communicator
from multiring.models.data.loader import Batch
from multiring.models.nets.resnet_spec import ResNetSpec
from multiring.models.nets.resnet_torch import TorchResNet, load_weights
from multiring.models.nets.weights import initial_weights
from multiring.models.peers.gloo import GlooGroup
from multiring.models.trainers.recipe import Recipe

__all__ = ["TorchDdpTrainer", "make_trainer"]


class TorchDdpTrainer:
    """The training of `TorchTrainer`, its gradients averaged by DistributedDataParallel.

    Gradients are views of its buckets, which is its faster way. The broadcast of running statistics, which is
    no part of reducing gradients, is left out.

    Args:
        spec: The network.
        recipe: Optimizer settings; the learning rate comes with each step.
        comm: The ranks; they join torch.distributed's default group, unless they are in one.
        seed: Seed of the weights, the same on every rank.
        dtype: "float32" or "float64".
    """

    def __init__(
        self, spec: ResNetSpec, recipe: Recipe, comm: Communicator, *, seed: int, dtype: str = "float32"
    ) -> None:
        self._comm = comm
        self._dtype = {"float32": torch.float32, "float64": torch.float64}[dtype]
        self._joined = None if distributed.is_initialized() else GlooGroup(comm)
        model = TorchResNet(spec, self._dtype)
        load_weights(model, initial_weights(spec, seed, dtype=dtype))
        named = dict(model.named_parameters())
        groups = [
            {
                "params": [named[p.name] for p in spec.parameters() if p.decays is decays],
                "weight_decay": recipe.weight_decay * decays,
            }
            for decays in (True, False)
        ]
        self._optimizer = torch.optim.SGD(
            groups, lr=recipe.peak_lr, momentum=recipe.momentum, nesterov=recipe.nesterov
        )
        self.plain = model
        with warnings.catch_warnings():
            # The newest Torch wants this option under another name, which older ones do not know.
            warnings.simplefilter("ignore", FutureWarning)
            self._model = DistributedDataParallel(
                model, gradient_as_bucket_view=True, broadcast_buffers=False
            )

    def step(self, batch: Batch, lr: float) -> float:
        """Train on one global batch; returns the sum of the losses of this rank's part."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.zero_grad()
        scores = self._model(torch.from_numpy(batch.images).to(self._dtype))
        loss = functional.cross_entropy(scores, torch.from_numpy(batch.labels), reduction="sum")
        torch.autograd.backward(loss * (self._comm.size / batch.global_count))
        self._optimizer.step()
        return float(loss.detach())

    def close(self) -> None:
        """Leave the group, if this trainer has joined it."""
        del self._model
        if self._joined is not None:
            self._joined.close()


def make_trainer(
    spec: ResNetSpec, recipe: Recipe, comm: Communicator, *, seed: int, dtype: str = "float32"
) -> TorchDdpTrainer:
    """This rank's trainer; see `TorchDdpTrainer`. Collective."""
    return TorchDdpTrainer(spec, recipe, comm, seed=seed, dtype=dtype)

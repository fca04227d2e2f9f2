"""Training steps to be timed: without synchronisation, with multiring's gradient hooks, with Horovod's
optimizer over multiring, and with Torch's DistributedDataParallel and FSDP2 over multiring's process group
and over Gloo. Each kind has a model of its own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import multiring.horovod.torch as hvd
import multiring.torch
from multiring import Communicator
from multiring.models.nets.resnet_spec import resnet
from multiring.models.nets.resnet_torch import TorchResNet

__all__ = ["KINDS", "SHARDED", "GradientsOnly", "Step", "gradient_shapes", "make_step", "training_model"]

BATCH, IMAGE_SIZE, CLASSES, DEPTH = 32, 32, 10, 20


class Step(Protocol):
    """One kind of training step."""

    name: str

    def __call__(self) -> None:
        """One step: gradients from nothing, reduced where the kind does that."""

    def release(self) -> None:
        """Lets go of the gradients."""

    def close(self) -> None:
        """Takes hooks off and lets go of the model."""


def gradient_shapes() -> list[tuple[int, ...]]:
    """Shapes of ResNet-50's 161 gradients, first layer first."""
    return [parameter.shape for parameter in resnet(50, classes=1000, stem="imagenet").parameters()]


class _FreshGradient(torch.autograd.Function):
    """Nothing forward; backward a gradient in new memory, as a convolution makes one."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.shape = weight.shape
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> torch.Tensor:
        return torch.full(ctx.shape, 1.0)


class GradientsOnly(nn.Module):
    """A model that computes nothing: its backward pass writes the gradients and that is all.

    Args:
        shapes: Of the parameters, in the order in which the forward pass uses them.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])

    def forward(self) -> torch.Tensor:
        """A scalar that depends on all parameters."""
        parts = [_FreshGradient.apply(weight) for weight in self.weights]  # type: ignore[no-untyped-call]
        return torch.stack(parts).sum()


def training_model() -> nn.Module:
    """ResNet-20 as for CIFAR, with seeded weights."""
    torch.manual_seed(0)
    return TorchResNet(resnet(DEPTH, classes=CLASSES, in_channels=3, stem="cifar"))


class _Base:
    """A model, and what a step does with it."""

    name: str

    def __init__(
        self, make_model: Callable[[], nn.Module], comm: Communicator, gloo: dist.ProcessGroup
    ) -> None:
        self._comm = comm
        self._gloo = gloo
        self.model = self._wrap(make_model())
        self._optimizer: torch.optim.Optimizer | None = None
        if not isinstance(self._plain(), GradientsOnly):
            self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
            generator = torch.Generator().manual_seed(comm.rank)
            self._images = torch.randn(BATCH, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator)
            self._labels = torch.randint(CLASSES, (BATCH,), generator=generator)

    def _wrap(self, model: nn.Module) -> nn.Module:
        return model

    def _plain(self) -> nn.Module:
        return self.model

    def release(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None

    def __call__(self) -> None:
        self.release()
        if self._optimizer is None:
            torch.autograd.backward(self.model())
            return
        torch.autograd.backward(functional.cross_entropy(self.model(self._images), self._labels))
        self._optimizer.step()

    def close(self) -> None:
        pass


class Unsynchronised(_Base):
    """Every rank for itself."""

    name = "no synchronisation"


class Hooks(_Base):
    """multiring.torch.register_gradient_hooks, for gradients alone; the other state is measured apart."""

    name = "multiring"

    def _wrap(self, model: nn.Module) -> nn.Module:
        self._hooks = multiring.torch.register_gradient_hooks(
            model, comm=self._comm, buffers="local", check_every=0
        )
        return model

    def close(self) -> None:
        self._hooks.remove()


class HvdOptimizer(_Base):
    """That of multiring.horovod.torch: an allreduce by name for each gradient, during backward."""

    name = "hvd.DistributedOptimizer"

    def __init__(
        self, make_model: Callable[[], nn.Module], comm: Communicator, gloo: dist.ProcessGroup
    ) -> None:
        hvd.init()
        super().__init__(make_model, comm, gloo)
        inner = self._optimizer or torch.optim.SGD(self.model.parameters(), lr=0.01)
        self._distributed = hvd.DistributedOptimizer(inner, self.model.named_parameters())

    def __call__(self) -> None:
        if self._optimizer is None:
            super().__call__()
            self._distributed.synchronize()
            return
        self.release()
        torch.autograd.backward(functional.cross_entropy(self.model(self._images), self._labels))
        self._distributed.step()

    def close(self) -> None:
        for hook in self._distributed._hooks:
            hook.remove()
        hvd.shutdown()


class Ddp(_Base):
    """DistributedDataParallel over torch.distributed's default group, which is of the backend `multiring`.

    Gradients are views of its buckets, which is its faster way. The broadcast of running statistics, which is
    no part of reducing gradients, is left out.
    """

    name = "DDP over multiring"

    def _group(self) -> dist.ProcessGroup | None:
        return None

    def _wrap(self, model: nn.Module) -> nn.Module:
        with warnings.catch_warnings():
            # The newest Torch wants this option under another name, which older ones do not know.
            warnings.simplefilter("ignore", FutureWarning)
            return DistributedDataParallel(
                model, process_group=self._group(), gradient_as_bucket_view=True, broadcast_buffers=False
            )

    def _plain(self) -> nn.Module:
        assert isinstance(self.model, DistributedDataParallel)
        plain: nn.Module = self.model.module
        return plain


class DdpOverGloo(Ddp):
    """The same over Gloo."""

    name = "DDP over Gloo"

    def _group(self) -> dist.ProcessGroup | None:
        return self._gloo


class Fsdp(_Base):
    """FSDP2 (`fully_shard`) over the default group: the parameters are gathered before the forward pass, all
    at once, and the gradients scattered after the backward pass. Each rank updates its shard."""

    name = "FSDP2 over multiring"

    def _mesh(self) -> DeviceMesh:
        return DeviceMesh.from_group(dist.group.WORLD, "cpu")  # type: ignore[arg-type]

    def _wrap(self, model: nn.Module) -> nn.Module:
        fully_shard(model, mesh=self._mesh())  # in place
        return model


class FsdpOverGloo(Fsdp):
    """The same over Gloo."""

    name = "FSDP2 over Gloo"

    def _mesh(self) -> DeviceMesh:
        return DeviceMesh.from_group(self._gloo, "cpu")


KINDS: dict[str, type[_Base]] = {
    "none": Unsynchronised,
    "multiring": Hooks,
    "horovod": HvdOptimizer,
    "ddp": Ddp,
    "gloo": DdpOverGloo,
}
SHARDED: dict[str, type[_Base]] = {"fsdp": Fsdp, "fsdp-gloo": FsdpOverGloo}


def make_step(
    kind: str, make_model: Callable[[], nn.Module], comm: Communicator, gloo: dist.ProcessGroup
) -> Step:
    """A step of one of `KINDS` or `SHARDED` on a model of its own. Collective.

    Args:
        kind: Which.
        make_model: Makes the model.
        comm: The ranks, which are those of torch.distributed's default group.
        gloo: A process group of all of them over Gloo.
    """
    return (KINDS | SHARDED)[kind](make_model, comm, gloo)

"""Batch normalisation over the batches of all ranks."""

from __future__ import annotations

import copy
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
from multiring.derived import derived, resolve
from multiring.errors import UsageError
from multiring.state.batch_moments import cannot_synchronise
from multiring.torch.batch_statistics import Normalise, Statistics, global_statistics, of_channels
from torch.nn.modules.batchnorm import _BatchNorm

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["SyncBatchNorm", "convert_sync_batchnorm"]

Tensor = torch.Tensor


class _Group:
    """The ranks of a layer; a copy of the layer refers to the same, a pickle to the world of its reader."""

    def __init__(self, comm: Communicator | None) -> None:
        self._comm = comm

    def parent(self) -> Communicator:
        return resolve(self._comm)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Group:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _Group, (None,)


# Per communicator: which thread has used which layer last.
_threads: weakref.WeakKeyDictionary[
    Communicator, weakref.WeakKeyDictionary[torch.nn.Module, threading.Thread]
] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _check_thread(comm: Communicator, layer: SyncBatchNorm) -> None:
    """Raise UsageError where two threads use layers of one communicator: their order differs by rank.

    A model may be handed to another thread; all layers that its thread has used go with it.
    """
    current = threading.current_thread()
    with _lock:
        users = _threads.setdefault(comm, weakref.WeakKeyDictionary())
        before = users.get(layer)
        if before is current:
            return
        if before is None and any(other is not current and other.is_alive() for other in users.values()):
            raise UsageError(
                f"rank {comm.rank}: {layer.label} is used by thread '{current.name}' while another thread "
                "has used other layers over the same communicator: which batches are normalised together "
                "would be a matter of chance; give each model a communicator of its own: "
                "convert_sync_batchnorm(model, comm.split(0))"
            )
        for other in [other for other, thread in users.items() if thread is before]:
            users[other] = current
        users[layer] = current


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation whose mean and variance are those of the batches of all ranks together.

    Takes inputs of shape (batch, channels, ...) in any number of dimensions; batches may differ in size,
    and be empty on some ranks. Parameters, buffers and evaluation are those of `torch.nn.BatchNorm2d`. In
    training every rank has to run the same layers in the same order; forward and backward take one
    collective each, on a communicator of their own.

    Statistics travel as count, mean and sum of squared deviations of each rank in float64 and are combined
    in a balanced tree over the ranks (Chan, Golub, LeVeque 1979), which loses no digits where the mean is
    large.

    Raises:
        UsageError: In training, the batches of all ranks together hold one value per channel.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        comm: Communicator | None = None,
    ) -> None:
        """Like `torch.nn.BatchNorm2d`.

        Args:
            num_features: Number of channels.
            eps: Added to the variance.
            momentum: Weight of a batch in the running statistics; None for the mean over all batches.
            affine: Learn a factor and an offset per channel.
            track_running_stats: Keep running statistics for evaluation.
            device: Device of parameters and buffers.
            dtype: Their dtype.
            comm: Ranks whose batches are normalised together; the world by default.
        """
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self._group = _Group(comm)
        self.label = "SyncBatchNorm"

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # the name in torch
        """Normalise; shape and dtype of the result are those of the input."""
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise UsageError(
                f"{self.label}: input has shape {tuple(input.shape)}; expected "
                f"(batch, {self.num_features}, ...)"
            )
        return self._train(input) if self.training else super().forward(input)

    def normalises_over(self, comm: Communicator) -> bool:
        """Whether the batches of these ranks are normalised together."""
        return self._group.parent() is comm

    # The public torch.compiler.disable would import the compiler along with this module.
    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _train(self, x: Tensor) -> Tensor:
        parent = self._group.parent()
        if parent.size == 1:
            return super().forward(x)
        _check_thread(parent, self)
        comm = derived(parent, "sync_batchnorm")
        with torch.no_grad():
            statistics = global_statistics(x, comm, self.label)
            self._track(statistics, comm.rank)
        normalised: Tensor = Normalise.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.bias, statistics, self.eps, comm, self.label
        )
        return normalised

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002
        """Any number of dimensions will do."""

    def _track(self, statistics: Statistics, rank: int) -> None:
        """Update the running statistics; every rank computes the same bits."""
        count = statistics.samples
        if count == 1:
            raise UsageError(f"rank {rank}: {self.label}: one value per channel on all ranks has no variance")
        if count == 0 or self.running_mean is None or self.running_var is None:
            return
        factor = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if factor is None:
                factor = 1.0 / float(self.num_batches_tracked)
        factor = 0.0 if factor is None else factor
        unbiased = statistics.variance * (count / (count - 1))
        for running, values in ((self.running_mean, statistics.mean), (self.running_var, unbiased)):
            new = of_channels(values, torch.float64, running.device).to(running.dtype)
            running.mul_(1 - factor).add_(new, alpha=factor)


def convert_sync_batchnorm(module: torch.nn.Module, comm: Communicator | None = None) -> torch.nn.Module:
    """Replace every batch normalisation layer by a `SyncBatchNorm` with the same parameters and buffers.

    Not collective. Parameters stay the same objects, so an optimizer that has them need not be rebuilt; hooks
    of a layer go with it.

    Args:
        module: A model; it is changed, unless it is itself a batch normalisation layer.
        comm: Ranks whose batches are normalised together; the world by default.

    Returns:
        The model, or the new layer if the model is a batch normalisation layer.

    Raises:
        UsageError: A layer is lazy and has no parameters yet; run a batch through the model first. Or a layer
            computes more than a batch normalisation, by a `forward` of its own or a parametrization.
    """
    return _convert(module, comm, "", {})


def _convert(
    module: torch.nn.Module, comm: Communicator | None, path: str, done: dict[int, torch.nn.Module]
) -> torch.nn.Module:
    if id(module) in done:  # a layer that occurs twice remains one layer
        return done[id(module)]
    result = module
    if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
        result = _converted(module, comm, path)
    done[id(module)] = result
    for name, child in list(module._modules.items()):  # named_children() has each layer once
        if child is None:
            continue
        converted = _convert(child, comm, f"{path}.{name}" if path else name, done)
        if converted is not child:
            setattr(module, name, converted)
    return result


def _converted(layer: _BatchNorm, comm: Communicator | None, path: str) -> SyncBatchNorm:
    if isinstance(layer, torch.nn.modules.lazy.LazyModuleMixin) and layer.has_uninitialized_params():
        raise UsageError(f"'{path}' is a lazy layer without parameters; run a batch through the model first")
    if _computes_more(layer):
        raise cannot_synchronise(layer, path, "multiring.torch.SyncBatchNorm")
    new = SyncBatchNorm.__new__(SyncBatchNorm)
    new.__dict__.update(layer.__dict__)  # hooks, too: their handles remove them from both
    new.__dict__.pop("_compiled_call_impl", None)  # what layer.compile() has made of the old layer
    for own in ("_parameters", "_buffers", "_non_persistent_buffers_set"):
        new.__dict__[own] = copy.copy(layer.__dict__[own])
    new._group = _Group(comm)
    new.label = f"SyncBatchNorm {path}".rstrip()
    return new


def _computes_more(layer: _BatchNorm) -> bool:
    """Return whether a layer computes something besides what Torch's batch normalisation does."""
    is_own = "forward" in layer.__dict__ or not type(layer).forward.__module__.startswith("torch.nn.")
    return is_own or bool(layer._modules)  # a parametrization is a layer of the layer

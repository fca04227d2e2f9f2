"""Batch normalisation over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import chainer
from chainer import links
from multiring.chainer.arrays import on_device, to_device
from multiring.chainer.groups import Group, plain_communicator
from multiring.chainer.normalise import Normalise, Statistics, local_moments
from multiring.derived import derived
from multiring.errors import UsageError
from multiring.state.batch_moments import cannot_synchronise, combine_moments, moments_row

__all__ = ["SyncBatchNormalization", "convert_sync_batch_normalization"]


class _Ranks:
    """The ranks of a link; a copy of the link refers to the same, a pickle to the world of its reader."""

    def __init__(self, comm: Group) -> None:
        self.comm = comm

    def __deepcopy__(self, memo: dict[int, Any]) -> _Ranks:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _Ranks, (None,)


class SyncBatchNormalization(links.BatchNormalization):
    """Batch normalisation whose mean and variance are those of the batches of all ranks together.

    Takes inputs of shape (batch, channels, ...); batches may differ in size, and be empty on some ranks.
    (ChainerMN's `MultiNodeBatchNormalization` takes the mean of the ranks' means, so it needs batches of one
    size.) Parameters, persistent values and evaluation are those of `chainer.links.BatchNormalization`, so
    snapshots of either fit. In training every rank has to run the same links in the same order; forward and
    backward take one collective each, on a communicator of their own.

    Statistics travel as count, mean and sum of squared deviations of each rank in float64 and are combined in
    a balanced tree over the ranks. It can be differentiated once.

    Raises:
        UsageError: In training, the batches of all ranks together hold one value per channel.
    """

    def __init__(
        self,
        size: int | None = None,
        comm: Group = None,
        decay: float = 0.9,
        eps: float = 2e-5,
        dtype: Any = None,
        use_gamma: bool = True,
        use_beta: bool = True,
        **initial: Any,
    ) -> None:
        """Like `chainer.links.BatchNormalization`.

        Args:
            size: Number of channels; taken from the first input if None.
            comm: Ranks whose batches are normalised together; the world by default.
            decay: Share that running statistics keep of their old value.
            eps: Added to the variance.
            dtype: Of parameters and running statistics.
            use_gamma: Learn a factor per channel.
            use_beta: Learn an offset per channel.
            initial: `initial_gamma`, `initial_beta`, `initial_avg_mean` and `initial_avg_var`.
        """
        if initial.get("axis") is not None or not isinstance(size, int | None):
            raise UsageError("SyncBatchNormalization normalises per channel, axis 1; size is their number")
        # Without a size Chainer wants the axes to take it from, which are not known before the first input.
        axis = (0,) if size is None else None
        super().__init__(size, decay, eps, dtype, use_gamma, use_beta, axis=axis, **initial)
        self.axis = None
        self._ranks = _Ranks(comm)
        self.label = type(self).__name__

    def forward(self, x: Any, **kwargs: Any) -> chainer.Variable:
        """Normalise; shape and dtype of the result are those of the input. Takes `finetune` too."""
        if self.avg_mean is None:
            self._initialize_params((x.shape[1],))
        label = self.label
        if x.ndim < 2 or x.shape[1] != len(self.avg_mean):
            raise UsageError(
                f"{label}: input has shape {x.shape}; expected (batch, {len(self.avg_mean)}, ...)"
            )
        parent = plain_communicator(self._ranks.comm)
        if not chainer.config.train or (parent.size == 1 and x.size > 0):
            result: chainer.Variable = super().forward(x, **kwargs)
            return result
        comm = derived(parent, "synchronised batch normalisation")
        array = x.array if isinstance(x, chainer.Variable) else x
        row = moments_row(*local_moments(array))
        rows = comm.allgather(row, name=f"{label} forward")
        statistics = Statistics(*combine_moments(rows))
        if statistics.samples == 1:
            raise UsageError(f"rank {comm.rank}: {label}: one value per channel on all ranks has no variance")
        if not chainer.config.in_recomputing:
            self._track(statistics, kwargs.get("finetune", False))
        gamma = self._get_gamma()[0] if self.gamma is None else self.gamma
        beta = self._get_beta()[0] if self.beta is None else self.beta
        normalised: chainer.Variable = Normalise(statistics, self.eps, comm, label)(x, gamma, beta)
        return normalised

    def _track(self, statistics: Statistics, finetune: bool) -> None:
        """Update the running statistics; every rank computes the same bits."""
        if statistics.samples == 0:
            return
        decay = self.decay
        if finetune:
            self.N += 1
            decay = 1.0 - 1.0 / self.N
        unbiased = statistics.variance * (statistics.samples / (statistics.samples - 1))
        for running, value in ((self.avg_mean, statistics.mean), (self.avg_var, unbiased)):
            running *= decay
            running += to_device((1.0 - decay) * value, on_device(running)).astype(running.dtype)


def convert_sync_batch_normalization(link: chainer.Link, comm: Group = None) -> chainer.Link:
    """Replace every `BatchNormalization` in a link by a `SyncBatchNormalization` with the same parameters.

    Not collective. Parameters and persistent arrays stay the same objects, so an optimizer that is set up
    with the link need not be set up again.

    Args:
        link: A chain or list of links, which is changed in place; or a batch normalisation, which is not.
        comm: Ranks whose batches are normalised together; the world by default.

    Returns:
        The link, or the new one if it is itself a batch normalisation.

    Raises:
        UsageError: A link normalises over other axes than all but the channels', or its class has a `forward`
            of its own.
    """
    return _convert(link, comm, "", {})


def _convert(link: chainer.Link, comm: Group, path: str, done: dict[int, chainer.Link]) -> chainer.Link:
    if id(link) in done:  # a link that occurs twice remains one link
        return done[id(link)]
    result = link
    if isinstance(link, links.BatchNormalization) and not isinstance(link, SyncBatchNormalization):
        result = _converted(link, comm, path)
    done[id(link)] = result
    if isinstance(link, chainer.ChainList):
        for index, child in enumerate(link):
            if (converted := _convert(child, comm, f"{path}/{index}".lstrip("/"), done)) is not child:
                _replace(link, index, converted)
    elif isinstance(link, chainer.Chain):
        for name in sorted(link._children):  # children() has no names, and a link knows one of them only
            child = getattr(link, name)
            if (converted := _convert(child, comm, f"{path}/{name}".lstrip("/"), done)) is not child:
                delattr(link, name)
                with link.init_scope():
                    setattr(link, name, converted)
    return result


def _replace(parent: chainer.ChainList, index: int, link: chainer.Link) -> None:
    if not isinstance(parent, chainer.Sequential):
        parent[index] = link
        return
    # Its own assignment takes the links in another order, by which parameters are named.
    replaced = parent._layers[index]
    parent._layers[index] = link
    parent._children = [link if child is replaced else child for child in parent._children]


def _converted(link: links.BatchNormalization, comm: Group, path: str) -> SyncBatchNormalization:
    if link.avg_mean is not None and (link.axis is not None or link.avg_mean.ndim != 1):
        raise UsageError(
            f"'{path}' normalises over axes of its own; what normalises per channel can be synchronised"
        )
    if "forward" in link.__dict__ or type(link).forward is not links.BatchNormalization.forward:
        raise cannot_synchronise(link, path, "multiring.chainer.SyncBatchNormalization")
    new = SyncBatchNormalization.__new__(SyncBatchNormalization)
    new.__dict__.update(link.__dict__)
    new._params, new._persistent = set(link._params), set(link._persistent)
    new._ranks = _Ranks(comm)
    new.label = f"{SyncBatchNormalization.__name__} {path}".rstrip()
    return new

"""Weights of ranks with different numbers of samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol, SupportsFloat, runtime_checkable

import numpy as np

from multiring.arrays import without_mask
from multiring.communicator import Communicator
from multiring.derived import resolve
from multiring.errors import UsageError

__all__ = ["average_metrics", "batch_weight", "batch_weights", "check_count", "stop_together"]


@runtime_checkable
class _Detachable(Protocol):
    def detach(self) -> SupportsFloat: ...


def average_metrics(
    metrics: Mapping[str, SupportsFloat], count: float, comm: Communicator | None = None
) -> dict[str, float]:
    """Average metrics over ranks, each rank weighted by the number of samples it saw. Collective.

    Args:
        metrics: Averages over this rank's samples, by name; the names have to be the same on every rank.
        count: Number of samples (or another weight, 0 or more). With 0 the values of this rank are not
            looked at.
        comm: Ranks that evaluated; the world by default.

    Returns:
        The averages over the samples of all ranks, in the order of `metrics`; NaN where no rank had a sample.

    Raises:
        UsageError: `count` is negative or not finite, or a metric is masked.
        MismatchError: The ranks pass different names.
    """
    comm = resolve(comm)
    check_count(comm, count)
    names = sorted(metrics)
    sums = np.zeros(len(names) + 1, dtype=np.float64)
    if count > 0:
        sums[:-1] = [_number(without_mask(metrics[name], f"'{name}'")) * count for name in names]
        sums[-1] = count
    # The names are part of the operation's name, so the core compares them.
    total = comm.allreduce(sums, op="sum", name="average_metrics(" + ", ".join(names) + ")")
    averages = dict(zip(names, total[:-1] / total[-1], strict=True)) if total[-1] > 0 else {}
    return {name: float(averages.get(name, math.nan)) for name in metrics}


def batch_weight(count: float, comm: Communicator | None = None) -> float:
    """What to multiply the mean loss of a batch, or its gradients, with where batches differ in size over
    ranks. Collective.

    Gradients are averaged over ranks, not over samples. With `loss * batch_weight(len(batch))` the average
    over ranks is the mean over the samples of all ranks.

    Args:
        count: Number of samples of this rank's batch (or another weight, 0 or more).
        comm: Ranks that train together; the world by default.

    Returns:
        count * size / (sum of the counts of all ranks); 0 where no rank has a sample.

    Raises:
        UsageError: `count` is negative or not finite.
    """
    comm = resolve(comm)
    check_count(comm, count)
    total = np.array([count], dtype=np.float64)
    comm.allreduce(total, op="sum", out=total, name="batch_weight")
    return float(count * comm.size / total[0]) if total[0] > 0 else 0.0


def batch_weights(counts: Sequence[float], comm: Communicator | None = None) -> list[float]:
    """Return factors for the mean losses of the batches of one step, whose gradients are added up before they
    are averaged over ranks: the result is the mean over all samples, or tokens, of all of them. Collective.

    Args:
        counts: Number of samples (or tokens that count) of each batch of this rank. Ranks may have different
            numbers of batches.
        comm: Ranks that train together; the world by default.

    Returns:
        For each batch count * size / (sum of all counts of all ranks); 0 where no rank has a sample.

    Raises:
        UsageError: A count is negative or not finite.
    """
    comm = resolve(comm)
    for count in counts:
        check_count(comm, count)
    total = np.array([sum(counts)], dtype=np.float64)
    comm.allreduce(total, op="sum", out=total, name="batch_weights")
    return [float(count * comm.size / total[0]) if total[0] > 0 else 0.0 for count in counts]


def stop_together(flag: object, comm: Communicator | None = None) -> bool:
    """Return whether any rank wants to stop: all then stop after the same step. Collective.

    For what one rank may decide alone: early stopping by its own metric, a signal that it will be ended, or
    the end of its data. Call it once a step, or once in every so many steps, on all ranks.

    Args:
        flag: Whether this rank wants to stop.
        comm: Ranks that train together; the world by default.
    """
    comm = resolve(comm)
    return bool(comm.allreduce(np.array(bool(flag)), op="max", name="stop_together"))


def check_count(comm: Communicator, count: float) -> None:
    """Raise UsageError if a weight of this rank is negative or not finite."""
    if not (math.isfinite(count) and count >= 0):
        raise UsageError(f"rank {comm.rank}: count is {count}; pass the number of samples, 0 or more")


def _number(metric: SupportsFloat) -> float:
    # Torch warns where a loss that still requires a gradient becomes a number.
    return float(metric.detach() if isinstance(metric, _Detachable) else metric)

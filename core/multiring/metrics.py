"""Metrics of an evaluation that was spread over ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, SupportsFloat

import numpy as np

from multiring.errors import UsageError

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["average_metrics"]


def average_metrics(
    comm: Communicator, metrics: Mapping[str, SupportsFloat], count: float
) -> dict[str, float]:
    """Average metrics over ranks, each rank weighted by the number of samples it saw. Collective.

    Args:
        comm: Communicator of the ranks that evaluated.
        metrics: Averages over this rank's samples, by name; the names have to be the same on every rank.
        count: Number of samples (or another weight, 0 or more). With 0 the values of this rank are not
            looked at.

    Returns:
        The averages over the samples of all ranks, in the order of `metrics`; NaN where no rank had a sample.

    Raises:
        UsageError: `count` is negative or not finite.
        MismatchError: The ranks pass different names.
    """
    if not (math.isfinite(count) and count >= 0):
        raise UsageError(f"rank {comm.rank}: count is {count}; pass the number of samples, 0 or more")
    names = sorted(metrics)
    sums = np.zeros(len(names) + 1, dtype=np.float64)
    if count > 0:
        sums[:-1] = [float(metrics[name]) * count for name in names]
        sums[-1] = count
    # The names are part of the operation's name, so the core compares them.
    total = comm.allreduce(sums, op="sum", name="average_metrics(" + ", ".join(names) + ")")
    averages = dict(zip(names, total[:-1] / total[-1], strict=True)) if total[-1] > 0 else {}
    return {name: float(averages.get(name, math.nan)) for name in metrics}

"""What a job on several hosts finds out at its start, where no file says how its allreduces go best.

A few allreduces of a few sizes are timed for each algorithm, which takes a fraction of a second; a line
through them, latency + bytes / speed (Hockney's model), then tells the algorithm for every size between.
Larger ones use the automatic plan, which sends the fewest bytes. What is this close to chance must be clearly
quicker than what is used anyway. All ranks decide by the same numbers, and the algorithm changes no bit.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from multiring import _core as native
from multiring.errors import UsageError
from multiring.tuning.measure import Measured, default_algorithm, measure
from multiring.tuning.table import AUTO, Algorithm, SizeClass, Tuning, ranks_of_hosts
from multiring.units import size_text

if TYPE_CHECKING:
    from multiring.communicator import Communicator

__all__ = ["classes_by_model", "use_measured_algorithms"]

_log = logging.getLogger("multiring")

_SIZES = (1024, 8 * 1024, 32 * 1024, 128 * 1024)
_SECONDS = 0.2
# Where a barrier takes longer than this, ranks wait for processors, or for a network on which so many
# allreduces would take too long.
_MAX_BARRIER_SECONDS = 0.002
_BARRIERS = 5
# Of what is used anyway an algorithm may take so much, by the lines and at the nearest measured size.
_QUICKER = 0.8


def use_measured_algorithms(comm: Communicator) -> Tuning | None:
    """Let the allreduces of `comm` and its duplicates go as is measured to be quickest. Collective.

    Args:
        comm: The world, on several hosts, without a forced mode and without a tuning.

    Returns:
        What is followed from here on, the same on all ranks; None where nothing beats what is used anyway,
        or was not measured because it would take too long.
    """
    if comm.size == 2 or _barrier_seconds(comm) > _MAX_BARRIER_SECONDS:
        return None  # two ranks send each other everything by any algorithm
    began = time.perf_counter()
    measured = measure(comm, _SIZES, _SECONDS, _log.debug, turn_seconds=0.0)
    ranks = ranks_of_hosts(comm._core.hosts)
    tuning = Tuning(ranks, classes_by_model(measured, comm.size))
    if comm.rank == 0:
        _log.info(
            "allreduces use what was measured in %.0f ms: %s",
            1e3 * (time.perf_counter() - began),
            ", ".join(f"up to {size_text(each.up_to)} {each.algorithm}" for each in tuning.classes)
            or "as usual",
        )
    if not tuning.classes:
        return None
    comm._core.set_tuning(tuning.text)
    return tuning


def classes_by_model(measured: Sequence[Measured], size: int) -> tuple[SizeClass, ...]:
    """The algorithms of `size` ranks by their fitted lines; empty where they are the usual ones."""
    times: dict[Algorithm, dict[int, float]] = {}
    for each in measured:
        if not each.algorithm.segment:
            times.setdefault(each.algorithm, {})[each.nbytes] = each.seconds
    lines = {algorithm: _line(found) for algorithm, found in times.items()}
    sizes = [each.nbytes for each in measured]
    chosen: dict[int, Algorithm] = {}
    nbytes = min(sizes)
    while nbytes <= max(sizes):
        chosen[nbytes] = _quickest(nbytes, times, lines, default_algorithm(nbytes, size))
        nbytes *= 2
    if all(algorithm == default_algorithm(nbytes, size) for nbytes, algorithm in chosen.items()):
        return ()
    # From here on as usual; what is larger than all classes goes as the last.
    limit = native.rounds_up_to(size)
    if limit > max(sizes):
        chosen[limit] = default_algorithm(limit, size)
    chosen[max(2 * limit, nbytes)] = Algorithm(AUTO)
    classes: list[SizeClass] = []
    for up_to, algorithm in chosen.items():
        if classes and classes[-1].algorithm == algorithm:
            classes.pop()
        classes.append(SizeClass(up_to, algorithm))
    return tuple(classes)


def _quickest(
    nbytes: int,
    times: Mapping[Algorithm, Mapping[int, float]],
    lines: Mapping[Algorithm, tuple[float, float]],
    usual: Algorithm,
) -> Algorithm:
    def predicted(algorithm: Algorithm) -> float:
        latency, per_byte = lines[algorithm]
        return latency + per_byte * nbytes

    # An algorithm that was given up among smaller sizes is none for larger ones.
    known = [algorithm for algorithm, measured in times.items() if max(measured) >= nbytes]
    if usual not in known:
        return usual
    nearest = min(times[usual], key=lambda each: abs(math.log(each / nbytes)))
    quicker = [
        algorithm
        for algorithm in known
        if predicted(algorithm) <= _QUICKER * predicted(usual)
        and times[algorithm].get(nearest, math.inf) <= _QUICKER * times[usual][nearest]
    ]
    return min(quicker, key=predicted, default=usual)


def _line(times: Mapping[int, float]) -> tuple[float, float]:
    """Latency and seconds per byte."""
    try:
        line = native.fit_link(list(times.items()))
    except UsageError:  # one size, or times that do not grow with it
        return statistics.median(times.values()), 0.0
    return line.latency, 1 / line.bytes_per_second


def _barrier_seconds(comm: Communicator) -> float:
    """The median of the slowest rank."""
    times = []
    for _ in range(_BARRIERS):
        began = time.perf_counter()
        comm.barrier()
        times.append(time.perf_counter() - began)
    return float(comm.allreduce(np.array(statistics.median(times)), "max", name="tune.barrier"))

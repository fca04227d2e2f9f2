"""Measures allreduces across hosts by the algorithms that may run there.

The communicator changes its algorithm between operations (`set_tuning` of the native one), so all of them use
the same connections and memory. For each size they take turns, so that what else machines and network do
meets all alike, and the median of an algorithm's turns counts. Every call comes after a barrier: where calls
follow each other at once, ranks that are done early begin the next, and algorithms that keep most ranks idle
look quick.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from multiring.tuning.file import ROUNDS, only
from multiring.units import seconds_text, size_text

if TYPE_CHECKING:
    from multiring.communicator import Communicator

__all__ = ["Measured", "algorithms_of", "measure"]

# What takes so many times as long as the quickest is not measured for larger sizes.
_HOPELESS = 4.0

# The first call after a change of algorithm chooses anew, which the calls of a job do not. It is left out
# where it is a part of the time, and costs little.
_WARM_BELOW_SECONDS = 0.001

_MAX_CALLS = 16
MIN_TURNS, _MAX_TURNS = 3, 25


class Measured(NamedTuple):
    """What an allreduce took.

    Attributes:
        algorithm: "rounds" or the mode of a plan.
        nbytes: Of the array on each rank.
        seconds: The median of all turns, of the slowest rank; of one turn where that took so long that no
            more were made.
    """

    algorithm: str
    nbytes: int
    seconds: float


def algorithms_of(comm: Communicator, *, few: bool = False) -> list[str]:
    """The algorithms that run among these ranks in the canonical order; `few`: those that differ most."""
    # Those for small arrays: of many hosts the divisions that connect the fewest.
    modes = [row.name for row in comm._core.algorithm_rows("allreduce", 1024, "canonical") if row.is_compared]
    if few:
        # The first one within hosts with each of those across them: in several dimensions where there are
        # many hosts, for each of which a rank would need a connection otherwise.
        most = max(mode.count("x") for mode in modes)
        divided = [mode for mode in modes if mode.count("x") == most and mode != ROUNDS]
        modes = [ROUNDS, *{mode[-1]: mode for mode in reversed(divided)}.values()]
    return modes


def measure(
    comm: Communicator,
    algorithms: Sequence[str],
    sizes: Sequence[int],
    seconds: float,
    report: Callable[[str], None],
    *,
    turn_seconds: float,
    first_seconds: float = math.inf,
) -> list[Measured]:
    """Measures algorithms for each size, the smallest first; the same outcome on all ranks. Collective.

    Args:
        comm: The world, without a forced mode.
        algorithms: What is measured.
        sizes: Bytes, multiples of 4.
        seconds: For all sizes together, about. The largest are left out where they would take longer; the
            first is measured unless it takes `first_seconds`.
        report: Called with what to tell the user.
        turn_seconds: Of one algorithm before the next has its turn: so long at least, if few calls last that
            long.
        first_seconds: For the first size.
    """
    kept = list(algorithms)
    before = comm._core.tuning
    found: list[Measured] = []
    try:
        for algorithm in algorithms:  # connects
            _turn(comm, algorithm, np.zeros(16 * comm.size, np.float32), 1)
        began = time.perf_counter()
        for number, nbytes in enumerate(sizes):
            left = comm.broadcast_object(seconds - (time.perf_counter() - began))
            share = left / (len(sizes) - number)
            here: list[Measured] = []
            if left > 0 or not found:
                here = _measure_size(
                    comm, nbytes, kept, share, turn_seconds, left if found else first_seconds
                )
            if not here:
                report(f"{size_text(nbytes)} and more: left out, as that takes over --seconds {seconds:g}")
                break
            found += here
            best = min(here, key=lambda each: each.seconds)
            report(f"{size_text(nbytes)}: {best.algorithm} is quickest, {seconds_text(best.seconds)}")
            kept = [each.algorithm for each in here if each.seconds <= _HOPELESS * best.seconds]
    finally:
        if not comm.is_broken:
            comm._core.set_tuning(before)
    return found


def _measure_size(
    comm: Communicator,
    nbytes: int,
    algorithms: Sequence[str],
    seconds: float,
    turn_seconds: float,
    most_seconds: float,
) -> list[Measured]:
    """Empty: it would take longer than `most_seconds`."""
    data = np.zeros(nbytes // 4, np.float32)
    first = _of_slowest(comm, [_turn(comm, algorithm, data, 1) for algorithm in algorithms]).tolist()
    hopeless: list[Measured] = []
    estimates: list[float] = first
    if sum(first) * MIN_TURNS > most_seconds:
        # A switch that loses what many hosts send to one holds up some algorithms a hundred times as long.
        once = [Measured(name, nbytes, each) for name, each in zip(algorithms, first, strict=True)]
        limit = _HOPELESS * min(first)
        hopeless = [each for each in once if each.seconds > limit]
        algorithms = [each.algorithm for each in once if each.seconds <= limit]
        estimates = [each.seconds for each in once if each.seconds <= limit]
        if sum(estimates) * MIN_TURNS > most_seconds:
            return once if hopeless else []
    calls = [int(np.clip(turn_seconds / each, 1, _MAX_CALLS)) for each in estimates]
    turn = sum(each * count for each, count in zip(estimates, calls, strict=True))
    turns = int(np.clip(seconds / turn, MIN_TURNS, _MAX_TURNS))
    times = [
        [
            _turn(comm, algorithm, data, count, warm=each < _WARM_BELOW_SECONDS)
            for algorithm, count, each in zip(algorithms, calls, estimates, strict=True)
        ]
        for _ in range(turns)
    ]
    slowest = _of_slowest(comm, times)
    return hopeless + [
        Measured(algorithm, nbytes, statistics.median(column))
        for algorithm, column in zip(algorithms, slowest.T.tolist(), strict=True)
    ]


def _turn(
    comm: Communicator,
    algorithm: str,
    data: np.ndarray[tuple[int, ...], np.dtype[np.float32]],
    calls: int,
    *,
    warm: bool = False,
) -> float:
    """Seconds of a call; `warm`: after one that is not timed."""
    comm._core.set_tuning(only(algorithm))
    out = np.empty_like(data)

    def call() -> None:
        # Half precision would keep its own algorithm.
        comm.allreduce(data, out=out, name="tune", comm_dtype="float32", order="canonical")

    if warm:
        call()
    taken = 0.0
    for _ in range(calls):
        comm.barrier()
        began = time.perf_counter()
        call()
        taken += time.perf_counter() - began
    return taken / calls


def _of_slowest(comm: Communicator, times: object) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return np.asarray(comm.allreduce(np.array(times, np.float64), op="max", name="tune.times"))

"""Measures the algorithms of an allreduce across hosts against each other, by the allreduces themselves.

The communicator changes its algorithm between operations (`set_tuning` of the native one), so all of them use
the same connections and memory. For each size they take turns, so that what else machines and network do
meets all alike, and the median of an algorithm's turns counts. Every call comes after a barrier: where calls
follow each other at once, ranks that are done early begin the next, and algorithms that keep most ranks idle
look quick.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from multiring import _core as native
from multiring.tuning.table import AUTO, ROUNDS, Algorithm, SizeClass, Tuning, ranks_of_hosts
from multiring.units import seconds_text, size_text

if TYPE_CHECKING:
    from multiring.communicator import Communicator

__all__ = ["Measured", "candidates", "classes_of", "default_algorithm", "measure"]

# An algorithm has to be so much quicker than that to take its place: less is chance.
_QUICKER = 0.95
# An algorithm that keeps few rounds at the price of bytes, and takes so many times as long as the automatic
# plan, is not measured for larger sizes, where it only gets worse.
_HOPELESS = 2.0

# From here on segments are tried, which staging memory limits to half of MULTIRING_STAGING_BYTES.
_SEGMENTS_FROM = 256 * 1024
_SEGMENTS = (32 * 1024, 64 * 1024)

_TURN_SECONDS = 0.004
_MAX_CALLS = 16
_MIN_TURNS, _MAX_TURNS = 5, 25
_UNMEASURED_TURNS = 2


@dataclass(frozen=True)
class Measured:
    """What an allreduce took.

    Attributes:
        nbytes: Of the array on each rank.
        algorithm: How it went.
        seconds: The median of all turns, of the slowest rank.
    """

    nbytes: int
    algorithm: Algorithm
    seconds: float


def candidates(ranks: Sequence[int]) -> list[Algorithm]:
    """The algorithms among hosts of so many ranks; all give the same bits, unless any order is allowed."""
    modes = [ROUNDS, AUTO]
    each, hosts = ranks[0], len(ranks)
    if len(set(ranks)) == 1:
        within = ("p", "t") if each > 1 else ("p",)
        modes += [f"{each}{letter}x{hosts}d" for letter in within]
        modes += [f"{each}{within[-1]}x{hosts}t"]
        near = max((n for n in range(2, int(hosts**0.5) + 1) if hosts % n == 0), default=1)
        if near > 1:
            modes.append(f"{each}px{hosts // near}px{near}p")
    return [Algorithm(mode) for mode in modes]


def default_algorithm(nbytes: int, size: int) -> Algorithm:
    """How an allreduce of `size` ranks goes without a table."""
    return Algorithm(ROUNDS if size == 2 or nbytes <= native.rounds_up_to(size) else AUTO)


def measure(
    comm: Communicator,
    sizes: Sequence[int],
    seconds: float,
    report: Callable[[str], None],
    *,
    turn_seconds: float = _TURN_SECONDS,
) -> list[Measured]:
    """Measures all algorithms for each size, the smallest first; the same outcome on all ranks. Collective.

    Args:
        comm: The world, without a forced mode.
        sizes: Bytes, multiples of 4.
        seconds: For all sizes together, about. The largest are left out where they would take longer; the
            first is measured in any case.
        report: Called with what to tell the user.
        turn_seconds: Of one algorithm before the next has its turn: so long at least, if few calls last that
            long.
    """
    algorithms = candidates(ranks_of_hosts(comm._core.hosts))
    began = time.perf_counter()
    found: list[Measured] = []
    least_per_byte = 0.0  # of the next size, in seconds, if its bytes pass no quicker
    try:
        for number, nbytes in enumerate(sizes):
            left = comm.broadcast_object(seconds - (time.perf_counter() - began))
            if found and left < least_per_byte * nbytes:
                report(f"{size_text(nbytes)} and more: left out, as that takes over --seconds {seconds:g}")
                break
            share = left / (len(sizes) - number)
            here = _measure_size(comm, nbytes, algorithms, share, turn_seconds)
            best = min(here, key=lambda each: each.seconds)
            if nbytes >= _SEGMENTS_FROM and best.algorithm.mode != ROUNDS:
                segmented = [Algorithm(best.algorithm.mode, segment) for segment in _SEGMENTS]
                again = _measure_size(comm, nbytes, [best.algorithm, *segmented], share / 4, turn_seconds)
                here = [*(each for each in here if each.algorithm != best.algorithm), *again]
            found += here
            plan = next(each for each in here if each.algorithm == Algorithm(AUTO))
            kept = [each for each in here if not each.algorithm.segment and not _is_hopeless(each, plan)]
            algorithms = [each.algorithm for each in kept]
            least_per_byte = sum(each.seconds for each in kept) * (_UNMEASURED_TURNS + _MIN_TURNS) / nbytes
            best = min(here, key=lambda each: each.seconds)
            report(f"{size_text(nbytes)}: {best.algorithm} is quickest, {seconds_text(best.seconds)}")
    finally:
        if not comm.is_broken:
            comm._core.set_tuning("")
    return found


def _is_hopeless(one: Measured, plan: Measured) -> bool:
    sends_more = one.algorithm.mode == ROUNDS or one.algorithm.mode[-1] in "dt"
    return sends_more and one.seconds > _HOPELESS * plan.seconds


def _measure_size(
    comm: Communicator, nbytes: int, algorithms: Sequence[Algorithm], seconds: float, turn_seconds: float
) -> list[Measured]:
    data = np.zeros(nbytes // 4, np.float32)
    out = np.empty_like(data)
    ranks = ranks_of_hosts(comm._core.hosts)

    def turn(algorithm: Algorithm, calls: int) -> float:
        comm._core.set_tuning(Tuning(ranks, (SizeClass(1, algorithm),)).text)
        taken = 0.0
        for _ in range(calls):
            comm.barrier()
            began = time.perf_counter()
            # Half precision would keep its own algorithm.
            comm.allreduce(data, out=out, name="tune", comm_dtype="float32")
            taken += time.perf_counter() - began
        return taken / calls

    for algorithm in algorithms:  # connects
        turn(algorithm, 1)
    estimates = _of_slowest(comm, [turn(algorithm, 1) for algorithm in algorithms])
    calls = [int(np.clip(turn_seconds / each, 1, _MAX_CALLS)) for each in estimates]
    once = sum(each * count for each, count in zip(estimates, calls, strict=True))
    turns = int(np.clip(seconds / once, _MIN_TURNS, _MAX_TURNS))
    times = [
        [turn(algorithm, count) for algorithm, count in zip(algorithms, calls, strict=True)]
        for _ in range(turns)
    ]
    slowest = _of_slowest(comm, times)
    return [
        Measured(nbytes, algorithm, statistics.median(column))
        for algorithm, column in zip(algorithms, slowest.T.tolist(), strict=True)
    ]


def _of_slowest(comm: Communicator, times: object) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return np.asarray(comm.allreduce(np.array(times, np.float64), op="max", name="tune.times"))


def classes_of(measured: Sequence[Measured], size: int) -> tuple[SizeClass, ...]:
    """The quickest algorithms by size; what is used without a table where it is about as quick. A class ends
    midway between sizes that were measured, and neighbours of the same algorithm are one."""
    sizes = sorted({each.nbytes for each in measured})
    found: list[SizeClass] = []
    for nbytes, larger in zip(sizes, [*sizes[1:], sizes[-1]], strict=True):
        here = [each for each in measured if each.nbytes == nbytes]
        best = min(here, key=lambda each: each.seconds)
        usual = [each for each in here if each.algorithm == default_algorithm(nbytes, size)]
        algorithm = best.algorithm
        if usual and best.seconds > _QUICKER * usual[0].seconds:
            algorithm = usual[0].algorithm
        if found and found[-1].algorithm == algorithm:
            found.pop()
        found.append(SizeClass(round((nbytes * larger) ** 0.5), algorithm))
    return tuple(found)

"""What a job on several hosts finds out at its start: what its allreduces cost.

A few allreduces of a few sizes are timed for a few algorithms, which takes a fraction of a second. The costs
that explain their times best (core/collective/plan/fit_costs.h) are given to the table of algorithms, by
which all ranks choose from then on. The choice changes no bit of a sum in the canonical order.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from multiring import _core as native
from multiring.errors import UsageError
from multiring.settings import Settings
from multiring.tuning.file import OFF, ROUNDS, has_costs
from multiring.tuning.measure import MIN_TURNS, Measured, algorithms_of, measure
from multiring.units import seconds_text, size_text

if TYPE_CHECKING:
    from multiring.communicator import Communicator

__all__ = ["learn_costs"]

_log = logging.getLogger("multiring")

_SIZES = (1024, 16 * 1024, 128 * 1024, 1024 * 1024)
_SECONDS = 0.5
_SEGMENT = 32 * 1024
# Where a barrier takes longer than this, ranks wait for processors, or for a network on which so many
# allreduces would take too long.
_MAX_BARRIER_SECONDS = 0.002
_BARRIERS = 5
_LOGGED_SIZES = [1024 * 4**power for power in range(9)]
_CHOOSING = {
    "allreduce": "an allreduce",
    "reduce_scatter": "a reduce-scatter",
    "allgather": "an allgather",
    "broadcast": "a broadcast",
    "gather": "a gather",
    "scatter": "a scatter",
    "alltoall": "an alltoall",
}


def learn_costs(comm: Communicator, settings: Settings) -> None:
    """Let the allreduces of `comm` and its groups be chosen by what they cost here. Collective.

    Args:
        comm: The world. It stays as it is on one host, or where the settings say what to use; what it uses is
            logged. Where measuring would take too long, a barrier tells the latency, and the rest is assumed.
        settings: Of this rank; mode and tuning are the same on all.
    """
    is_measured = comm.cross_size > 1 and not settings.mode
    if is_measured and settings.tuning != OFF and not has_costs(comm._core.tuning):
        _measure_costs(comm)
    if comm.rank == 0 and comm.size > 1:
        _log_choices(comm, settings)


def _measure_costs(comm: Communicator) -> None:
    barrier = _barrier_seconds(comm)
    measured: list[Measured] = []
    began = time.perf_counter()
    if barrier <= _MAX_BARRIER_SECONDS:
        algorithms = algorithms_of(comm, few=True)
        measured = measure(comm, algorithms, _SIZES, _SECONDS, _log.debug, turn_seconds=0.0)
        if measured and (probe := _loss_probe(measured)):
            measured += measure(
                comm, [probe], _SIZES[-1:], 0.0, _log.debug, turn_seconds=0.0, first_seconds=_SECONDS
            )
    # The measured times are the same on all ranks; what rank 0 makes of them is so for certain.
    costs = comm.broadcast_object(_costs_line(comm, measured, barrier) if comm.rank == 0 else "")
    rules = comm._core.tuning
    comm._core.set_tuning(f"{rules}\n{costs}" if rules else costs)
    if comm.rank == 0:
        sizes = ", ".join(size_text(nbytes) for nbytes in sorted({one.nbytes for one in measured}))
        what = f"allreduces of {sizes}" if measured else f"barriers of {seconds_text(barrier)} alone"
        _log.info("measured %s in %.0f ms: %s", what, 1e3 * (time.perf_counter() - began), costs)


def _loss_probe(measured: Sequence[Measured]) -> str:
    """What to measure of the largest size if losses took the time for it; empty: it is measured, or the
    network is too slow.

    In small segments less is lost, if anything: that tells a network that loses bytes from a slow one.
    """
    size = max(one.nbytes for one in measured)
    planned = [one for one in measured if one.nbytes == size and one.algorithm != ROUNDS]
    # Small sizes pass where large ones lose bytes.
    turn = _SIZES[-1] * min(one.seconds / one.nbytes for one in measured)
    if size == _SIZES[-1] or not planned or MIN_TURNS * turn > _SECONDS:
        return ""
    return f"{min(planned, key=lambda one: one.seconds).algorithm}/{_SEGMENT}"


def _costs_line(comm: Communicator, measured: Sequence[Measured], barrier: float) -> str:
    try:
        if measured:
            return comm._core.fit_costs(measured)
    except UsageError as error:  # a clock that stands still, say: no reason to end the job
        _log.warning("what allreduces cost cannot be told from the measurement at the start: %s", error)
    return f"costs latency={barrier!r}"


def _log_choices(comm: Communicator, settings: Settings) -> None:
    """Logs which algorithms collectives use, by size: at level debug with all that the table has."""
    if not _log.isEnabledFor(logging.INFO):
        return
    for collective, one in _CHOOSING.items():
        if comm.cross_size == 1 and not native.adds(collective):
            continue  # of one host only these have a choice
        chosen: list[tuple[int, str]] = []
        for nbytes in _LOGGED_SIZES:
            rows = comm._core.algorithm_rows(collective, nbytes, "")
            _log.debug(
                "%s of %s is predicted to take %s",
                one,
                size_text(nbytes),
                ", ".join(f"{seconds_text(row.seconds)} by {row.name}" for row in rows if not row.excluded),
            )
            # On one host two, where it depends on the memory of arrays.
            names = [row.name + f" for {row.needs}" * bool(row.needs) for row in rows if row.is_chosen]
            # Nor does a table list every mode, or what a rule says.
            forced = settings.mode if collective == "allreduce" else ""
            name = " or ".join(sorted(names, reverse=True)) or forced or "a rule"
            if chosen and chosen[-1][1] == name:
                chosen.pop()
            chosen.append((nbytes, name))
        uses = ", ".join(f"{name} up to {size_text(nbytes)}" for nbytes, name in chosen)
        _log.info("%ss use %s", one.split()[1], uses)


def _barrier_seconds(comm: Communicator) -> float:
    """The median of the slowest rank."""
    times = []
    for _ in range(_BARRIERS):
        began = time.perf_counter()
        comm.barrier()
        times.append(time.perf_counter() - began)
    return float(comm.allreduce(np.array(statistics.median(times)), "max", name="tune.barrier"))

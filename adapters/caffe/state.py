"""State and metrics of nets over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, SupportsFloat, TypeVar

import multiring
from multiring import metrics as shared_metrics
from multiring.caffe.shape import Array, Net, Solver, learned_blobs
from multiring.state_sync import broadcast_arrays

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = [
    "average_metrics",
    "batch_weight",
    "broadcast_object",
    "broadcast_parameters",
    "broadcast_solver",
    "solver_settings",
    "solver_state",
]

T = TypeVar("T")

# Fields of the solver's parameters that updates depend on. Which of them pycaffe shows depends on the build.
_SETTINGS = (
    *("type", "iter_size", "base_lr", "lr_policy", "gamma", "power", "stepsize", "stepvalue", "max_iter"),
    *("momentum", "momentum2", "rms_decay", "delta"),
    *("weight_decay", "regularization_type", "clip_gradients"),
)


def broadcast_parameters(net: Net, root: int = 0, comm: Communicator | None = None) -> None:
    """Overwrite the blobs of all layers, running statistics included, with those of `root`. Collective.

    Args:
        net: A net with `params`, as pycaffe has it; alike on every rank.
        root: Rank whose values everyone gets.
        comm: Ranks that take part; the world by default.

    Raises:
        UsageError: `root` is not a rank.
        MismatchError: The nets have different layers, shapes or dtypes.
    """
    comm = multiring.world() if comm is None else comm
    broadcast_arrays(comm, _weights(net), root)


def broadcast_solver(solver: Solver, root: int, comm: Communicator) -> None:
    """`broadcast_parameters` of the solver's net, and the solver's history if it shows it. Collective."""
    broadcast_arrays(comm, _weights(solver.net) | dict(_history(solver)), root)


def solver_settings(solver: Solver) -> Iterator[tuple[str, object]]:
    """What updates depend on and the solver shows: its type, its iteration, fields of its `param`."""
    yield "iteration", solver.iter
    yield "type of solver", type(solver).__name__
    param = getattr(solver, "param", None)
    for name in _SETTINGS:
        value = getattr(param, name, None)
        if value is not None:
            yield name, value if isinstance(value, str | int | float) else list(value)


def solver_state(solver: Solver, *, statistics: bool = True) -> Iterator[tuple[str, object]]:
    """What has to be the same on all ranks: settings, weights, statistics if asked for, and the history if
    the solver shows it."""
    yield from solver_settings(solver)
    yield from _weights(solver.net, statistics=statistics).items()
    yield from _history(solver)


def broadcast_object(obj: T, root: int = 0, comm: Communicator | None = None) -> T:
    """Return `root`'s object on every rank; it has to be picklable. Collective."""
    comm = multiring.world() if comm is None else comm
    received: T = comm.broadcast_object(obj, root)
    return received


def average_metrics(
    metrics: Mapping[str, SupportsFloat], count: float, comm: Communicator | None = None
) -> dict[str, float]:
    """Average metrics over ranks, weighted by `count` samples; see `multiring.metrics.average_metrics`."""
    return shared_metrics.average_metrics(multiring.world() if comm is None else comm, metrics, count)


def batch_weight(count: float, comm: Communicator | None = None) -> float:
    """What to multiply the diff of the loss with where batches differ in size over ranks. Collective; see
    `multiring.metrics.batch_weight`."""
    return shared_metrics.batch_weight(multiring.world() if comm is None else comm, count)


def _weights(net: Net, *, statistics: bool = True) -> dict[str, Array]:
    return {
        found.name: net.params[found.layer][found.number].data
        for found in learned_blobs(net)
        if statistics or not found.is_statistic
    }


def _history(solver: Solver) -> Iterator[tuple[str, Array]]:
    for number, array in enumerate(getattr(solver, "history", ())):
        yield f"history[{number}]", array

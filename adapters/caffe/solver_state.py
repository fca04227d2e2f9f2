"""State of nets and solvers over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from multiring.caffe.shape import Array, Net, Parameter, Solver, learned_blobs
from multiring.derived import resolve
from multiring.errors import MismatchError
from multiring.gradients.model_check import check_same
from multiring.state.broadcast import broadcast_arrays
from multiring.state.buffer_sync import sync_arrays
from multiring.state.check import StateCheck
from multiring.types import BufferMode

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["SolverState", "broadcast_parameters"]

# Fields of the solver's parameters that updates depend on. Which of them pycaffe shows depends on the build.
_SETTINGS = (
    *("type", "iter_size", "base_lr", "lr_policy", "gamma", "power", "stepsize", "stepvalue", "max_iter"),
    *("momentum", "momentum2", "rms_decay", "delta"),
    *("weight_decay", "regularization_type", "clip_gradients"),
)

# The name of `compare_iteration`'s operation. Ranks whose iteration is the next one do not call it, and learn
# of it by the error of a mismatch, which names what each rank has asked for.
_ITERATION = "gradients of iteration {}, where {} comes next"
_IN_ERROR = "gradients of iteration "


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
    broadcast_arrays(resolve(comm), _weights(net, learned_blobs(net)), root)


class SolverState:
    """What has to stay the same on all ranks: a solver's settings, its weights, and its history if it has a
    `history`. Creation is collective."""

    def __init__(
        self,
        solver: Solver,
        comm: Communicator,
        own: Communicator | None,
        buffers: BufferMode,
        check_every: int | None,
    ) -> None:
        """Make a `StateCheck`.

        Args:
            solver: A solver of pycaffe's shape.
            comm: Ranks that train together.
            own: The same ranks, for what follows a reduction; None with one rank.
            buffers: What to do with the statistics of BatchNorm layers.
            check_every: Iterations between two comparisons.
        """
        self._solver, self._comm, self._own, self._buffers = solver, comm, own or comm, buffers
        # Once: that asks for gradients, which may lie on a GPU.
        self._parameters = learned_blobs(solver.net)
        self._check = StateCheck(self._own, check_every, "training state of the solver")

    def check_settings(self) -> None:
        """Raise MismatchError on every rank unless all have the same settings. Collective."""
        entries = [(name, str(value)) for name, value in self._settings()]
        advice = "use the same solver file, and restore the same snapshot, on every rank"
        check_same(self._comm, entries, "solver to train", advice=advice)

    def broadcast(self, root: int) -> None:
        """Overwrite weights and history with those of `root`. Collective."""
        arrays = _weights(self._solver.net, self._parameters) | dict(self._history())
        broadcast_arrays(self._comm, arrays, root)
        self._check.compare_next()

    def compare_iteration(self, following: int) -> None:
        """The solver is not at the iteration `following`: raise MismatchError on every rank unless all are at
        the same one; then compare the ranks in the next iterations. Collective; call it in `explaining`."""
        if self._own.size > 1:
            name = _ITERATION.format(self._solver.iter, following)
            self._own.allgather(np.array([self._solver.iter]), name=name)
        self._check.compare_next()

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Context of operations that other ranks' `compare_iteration` may meet: the error then says what has
        happened to the solver."""
        try:
            yield
        except MismatchError as error:
            if _IN_ERROR not in str(error):
                raise
            raise MismatchError(
                "the ranks do not agree about the iteration of the solver: a snapshot was restored, or an "
                "update failed, on some ranks only. Call restore() with the same snapshot on every rank, "
                "before the same iteration; to take over the weights of one rank alone, load them there and "
                f"call broadcast() of the SolverCallback on every rank. In detail, {error}",
                rank=self._comm.rank,
                peer=error.peer,
                host=self._comm.host,
                operation="iteration of the solver",
            ) from error

    def keep_equal(self, active: list[bool]) -> None:
        """After a reduction: synchronise statistics, and compare the ranks if it is time to. Collective."""
        if self._comm.size == 1:
            return
        net = self._solver.net
        if self._buffers != "local":
            statistics = [parameter for parameter in self._parameters if parameter.is_statistic]
            sync_arrays(self._own, _weights(net, statistics), self._buffers, active)
        if self._check.due():
            takes_part = active[self._comm.rank] or hasattr(self._solver, "apply_update")
            # On a GPU no arrays in steps that compare numbers: each would be copied to the host for that.
            device = getattr(net, "device", None)
            is_light = device is not None and device.type != "cpu" and not self._check.compares_arrays
            entries = self._settings() if is_light else self._everything()
            self._check.compare(entries, active=takes_part)

    def _settings(self) -> Iterator[tuple[str, object]]:
        """What updates depend on and the solver shows."""
        yield "iteration", self._solver.iter
        yield "type of solver", type(self._solver).__name__
        if (device := getattr(self._solver.net, "device", None)) is not None:
            yield "device", device.type  # of another kind the last bits are others
        param = getattr(self._solver, "param", None)
        for name in _SETTINGS:
            value = getattr(param, name, None)
            # Only this policy depends on it; otherwise ranks may have batches for more or fewer iterations.
            is_idle = name == "max_iter" and getattr(param, "lr_policy", None) != "poly"
            if value is not None and not is_idle:
                yield name, value if isinstance(value, str | int | float) else list(value)

    def _history(self) -> Iterator[tuple[str, Array]]:
        for number, array in enumerate(getattr(self._solver, "history", ())):
            yield f"history[{number}]", array

    def _everything(self) -> Iterator[tuple[str, object]]:
        yield from self._settings()
        is_local = self._buffers == "local"
        compared = [parameter for parameter in self._parameters if not (parameter.is_statistic and is_local)]
        yield from _weights(self._solver.net, compared).items()
        yield from self._history()


def _weights(net: Net, parameters: Iterable[Parameter]) -> dict[str, Array]:
    return {found.name: net.params[found.layer][found.number].data for found in parameters}

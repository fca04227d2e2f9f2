"""The state check of distributed optimizers: `multiring.state.check` over the ranks of a process set."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring.errors import MismatchError
from multiring.horovod import basics
from multiring.horovod.host_calls import Asked, start
from multiring.horovod.process_sets import ProcessSet
from multiring.state.check import Description, Scope, StateCheck, scope_at

__all__ = ["SetCheck"]

Entries = Iterable[tuple[str, object]]
_SUM = Asked("allreduce", "sum")


class _Rows:
    """Rows of all ranks, which were submitted; those of ranks that have joined are zeros."""

    def __init__(self, wait: Callable[[], Any]) -> None:
        self._wait = wait

    def wait(self) -> Any:
        return self._wait()


class _Ranks:
    """The ranks of a process set as a state check needs them: part of a communicator's interface.

    Collectives are allreduces, since ranks that have joined take part in those alone. Their zeros stand for
    nothing to compare.
    """

    def __init__(self, process_set: ProcessSet, title: str) -> None:
        operations = process_set.operations()
        self.rank, self.size, self.host = operations.rank, operations.size, operations.host
        self._process_set, self._title = process_set, title

    def allgather_async(self, own: NDArray[Any], *, name: str) -> _Rows:
        """Begin to gather a row of bytes, whose number is a multiple of 4, of each rank."""
        rows = np.zeros((self.size, own.size // 4), np.int32)
        rows[self.rank] = own.view(np.int32).reshape(-1)
        started = start(_SUM, f"{self._title}: state check", [rows], self._process_set, [rows])
        return _Rows(lambda: started.wait()[0].view(np.uint8))

    def allgather_object(self, value: Any, *, name: str) -> list[Any]:
        """Return the objects of all ranks; None for a rank that has joined. `name` is accepted as by
        Communicator, and ignored, since the title tells the operations apart."""
        data = pickle.dumps(value)
        data += bytes(-len(data) % 4)
        lengths = np.zeros(self.size, np.int64)
        lengths[self.rank] = len(data)
        start(_SUM, f"{self._title}: length", [lengths], self._process_set, [lengths]).wait()
        own = np.zeros((1, int(lengths.max())), np.uint8)
        own[0, : len(data)] = np.frombuffer(data, np.uint8)
        rows = self.allgather_async(own, name="").wait()
        return [pickle.loads(row) if length else None for row, length in zip(rows, lengths, strict=True)]


class SetCheck:
    """Compares the state of an optimizer over the ranks of a process set, in some of its steps.

    Steps are known by how many reductions of one name came before: ranks that have joined, or have missed a
    step through an error, know them as well.
    """

    def __init__(self, process_set: ProcessSet, call: str) -> None:
        """Create. Not collective; `call` is what broadcasts the state."""
        self._process_set, self._call = process_set, call
        self._made_for: object = None
        self._check: StateCheck | None = None
        self._noted: list[tuple[str, Description]] | None = None

    def run(
        self, name: str, step: int, entries: Callable[[], Entries], numbers: Callable[[], Entries]
    ) -> None:
        """Compare if it is time. Collective over the ranks of the set that have not joined.

        Where entries differ that the end of the last step has noted, and only then, a difference is an error:
        programs perturb parameters while they compute gradients, or take over new ones from one rank.

        Args:
            name: What the step is known by.
            step: Number of the step, from 1.
            entries: Gives names and values, such as parameters.
            numbers: Gives hyperparameters.

        Raises:
            MismatchError: The ranks differ.
        """
        noted, self._noted = self._noted, None
        check = self._check_for(name)
        if not check.due(step):
            return
        # Numbers come first: another learning rate makes other parameters.
        try:
            check.compare([*numbers(), *(entries() if check.compares_arrays else ())])
        except MismatchError:
            check.compare([*numbers(), *(entries() if noted is None else noted)])

    def note(self, step: int, entries: Callable[[], Entries]) -> None:
        """Take note of entries at the end of a step."""
        is_due = scope_at(step + 1, basics.check_every()) is Scope.EVERYTHING
        if is_due and self._check is not None:
            self._noted = self._check.describe_for_next(entries(), step + 1)

    def _check_for(self, name: str) -> StateCheck:
        operations = self._process_set.operations()
        if self._check is None or self._made_for is not operations:
            ranks: Any = _Ranks(self._process_set, name)
            what, every = "training state of the optimizer", basics.check_every()
            self._check = StateCheck(ranks, every, what, call=self._call, is_agreed=True)
            self._made_for = operations
        return self._check

"""Compares the training state over ranks every so many steps: drift is an error, not a bad model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from numbers import Real
from typing import TYPE_CHECKING

import numpy as np

from multiring.arrays import checksum
from multiring.gradients.model_check import Entry, check_same
from multiring.gradients.options import check_interval
from multiring.state.advice import BROADCAST, advice_for

if TYPE_CHECKING:
    from multiring.communicator import Communicator

__all__ = [
    "NUMBERS_EVERY",
    "Description",
    "Scope",
    "StateCheck",
    "agreed_interval",
    "compare_state",
    "scope_at",
]

NUMBERS_EVERY = 10
_CHECKSUM = " with checksum "  # only arrays have one


class Scope(Enum):
    """What a step compares."""

    NOTHING = 0
    NUMBERS = 1
    """What is a single number: learning rates and the like, which cost nothing."""
    EVERYTHING = 2


def scope_at(step: int, every: int) -> Scope:
    """What a step compares, where everything is compared every so many steps (0: never).

    The second step does, because a broadcast that was forgotten or an optimizer of another kind shows there;
    then the powers of two below the interval, for jobs that are shorter than it, and its multiples. Numbers
    are compared in every tenth step as well.

    Args:
        step: From 1.
        every: Steps between two comparisons.
    """
    if not every or step < 2:
        return Scope.NOTHING
    if step % every == 0 or (step < every and step & (step - 1) == 0):
        return Scope.EVERYTHING
    return Scope.NOTHING if step % NUMBERS_EVERY else Scope.NUMBERS


def agreed_interval(comm: Communicator, every: int | None = None) -> int:
    """Return the steps between two comparisons, of `every` or MULTIRING_CHECK_EVERY. Collective.

    Raises:
        UsageError: `every` is negative.
        MismatchError: The ranks pass different values.
    """
    interval = check_interval(comm.rank, every)
    advice = "pass the same check_every, and set the same MULTIRING_CHECK_EVERY, on every rank"
    check_same(comm, [("check_every", str(interval))], "interval of the state check", advice=advice)
    return interval


class StateCheck:
    """Compares checksums of the training state over ranks every so many steps. Creation is collective.

    Synchronous training keeps parameters, hyperparameters and buffers equal, bit for bit, on all ranks. Where
    something has changed them on one rank alone, gradients are averages over different models from then on.
    """

    def __init__(
        self,
        comm: Communicator,
        every: int | None = None,
        what: str = "training state",
        *,
        call: str = BROADCAST,
        is_agreed: bool = False,
    ) -> None:
        """Agree with the other ranks about when to compare.

        Args:
            comm: Ranks that train together. No other traffic may come between its steps in another order on
                another rank.
            every: Steps between two comparisons; 0: never; None: as MULTIRING_CHECK_EVERY says.
            what: What is compared, for the message.
            call: What broadcasts the state.
            is_agreed: Whether `every` is of `agreed_interval`; then creation is not collective.

        Raises:
            UsageError: `every` is negative.
            MismatchError: The ranks pass different values.
        """
        self._comm, self._what, self._call = comm, what, call
        self._every = check_interval(comm.rank, every) if is_agreed else agreed_interval(comm, every)
        self._step = self._compare_until = 0

    def due(self, step: int | None = None) -> bool:
        """Count a step; whether this one compares anything. To be called once in each step, on every rank.

        Args:
            step: Number of the step, where the caller counts steps itself.
        """
        self._step = self._step + 1 if step is None else step
        return self._scope(self._step) is not Scope.NOTHING

    @property
    def compares_arrays(self) -> bool:
        """Whether this step compares more than numbers."""
        return self._scope(self._step) is Scope.EVERYTHING

    def describe_for_next(
        self, entries: Iterable[tuple[str, object]], step: int | None = None
    ) -> list[tuple[str, Description]] | None:
        """Describe entries as they are now, for the next step to compare in their place; None: it compares
        nothing. `step` is that step's number, where the caller counts steps itself."""
        scope = self._scope(self._step + 1 if step is None else step)
        return None if scope is Scope.NOTHING else _described(entries, scope)

    def _scope(self, step: int) -> Scope:
        if self._comm.size == 1 or not self._every:
            return Scope.NOTHING
        return Scope.EVERYTHING if 1 < step <= self._compare_until else scope_at(step, self._every)

    def compare_next(self, steps: int = 2) -> None:
        """Compare in each of the next steps: something has changed the state of all ranks: a broadcast.

        What cannot be compared, such as an optimizer state that is not shown, shows in the second of them.
        """
        self._compare_until = self._step + steps

    def compare(self, entries: Iterable[tuple[str, object]], *, active: bool = True) -> None:
        """Raise on every rank unless all ranks have equal entries. Collective.

        Args:
            entries: Names and values in an order that is the same on every rank. Of arrays the bytes are
                compared, of other values what `repr` shows.
            active: This rank takes part in training; otherwise `entries` are not looked at.

        Raises:
            MismatchError: The ranks differ; the message shows the first difference and which rank has what.
        """
        self.begin(entries, active=active)()

    def begin(self, entries: Iterable[tuple[str, object]], *, active: bool = True) -> Callable[[], None]:
        """`compare` in two halves: this one does not wait, the other is to call what it returns.

        A program with several models begins with all before it waits for one: ranks may have them in any
        order.
        """
        step, what = self._step, f"{self._what} at step {self._step}"
        described = _described(entries, self._scope(step)) if active else None
        if self._comm.size == 1:
            return lambda: None
        own = np.zeros((1, 32), np.uint8)  # all zeros: this rank agrees with all
        if described is not None:
            own[0] = np.frombuffer(hashlib.sha256(repr(described).encode()).digest(), np.uint8)
        work = self._comm.allgather_async(own, name=f"checksum of the {what}")

        def finish() -> None:
            if len({row.tobytes() for row in work.wait() if row.any()}) > 1:
                check_same(self._comm, described, what, advice=_adviser(step, self._call))

        return finish

    def go_on(self, comm: Communicator) -> None:
        """Use another communicator of the same ranks from now on."""
        self._comm = comm


def compare_state(
    comm: Communicator,
    entries: Iterable[tuple[str, object]],
    when: str,
    *,
    call: str = BROADCAST,
) -> None:
    """Raise on every rank unless all ranks have equal entries, as `StateCheck.compare`. Collective.

    Args:
        comm: Ranks that train together.
        entries: As for `StateCheck.compare`.
        when: For the message: "the end of epoch 3".
        call: What broadcasts the state.

    Raises:
        MismatchError: The ranks differ.
    """
    described = _described(entries, Scope.EVERYTHING)
    check_same(comm, described, f"training state at {when}", advice=_adviser(0, call))


class Description(str):
    """What was said of a value earlier, in the value's place."""

    __slots__ = ()
    __repr__ = str.__str__


def _adviser(step: int, call: str) -> Callable[[Sequence[Entry], Sequence[Entry]], str]:
    def advise(differing: Sequence[Entry], compared: Sequence[Entry]) -> str:
        arrays = [name for name, text in differing if _CHECKSUM in text]
        count = sum(_CHECKSUM in text for _, text in compared)
        return advice_for(step, arrays, count, call, has_numbers=count < len(compared))

    return advise


def _described(entries: Iterable[tuple[str, object]], scope: Scope) -> list[tuple[str, Description]]:
    """What is compared of entries where that is the scope. Without a step everything is."""
    return [
        (name, Description(_describe(value)))
        for name, value in entries
        if scope is not Scope.NUMBERS or not (isinstance(value, np.ndarray) and value.size != 1)
    ]


def _describe(value: object) -> str:
    """A NumPy number counts as the Python number that it equals."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape}{_CHECKSUM}{checksum(value):016x}"
    if isinstance(value, Real) and not isinstance(value, bool):
        return repr(float(value))
    # The order of a set of strings differs by process.
    text = repr(sorted(map(repr, value)) if isinstance(value, set | frozenset) else value)
    return type(value).__name__ if " at 0x" in text else text  # an address says nothing about the value

"""Compares the training state over ranks every so many steps: drift is an error, not a bad model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from numbers import Real
from typing import TYPE_CHECKING

import numpy as np

from multiring import config
from multiring.arrays import checksum
from multiring.errors import UsageError
from multiring.gradients.model_check import check_same

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["Description", "StateCheck", "advice_at", "check_interval", "describe"]

_ADVICE = (
    "use the same hyperparameters on every rank, and change parameters in the same way on all of them "
    "(docs/correctness.md; check_every=0 turns this check off, as for weights that each rank perturbs on its "
    "own while gradients are computed)"
)


def advice_at(step: int | None, call: str = "broadcast_parameters") -> str:
    """What to do about state that differs over ranks.

    Args:
        step: Where it was found, or None where that is not known. At the second one, the first that compares,
            it has mostly differed from the start.
        call: What broadcasts the state.
    """
    if step is None:
        return f"if this is step 2, {call} was most likely not called before the first step; {_ADVICE}"
    if step == 2:
        return f"most likely {call} was not called, on every rank, before the first step; else {_ADVICE}"
    return f"broadcast parameters and optimizer state before the first step, {_ADVICE}"


def check_interval(rank: int, every: int | None) -> int:
    """Steps between two comparisons, 0 for never; None stands for what MULTIRING_CHECK_EVERY says.

    Raises:
        UsageError: A negative number.
    """
    interval = config.load().check_every if every is None else every
    if interval < 0:
        raise UsageError(f"rank {rank}: check_every is {interval}; pass 0 (never) or more")
    return interval


class StateCheck:
    """Compares checksums of the training state over ranks every so many steps. Creation is collective.

    Synchronous training keeps parameters, hyperparameters and buffers equal, bit for bit, on all ranks. Where
    something has changed them on one rank alone, gradients are averages over different models from then on.
    """

    def __init__(self, comm: Communicator, every: int | None = None, what: str = "training state") -> None:
        """Agree with the other ranks about when to compare.

        Args:
            comm: Ranks that train together. No other traffic may come between its steps in another order on
                another rank.
            every: Steps between two comparisons; 0: never; None: as MULTIRING_CHECK_EVERY says.
            what: What is compared, for the message.

        Raises:
            UsageError: `every` is negative.
            MismatchError: The ranks pass different values.
        """
        self._comm, self._what = comm, what
        self._every = check_interval(comm.rank, every)
        advice = "pass the same check_every, and set the same MULTIRING_CHECK_EVERY, on every rank"
        check_same(comm, [("check_every", str(self._every))], "interval of the state check", advice=advice)
        self._step, self._compare_until = 0, 2

    def due(self) -> bool:
        """Count a step; whether this one compares. To be called once in each step, on every rank.

        The second step compares, because a broadcast that was forgotten or an optimizer of another kind shows
        there, and then each that is a multiple of the interval.
        """
        is_due = self.is_next_due()
        self._step += 1
        return is_due

    def is_next_due(self) -> bool:
        """What `due` is going to say of the next step, as things are."""
        step = self._step + 1
        if self._comm.size == 1 or not self._every:
            return False
        if step <= self._compare_until:
            return step > 1
        return step % self._every == 0

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
        what, advice = f"{self._what} at step {self._step}", advice_at(self._step)
        described = [(name, _describe(value)) for name, value in entries] if active else None
        if self._comm.size == 1:
            return lambda: None
        own = np.zeros((1, 32), np.uint8)  # all zeros: this rank agrees with all
        if described is not None:
            own[0] = np.frombuffer(hashlib.sha256(repr(described).encode()).digest(), np.uint8)
        work = self._comm.allgather_async(own, name=f"checksum of the {what}")

        def finish() -> None:
            if len({row.tobytes() for row in work.wait() if row.any()}) > 1:
                check_same(self._comm, described, what, advice=advice)

        return finish

    def go_on(self, comm: Communicator) -> None:
        """Use another communicator of the same ranks from now on."""
        self._comm = comm


class Description(str):
    """What `describe` has said of a value earlier, in the value's place."""

    __slots__ = ()
    __repr__ = str.__str__


def describe(value: object) -> Description:
    """What is compared of a value. A NumPy number counts as the Python number that it equals."""
    return Description(_describe(value))


def _describe(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape} with checksum {checksum(value):016x}"
    if isinstance(value, Real) and not isinstance(value, bool):
        return repr(float(value))
    # The order of a set of strings differs by process.
    text = repr(sorted(map(repr, value)) if isinstance(value, set | frozenset) else value)
    return type(value).__name__ if " at 0x" in text else text  # an address says nothing about the value

"""What to do about training state that differs over ranks: that depends on what differs."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["BROADCAST", "advice_for", "advice_in_general"]

BROADCAST = "broadcast_parameters"

_MORE = "(docs/correctness.md)"


def advice_for(
    step: int, arrays: Sequence[str], compared: int, call: str = BROADCAST, *, has_numbers: bool = True
) -> str:
    """What to do about these differences.

    Args:
        step: Where they were found. What differs at the second one, the first that compares, has mostly
            differed from the start.
        arrays: Names of the arrays that differ. If there are none, numbers do: hyperparameters.
        compared: How many arrays were compared.
        call: What broadcasts the state.
        has_numbers: Whether hyperparameters were compared as well, and are the same.
    """
    if not arrays:
        todo = (
            "set the same hyperparameters on every rank; schedulers that look at metrics need those that are "
            "averaged over ranks"
        )
    elif all(name.startswith("buffer ") for name in arrays):
        todo = (
            "something has written to it on some rank alone after the last reduction; buffers='local' leaves "
            "each rank its own"
        )
    elif step == 2:
        # Arrays that begin as zeros are equal without it, so that few may differ.
        todo = f"most likely {call} was not called before the first step"
        if not has_numbers:
            todo += ", or the optimizers differ (learning rate, momentum: DistributedOptimizer compares them)"
    elif 2 * len(arrays) <= compared:
        todo = (
            f"{len(arrays)} of {compared} arrays differ, so something has changed them on some rank alone: "
            "change parameters in the same way on every rank"
        )
    else:
        todo = (
            f"broadcast parameters and optimizer state ({call}) before the first step, use the same "
            "hyperparameters on every rank, and change parameters in the same way on all of them"
        )
    return f"{todo} {_MORE}"


def advice_in_general(call: str = BROADCAST) -> str:
    """The same where it is not known what differs, and at which step."""
    return (
        f"if this is step 2, {call} was most likely not called before the first step; use the same "
        f"hyperparameters on every rank, and change parameters in the same way on all of them {_MORE}"
    )

"""Do all ranks mean the same model? Compared before the first gradient is sent, not found out by a hang."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from multiring.errors import MismatchError

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["check_same"]

Entry = tuple[str, str]


def check_same(comm: Communicator, entries: Sequence[Entry], what: str) -> None:
    """Raise on every rank unless all ranks pass equal lists. Collective.

    One small hash travels per rank; the lists themselves do only when the hashes differ.

    Args:
        comm: Communicator of the ranks to compare.
        entries: Pairs of a name and its description ("float32 (10, 64)"), in an order that is part of the
            check.
        what: What is compared, for the message: "parameters of the model".

    Raises:
        MismatchError: The lists differ; the message shows the first difference and which rank has what.
    """
    if comm.size == 1:
        return
    digest = hashlib.sha256(repr((what, list(entries))).encode()).hexdigest()
    if len(set(comm.allgather_object(digest))) == 1:
        return
    everyone: list[tuple[str, list[Entry]]] = comm.allgather_object((what, list(entries)))
    name, difference = _first_difference(everyone)
    raise MismatchError(
        f"rank {comm.rank} on {comm.host}: the ranks do not agree about the {what}: {difference}; "
        "build the same model, in the same order and with the same options, on every rank",
        rank=comm.rank,
        host=comm.host,
        operation="model check",
        tensor=name,
    )


def _first_difference(everyone: Sequence[tuple[str, list[Entry]]]) -> tuple[str | None, str]:
    """Name of the first entry that differs and a sentence that says who has what there."""
    topics = [what for what, _ in everyone]
    if len(set(topics)) > 1:
        return None, _who_has(topics, "they compare")
    for place in range(max(len(entries) for _, entries in everyone)):
        found = [entries[place] if place < len(entries) else None for _, entries in everyone]
        if len(set(found)) > 1:
            name = next(entry[0] for entry in found if entry is not None)
            shown = ["nothing" if entry is None else f"'{entry[0]}' {entry[1]}".rstrip() for entry in found]
            return name, _who_has(shown, f"entry {place} is")
    return None, "their lists differ"  # unreachable unless a hash collides


def _who_has(values: Sequence[str], verb: str) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return verb + " " + ", but ".join(f"{value} on {_ranks(who)}" for value, who in ranks.items())


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8]) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"

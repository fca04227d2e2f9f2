"""Do all ranks mean the same model? Compared before the first gradient is sent, not found out by a hang."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from multiring.errors import MismatchError

if TYPE_CHECKING:
    from multiring.communicator import Communicator

__all__ = ["ADVICE", "Entry", "check_same"]

Entry = tuple[str, str]


ADVICE = "build the same model, in the same order and with the same options, on every rank"


def check_same(
    comm: Communicator,
    entries: Sequence[Entry] | None,
    what: str,
    *,
    advice: str | Callable[[Sequence[Entry], Sequence[Entry]], str] = ADVICE,
) -> None:
    """Raise on every rank unless all ranks pass equal lists. Collective.

    One small hash travels per rank; the lists themselves do only when the hashes differ.

    Args:
        comm: Communicator of the ranks to compare.
        entries: Pairs of a name and its description ("float32 (10, 64)"), in an order that is part of the
            check. None: this rank has nothing to compare, and agrees with all.
        what: What is compared, for the message: "parameters of the model".
        advice: What to do about a difference, for the message; or what says so of the entries that differ and
            all that are compared, as the first rank has them.

    Raises:
        MismatchError: The lists differ; the message shows the first difference and which rank has what.
    """
    if comm.size == 1:
        return
    digest = None if entries is None else hashlib.sha256(repr((what, list(entries))).encode()).hexdigest()
    if len(set(comm.allgather_object(digest, name="model check")) - {None}) <= 1:
        return
    own = None if entries is None else (what, list(entries))
    everyone: list[tuple[str, list[Entry]] | None] = comm.allgather_object(own, name="model check, in full")
    having = {r: found for r, found in enumerate(everyone) if found is not None}
    name, difference = _first_difference(having)
    if not isinstance(advice, str):
        compared = next(iter(having.values()))[1]
        advice = advice(_differing([found for _, found in having.values()]), compared)
    raise MismatchError(
        f"rank {comm.rank} on {comm.host}: the ranks do not agree about the {what}: {difference}.\n"
        f"    {advice[0].upper()}{advice[1:]}",
        rank=comm.rank,
        host=comm.host,
        operation="model check",
        tensor=name,
    )


def _first_difference(everyone: Mapping[int, tuple[str, list[Entry]]]) -> tuple[str | None, str]:
    """Name of the first entry that differs and a sentence that says who has what there."""
    topics = {rank: what for rank, (what, _) in everyone.items()}
    if len(set(topics.values())) > 1:
        return None, _who_has(topics, "they compare")
    for index in range(max(len(entries) for _, entries in everyone.values())):
        found = {r: entries[index] if index < len(entries) else None for r, (_, entries) in everyone.items()}
        if len(set(found.values())) > 1:
            name = next(entry[0] for entry in found.values() if entry is not None)
            shown = {
                rank: "nothing" if entry is None else f"'{entry[0]}' {entry[1]}".rstrip()
                for rank, entry in found.items()
            }
            return name, _who_has(shown, f"entry {index} is")
    return None, "their lists differ"  # unreachable unless a hash collides


def _differing(everyone: Sequence[Sequence[Entry]]) -> list[Entry]:
    """The first rank's entries that differ from another rank's."""
    first, *others = everyone
    return [
        entry
        for index, entry in enumerate(first)
        if any(index >= len(other) or other[index] != entry for other in others)
    ]


def _who_has(values: Mapping[int, str], verb: str) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return verb + " " + ", but ".join(f"{value} on {_ranks(who)}" for value, who in ranks.items())


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8]) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"

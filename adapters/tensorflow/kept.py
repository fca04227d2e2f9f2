"""Reductions that are kept for the next step with the same variables."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

from multiring.initialization import at_shutdown

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["KeptReductions"]

_everything: weakref.WeakSet[KeptReductions] = weakref.WeakSet()
_Entry = tuple["Communicator", tuple[weakref.ref[Any], ...], Any]


class KeptReductions:
    """Reductions by communicator, variables and settings, as long as the first two can be used.

    What has become useless is forgotten when another reduction is made, and all of it with the world. Ranks
    that pass the same variables find the same, or make one together.
    """

    def __init__(self) -> None:
        self._entries: dict[Hashable, _Entry] = {}
        _everything.add(self)

    def __len__(self) -> int:
        return len(self._entries)

    def get(
        self, comm: Communicator, variables: Sequence[Any], settings: Hashable, make: Callable[[], Any]
    ) -> Any:
        """The reduction for these very variables; that of `make` if there is none."""
        key = id(comm), tuple(id(variable) for variable in variables), settings
        entry = self._entries.get(key)
        if entry is None or any(ref() is not v for ref, v in zip(entry[1], variables, strict=True)):
            self._forget()
            entry = comm, tuple(weakref.ref(variable) for variable in variables), make()
            self._entries[key] = entry
        return entry[2]

    def clear(self) -> None:
        """Forget all."""
        self._entries.clear()

    def _forget(self) -> None:
        useless = [
            key
            for key, (comm, refs, _) in self._entries.items()
            if comm.is_broken or any(ref() is None for ref in refs)
        ]
        for key in useless:
            del self._entries[key]


def _forget_all() -> None:
    for kept in list(_everything):
        kept.clear()


at_shutdown(_forget_all)

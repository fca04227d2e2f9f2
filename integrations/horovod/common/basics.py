"""The functions of `multiring.horovod.basics` as methods of an object, as Horovod's modules have them."""

from __future__ import annotations

from typing import Any

from multiring.horovod import basics

__all__ = ["HorovodBasics"]


class HorovodBasics:
    """The object whose methods are the functions of `multiring.horovod.basics`: `init`, `rank`, `size`, …"""

    def __init__(self, pkg_path: str = "", *args: str) -> None:
        """Make it; there is no library at `pkg_path` to be loaded."""

    def __getattr__(self, name: str) -> Any:
        if name not in basics.__all__:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}", name=name, obj=basics)
        return getattr(basics, name)

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        """Return the ranks of each registered process set, by its number."""
        return {int(each.process_set_id or 0): list(each.ranks or ()) for each in basics.process_sets()}

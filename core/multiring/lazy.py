"""Names that a package takes from their modules when they are used for the first time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

__all__ = ["lazy_names"]


def lazy_names(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package.

    Args:
        package: Its `__name__`; it has an `__all__`.
        homes: The module of each name, ".x" for one of the package; a name may be that of the module itself.
    """
    module = sys.modules[package]

    def find(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            # Python suggests similar names of the module that the error names.
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=module)
        found = import_module(home, package)
        value = found if home == f".{name}" else getattr(found, name)
        setattr(module, name, value)
        return value

    return find, lambda: sorted({*vars(module), *module.__all__})

"""The package `horovod` under `multiring run --horovod`; its modules are those of multiring.horovod."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from multiring.horovod import HorovodInternalError, __version__
from multiring.lazy import lazy_names

if TYPE_CHECKING:
    from multiring.horovod import run

__getattr__, __dir__ = lazy_names(__name__, {"run": "multiring.horovod"})

__all__ = ["HorovodInternalError", "__version__", "run"]


class _Loader(Loader):
    """Gives the module of multiring.horovod itself, so that there is one of each."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has put the other name there


class _Finder(MetaPathFinder):
    """Finds `horovod.X` at `multiring.horovod.X`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{__name__}."):
            return None
        name = f"multiring.{fullname}"
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise ModuleNotFoundError(
                f"there is no {name} to take the place of {fullname}; docs/horovod.md says what there is",
                name=fullname,
            )
        return ModuleSpec(fullname, _Loader(name), is_package=found.submodule_search_locations is not None)


def _tell_of_another() -> None:
    """A Horovod that is installed is not used without a line that says so."""
    here = Path(__file__).resolve().parent.parent
    others = [entry for entry in sys.path if Path(entry or ".").resolve() != here]
    other = PathFinder.find_spec(__name__, others)
    if other is not None and other.origin is not None and os.environ.get("HOROVOD_RANK", "0") == "0":
        text = (
            f"multiring: `import horovod` gives multiring.horovod, not the Horovod that is at {other.origin}"
        )
        print(f"{text}; leave out --horovod or multiring.horovod.install() to use that one", file=sys.stderr)


_tell_of_another()
sys.meta_path.insert(0, _Finder())

"""The package `horovod` under `multiring run --horovod`, and of the wheel multiring-horovod; its modules are
those of multiring.horovod."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from multiring import horovod as api
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


def _installed_by(distribution: str) -> Path | None:
    """Return the file of the package `horovod` that this distribution has installed; None: there is none."""
    try:
        return Path(str(metadata.distribution(distribution).locate_file("horovod/__init__.py"))).resolve()
    except metadata.PackageNotFoundError:
        return None


def _look_for_another() -> None:
    """Say in a line that a Horovod that is installed is not used.

    Raises:
        ImportError: It is installed in the same place as multiring-horovod, so that files of both are mixed.
    """
    own = _installed_by("multiring-horovod")
    if own is not None and own == _installed_by("horovod"):
        raise ImportError(
            f"Horovod and multiring-horovod are both installed, and have overwritten files of one another in "
            f"{own.parent}: `pip uninstall horovod multiring-horovod`, then install the one that you want"
        )
    files = (Path(__file__), Path(api.__file__).parent / "shim" / "horovod" / "__init__.py", own)
    ours = {file.resolve().parent.parent for file in files if file is not None}
    others = [entry for entry in sys.path if Path(entry or ".").resolve() not in ours]
    other = PathFinder.find_spec(__name__, others)
    if other is not None and other.origin is not None and os.environ.get("HOROVOD_RANK", "0") == "0":
        text = (
            f"multiring: `import horovod` gives multiring.horovod, not the Horovod that is at {other.origin}"
        )
        print(f"{text}; leave out --horovod or multiring.horovod.install() to use that one", file=sys.stderr)


_look_for_another()
sys.meta_path.insert(0, _Finder())

"""Makes Chainer importable with a current NumPy.

Chainer 7.8.1, its last release, uses two names that NumPy 2 has removed: `np.sctypes`, when it is imported,
and `np.float`, when `resize_images` runs. Both are put back, with the values that they had, before Chainer is
imported; nothing else is changed in NumPy. In Chainer, `chainermn.create_communicator` refuses to let
each rank of `multiring run` train alone; nothing else is changed.

Processes that `multiprocessing` starts with "spawn" or "forkserver", such as those of Chainer's
`MultiprocessIterator`, import NumPy and Chainer anew, and not necessarily this package. One without the two
names would die, and the pool of processes would start another for ever. So the names are sent to each such
process, ahead of what it runs.
"""

from __future__ import annotations

import functools
from importlib import import_module
from multiprocessing import spawn
from typing import Any

import numpy as np

from multiring import config
from multiring.errors import UsageError

__all__ = ["HOW_TO_INSTALL", "import_chainer", "restore_numpy_names"]

HOW_TO_INSTALL = (
    "Chainer 7.8 needs Python 3.11 or older, NumPy older than 2.4 and setuptools older than 82, and builds "
    "only without build isolation: pip install 'setuptools<82' wheel 'numpy<2.4', then "
    "pip install --no-build-isolation 'chainer==7.8.1' (or 'multiring[chainer]')"
)

# As in NumPy 1.26.
_SCTYPES = {
    "int": [np.int8, np.int16, np.int32, np.int64],
    "uint": [np.uint8, np.uint16, np.uint32, np.uint64],
    "float": [np.float16, np.float32, np.float64, np.longdouble],
    "complex": [np.complex64, np.complex128, np.clongdouble],
    "others": [bool, object, bytes, str, np.void],
}


def restore_numpy_names() -> None:
    """Put `np.sctypes` and `np.float` back if they are missing."""
    for name, value in (("sctypes", _SCTYPES), ("float", float)):
        if name not in vars(np):  # hasattr() would warn about the removed one
            setattr(np, name, value)


class _Numpy:
    """Is the module when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return import_module, ("numpy",)


class _NumpyName:
    """Sets a name of NumPy when it is unpickled. Needs nothing of this package, which imports Chainer."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return setattr, (_Numpy(), self._name, getattr(np, self._name))


def _restore_in_child_processes() -> None:
    """Have `multiprocessing` send the names with what prepares a process, which is unpickled first of all."""
    make: Any = spawn.get_preparation_data
    if hasattr(make, "_of_multiring"):
        return

    @functools.wraps(make)
    def get_preparation_data(name: str) -> dict[str, Any]:
        return {**make(name), "names of NumPy": [_NumpyName("sctypes"), _NumpyName("float")]}

    get_preparation_data._of_multiring = True  # type: ignore[attr-defined]
    spawn.get_preparation_data = get_preparation_data


def import_chainer() -> None:
    """Import Chainer and ChainerMN, which is part of it, and refuse to train alone under `multiring run`.

    Raises:
        ImportError: They are missing, or something that they need is; says what to install.
    """
    restore_numpy_names()
    _restore_in_child_processes()
    for name in ("chainer", "chainermn"):
        try:
            import_module(name)
        except ImportError as error:
            missing = isinstance(error, ModuleNotFoundError) and error.name == name
            what = f"{name} is not installed" if missing else f"{name} cannot be imported: {error}"
            raise ImportError(f"{what}. {HOW_TO_INSTALL}", name=name) from error
    _refuse_to_train_alone()


def _refuse_to_train_alone() -> None:
    """ChainerMN's own communicators are MPI's. Where `multiring run` has started the ranks, each has one."""
    chainermn: Any = import_module("chainermn")
    make = chainermn.create_communicator
    if hasattr(make, "_of_multiring"):
        return

    @functools.wraps(make)
    def create_communicator(
        communicator_name: str = "pure_nccl", mpi_comm: Any = None, **options: Any
    ) -> Any:
        made, size = make(communicator_name, mpi_comm, **options), config.load().size
        if mpi_comm is None and size is not None and made.size == 1 < size:
            raise UsageError(
                f"rank {config.load().rank}: chainermn.create_communicator('{communicator_name}') makes a "
                f"communicator of MPI with one rank, but 'multiring run' has started {size}, each of which "
                "would train alone; call multiring.chainer.create_communicator() instead"
            )
        return made

    create_communicator._of_multiring = True  # type: ignore[attr-defined]
    chainermn.create_communicator = create_communicator

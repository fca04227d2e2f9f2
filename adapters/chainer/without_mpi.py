"""Lets ChainerMN run without MPI.

ChainerMN works on any `CommunicatorBase`, with one exception: to choose a backend, its synchronised batch
normalisation asks whether the communicator is a `PureNcclCommunicator`, and the module of that class imports
mpi4py, which initialises MPI. A process that was not started by `mpirun` need not have MPI at all. So unless
that module is loaded already, a stand-in takes its place that answers the question, and that loads the real
module as soon as anything else of it is asked for (a PureNcclCommunicator to be made, for example).

The other modules that import mpi4py, those of ChainerMN's own communicators, are loaded only when one of them
is made.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

__all__ = ["keep_mpi_out"]

_MODULE = "chainermn.communicators.pure_nccl_communicator"
_CLASS = "PureNcclCommunicator"


class _StandInClass(type):
    """Type of the stand-in for the class: nothing is an instance until the real class is loaded."""

    def __instancecheck__(cls, instance: object) -> bool:
        module = sys.modules[_MODULE]
        real = vars(module).get("_real")
        return real is not None and isinstance(instance, getattr(real, _CLASS))

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return getattr(_load(), _CLASS)(*args, **kwargs)


class _StandIn(ModuleType):
    """The stand-in for the module."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_load(), name)


def keep_mpi_out() -> None:
    """Put the stand-in in place unless the real module is loaded. May be called again."""
    if _MODULE in sys.modules:
        return
    spec = importlib.util.find_spec(_MODULE)
    module = _StandIn(_MODULE)
    module.__spec__ = spec
    setattr(module, _CLASS, _StandInClass(_CLASS, (), {"__module__": _MODULE}))
    sys.modules[_MODULE] = module


def _load() -> ModuleType:
    stand_in = sys.modules[_MODULE]
    real = vars(stand_in).get("_real")
    if real is None:
        spec = stand_in.__spec__
        assert spec is not None
        assert spec.loader is not None
        real = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(real)
        vars(stand_in)["_real"] = real
    found: ModuleType = real
    return found

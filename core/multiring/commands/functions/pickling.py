"""How functions, arguments and results are pickled: by cloudpickle where it is installed, otherwise by
pickle, which knows functions and classes by their module, and so none of the main script or of a notebook.
"""

from __future__ import annotations

import io
import pickle
from types import FunctionType
from typing import IO, Any

try:
    import cloudpickle
except ModuleNotFoundError:
    cloudpickle = None

__all__ = ["ADVICE", "dump", "dumps"]

ADVICE = "" if cloudpickle else "; pip install cloudpickle, or define it in a module that is imported"
"""What helps where something cannot be pickled."""

# In processes of multiprocessing the main script has the second name.
_MAIN = ("__main__", "__mp_main__")


def dump(value: Any, file: IO[bytes]) -> None:
    """Pickles a value into a file; `pickle.load` reads it.

    Raises:
        Exception: It cannot be pickled.
    """
    if cloudpickle is not None:
        cloudpickle.dump(value, file, protocol=pickle.HIGHEST_PROTOCOL)
    else:
        _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)


def dumps(value: Any) -> bytes:
    """A value, pickled.

    Raises:
        Exception: It cannot be pickled.
    """
    file = io.BytesIO()
    dump(value, file)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """Refuses at once what no other process finds."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type | FunctionType) and value.__module__ in _MAIN:
            raise pickle.PicklingError(
                f"{value.__qualname__} is defined in the main script or notebook, where ranks do not find it"
            )
        return NotImplemented

"""State of PyTensor models over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from multiring.derived import resolve
from multiring.errors import UsageError
from multiring.state.broadcast import broadcast_arrays, check_root
from multiring.state.buffer_sync import sync_arrays
from multiring.types import BufferMode
from pytensor.compile.sharedvalue import SharedVariable

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["broadcast_parameters", "names_of", "sync_buffers"]


def names_of(variables: Sequence[SharedVariable], rank: int) -> list[str]:
    """Unique names: a variable's own, or its place where it has none.

    Raises:
        UsageError: Not a shared variable, or two of one name.
    """
    names: list[str] = []
    for index, variable in enumerate(variables):
        if not isinstance(variable, SharedVariable):
            raise UsageError(f"rank {rank}: item {index} is {variable!r}; pass shared variables")
        name = variable.name or f"shared[{index}]"
        if name in names:
            raise UsageError(
                f"rank {rank}: two shared variables are called '{name}'; names have to be unique"
            )
        names.append(name)
    return names


def _named(variables: Iterable[SharedVariable], rank: int) -> dict[str, SharedVariable]:
    shared = list(variables)
    return dict(zip(names_of(shared, rank), shared, strict=True))


def broadcast_parameters(
    variables: Iterable[SharedVariable], root: int = 0, comm: Communicator | None = None
) -> None:
    """Set the shared variables of all ranks to the values of `root`. Collective.

    To be called once before training, with everything that has to start alike: parameters, running
    statistics, the optimizer's state. Values that are no arrays (the generators of random streams) travel as
    pickles.

    Args:
        variables: Shared variables in the same order on every rank.
        root: Rank whose values everyone gets.
        comm: Ranks that take part; the world by default.

    Raises:
        UsageError: `root` is not a rank, not a shared variable, or two of one name.
        MismatchError: The ranks pass different names, shapes or dtypes.
    """
    comm = resolve(comm)
    check_root(comm, root)
    named = _named(variables, comm.rank)
    if comm.size == 1:
        return
    values: dict[str, Any] = {name: variable.get_value(borrow=False) for name, variable in named.items()}
    arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
    objects = {name: value for name, value in values.items() if name not in arrays}
    broadcast_arrays(comm, arrays, root)
    if objects:
        objects = comm.broadcast_object(objects, root, name="state")
    if comm.rank != root:
        for name, value in (arrays | objects).items():
            named[name].set_value(value, borrow=True)


def sync_buffers(
    variables: Iterable[SharedVariable], mode: BufferMode = "broadcast", comm: Communicator | None = None
) -> None:
    """Make the buffers of a model the same on all ranks. Collective unless `mode` is "local".

    For shared variables that each rank updates from its own batch alone, such as running statistics. To be
    called after each call of the training function, or at least before evaluation and saving.

    Args:
        variables: Shared variables of arrays, in the same order on every rank.
        mode: "broadcast": those of rank 0; "average": averages of floating-point arrays over the ranks,
            others of rank 0; "local": nothing.
        comm: Ranks that train together; the world by default.

    Raises:
        UsageError: There is no such mode, not a shared variable of an array, or two of one name.
    """
    comm = resolve(comm)
    named = _named(variables, comm.rank)
    values = {name: np.array(variable.get_value(borrow=True)) for name, variable in named.items()}
    for name, value in values.items():
        if value.dtype == object:
            raise UsageError(f"rank {comm.rank}: '{name}' holds no array; use broadcast_parameters for it")
    sync_arrays(comm, values, mode)
    for name, value in values.items():
        named[name].set_value(value, borrow=True)

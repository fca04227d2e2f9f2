"""Variables and objects from one rank to all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from multiring.horovod import objects
from multiring.horovod.host_calls import Asked
from multiring.horovod.process_sets import ProcessSet, global_process_set
from multiring.horovod.tensorflow.differentiable import as_is
from multiring.horovod.tensorflow.errors import raised_as_tensorflow
from multiring.horovod.tensorflow.gradients import source_of
from multiring.horovod.tensorflow.graph_calls import begin, name_in_graph

__all__ = [
    "BroadcastGlobalVariablesHook",
    "allgather_object",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "optimizer_variables",
]


def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Assigns the values of rank `root_rank` to variables, on all ranks.

    Returns:
        The variables; in a graph of TensorFlow 1, the assignments.
    """
    assigned: list[Any] = _broadcast(list(variables), root_rank, name, process_set)
    return assigned


@as_is
def _broadcast(variables: list[Any], root_rank: int, name: str | None, process_set: ProcessSet) -> list[Any]:
    name = name_in_graph("broadcast of variables", name, process_set)
    waits = []
    for k, variable in enumerate(variables):
        sources = (source_of(k, variables, True, "value"),)
        asked = Asked("broadcast", root=root_rank, sources=sources)
        waits.append(begin(asked, [variable], name and f"{name}.{k}", process_set))
    assigned = [variable.assign(wait()[0]) for variable, wait in zip(variables, waits, strict=True)]
    is_graph = not tf.executing_eagerly() and not isinstance(
        tf.compat.v1.get_default_graph(), tf.__internal__.FuncGraph
    )
    return assigned if is_graph else variables


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Gives variables of all ranks the values of rank `root_rank`.

    Args:
        variables: Variables of TensorFlow or Keras, the same ones in the same order on all ranks.
        root_rank: Rank of the job whose values all ranks get.
        process_set: Ranks that take part.
        inplace: Ignored: the memory of variables is never shared.

    Returns:
        In a graph of TensorFlow 1 an operation that does it; otherwise None.
    """
    return _broadcast_and_group(list(variables), root_rank, process_set)


@as_is
def _broadcast_and_group(variables: list[Any], root_rank: int, process_set: ProcessSet) -> Any:
    assigned = _broadcast(variables, root_rank, None, process_set)
    return None if tf.executing_eagerly() else tf.group(*[getattr(each, "op", each) for each in assigned])


def broadcast_global_variables(root_rank: int) -> Any:
    """An operation that gives all global variables of a graph of TensorFlow 1 the values of `root_rank`.

    Raises:
        RuntimeError: There is no graph, and so no global variables.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "hvd.broadcast_global_variables() does not support eager execution. Please use "
            "`hvd.broadcast_variables(<model/optimizer variables>)` instead."
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Gives all ranks the global variables of one, after they have been initialised or restored."""

    def __init__(self, root_rank: int, device: str = "") -> None:
        """Of the rank `root_rank`; `device` is ignored."""
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.bcast_op: Any = None

    def begin(self) -> None:
        """Adds the operation to the graph, before it is finished."""
        if self.bcast_op is None or self.bcast_op.graph != tf.compat.v1.get_default_graph():
            self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Runs it."""
        session.run(self.bcast_op)


def optimizer_variables(optimizer: Any) -> list[Any]:
    """The variables of an optimizer of Keras 3 or of tf_keras."""
    found = optimizer.variables
    return list(found() if callable(found) else found)


def build_optimizer(optimizer: Any, variables: list[Any]) -> None:
    """Make the variables that an optimizer of Keras 3 or of tf_keras has for a model's."""
    # Legacy optimizers of tf_keras make them with the first step, by a method of theirs.
    build = getattr(optimizer, "build", None) or getattr(optimizer, "_create_all_weights", None)
    if build is not None:
        build(variables)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The object of rank `root_rank`, pickled (by cloudpickle where it is installed); `session` is not
    needed.

    Raises:
        tf.errors.FailedPreconditionError: The root could not pickle it; what pickling raised is raised there.
    """
    with raised_as_tensorflow():
        return objects.broadcast_object(obj, root_rank, name, process_set)


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """The objects of all ranks, in the order of the ranks, pickled as there; `session` is not needed."""
    with raised_as_tensorflow():
        return objects.allgather_object(obj, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """A function that gives the object of rank `root_rank` on all ranks; `session` is not needed."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)

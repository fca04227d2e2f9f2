"""Collectives of TensorFlow's tensors: at once where there is no graph, as an operation in a graph."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from multiring.error_text import text_of
from multiring.errors import MultiringError
from multiring.horovod import basics
from multiring.horovod.host_calls import Asked, start
from multiring.horovod.process_sets import ProcessSet, global_process_set
from multiring.horovod.started import tell_when_done
from multiring.horovod.submissions import join
from multiring.horovod.tensorflow.errors import code_of, raised_as_tensorflow
from multiring.lazy import made_once
from multiring.tensorflow.graph.delegated import Delegated, add_to_graph, delegate_to, new_owner
from multiring.tensorflow.graph.naming import operation_name
from multiring.tensorflow.tensors import to_tensor

__all__ = ["begin", "call", "joined", "name_in_graph", "note_unreduced", "number"]

_log = logging.getLogger("multiring")

Tensor = Any

_KEEP_SHAPES = frozenset({"allreduce", "broadcast"})
_owners: dict[int, ProcessSet] = {}
_owners_lock = threading.Lock()

_NUMBERS: dict[str, Callable[[ProcessSet], int]] = {
    "size": lambda which: basics.size() if which is global_process_set else which.size() or 0,
    "rank": lambda _: basics.rank(),
    "local_size": lambda _: basics.local_size(),
    "local_rank": lambda _: basics.local_rank(),
    "rank_in_set": lambda process_set: process_set.operations().rank,
    "included": lambda process_set: int(process_set.included()),
}


def name_in_graph(kind: str, name: str | None, process_set: ProcessSet) -> str | None:
    """Return the name that an operation gets: its own, or in a graph one of its place there; else None."""
    return name if name or tf.executing_eagerly() else operation_name(kind, _owner_of(process_set))


def begin(
    asked: Asked, tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet
) -> Callable[[], list[Tensor]]:
    """Submits a call, or adds it to the graph; gives a function that waits, and returns the results.

    Raises:
        tf.errors.OpError: As the function that is returned: the ranks do not agree, or an argument is not
            accepted.
    """
    tensors = [to_tensor(tensor) for tensor in tensors]
    if not tf.executing_eagerly():
        results = _in_graph(asked, tensors, name, process_set)
        return lambda: results
    operations = process_set.operations()
    arrays = [np.array(tensor.numpy()) for tensor in tensors]
    with raised_as_tensorflow():
        outputs = arrays if asked.kind in _KEEP_SHAPES else None
        started = start(asked, name or operations.auto_name(), arrays, process_set, outputs)

    def wait() -> list[Tensor]:
        with raised_as_tensorflow():
            return [tf.convert_to_tensor(array) for array in started.wait()]

    return wait


def call(asked: Asked, tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet) -> list[Tensor]:
    """The results of a call."""
    return begin(asked, tensors, name, process_set)()


def number(which: str, process_set: ProcessSet, name: str | None) -> Tensor:
    """A number that is looked up when the graph runs, which may be after another `init` than the one before
    it was made: "size", "rank", "local_size", "local_rank", "rank_in_set" or "included"."""
    if tf.executing_eagerly():
        return tf.constant(_NUMBERS[which](process_set))
    return _add([], [tf.int32], process_set, name or operation_name(which, _owner_of(process_set)), which)[0]


def joined() -> Tensor:
    """The rank that is the last to join; the operation ends when all have."""
    if tf.executing_eagerly():
        with raised_as_tensorflow():
            return tf.constant(join())
    return _add([], [tf.int32], global_process_set, operation_name("join", 0), "join")[0]


def _in_graph(asked: Asked, tensors: list[Tensor], name: str | None, process_set: ProcessSet) -> list[Tensor]:
    keeps = asked.kind in _KEEP_SHAPES
    types = [tensor.dtype for tensor in tensors]
    if asked.kind == "alltoall":
        types = [types[0], tf.int32]
    name = name_in_graph(asked.kind, name, process_set) or asked.kind
    results = _add(tensors, types, process_set, name, asked.text(), same_shapes=keeps)
    for tensor, result in zip(tensors, results, strict=False):
        if keeps:
            result.set_shape(tensor.shape)
        elif tensor.shape.rank:
            result.set_shape([None, *tensor.shape[1:]])
        if asked.kind == "alltoall":
            results[1].set_shape([None])
            break
    return results


def _add(
    tensors: list[Tensor],
    types: list[Any],
    process_set: ProcessSet,
    name: str,
    asked: str,
    *,
    same_shapes: bool = False,
) -> list[Tensor]:
    _use_delegate()
    owner = _owner_of(process_set)
    results = add_to_graph(tensors, types, owner=owner, name=name, asked=asked, same_shapes=same_shapes)
    if not tensors:
        results[0].set_shape([])
    return results


def _owner_of(process_set: ProcessSet) -> int:
    """The number of a process set in graphs, which may live longer than what `init` has registered."""
    with _owners_lock:
        for owner, known in _owners.items():
            if known is process_set:
                return owner
        owner = new_owner()
        _owners[owner] = process_set
        return owner


# Graphs that reduce no gradients, since this rank was alone or outside of the set when they were made.
_unreduced: weakref.WeakKeyDictionary[Any, ProcessSet] = weakref.WeakKeyDictionary()


def note_unreduced(process_set: ProcessSet) -> None:
    """Note that the graph that is being made, if one is, has no reductions over these ranks: there is nobody
    to reduce with now."""
    if not tf.executing_eagerly():
        _watch_init()
        _unreduced[tf.compat.v1.get_default_graph()] = process_set


@made_once
def _watch_init() -> None:
    basics.after("init", _tell_of_unreduced)


def _tell_of_unreduced() -> None:
    """Warn of graphs that would now have to reduce gradients."""
    titles = sorted(
        {
            getattr(graph, "name", "a graph")
            for graph, process_set in list(_unreduced.items())
            if (process_set.size() or 1) > 1 and process_set.included()
        }
    )
    if titles:
        _log.warning(
            "rank %d: %s: made before this hvd.init(), when there was nobody to reduce gradients with, and "
            "reduces none: make such a tf.function anew after hvd.init()",
            basics.rank(),
            ", ".join(titles),
        )


@made_once
def _use_delegate() -> None:
    delegate_to(_run)


def _run(operation: Delegated) -> None:
    """Submits what an operation of a graph asks for. In a thread of TensorFlow."""
    try:
        process_set = _owners[operation.owner]
        if operation.asked in _NUMBERS:
            operation.succeed([np.array(_NUMBERS[operation.asked](process_set), np.int32)])
        elif operation.asked == "join":
            threading.Thread(target=_join, args=(operation,), daemon=True).start()
        else:
            asked = Asked.of(operation.asked)
            started = start(asked, operation.name, operation.inputs, process_set, operation.outputs)
            tell_when_done(started, lambda results, error: _end(operation, results, error))
    except Exception as error:
        _end(operation, [], error)


def _join(operation: Delegated) -> None:
    try:
        last = join()
    except Exception as error:
        _end(operation, [], error)
    else:
        operation.succeed([np.array(last, np.int32)])


def _end(operation: Delegated, results: Any, error: Exception | None) -> None:
    if error is not None:
        cause = error.__cause__ or error  # multiring's own, if there is one
        text = text_of(cause) if isinstance(cause, MultiringError) else f"{type(cause).__name__}: {error}"
        operation.fail(code_of(error), text)
    else:
        operation.succeed(() if operation.outputs is not None else results)

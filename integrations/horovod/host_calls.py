"""Collectives of NumPy arrays, for faces whose tensors are handed over as such."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring.horovod.adasum import adasum
from multiring.horovod.operations import Operations, Start
from multiring.horovod.process_sets import ProcessSet
from multiring.horovod.request import Request, Source
from multiring.horovod.started import Finish, Started, submit_all
from multiring.horovod.submissions import (
    check_reducescatter,
    check_rows,
    checked_counts,
    names_of,
    start_allgather,
    start_allreduce,
    start_alltoall,
    start_broadcast,
    start_reducescatter,
)

__all__ = ["Asked", "start"]

Array = NDArray[Any]
Arrays = Sequence[Array]

_REDUCED = frozenset({"int32", "int64", "float16", "bfloat16", "float32", "float64"})
_MOVED = _REDUCED | {"uint8", "int8", "uint16", "int16", "bool"}


@dataclass(frozen=True)
class Asked:
    """What is asked for by a call, beside tensors and a name.

    Attributes:
        kind: As in `Request`, or "sparse": an allgather of the rows of sparse tensors.
        op: Of a reduction, as there.
        prescale: Factor for each input.
        postscale: Factor for the result.
        root: Of a broadcast, as a rank of the job.
        is_group: Whether the tensors fail together.
        sources: Variables, if the tensors are their gradients or values.
    """

    kind: str
    op: str = ""
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    is_group: bool = False
    sources: tuple[Source, ...] = ()

    def text(self) -> str:
        """It, for the attribute of a node."""
        return json.dumps(asdict(self))

    @staticmethod
    @lru_cache
    def of(text: str) -> Asked:
        """What `text` was called for."""
        fields = json.loads(text)
        return Asked(**{**fields, "sources": tuple(Source(**each) for each in fields["sources"])})


def start(
    asked: Asked, name: str, arrays: Arrays, process_set: ProcessSet, outputs: Arrays | None = None
) -> Started:
    """Submits a call; its result is a list of arrays.

    Args:
        asked: What is asked for; with `is_group`, of several arrays.
        name: What the ranks match it by.
        arrays: The tensors; of an alltoall, the splits are the second one if they are given; of a sparse
            tensor, the rows and the number of each row.
        process_set: Ranks that take part.
        outputs: Where results that have the shapes of the inputs are written; they may be the inputs.

    Raises:
        ValueError: An array is not accepted, or an operation of this name is in flight.
        HorovodInternalError: The ranks cannot do this.
    """
    accepted = _REDUCED if asked.op else _MOVED
    for array in arrays:
        if array.dtype.name not in accepted:
            raise ValueError(f"Tensor type {array.dtype.name} is not supported by {asked.kind}.")
    return _KINDS[asked.kind](_Call(asked, name, arrays, process_set.operations()), process_set, outputs)


class _Call:
    """Arguments of one call."""

    def __init__(self, asked: Asked, name: str, arrays: Arrays, operations: Operations) -> None:
        self.asked, self.name, self.arrays, self.operations = asked, name, arrays, operations
        described = ", ".join(f"{array.dtype.name}{list(array.shape)}" for array in arrays)
        self._group = described if asked.is_group and asked.op else f"{len(arrays)} tensors"

    def request(self, array: Array, name: str) -> Request:
        return Request(
            *(self.asked.kind, name, array.dtype.name, array.shape),
            *(self.asked.op, self.asked.prescale, self.asked.postscale, self.asked.root),
            group=self._group if self.asked.is_group else "",
            sources=self.asked.sources,
        )

    def submit(self, starts: Sequence[Callable[[Request], Start]], finish: Finish) -> Started:
        """Submits an operation for each of the first arrays."""
        names = names_of(self.name, len(starts), self.asked.is_group)
        requests = [self.request(*pair) for pair in zip(self.arrays, names, strict=False)]
        parts = [(request, start_one(request)) for request, start_one in zip(requests, starts, strict=True)]
        return submit_all(self.operations, parts, finish)


def _allreduce(call: _Call, process_set: ProcessSet, outputs: Arrays | None) -> Started:
    targets = [np.empty_like(array) for array in call.arrays] if outputs is None else list(outputs)
    asked = call.asked
    if asked.op == "adasum" and any(array.dtype.name.startswith("int") for array in call.arrays):
        raise ValueError("Adasum needs floating-point tensors.")

    def start_of(array: Array, target: Array) -> Callable[[Request], Start]:
        return lambda request: start_allreduce(array, target, request)

    def finish(results: list[Any]) -> list[Array]:
        if asked.op == "adasum":
            for result, target in zip(results, targets, strict=True):
                rows = result.reshape(call.operations.size, -1)
                target[...] = (adasum(rows) * asked.postscale).reshape(target.shape).astype(target.dtype)
        return targets

    return call.submit([start_of(*pair) for pair in zip(call.arrays, targets, strict=True)], finish)


def _allgather(call: _Call, process_set: ProcessSet, outputs: Arrays | None) -> Started:
    def start_of(array: Array) -> Callable[[Request], Start]:
        return lambda request: start_allgather(array, request)

    def finish(results: list[Any]) -> list[Array]:
        check_rows([array.ndim for array in call.arrays], call.name)
        return results

    return call.submit([start_of(array) for array in call.arrays], finish)


def _sparse(call: _Call, process_set: ProcessSet, outputs: Arrays | None) -> Started:
    """Gather the rows of sparse tensors, each with its number, in one operation."""
    rows, numbers = call.arrays
    check_rows([rows.ndim], call.name)
    request = Request(
        *("allgather", call.name, rows.dtype.name, rows.shape),
        group=f"rows of a sparse tensor, with numbers of {numbers.dtype.name}",
        sources=call.asked.sources,
    )
    parts = [_bytes_of_rows(numbers), _bytes_of_rows(rows)]
    width = parts[0].shape[1]

    def finish(results: list[Any]) -> list[Array]:
        gathered = results[0]
        return [_rows_of_bytes(gathered[:, width:], rows), _rows_of_bytes(gathered[:, :width], numbers)]

    start_one = start_allgather(np.concatenate(parts, axis=1), request)
    return submit_all(call.operations, [(request, start_one)], finish)


def _bytes_of_rows(array: Array) -> Array:
    """Return the bytes of an array, those of each row along axis 0 as a row."""
    width = math.prod(array.shape[1:]) * array.dtype.itemsize
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(array.shape[0], width)


def _rows_of_bytes(found: Array, like: Array) -> Array:
    """Return the array whose rows have these bytes, of the dtype and the shape of rows of `like`."""
    return found.reshape(-1).copy().view(like.dtype).reshape(found.shape[0], *like.shape[1:])


def _broadcast(call: _Call, process_set: ProcessSet, outputs: Arrays | None) -> Started:
    root = process_set.root(call.asked.root)
    source = call.arrays[0]
    target = np.empty_like(source) if outputs is None else outputs[0]
    return call.submit(
        [lambda request: start_broadcast(source, target, root, request)], lambda results: [target]
    )


def _alltoall(call: _Call, process_set: ProcessSet, outputs: Arrays | None) -> Started:
    source, *splits = call.arrays
    counts = checked_counts(splits[0].tolist() if splits else None, source.shape, call.operations.size)

    def finish(results: list[Any]) -> list[Array]:
        received, numbers = results[0]
        return [received, np.asarray(numbers, np.int32)]

    return call.submit([lambda request: start_alltoall(source, counts, request)], finish)


def _reducescatter(call: _Call, process_set: ProcessSet, outputs: Arrays | None) -> Started:
    check_reducescatter(call.asked.op, [array.ndim for array in call.arrays])

    def start_of(array: Array) -> Callable[[Request], Start]:
        return lambda request: start_reducescatter(array, request)

    return call.submit([start_of(array) for array in call.arrays], lambda results: results)


_KINDS: dict[str, Callable[[_Call, ProcessSet, Arrays | None], Started]] = {
    "allreduce": _allreduce,
    "allgather": _allgather,
    "sparse": _sparse,
    "broadcast": _broadcast,
    "alltoall": _alltoall,
    "reducescatter": _reducescatter,
}

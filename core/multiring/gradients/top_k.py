"""Buckets of which every rank sends only the largest entries, as indices and values (`TopK`).

For each bucket one allgather carries the *records* of all ranks, all of the same length:

    | 1 byte per slot: this rank has a new gradient | 1 byte: it has data | padding | indices | values |

Every rank adds up the same records in the canonical order of the ranks, with zeros where a rank has sent
nothing, so all have the same bits, and with a ratio of 1 those of an allreduce.

A rank selects from its gradients, times prescale, plus its *residual*. What it does not send is its residual
from then on: sent + residual is what it had, exactly. A gradient of an earlier round that the program keeps
takes part as a new one does, because another rank may have added to it. The residual changes when the round
ends, and only for parameters of which some rank had a new gradient; if none had, nothing of it has been used,
and kept gradients stay as they are.

Residuals have the parameters' names. Where a model's buckets are made anew, because parameters come or go,
the next exchange takes over all of them: that of a parameter that takes no part waits until it does again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from multiring import _core as native
from multiring.arrays import multiply
from multiring.errors import UsageError
from multiring.gradients.bucket_exchange import BucketExchange, DenseExchange, Elsewhere, Flags
from multiring.gradients.bucket_memory import BucketMemory, Bytes
from multiring.gradients.bucketing import Bucket, ParameterSpec, itemsize
from multiring.gradients.compression import TopK
from multiring.gradients.options import ReducerOptions
from multiring.reductions import reduce_op

if TYPE_CHECKING:
    from multiring.communicator import Communicator
    from multiring.work import Work

__all__ = ["TopKExchange", "add_up", "largest", "make_exchange"]

Values = NDArray[Any]
Indices = NDArray[np.int64]

_ALIGNMENT = 8
# Entries that are added up at a time, of all ranks: they stay in the second cache.
_BLOCK = 1 << 16


def largest(values: Values, count: int) -> Indices:
    """Indices of the `count` entries of largest magnitude, ascending; the first of equal ones.

    What is not finite is larger than all else. The choice depends on nothing but the values.
    """
    if count == len(values):
        return np.arange(count)
    magnitudes = np.abs(values)
    magnitudes[np.isnan(magnitudes)] = np.inf
    least = np.partition(magnitudes, len(values) - count)[len(values) - count]
    above = np.flatnonzero(magnitudes > least)
    equal = np.flatnonzero(magnitudes == least)[: count - len(above)]
    return np.sort(np.concatenate((above, equal)))


def add_up(indices: Sequence[Indices], values: Sequence[Values], entries: int, op: str) -> Values:
    """What ranks have sent, reduced in the canonical order with zeros where a rank has sent nothing.

    Args:
        indices: Of each rank, ascending.
        values: At these indices.
        entries: Of the result.
        op: "sum" or "average".
    """
    result = np.zeros(entries, values[0].dtype)
    union = np.unique(np.concatenate(indices))
    width = max(1, _BLOCK // len(indices))
    for begin in range(0, len(union), width):
        columns = union[begin : begin + width]
        rows = np.zeros((len(indices), len(columns)), result.dtype)
        for row, mine, sent in zip(rows, indices, values, strict=True):
            first, last = np.searchsorted(mine, (columns[0], columns[-1] + 1))
            row[np.searchsorted(columns, mine[first:last])] = sent[first:last]
        native.ArrayReduction(list(rows), [rows[0]], reduce_op(op))()
        result[columns] = rows[0]
    return result


@dataclass(frozen=True)
class _Record:
    """Where the parts of a bucket's record lie."""

    slots: int
    entries: int
    count: int
    dtype: np.dtype[Any]

    @property
    def index_type(self) -> np.dtype[Any]:
        return np.dtype(np.uint32 if self.entries <= 1 << 32 else np.uint64)

    @property
    def indices_at(self) -> int:
        return -(-(self.slots + 1) // _ALIGNMENT) * _ALIGNMENT

    @property
    def values_at(self) -> int:
        nbytes = self.count * self.index_type.itemsize
        return self.indices_at + -(-nbytes // _ALIGNMENT) * _ALIGNMENT

    @property
    def nbytes(self) -> int:
        return self.values_at + self.count * self.dtype.itemsize

    def indices(self, record: Bytes) -> Values:
        """A view of the indices in a record."""
        end = self.indices_at + self.count * self.index_type.itemsize
        return record[self.indices_at : end].view(self.index_type)

    def values(self, record: Bytes) -> Values:
        """A view of the values in a record."""
        return record[self.values_at : self.nbytes].view(self.dtype)


@dataclass(frozen=True)
class _Sent:
    """A bucket on its way."""

    record: _Record
    rest: Values  # what is not sent
    present: list[bool]  # slots that take part with a gradient of this rank; other residuals stay as they are


class TopKExchange:
    """The exchange of buckets by their largest entries, with the residuals of this rank.

    Attributes:
        residuals: By the parameters' names, also of those that take no part now.
    """

    def __init__(
        self,
        comm: Communicator,
        memory: BucketMemory,
        specs: Sequence[ParameterSpec],
        options: ReducerOptions,
        compression: TopK,
    ) -> None:
        """Begin without residuals."""
        self._comm, self._memory, self._specs = comm, memory, specs
        self._options, self._compression = options, compression
        self._sent: dict[int, _Sent] = {}
        self.residuals: dict[str, Values] = {}

    def send(
        self,
        number: int,
        elsewhere: Elsewhere,
        produced: Sequence[int],
        active: bool,
        kept: Collection[int],
    ) -> Work:
        bucket = self._memory.buckets[number]
        dtype = np.dtype(bucket.dtype)
        entries = sum(slot.nbytes for slot in bucket.slots) // dtype.itemsize
        record = _Record(len(bucket.slots), entries, self._compression.count(entries), dtype)
        present = [flag != 0 or slot.index in kept for slot, flag in zip(bucket.slots, produced, strict=True)]
        with _same_everywhere():
            values = self._gradients(bucket, elsewhere, entries, present)
            chosen = largest(values, record.count)
        message = np.zeros(record.nbytes, np.uint8)
        message[: len(produced)] = np.asarray(produced) != 0
        message[len(produced)] = active
        record.indices(message)[:] = chosen
        record.values(message)[:] = values[chosen]
        values[chosen] = 0
        self._sent[number] = _Sent(record, values, present)
        return self._comm.allgather_async(message, name=self._memory.names[number])

    def receive(self, number: int, elsewhere: Elsewhere, work: Work) -> Flags:
        sent = self._sent.pop(number)
        record = sent.record
        messages = work.wait().reshape(self._comm.size, record.nbytes)
        flags = messages[:, : record.slots + 1] != 0
        produced = flags[:, : record.slots].any(axis=0)
        reduced = add_up(
            [record.indices(message).astype(np.int64) for message in messages],
            [record.values(message) for message in messages],
            record.entries,
            self._options.op,
        )
        if self._options.postscale != 1.0:
            multiply(reduced, self._options.postscale)
        begin = 0
        slots = self._memory.buckets[number].slots
        for slot, is_produced, is_present in zip(slots, produced, sent.present, strict=True):
            part = slice(begin, begin + slot.nbytes // record.dtype.itemsize)
            begin = part.stop
            if not is_produced:
                continue
            self._memory.write(slot.index, elsewhere, reduced[part].view(np.uint8))
            if is_present:
                self._keep(self._specs[slot.index].name, sent.rest[part])
        return produced, flags[:, record.slots]

    def kept(self) -> dict[str, Values]:
        """Copies of the residuals."""
        return {name: residual.copy() for name, residual in self.residuals.items()}

    def load(self, residuals: Mapping[str, Values], idle: Sequence[ParameterSpec] = ()) -> None:
        """Replace all residuals by these, given by the parameters' names.

        Args:
            residuals: Of parameters of this exchange, and of `idle`.
            idle: Parameters that take no part now.
        """
        specs = {spec.name: spec for spec in (*idle, *self._specs)}
        loaded: dict[str, Values] = {}
        for name, kept in residuals.items():
            spec = specs.get(name)
            if spec is None or np.size(kept) != _entries(spec):
                expected = "no such parameter" if spec is None else f"{_entries(spec)} elements"
                raise UsageError(
                    f"rank {self._comm.rank}: a residual of '{name}' with {np.size(kept)} elements is to be "
                    f"loaded, but the model has {expected}",
                    rank=self._comm.rank,
                    tensor=name,
                )
            loaded[name] = np.array(kept, spec.dtype).reshape(-1)
        self.residuals = loaded

    def transfer_residuals(self, residuals: Mapping[str, Values]) -> None:
        """Begin with what an exchange of the same model has kept back before.

        What does not fit a parameter any more is dropped; that of parameters not in this exchange waits.
        """
        specs = {spec.name: spec for spec in self._specs}
        self.residuals = {}
        for name, kept in residuals.items():
            spec = specs.get(name)
            if spec is None:
                self.residuals[name] = kept
            elif len(kept) == _entries(spec):
                self.residuals[name] = kept.astype(spec.dtype, copy=False)

    def _gradients(
        self, bucket: Bucket, elsewhere: Elsewhere, entries: int, present: Sequence[bool]
    ) -> Values:
        """The bucket's gradients, scaled, with this rank's residuals. Shape (entries,).

        Zeros where this rank has no gradient: a residual sent for a parameter that nobody uses would reach
        none, and take the place of what others need, in every step anew.
        """
        dtype = np.dtype(bucket.dtype)
        values = np.zeros(entries, dtype)
        begin = 0
        for slot, is_present in zip(bucket.slots, present, strict=True):
            part = values[begin : begin + slot.nbytes // dtype.itemsize]
            begin += len(part)
            if not is_present:
                continue
            gradient = self._memory.read(slot.index, elsewhere).view(dtype)
            np.multiply(gradient, dtype.type(self._options.prescale), out=part)
            if (residual := self.residuals.get(self._specs[slot.index].name)) is not None:
                np.add(part, residual, out=part, where=residual != 0)  # -0.0 stays what it is
        return values

    def _keep(self, name: str, rest: Values) -> None:
        # Infinities and NaNs would never leave it. They are the first to be sent, so all ranks know of them.
        residual = self.residuals.setdefault(name, np.empty_like(rest))
        np.copyto(residual, rest)
        residual[~np.isfinite(residual)] = 0


@contextmanager
def _same_everywhere() -> Iterator[None]:
    """Context of NumPy's arithmetic that must not depend on how this rank's program has set up its own.

    One that flushes denormals would choose and send other entries; one that raises on overflow would end the
    job.
    """
    with native.StandardFloatMode(), np.errstate(all="ignore"):
        yield


def _entries(spec: ParameterSpec) -> int:
    return spec.nbytes // itemsize(spec.dtype)


def make_exchange(
    comm: Communicator | None,
    memory: BucketMemory,
    specs: Sequence[ParameterSpec],
    options: ReducerOptions,
) -> BucketExchange | None:
    """The exchange that the options ask for; None with one rank, where nothing is sent."""
    if comm is None:
        return None
    if options.compression is None:
        return DenseExchange(comm, memory, options)
    return TopKExchange(comm, memory, specs, options, options.compression)

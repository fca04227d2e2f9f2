"""Messages between two ranks, received by tag.

The core delivers the messages between two ranks in the order in which they were sent. MPI, whose rules
ChainerMN follows, lets a receiver ask for a tag instead. So a message carries its tag, and one that is not
asked for yet waits here.

    letter          header                                    then
    object          tag, the object                           nothing
    small arrays    tag, whether a tuple, the arrays          nothing
    other arrays    tag, whether a tuple, their forms         one message of the core for each array

The core lets one small message between two ranks leave before it is received, so that two ranks may both send
first and then receive; with large ones, several, or arrays on a device, one has to receive first. (ChainerMN
over MPI always waits for the receiver.)
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np

from multiring import Communicator
from multiring.chainer.arrays import (
    check_dtype,
    check_same_dtype,
    empty,
    is_array,
    on_device,
    ordered,
    to_device,
)
from multiring.errors import UsageError

__all__ = ["Mailbox"]

# Up to here arrays travel in the header: one message, and well below what the core sends without waiting.
_SMALL_BYTES = 32 * 1024


@dataclass(frozen=True, eq=False)  # equality is identity: contents need not compare
class _Letter:
    tag: int
    is_object: bool
    content: Any
    nbytes: int  # of the message


_Waiting: TypeAlias = dict[int, deque[_Letter]]
_waiting: WeakKeyDictionary[Communicator, _Waiting] = WeakKeyDictionary()


class Mailbox:
    """Sends and receives. All of one communicator of the core share what waits, as ChainerMN's communicators
    share the messages of one of MPI."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._waiting: _Waiting = _waiting.setdefault(comm, {})

    def send_arrays(self, data: Any, dest: int, tag: int) -> None:
        """Send an array, or a tuple or list of arrays of one dtype."""
        is_tuple = isinstance(data, tuple | list)
        arrays = list(data) if is_tuple else [data]
        for x in arrays:
            if not is_array(x):
                raise TypeError(
                    f"send takes an array of NumPy or CuPy, or a tuple of them, not {type(x).__name__}"
                )
            check_dtype("send", x)
        check_same_dtype("send", (x.dtype for x in arrays))
        if dest == self._comm.rank:
            copies = tuple(x.copy() for x in arrays)
            nbytes = sum(x.nbytes for x in copies)
            self._keep(dest, _Letter(tag, False, copies if is_tuple else copies[0], nbytes))
            return
        is_small = sum(x.nbytes for x in arrays) <= _SMALL_BYTES
        if is_small and not any(on_device(x) for x in arrays):
            self._send_header((tag, False, is_tuple, True, [np.asarray(x) for x in arrays]), dest)
            return
        forms = [(tuple(x.shape), x.dtype.str, on_device(x)) for x in arrays]
        self._send_header((tag, False, is_tuple, False, forms), dest)
        for x in arrays:
            self._comm.send(ordered(x), dest)

    def send_object(self, obj: Any, dest: int, tag: int) -> None:
        """Send anything that can be pickled."""
        if dest == self._comm.rank:
            data = pickle.dumps(obj)
            self._keep(dest, _Letter(tag, True, pickle.loads(data), len(data)))
        else:
            self._send_header((tag, True, obj), dest)

    def receive_arrays(self, source: int, tag: int | None) -> Any:
        """The oldest message of that tag (any with None), as it was sent."""
        return self._take(source, tag, False).content

    def receive_object(self, source: int, tag: int | None, status: Any = None) -> Any:
        """The oldest object of that tag (any with None). `status` is told where it came from, see
        `_fill_status`."""
        letter = self._take(source, tag, True)
        if status is not None:
            _fill_status(status, source, letter)
        return letter.content

    def _take(self, source: int, tag: int | None, is_object: bool) -> _Letter:
        if not 0 <= source < self._comm.size:
            raise UsageError(
                f"rank {self._comm.rank}: cannot receive from rank {source}; name one from 0 to "
                f"{self._comm.size - 1} (there is no receiving from any rank)"
            )
        waiting = self._waiting.setdefault(source, deque())
        letter = next((one for one in waiting if tag is None or one.tag == tag), None)
        while letter is None:
            if source == self._comm.rank:
                wanted = "nothing" if tag is None else f"nothing with tag {tag}"
                raise UsageError(f"rank {source}: {wanted} was sent from this rank to itself")
            arrived = self._receive(source)
            waiting.append(arrived)
            if tag is None or arrived.tag == tag:
                letter = arrived
        if letter.is_object != is_object:
            sent, other = ("send_obj", "recv_obj") if letter.is_object else ("send", "recv")
            raise UsageError(
                f"rank {self._comm.rank}: the next message from rank {source} with tag {letter.tag} was sent "
                f"by {sent}; receive it with {other}"
            )
        waiting.remove(letter)
        return letter

    def _keep(self, source: int, letter: _Letter) -> None:
        self._waiting.setdefault(source, deque()).append(letter)

    def _send_header(self, header: tuple[Any, ...], dest: int) -> None:
        self._comm.send(np.frombuffer(pickle.dumps(header, pickle.HIGHEST_PROTOCOL), np.uint8), dest)

    def _receive(self, source: int) -> _Letter:
        data = self._comm.recv(source)
        tag, is_object, *rest = pickle.loads(data)
        if is_object:
            return _Letter(tag, True, rest[0], data.nbytes)
        is_tuple, has_arrays, content = rest
        arrays = tuple(content if has_arrays else self._receive_all(source, content))
        nbytes = sum(x.nbytes for x in arrays)
        return _Letter(tag, False, arrays if is_tuple else arrays[0], nbytes)

    def _receive_all(self, source: int, forms: Sequence[tuple[tuple[int, ...], str, bool]]) -> list[Any]:
        arrays = [empty(shape, dtype, device) for shape, dtype, device in forms]
        for array in arrays:
            self._comm.recv(source, out=array)
        # Only now: without a device this raises, and what comes next has to be the next letter.
        return [to_device(array, device) for array, (_, _, device) in zip(arrays, forms, strict=True)]


def _fill_status(status: Any, source: int, letter: _Letter) -> None:
    """Tell a `Status` of mpi4py, or any object that takes attributes, a message's source, tag and size."""
    if not hasattr(status, "Set_source"):
        status.source, status.tag, status.count = source, letter.tag, letter.nbytes
        return
    from mpi4py import MPI  # the program has it, or there would be no status of it

    status.Set_source(source)
    status.Set_tag(letter.tag)
    status.Set_error(MPI.SUCCESS)
    status.Set_elements(MPI.BYTE, letter.nbytes)

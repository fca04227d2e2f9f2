"""An object from one rank to the others: pickled whole, or in pieces while it is pickled."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring.collectives import Collectives
from multiring.errors import UsageError

__all__ = ["not_pickled", "pickled", "receive_object", "send_object", "unpickled"]

# Pieces in which a pickled object travels: what is smaller is joined up to _JOINED_BYTES.
_PIECE_BYTES = 8 << 20
_JOINED_BYTES = 1 << 20


class _NotPickled(str):
    """Stands for an object that a rank could not send, and says why."""


def pickled(obj: Any) -> tuple[NDArray[np.uint8], Exception | None]:
    """An object as bytes to be sent. If it cannot be pickled, bytes that say so, and what was raised."""
    try:
        return np.frombuffer(pickle.dumps(obj, 5), np.uint8), None
    except Exception as error:
        return not_pickled(error), error


def not_pickled(error: Exception) -> NDArray[np.uint8]:
    """Bytes to be sent in place of an object that cannot be."""
    return np.frombuffer(pickle.dumps(_NotPickled(f"{type(error).__name__}: {error}")), np.uint8)


def unpickled(comm: Collectives, operation: str, joined: Any, lengths: Any) -> list[Any]:
    """The objects of all ranks from what `pickled` has made of them; None from one that has sent nothing.

    Args:
        comm: The ranks.
        operation: What to call it in an error.
        joined: All their bytes, uint8.
        lengths: Of each rank.

    Raises:
        UsageError: Some rank could not send its object.
    """
    ends = np.cumsum(lengths)
    found = [
        pickle.loads(joined[end - length : end]) if length else None
        for end, length in zip(ends, lengths, strict=True)
    ]
    for rank, obj in enumerate(found):
        if isinstance(obj, _NotPickled):
            raise UsageError(
                f"{operation} failed on rank {comm.rank}: rank {rank} could not send its object ({obj}); "
                "nothing was received"
            )
    return found


# The pickle module writes an object to a file and reads it from one, and passes large bytes and arrays from
# and to their own memory. These files are broadcasts in pieces. The length of a piece goes first, negative
# for the last piece; a length of 0 says that the root could not pickle its object, and the next piece why.


def send_object(comm: Collectives, obj: Any, root: int, name: str) -> Any:
    """Give all ranks the object of `root`, this rank; the others call `receive_object`."""
    writer = _ObjectWriter(comm, root, name)
    try:
        pickle.Pickler(writer, 5).dump(obj)
        writer.end()
    except BaseException as error:
        if not comm.is_broken:
            writer.fail(f"{type(error).__name__}: {error}")
        raise
    return obj


def receive_object(comm: Collectives, root: int, name: str) -> Any:
    """The object of `root`, which is another rank."""
    reader = _ObjectReader(comm, root, name)
    try:
        return pickle.Unpickler(reader).load()
    finally:
        if not comm.is_broken:
            reader.skip_rest()


class _ObjectWriter:
    """A file; what is written to it goes to all ranks."""

    def __init__(self, comm: Collectives, root: int, name: str) -> None:
        self._comm, self._root, self._name = comm, root, name
        self._joined = bytearray()

    def write(self, data: bytes | pickle.PickleBuffer) -> int:
        view = data.raw() if isinstance(data, pickle.PickleBuffer) else memoryview(data)
        if view.nbytes < _JOINED_BYTES:
            self._joined += view
            if len(self._joined) > _JOINED_BYTES:
                self._send_joined()
            return view.nbytes
        self._send_joined()
        for begin in range(0, view.nbytes, _PIECE_BYTES):
            piece = view[begin : begin + _PIECE_BYTES]
            self._send(piece, piece.nbytes)
        return view.nbytes

    def end(self) -> None:
        """Send the last piece, which may be empty."""
        self._joined += b"."  # a length of 0 has another meaning; nothing is read after the end of a pickle
        self._send(memoryview(self._joined), -len(self._joined))

    def fail(self, text: str) -> None:
        """Tell the others that the object is not coming."""
        self._send(memoryview(b""), 0)
        reason = text.encode(errors="replace")
        self._send(memoryview(reason), -len(reason))

    def _send_joined(self) -> None:
        if self._joined:
            piece, self._joined = self._joined, bytearray()
            self._send(memoryview(piece), len(piece))

    def _send(self, piece: memoryview, length: int) -> None:
        self._comm.broadcast(np.array([length]), self._root, name=f"{self._name}.length")
        if length:
            array = np.frombuffer(piece, np.uint8)
            out = array if array.flags.writeable else None  # without it, the result is a copy of the piece
            self._comm.broadcast(array, self._root, out=out, name=f"{self._name}.data")


class _ObjectReader:
    """A file that holds what the root writes."""

    def __init__(self, comm: Collectives, root: int, name: str) -> None:
        self._comm, self._root, self._name = comm, root, name
        self._piece = memoryview(b"")  # what has arrived and was not read yet
        self._is_last = False

    def readinto(self, target: Any) -> int:
        view = memoryview(target).cast("B")
        filled = 0
        while filled < view.nbytes:
            if not self._piece:
                length = self._next_length()
                if length <= view.nbytes - filled:
                    self._receive(view[filled : filled + length])
                    filled += length
                    continue
                self._piece = self._receive(memoryview(bytearray(length)))
            part = self._piece[: view.nbytes - filled]
            view[filled : filled + part.nbytes] = part
            self._piece = self._piece[part.nbytes :]
            filled += part.nbytes
        return filled

    def read(self, size: int) -> bytes:
        memory = io.BytesIO(bytes(size))
        with memory.getbuffer() as view:
            self.readinto(view)
        return memory.getvalue()  # the memory itself

    def readline(self) -> bytes:
        line = bytearray()
        while not line.endswith(b"\n"):
            line += self.read(1)
        return bytes(line)

    def skip_rest(self) -> None:
        """Take what the root still sends, so that the ranks' next calls meet."""
        while not self._is_last:
            self._receive(memoryview(bytearray(self._next_length())))

    def _next_length(self) -> int:
        length = self._number()
        if length == 0:
            text = bytes(self._receive(memoryview(bytearray(-self._number())))).decode()
            self._is_last = True
            raise UsageError(
                f"{self._name} failed on rank {self._comm.rank}: rank {self._root} could not pickle its "
                f"object ({text}); nothing was received"
            )
        self._is_last = length < 0
        return abs(length)

    def _number(self) -> int:
        received = self._comm.broadcast(np.zeros(1, np.int64), self._root, name=f"{self._name}.length")
        return int(received[0])

    def _receive(self, target: memoryview) -> memoryview:
        array = np.frombuffer(target, np.uint8)
        self._comm.broadcast(array, self._root, out=array, name=f"{self._name}.data")
        return target

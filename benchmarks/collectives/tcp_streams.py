"""What plain TCP carries between neighbouring hosts, measured in turns with the contenders."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable

import numpy as np

from multiring import Communicator, _core
from multiring.benchmarks.contenders import Call, Contender, FloatArray
from multiring.benchmarks.emulation.start import Emulation
from multiring.errors import InternalError

__all__ = ["TcpStreams"]

_PIECE = 1 << 20  # bytes of a call
_PATIENCE = 20.0  # seconds


def _moved(call: Callable[[memoryview], int], piece: memoryview) -> int:
    """Bytes that a stream takes or gives now."""
    try:
        return call(piece) if piece else 0
    except BlockingIOError:
        return 0


class TcpStreams(Contender[FloatArray]):
    """A stream from every rank to its counterpart on the next host, and one from the host before.

    They carry the bytes that every host has to send in an allreduce, of which its ranks have equal shares.
    Nothing is added.
    """

    name = "TCP streams"
    exact = False

    def __init__(self, comm: Communicator, emulation: Emulation) -> None:
        self._hosts, self._ranks = emulation.hosts, emulation.ranks
        following = (comm.rank + emulation.ranks) % comm.size
        addresses = [address for _, address, _ in _core.interface_addresses([])]
        with socket.create_server((addresses[0], 0)) as listener:
            listener.settimeout(_PATIENCE)
            where = comm.allgather_object(listener.getsockname())
            self._out = socket.create_connection(where[following][:2], _PATIENCE)
            self._in, _ = listener.accept()
        for stream in (self._out, self._in):
            stream.setblocking(False)
        self._out.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def prepare(self, count: int) -> tuple[FloatArray, Call]:
        x = np.zeros(count, np.float32)
        share = 2 * (self._hosts - 1) * x.nbytes // (self._hosts * self._ranks)
        going, coming = memoryview(bytearray(share)), memoryview(bytearray(share))
        return x, lambda: self._exchange(going, coming)

    def _exchange(self, going: memoryview, coming: memoryview) -> None:
        sent = received = 0
        deadline = time.monotonic() + _PATIENCE
        while sent < len(going) or received < len(coming):
            put = _moved(self._out.send, going[sent : sent + _PIECE])
            got = _moved(self._in.recv_into, coming[received : received + _PIECE])
            sent += put
            received += got
            if put or got:
                continue
            if time.monotonic() > deadline:
                raise InternalError(
                    f"a TCP stream to the next host carried {sent} of {len(going)} B in {_PATIENCE:.0f} s"
                )
            select.select(
                [self._in] if received < len(coming) else [],
                [self._out] if sent < len(going) else [],
                [],
                1.0,
            )

    def close(self) -> None:
        self._out.close()
        self._in.close()

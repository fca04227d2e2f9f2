"""A store behind one TCP port, for ranks that share no directory.

Both ends prove that they know the job's secret before anything else is read (store/handshake.py). Messages
are plain bytes with bounded sizes and are never unpickled. What follows the proofs is neither encrypted nor
signed, so the port belongs in a network that can be trusted with the training data as well.

A request is: operation (1 byte), milliseconds to wait (4 bytes), length of the key (2 bytes), key, value. A
reply is a status byte and, after `get`, the value.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import struct
import threading
import time
import weakref
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection

from multiring import errors
from multiring.errors import PeerLostError, UsageError
from multiring.store.base import (
    MAX_KEY_BYTES,
    MAX_VALUE_BYTES,
    ClosedOnExit,
    Interrupt,
    Store,
    check_key,
    check_value,
    no_such_key,
)
from multiring.store.handshake import prove_to_client, prove_to_server

__all__ = ["OTHER_SECRET", "TcpStore", "TcpStoreServer"]

OTHER_SECRET = "MULTIRING_SECRET differs between ranks, or the port belongs to another job"
"""Why a server may refuse a client that was given its secret."""

_REQUEST = struct.Struct("!BIH")
_MAX_REQUEST = _REQUEST.size + MAX_KEY_BYTES + MAX_VALUE_BYTES
_MAX_REPLY = 1 + MAX_VALUE_BYTES
_SET, _GET = 1, 2
_OK, _ABSENT = b"\x01", b"\x00"

# An unauthenticated peer holds a thread and a descriptor for so long at most, and there are so many of them
# at most; then the oldest goes, so that a flood of them cannot lock out a rank.
_HANDSHAKE_SECONDS = 10.0
_MAX_UNTRUSTED = 128

# A client asks anew so often, so that no server thread waits long for a client that is gone.
_GET_SLICE = 0.5
_REPLY_GRACE = 20.0
# Between two calls of an interrupt: while an answer is awaited, and while a connection is.
_INTERRUPT_SECONDS = 0.05
_CONNECT_SLICE = 1.0

# The kernels find out within about half a minute that the other host has gone. They answer for a process that
# stands still, which is no reason to give up.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}


class TcpStoreServer(ClosedOnExit):
    """Serves a store on one port until it is closed; runs in threads of its own.

    Args:
        host: Address to listen on.
        port: Port to listen on; 0 lets the system choose.
        secret: The job's secret; not empty.

    Attributes:
        host: The address.
        port: The port.

    Raises:
        UsageError: The secret is empty or the address cannot be listened on.
    """

    def __init__(self, host: str, port: int = 0, secret: bytes = b"") -> None:
        if not secret:
            raise UsageError("a TCP store needs a secret that is not empty: anybody can reach its port")
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, port), family=family, backlog=512)
        except (OSError, OverflowError) as error:
            raise UsageError(f"the store cannot listen on {host}:{port}: {error}") from error
        self._listener.settimeout(1.0)
        self.host = host
        self.port: int = self._listener.getsockname()[1]
        self._secret = secret
        self._values: dict[bytes, bytes] = {}
        self._changed = threading.Condition()
        self._closed = False  # guarded by _changed, like _values
        self._peers: dict[_Peer, None] = {}  # in order of arrival
        self._peers_lock = threading.Lock()  # never held together with _changed
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # of the peers
        self._acceptor = threading.Thread(target=self._accept, name="multiring-store", daemon=True)
        self._acceptor.start()

    def __contains__(self, key: str) -> bool:
        with self._changed:
            return key.encode() in self._values

    def set(self, key: str, value: bytes) -> None:
        """Sets a key to a value, as a client does."""
        self._put(key.encode(), value)

    def keys(self) -> list[str]:
        """The keys that have been set, in the order in which they first were."""
        with self._changed:
            return [key.decode(errors="replace") for key in self._values]

    def close(self) -> None:
        """Stops serving and closes every connection; clients get PeerLostError. May be called again."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join()
        self._listener.close()
        with self._peers_lock:
            peers = list(self._peers)
        for peer in peers:
            peer.hang_up()
        for thread in list(self._threads):  # also those that have forgotten their peer, and are about to end
            thread.join()

    def _accept(self) -> None:
        while not self._closed:
            try:
                accepted, _ = self._listener.accept()
            except TimeoutError:
                pass
            except OSError:
                # Out of descriptors, or a connection that was reset in the queue: neither ends the service.
                time.sleep(0.01)
            else:
                self._start(accepted)
            self._dismiss_untrusted()

    def _start(self, accepted: socket.socket) -> None:
        try:
            peer = _Peer(accepted)
        except OSError:  # no descriptor left: the client asks again
            accepted.close()
            return
        thread = threading.Thread(target=self._serve, args=(peer,), daemon=True)
        with self._peers_lock:
            self._peers[peer] = None
        try:
            thread.start()
            self._threads.add(thread)
        except RuntimeError:  # no thread left
            self._forget(peer)

    def _dismiss_untrusted(self) -> None:
        now = time.monotonic()
        with self._peers_lock:
            untrusted = [peer for peer in self._peers if not peer.trusted]
        for index, peer in enumerate(untrusted):
            if now - peer.arrived > _HANDSHAKE_SECONDS or index < len(untrusted) - _MAX_UNTRUSTED:
                peer.hang_up()

    def _serve(self, peer: _Peer) -> None:
        try:
            peer.greet(self._secret)
            while True:
                peer.connection.send_bytes(self._answer(peer.connection.recv_bytes(_MAX_REQUEST)))
        except (OSError, EOFError, AuthenticationError, AssertionError, ValueError, struct.error):
            pass  # gone, or not one of ours
        finally:
            self._forget(peer)

    def _forget(self, peer: _Peer) -> None:
        with self._peers_lock:
            self._peers.pop(peer, None)
        peer.close()

    def _answer(self, request: bytes) -> bytes:
        operation, milliseconds, key_length = _REQUEST.unpack_from(request)
        end = _REQUEST.size + key_length
        key, value = request[_REQUEST.size : end], request[end:]
        if len(key) != key_length:
            raise ValueError("truncated request")
        if operation == _SET:
            self._put(key, value)
            return _OK
        if operation != _GET:
            raise ValueError("unknown operation")
        with self._changed:
            wait = min(milliseconds / 1000, 2 * _GET_SLICE)
            self._changed.wait_for(lambda: self._closed or key in self._values, wait)
            found = self._values.get(key)
        return _ABSENT if found is None else _OK + found

    def _put(self, key: bytes, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()


class _Peer:
    """One accepted connection."""

    def __init__(self, accepted: socket.socket) -> None:
        self._socket = accepted
        _limit_waits(accepted, receive=_HANDSHAKE_SECONDS, send=_HANDSHAKE_SECONDS)
        self.connection = _connection(accepted)
        self.arrived = time.monotonic()
        self.trusted = False

    def greet(self, secret: bytes) -> None:
        prove_to_client(self.connection, secret)
        self.trusted = True
        _limit_waits(self._socket, receive=0.0, send=_REPLY_GRACE)

    def hang_up(self) -> None:
        # Wakes the thread that reads from it, which then closes it; closing here could hit a reused number.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.connection.close()
        self._socket.close()


def _limit_waits(sock: socket.socket, *, receive: float, send: float) -> None:
    """Lets reads and writes fail after so many seconds; 0 means never."""
    sock.settimeout(None)
    for option, seconds in ((socket.SO_RCVTIMEO, receive), (socket.SO_SNDTIMEO, send)):
        fraction, whole = math.modf(seconds)
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(whole), int(fraction * 1e6)))


def _connection(sock: socket.socket) -> Connection:
    """A message connection over a duplicate of the socket's descriptor, closed apart from the socket."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return Connection(os.dup(sock.fileno()))


class TcpStore(Store):
    """A client of `TcpStoreServer`; may be used by several threads.

    Args:
        host: Address of the server.
        port: Port of the server.
        secret: The job's secret.
        connect_timeout: Seconds to go on trying, because the server may start after its clients.
        refused_because: What it means if the server has another secret; for the message.
        answer_timeout: Seconds that an answer may take, beyond what the server is asked to wait, 20 at least;
            None: any number. A process that serves a store may be stopped for a while, as by Ctrl-Z.

    Raises:
        UsageError: The server has another secret.
        TimeoutError: The server cannot be reached.
    """

    def __init__(
        self,
        host: str,
        port: int,
        secret: bytes,
        connect_timeout: float = 30.0,
        refused_because: str = OTHER_SECRET,
        answer_timeout: float | None = 0.0,
    ) -> None:
        self.host = host
        self.port = port
        self._secret = secret
        self._connect_timeout = connect_timeout
        self._refused_because = refused_because
        self._answer_timeout = answer_timeout
        self._lock = threading.Lock()
        self._closed = False  # guarded by _lock
        # One for each request that is under way at the same time, kept for the next; guarded by _lock.
        self._idle: list[Connection] = [self._connect(None)]

    def __str__(self) -> str:
        return f"store tcp://{self.host}:{self.port}"

    def set(self, key: str, value: bytes, interrupt: Interrupt | None = None) -> None:
        encoded = check_key(key)
        check_value(key, value)
        self._ask(_REQUEST.pack(_SET, 0, len(encoded)) + encoded + value, 0.0, interrupt)

    def get(self, key: str, timeout: float, interrupt: Interrupt | None = None) -> bytes:
        encoded = check_key(key)
        deadline = time.monotonic() + timeout
        while True:
            remaining = max(0.0, deadline - time.monotonic())
            wait = min(_GET_SLICE, remaining)
            request = _REQUEST.pack(_GET, math.ceil(wait * 1000), len(encoded)) + encoded
            reply = self._ask(request, wait, interrupt)
            if reply[:1] == _OK:
                return reply[1:]
            if time.monotonic() >= deadline:
                raise no_such_key(key, str(self), timeout)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            while self._idle:
                self._idle.pop().close()

    def _connect(self, interrupt: Interrupt | None) -> Connection:
        deadline = time.monotonic() + self._connect_timeout
        while True:
            remaining = max(0.1, deadline - time.monotonic())
            try:
                return self._try_to_connect(remaining, remaining if interrupt is None else _CONNECT_SLICE)
            except (AuthenticationError, AssertionError) as error:
                raise UsageError(
                    f"the {self} does not know this job's secret: {self._refused_because}"
                ) from error
            except (OSError, EOFError) as error:
                if time.monotonic() >= deadline:
                    raise errors.TimeoutError(
                        f"the {self} cannot be reached within {self._connect_timeout:g} s "
                        f"({error or 'it hung up'}): check that rank 0 runs and that no firewall is between",
                        elapsed=self._connect_timeout,
                    ) from error
            if interrupt is not None:
                interrupt()
            time.sleep(_INTERRUPT_SECONDS)

    def _try_to_connect(self, timeout: float, connect_timeout: float) -> Connection:
        address = self.host, self.port
        with socket.create_connection(address, timeout=min(timeout, connect_timeout)) as sock:
            _limit_waits(sock, receive=min(timeout, _HANDSHAKE_SECONDS), send=_REPLY_GRACE)
            connection = _connection(sock)
            try:
                prove_to_server(connection, self._secret)
                _limit_waits(sock, receive=0.0, send=_REPLY_GRACE)
            except BaseException:
                connection.close()
                raise
            return connection

    def _await_reply(self, connection: Connection, wait: float, interrupt: Interrupt | None) -> None:
        """Returns when there is a reply to a request that the server answers after `wait` seconds at most."""
        extra = math.inf if self._answer_timeout is None else max(self._answer_timeout, _REPLY_GRACE)
        longest = wait + extra
        deadline = time.monotonic() + longest
        while not connection.poll(min(_INTERRUPT_SECONDS, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                raise OSError(f"no answer within {longest:g} s")
            if interrupt is not None:
                interrupt()

    def _ask(self, request: bytes, wait: float, interrupt: Interrupt | None) -> bytes:
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        connection = connection or self._connect(interrupt)
        try:
            connection.send_bytes(request)
            self._await_reply(connection, wait, interrupt)
            reply = connection.recv_bytes(_MAX_REPLY)
        except (OSError, EOFError) as error:
            connection.close()
            raise PeerLostError(
                f"the {self} is gone ({error or 'it hung up'}): the process that serves it, rank 0 or "
                "the launcher, has ended, or the network to it is cut; look at its output"
            ) from error
        except BaseException:
            connection.close()  # the reply to this request would be taken for the next one's
            raise
        with self._lock:
            if self._closed:
                connection.close()
            else:
                self._idle.append(connection)
        return reply

"""The TCP store among unauthenticated peers and failures."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection

import pytest

from multiring import errors
from multiring.errors import PeerLostError, UsageError
from multiring.store import TcpStore, TcpStoreServer, tcp
from multiring.store.handshake import prove_to_client, prove_to_server
from tests.support import held_port, no_new_descriptors

SECRET = b"a secret of the job"


@pytest.fixture
def server() -> Iterator[TcpStoreServer]:
    before = threading.active_count()
    with no_new_descriptors(), TcpStoreServer("127.0.0.1", 0, SECRET) as started:
        yield started
    assert threading.active_count() == before, "its threads end with it"


def connect(server: TcpStoreServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=30)


def read_to_the_end(sock: socket.socket) -> None:
    """Waits until the server has hung up, politely or not."""
    with contextlib.suppress(ConnectionResetError):
        while sock.recv(4096):
            pass


def assert_serves(server: TcpStoreServer) -> None:
    with TcpStore("127.0.0.1", server.port, SECRET) as store:
        store.set("key", b"value")
        assert store.get("key", 5.0) == b"value"


def test_an_interrupt_ends_waits_for_a_server_that_does_not_answer(
    server: TcpStoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after its host has vanished: ranks have to notice other things meanwhile."""

    def interrupt() -> None:
        raise LookupError("enough")

    goes_on = threading.Event()
    monkeypatch.setattr(server, "_answer", lambda request: b"\x01" if goes_on.wait(60) else b"\x00")
    with TcpStore("127.0.0.1", server.port, SECRET) as store:
        with pytest.raises(LookupError):
            store.set("key", b"value", interrupt)
        with pytest.raises(LookupError):
            store.get("key", 0.0, interrupt)
        goes_on.set()
        store.set("key", b"value")


@pytest.mark.parametrize(
    "greeting",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        struct.pack("!i", 20) + b"x" * 20,
        struct.pack("!i", -1) + struct.pack("!Q", 1 << 60),
    ],
)
def test_garbage_is_hung_up_on_and_harms_nobody(server: TcpStoreServer, greeting: bytes) -> None:
    with connect(server) as strange:
        strange.sendall(greeting)
        with contextlib.suppress(OSError):  # the server may have hung up already
            strange.shutdown(socket.SHUT_WR)
        read_to_the_end(strange)
    assert_serves(server)


def test_an_unauthenticated_peer_that_stays_is_dismissed(
    server: TcpStoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "_HANDSHAKE_SECONDS", 0.2)
    with connect(server) as strange:
        read_to_the_end(strange)
    assert_serves(server)


def test_a_flood_of_unauthenticated_peers_cannot_lock_out_a_rank(
    server: TcpStoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "_MAX_UNTRUSTED", 5)
    with TcpStore("127.0.0.1", server.port, SECRET) as store:
        store.set("first", b"")  # its answer says that the server takes it for a rank
        crowd = [connect(server) for _ in range(30)]
        assert_serves(server)
        for early in crowd[:20]:
            read_to_the_end(early)
        store.set("still", b"here")
        assert store.get("still", 5.0) == b"here"
        for one in crowd:
            one.close()


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"",
        b"\x01",  # the header is cut off
        b"\x09" + bytes(6),  # an unknown operation
        struct.pack("!BIH", 1, 0, 500) + b"short",  # the key is cut off
        struct.pack("!BIH", 2, 60_000, 5) + b"never",  # a wait, which its client leaves
    ],
)
def test_what_a_trusted_client_does_harms_nobody_else(server: TcpStoreServer, request_bytes: bytes) -> None:
    sock = connect(server)
    sock.settimeout(None)
    with Connection(sock.detach()) as connection:
        prove_to_server(connection, SECRET)
        connection.send_bytes(request_bytes)
        if not request_bytes.endswith(b"never"):
            with pytest.raises((EOFError, ConnectionError)):
                connection.recv_bytes()
    assert_serves(server)


def test_a_server_that_ends_is_a_lost_peer() -> None:
    server = TcpStoreServer("127.0.0.1", 0, SECRET)
    store = TcpStore("127.0.0.1", server.port, SECRET)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(store.get, "never", 60.0)
        time.sleep(0.05)  # either way the answer is the same; usually this hits the wait itself
        server.close()
        with pytest.raises(PeerLostError, match="is gone"):
            waiting.result()
    server.close()
    store.close()


def test_a_client_waits_for_a_server_that_starts_later() -> None:
    with held_port() as port, ThreadPoolExecutor(1) as threads:
        connecting = threads.submit(TcpStore, "127.0.0.1", port, SECRET)
        time.sleep(0.1)  # lets the first attempts fail; without it the test is easier, not wrong
        with TcpStoreServer("127.0.0.1", port, SECRET), connecting.result() as store:
            store.set("key", b"value")


def test_a_server_that_never_comes_or_says_nothing_is_a_timeout() -> None:
    with held_port() as port, socket.create_server(("127.0.0.1", 0)) as mute:
        for number in (port, mute.getsockname()[1]):
            with pytest.raises(errors.TimeoutError, match=f":{number} cannot be reached"):
                TcpStore("127.0.0.1", number, SECRET, connect_timeout=0.2)


def test_a_port_in_use_is_a_usage_error(server: TcpStoreServer) -> None:
    with pytest.raises(UsageError, match="cannot listen"):
        TcpStoreServer("127.0.0.1", server.port, SECRET)


def test_one_client_serves_several_threads(server: TcpStoreServer) -> None:
    with TcpStore("127.0.0.1", server.port, SECRET) as store, ThreadPoolExecutor(4) as threads:
        waits = [threads.submit(store.get, f"key-{n}", 30.0) for n in range(3)]
        for n in range(3):
            store.set(f"key-{n}", b"%d" % n)
        assert [wait.result() for wait in waits] == [b"0", b"1", b"2"]


def test_a_thread_that_cannot_be_started_costs_one_connection_only(
    server: TcpStoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        if threading.current_thread().name == "multiring-store":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail)
    with connect(server) as refused:
        read_to_the_end(refused)
    monkeypatch.undo()
    assert_serves(server)
    server.close()


class Relay:
    """Knows no secret, and lets two who do answer each other."""

    def __init__(self) -> None:
        self.pairs = [socket.socketpair() for _ in range(2)]
        self.victims = [Connection(mine.detach()) for mine, _ in self.pairs]
        self.own = [Connection(theirs.detach()) for _, theirs in self.pairs]


def test_what_one_client_answers_is_no_proof_for_another() -> None:
    relay = Relay()
    with ThreadPoolExecutor(2) as threads:
        proofs = [threads.submit(prove_to_server, victim, SECRET) for victim in relay.victims]
        for own in relay.own:
            own.send_bytes(b"multiring store 1 " + bytes(32))
        first, second = (own.recv_bytes() for own in relay.own)
        relay.own[0].send_bytes(second[32:])  # the other's proof
        relay.own[1].send_bytes(first[32:])
        for proof in proofs:
            with pytest.raises(AuthenticationError):
                proof.result(20)


def test_a_proof_does_not_hold_for_another_connection() -> None:
    first, second = Relay(), Relay()
    with ThreadPoolExecutor(3) as threads:
        server = threads.submit(prove_to_client, first.victims[0], SECRET)
        client = threads.submit(prove_to_server, second.victims[0], SECRET)
        second.own[0].send_bytes(first.own[0].recv_bytes())
        answer = second.own[0].recv_bytes()
        first.own[0].send_bytes(answer)
        second.own[0].send_bytes(first.own[0].recv_bytes())
        server.result(20)
        client.result(20)
        late = threads.submit(prove_to_client, first.victims[1], SECRET)
        first.own[1].send_bytes(answer)
        with pytest.raises(AuthenticationError):
            late.result(20)

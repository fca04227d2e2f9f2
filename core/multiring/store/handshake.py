"""Both ends of a store's connection prove that they know the job's secret, before anything else is read.

Unlike the challenge of `multiprocessing.connection`, a proof holds for one role and both ends' numbers: what
one client answers is no server's proof for another, so nobody who lacks the secret passes for the store.

    server: greeting, 32 random bytes
    client: 32 random bytes, HMAC-SHA256 of "client" and both numbers by the secret
    server: HMAC-SHA256 of "server" and both numbers; or a refusal
"""

from __future__ import annotations

import hmac
import secrets
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection

__all__ = ["prove_to_client", "prove_to_server"]

_GREETING = b"multiring store 1 "
_REFUSAL = b"refused"
_NUMBER_BYTES = 32
_MAX_BYTES = 256


def prove_to_client(connection: Connection, secret: bytes) -> None:
    """The server's part.

    Raises:
        AuthenticationError: The client has another secret, or is something else.
        OSError, EOFError: It has hung up.
    """
    ours = secrets.token_bytes(_NUMBER_BYTES)
    connection.send_bytes(_GREETING + ours)
    answer = connection.recv_bytes(_MAX_BYTES)
    theirs, proof = answer[:_NUMBER_BYTES], answer[_NUMBER_BYTES:]
    if not hmac.compare_digest(proof, _proof(secret, b"client", ours, theirs)):
        connection.send_bytes(_REFUSAL)
        raise AuthenticationError("the client has another secret")
    connection.send_bytes(_proof(secret, b"server", ours, theirs))


def prove_to_server(connection: Connection, secret: bytes) -> None:
    """The client's part.

    Raises:
        AuthenticationError: The server has another secret, or is something else.
        OSError, EOFError: It has hung up.
    """
    greeting = connection.recv_bytes(_MAX_BYTES)
    theirs = greeting.removeprefix(_GREETING)
    if not greeting.startswith(_GREETING) or len(theirs) != _NUMBER_BYTES:
        raise AuthenticationError("what answers is no store")
    ours = secrets.token_bytes(_NUMBER_BYTES)
    connection.send_bytes(ours + _proof(secret, b"client", theirs, ours))
    if not hmac.compare_digest(connection.recv_bytes(_MAX_BYTES), _proof(secret, b"server", theirs, ours)):
        raise AuthenticationError("the server has another secret")


def _proof(secret: bytes, role: bytes, of_server: bytes, of_client: bytes) -> bytes:
    return hmac.digest(secret, role + of_server + of_client, "sha256")

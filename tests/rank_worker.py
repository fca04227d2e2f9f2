"""One rank of a `RankPool`: does what the pool asks until the pool is gone."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import os
import pickle
import signal
import socket
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

import multiring
from multiring import errors, initialization
from tests.rank_pool import UnpicklableError
from tests.support import pretend_places


def main() -> None:
    """Joins the pool at the address in argv[1]."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the pool asks for stacks when a rank is late
    client = socket.socket(socket.AF_UNIX)
    client.connect(sys.argv[1])
    connection = Connection(client.detach())
    _send(connection, (int(os.environ["MULTIRING_RANK"]), os.getpid()))
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            _send(connection, _obey(pickle.loads(connection.recv_bytes())))
    multiring.shutdown()
    # As at any exit, but without the time that it takes to free every module of a framework.
    atexit._run_exitfuncs()
    os._exit(0)


def _send(connection: Connection, message: Any) -> None:
    connection.send_bytes(pickle.dumps(message))


def _obey(request: dict[str, Any]) -> dict[str, Any]:
    if request["kind"] == "join":
        return _attempt(lambda: _join(**request["place"]))

    if request["kind"] == "load":
        sys.path[:] = request["path"]
        answer = _attempt(lambda: importlib.import_module(request["module"]))
        return _portable({**answer, "value": None})  # modules cannot be sent

    def call() -> Any:
        function, args, kwargs = pickle.loads(request["call"])
        try:
            return function(multiring.world(), *args, **kwargs)
        finally:
            for value in kwargs.values():  # a MonkeyPatch is undone where it has patched
                getattr(value, "undo", lambda: None)()

    answer = _attempt(call)
    if request["abort"] and isinstance(answer["error"], Exception):
        # Without this the other ranks would wait for this one until the deadline.
        _abort(answer["error"])
    # Queues and derived communicators may be broken where the world is not.
    failed = isinstance(answer["error"], errors.MultiringError)
    answer["broken"] = failed or not multiring.is_initialized() or multiring.world().is_broken
    return _portable(answer)


def _attempt(call: Any) -> dict[str, Any]:
    """The outcome of a call: value, error and its traceback."""
    answer: dict[str, Any] = {"value": None, "error": None, "trace": "", "broken": False}
    try:
        answer["value"] = call()
    except Exception as error:
        answer["error"] = error
        answer["trace"] = traceback.format_exc()
    return answer


def _portable(answer: dict[str, Any]) -> dict[str, Any]:
    """The same answer with what cannot be pickled replaced by an error that says so."""
    if answer["error"] is not None:
        answer["error"] = answer["error"].with_traceback(None)
        answer["error"].__cause__ = answer["error"].__context__ = None
    try:
        pickle.loads(pickle.dumps(answer))
    except Exception as failure:
        what = "error" if answer["error"] is not None else "value"
        rank = os.environ["MULTIRING_RANK"]
        text = f"the {what} of rank {rank} cannot be sent: {failure!r}\n{answer['trace']}"
        answer |= {"value": None, "error": UnpicklableError(text), "trace": text}
    return answer


def _abort(error: Exception) -> None:
    if isinstance(error, errors.MultiringError) and not isinstance(error, errors.UsageError):
        return  # the communicator is broken already and the others know
    with contextlib.suppress(errors.MultiringError):
        multiring.world().abort(f"test function failed: {error!r}")


def _join(rank: int, size: int, hosts: int, number: int) -> None:
    """Leaves the world, if there is one, for one of so many ranks on as many pretended hosts."""
    with contextlib.suppress(errors.MultiringError):
        multiring.shutdown()
    for variable in ("MULTIRING_RANK", "RANK", "LOCAL_RANK"):
        os.environ[variable] = str(rank)
    for variable in ("MULTIRING_SIZE", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ[variable] = str(size)
    os.environ.pop("MULTIRING_HOST", None)
    pretend_places([rank % hosts for rank in range(size)])
    # Ranks of a job call `init` equally often. Those of this one may come from different worlds before, whose
    # tests may have called it as well.
    initialization._generation = 1000 * number
    multiring.init()


if __name__ == "__main__":
    main()

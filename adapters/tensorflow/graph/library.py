"""The native library with the ops, and the queues that the ops submit to."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from multiring import _core, config
from multiring.derived import shared_queue
from multiring.error_text import address_for_native_code
from multiring.errors import InternalError, UsageError
from multiring.lazy import made_once
from multiring.log import announce

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = [
    "abort",
    "is_asynchronous",
    "native_library",
    "native_ops",
    "number_of",
    "on_host",
    "rank_and_size",
    "register_one_rank",
]

_NAME = "libmultiring_tensorflow.so"


class _Library:
    """The loaded library.

    Attributes:
        ops: Module with a function for each op.
        has_devices: Whether TensorFlow sees GPUs, whose tensors it copies to the host for the ops.
        is_asynchronous: Whether operations wait without holding one of TensorFlow's threads.
        native: It, by its functions of the C ABI.
        ranks: Rank and size by the number of each queue.
    """

    def __init__(self) -> None:
        # Beside the extension module in every kind of installation; sources may lie elsewhere.
        path = Path(_core.__file__).parent / "tensorflow" / _NAME
        if not path.exists():
            raise InternalError(f"{path} is missing: this installation of multiring is incomplete")
        self.has_devices = bool(tf.config.get_visible_devices("GPU"))
        self.ranks: dict[int, tuple[int, int]] = {}
        self.ops = tf.load_op_library(str(path))
        self.native = ctypes.CDLL(str(path))
        self.native.multiring_tensorflow_load_error.restype = ctypes.c_char_p
        self.native.multiring_tensorflow_register_queue.argtypes = [ctypes.c_void_p]
        self.native.multiring_tensorflow_register_queue.restype = ctypes.c_int64
        self.is_asynchronous = bool(self.native.multiring_tensorflow_is_asynchronous())
        if problem := self.native.multiring_tensorflow_load_error().decode():
            raise UsageError(f"multiring's ops cannot be used with TensorFlow {tf.__version__}: {problem}")

    def register(self, queue: Any) -> int:
        """Number under which graphs refer to a queue."""
        address = address_for_native_code(queue)
        number = int(self.native.multiring_tensorflow_register_queue(address))
        self.ranks[number] = queue.rank, queue.size
        return number


@made_once
def _library() -> _Library:
    return _Library()


_owners_lock = threading.Lock()  # of the numbers that stand for no queue

# Number of the queue of each communicator that has been used. The queue itself is held by the communicator,
# which it refers to.
_numbers: weakref.WeakKeyDictionary[Communicator, int] = weakref.WeakKeyDictionary()


def native_ops() -> Any:
    """Module with a function for each native op."""
    return _library().ops


def native_library() -> Any:
    """The native library by its functions of the C ABI."""
    return _library().native


def register_one_rank() -> int:
    """A number that stands for no queue: for operations that others carry out, which no thread owns."""
    with _owners_lock:
        number = min([0, *_library().ranks]) - 1
        _library().ranks[number] = 0, 1
    return number


def number_of(comm: Communicator) -> int:
    """Number under which graphs refer to the communicator's queue. Collective at the first call."""
    if comm not in _numbers:
        _tell_of_devices(comm)
        # Of two threads that come here at once, both register the one queue; one number is kept.
        _numbers.setdefault(comm, _library().register(shared_queue(comm, "tensorflow")))
    return _numbers[comm]


@functools.cache
def _announce_copies() -> None:
    announce(
        "TensorFlow has a GPU; gradients and other tensors of collectives pass through the host, for its "
        "interface for ops gives no stream of a GPU"
    )


def _tell_of_devices(comm: Communicator) -> None:
    if comm.rank == 0 and comm.size > 1 and _library().has_devices and not config.load().quiet:
        _announce_copies()


def on_host() -> Any:
    """Where ops run, and what they give lies: a context. TensorFlow copies tensors of GPUs there and back,
    with soft placement or without."""
    return tf.device("CPU:0") if _library().has_devices else contextlib.nullcontext()


def rank_and_size(number: int) -> tuple[int, int]:
    """Rank and size of the communicator with this number."""
    return _library().ranks[number]


def is_asynchronous() -> bool:
    """Whether operations wait without holding one of TensorFlow's threads."""
    return _library().is_asynchronous


def abort(number: int, message: str) -> None:
    """Make all operations of the communicator with this number fail, on all ranks."""
    for comm, known in list(_numbers.items()):
        if known == number:
            shared_queue(comm, "tensorflow").abort(message)

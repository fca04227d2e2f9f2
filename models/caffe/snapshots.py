"""Caffe's binary files: `.caffemodel` (a `NetParameter`) and `.solverstate` (a `SolverState`)."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from multiring.errors import UsageError
from multiring.models.caffe.blob import Array, Blob
from multiring.models.caffe.schema import NetParameter, SolverState, message
from multiring.models.errors import CheckpointError

__all__ = ["State", "read_blobs", "read_mean", "read_net", "read_state", "write_net", "write_state"]

BlobProto: Any = message("BlobProto")

# The field's number and type of wire: bytes with a length.
_FIELDS = {np.dtype(np.float32): ("data", 5 << 3 | 2), np.dtype(np.float64): ("double_data", 8 << 3 | 2)}


@dataclass(frozen=True)
class State:
    """What a `.solverstate` holds.

    Attributes:
        iteration: Updates done.
        current_step: Steps of the learning rate's "multistep" policy done.
        learned_net: Path of the `.caffemodel`.
        history: The solver's arrays.
    """

    iteration: int
    current_step: int
    learned_net: str
    history: list[Array]


def write_net(path: Path, name: str, layers: Sequence[tuple[Any, Sequence[Blob]]]) -> None:
    """Write layers, each a `LayerParameter` with its blobs; atomically."""
    net = NetParameter(name=name)
    for param, blobs in layers:
        layer = net.layer.add()
        layer.CopyFrom(param)
        layer.ClearField("blobs")
        for blob in blobs:
            layer.blobs.append(_pack(blob.data))
    _write(path, net.SerializeToString())


def read_net(path: Path) -> dict[str, list[Array]]:
    """Blobs of a `.caffemodel` by the names of their layers.

    Raises:
        CheckpointError: The file cannot be read or is none.
    """
    net = _read(path, NetParameter)
    if not net.layer:
        raise CheckpointError(
            f"{path} holds no layers; files of Caffe's format of 2014 have to be converted with its "
            "upgrade_net_proto_binary"
        )
    return {str(layer.name): [_unpack(path, blob) for blob in layer.blobs] for layer in net.layer}


def read_blobs(path: Path, params: Mapping[str, Sequence[Blob]]) -> list[tuple[Blob, Array]]:
    """Blobs of layers with the values that a `.caffemodel` has for layers of the same names.

    Raises:
        CheckpointError: The file cannot be read.
        UsageError: A layer's blobs have other shapes.
    """
    found = read_net(path)
    pairs: list[tuple[Blob, Array]] = []
    for name, blobs in params.items():
        arrays = found.get(name, [])
        if not arrays:
            continue
        shapes = [blob.shape for blob in blobs]
        if [array.shape for array in arrays] != shapes:
            legacy = [array.shape[-len(shape) :] for array, shape in zip(arrays, shapes, strict=False)]
            if len(arrays) != len(blobs) or legacy != shapes:
                raise UsageError(
                    f"layer {name!r} has blobs of shapes {shapes}, {path} has {[a.shape for a in arrays]}"
                )
        pairs += zip(blobs, arrays, strict=True)
    return pairs


def read_mean(path: Path) -> Array:
    """The mean image of a `.binaryproto`, as `compute_image_mean` writes it: shape (channels, height, width).

    Raises:
        CheckpointError: The file cannot be read or holds no image.
    """
    mean = _unpack(path, _read(path, BlobProto))
    mean = mean[0] if mean.ndim == 4 and len(mean) == 1 else mean
    if mean.ndim != 3:
        raise CheckpointError(f"{path} holds an array of shape {mean.shape}, not a mean image")
    return mean.astype(np.float32)


def write_state(path: Path, state: State) -> None:
    """Write a solver's state; atomically."""
    proto = SolverState(iter=state.iteration, learned_net=state.learned_net, current_step=state.current_step)
    for array in state.history:
        proto.history.append(_pack(array))
    _write(path, proto.SerializeToString())


def read_state(path: Path) -> State:
    """Read a solver's state.

    Raises:
        CheckpointError: The file cannot be read or is none.
    """
    proto = _read(path, SolverState)
    if not proto.HasField("iter"):
        raise CheckpointError(f"{path} is no solver state: it has no iteration")
    history = [_unpack(path, blob) for blob in proto.history]
    return State(proto.iter, proto.current_step, str(proto.learned_net), history)


def _pack(array: Array) -> Any:
    """The array as a `BlobProto`. Its bytes are put on the wire as they are: element by element would take
    seconds for a large net."""
    proto = BlobProto()
    proto.shape.dim.extend(array.shape)
    _, tag = _FIELDS[array.dtype]
    data = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    if data:
        proto.MergeFromString(bytes([tag]) + _varint(len(data)) + data)
    return proto


def _varint(value: int) -> bytes:
    result = bytearray()
    while value > 127:
        result.append(value & 127 | 128)
        value >>= 7
    result.append(value)
    return bytes(result)


def _unpack(path: Path, proto: Any) -> Array:
    values = proto.double_data or proto.data
    dtype = np.float64 if len(proto.double_data) else np.float32
    if proto.HasField("shape"):
        shape = tuple(proto.shape.dim)
    else:
        shape = (proto.num, proto.channels, proto.height, proto.width)
    if math.prod(shape) != len(values):
        raise CheckpointError(f"{path} is damaged: {len(values)} values for a blob of shape {shape}")
    return np.fromiter(values, dtype, len(values)).reshape(shape)


def _read(path: Path, kind: Any) -> Any:
    proto = kind()
    try:
        proto.ParseFromString(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    except DecodeError as error:
        raise CheckpointError(f"{path} is damaged or no file of Caffe's: {error}") from error
    return proto


def _write(path: Path, data: bytes) -> None:
    """Write beside the target and rename: a reader finds the old file or the new one."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

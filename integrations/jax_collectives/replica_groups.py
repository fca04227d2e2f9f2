"""Which devices communicate in a compiled program, as its text (HLO) says."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from multiring.errors import UsageError

__all__ = ["communicating_devices"]

_GROUPS = re.compile(r"\breplica_groups=(.*)")
# The three forms of xla/hlo/ir/replica_group.cc: {{0,1},{2,3}}; [2,2]<=[4] and [2,2]<=[2,2]T(1,0);
# mesh['x'=2,'y'=2] {'x'}, where a part of an axis is 'x':(1)2, and devices in another order than by their
# numbers come before the axes as device_ids=(...).
_LISTED = re.compile(r"\{\s*(\{[^{}]*\}(?:\s*,\s*\{[^{}]*\})*)?\s*\}")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"@?mesh\[([^\]]*)\](?:,\s*device_ids=\(([^)]*(?:T\([\d,]+\))?)\))?\s*\{([^}]*)\}")
_AXIS_SIZES = re.compile(r"([^,]+)=(\d+)")
_PART_OF_AXIS = re.compile(r"(.+):\((\d+)\)(\d+)")

Devices = tuple[int, ...]


def communicating_devices(text: str, assignment: NDArray[np.int64], device: int) -> list[Devices]:
    """Return the groups of devices in which a device communicates when a program runs.

    Args:
        text: The optimised program.
        assignment: Number of the device of each replica and partition, shape (replicas, partitions).
        device: Number of the device.

    Returns:
        Each group once, as the numbers of its devices in the order in which XLA numbers them.

    Raises:
        UsageError: The text says it in a way that is not known.
    """
    replica, partition = (int(index[0]) for index in np.nonzero(assignment == device))
    found: dict[Devices, None] = {}
    for line in text.splitlines():
        line = line.partition(", metadata={")[0]  # names that the program chooses
        if (groups := _groups_of(line)) is not None:
            found[_members(groups, _mode_of(line), assignment, (replica, partition))] = None
    return list(found)


def _groups_of(line: str) -> list[list[int]] | None:
    """Return the groups of replicas, partitions or both that a line names.

    None means that the line has no collective; an empty list stands for one group of all.
    """
    if (match := _GROUPS.search(line)) is not None:
        return _parse(match[1])
    # A permutation names pairs; all of its participants share one communicator.
    return [] if "source_target_pairs=" in line else None


def _parse(text: str) -> list[list[int]]:
    if (listed := _LISTED.match(text)) is not None:
        return [_numbers(group) for group in re.findall(r"\{([^{}]*)\}", listed[1] or "")]
    if (iota := _IOTA.match(text)) is not None:
        return _rows(_iota(iota))
    if (mesh := _MESH.match(text)) is not None:
        return _rows(_groups_of_mesh(*mesh.groups()))
    raise UsageError(
        f"multiring does not understand how this version of JAX names groups of devices: {text[:80]!r}. "
        "Update multiring, or set JAX_CPU_COLLECTIVES_IMPLEMENTATION=gloo to run without it"
    )


def _rows(groups: NDArray[np.int64]) -> list[list[int]]:
    return [list(map(int, row)) for row in groups]


def _iota(form: re.Match[str]) -> NDArray[np.int64]:
    shape, dims, order = (_numbers(part or "") for part in form.groups())
    numbers = np.arange(np.prod(dims)).reshape(dims)
    return (numbers.transpose(order) if order else numbers).reshape(shape)


def _groups_of_mesh(mesh: str, device_ids: str | None, grouped: str) -> NDArray[np.int64]:
    """Return the groups of devices that differ along the named axes, or parts of axes, alone."""
    sizes = {name: int(size) for name, size in _AXIS_SIZES.findall(",".join(_names(mesh)))}
    parts = []  # of the named axes: name, product of the sizes before the part, size of the part
    for axis in _names(grouped):
        part = _PART_OF_AXIS.fullmatch(axis)
        parts.append((part[1], int(part[2]), int(part[3])) if part else (axis, 1, sizes[axis]))
    # Each axis is split where parts of it begin and end.
    shape: list[int] = []
    index: dict[tuple[str, int], int] = {}
    for name, size in sizes.items():
        cuts = {1, size} | {
            cut for each, before, of_it in parts if each == name for cut in (before, before * of_it)
        }
        ends = sorted(cuts)
        for begin, end in zip(ends, ends[1:] or ends, strict=False):
            index[name, begin] = len(shape)
            shape.append(end // begin)
    axes = [index[name, before] for name, before, _ in parts]
    numbers = _device_ids(device_ids, math.prod(shape)).reshape(shape)
    others = [axis for axis in range(len(shape)) if axis not in axes]
    return numbers.transpose([*others, *axes]).reshape(-1, math.prod(size for *_, size in parts))


def _device_ids(text: str | None, count: int) -> NDArray[np.int64]:
    if text is None:
        return np.arange(count)
    iota = _IOTA.match(text)
    return _iota(iota).ravel() if iota is not None else np.array(re.findall(r"\d+", text), np.int64)


def _names(text: str) -> list[str]:
    return [name.strip().replace("'", "").replace('"', "") for name in text.split(",") if name.strip()]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number.strip()]


def _mode_of(line: str) -> str:
    """Return what the numbers of a collective's groups count (xla/service/collective_ops_utils.h)."""
    if "channel_id=" not in line:
        return "replicas"
    if "use_global_device_ids=true" in line:
        return "both"
    # These two have no attribute for it.
    is_partitions = re.search(r" (all-to-all|collective-permute)(-start)?\(", line) is not None
    return "partitions" if is_partitions else "replicas, all partitions"


def _members(
    groups: Sequence[Sequence[int]], mode: str, assignment: NDArray[np.int64], place: tuple[int, int]
) -> Devices:
    """Return the devices of the group that a place, as (replica, partition), belongs to."""
    replica, partition = place
    replicas, partitions = assignment.shape
    if mode == "both":
        return _at(assignment.ravel(), groups, replica * partitions + partition)
    if mode == "partitions":
        return _at(assignment[replica], groups, partition)
    if mode == "replicas":
        return _at(assignment[:, partition], groups, replica)
    rows = _at(np.arange(replicas), groups, replica)
    return tuple(int(number) for row in rows for number in assignment[row])


def _at(devices: NDArray[np.int64], groups: Sequence[Sequence[int]], index: int) -> Devices:
    group: Iterator[int] | range = iter(next((each for each in groups if index in each), ()))
    if not groups:
        group = range(len(devices))
    return tuple(int(devices[number]) for number in group)

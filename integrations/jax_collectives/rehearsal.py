"""Groups of devices are made known to the native library before a program uses them.

XLA asks MPI for a communicator (`MPI_Comm_split`) when a program first communicates in a group of devices. It
passes the group's first device and this rank's index in it, which several groups have in common: rank 0 of a
2 x 2 mesh has index 0 of its row, of its column, and of the whole mesh. So each group gets its communicator
from a program of our own, compiled for this group alone, which runs before the user's. XLA keeps
communicators by their groups, and the user's program finds them there.

The small program runs on this rank alone: its allreduce returns at once. Nothing is asked of other ranks,
which may never compile the user's program.
"""

from __future__ import annotations

import ctypes
import functools
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxlib import xla_client

from multiring.errors import InternalError, UsageError
from multiring.jax_collectives.replica_groups import communicating_devices

__all__ = ["Rehearsals"]

# One allreduce over all replicas, of a value that the compiler does not know.
_PROGRAM = """
module @multiring_group attributes {{mhlo.num_replicas = {count} : i32, mhlo.num_partitions = 1 : i32}} {{
  func.func public @main() -> tensor<ui32> {{
    %index = stablehlo.replica_id : tensor<ui32>
    %result = "stablehlo.all_reduce"(%index) <{{
        replica_groups = dense<[{indices}]> : tensor<1x{count}xi64>}}> ({{
    ^bb0(%a: tensor<ui32>, %b: tensor<ui32>):
      %larger = stablehlo.maximum %a, %b : tensor<ui32>
      stablehlo.return %larger : tensor<ui32>
    }}) : (tensor<ui32>) -> tensor<ui32>
    return %result : tensor<ui32>
  }}
}}
"""
# Methods of JAX's client that return a program which can run. Their second argument is its devices.
_LOADING = ("compile_and_load", "deserialize_executable")
_REPLICAS = re.compile(r"\breplica_count=(\d+)")


class Rehearsals:
    """The groups of devices that have a communicator on this rank.

    Args:
        native: The library with `multiring_mpi_begin_rehearsal`.
        rank: Number of this process.
    """

    def __init__(self, native: ctypes.CDLL, rank: int) -> None:
        self._native = native
        self._rank = rank
        self._lock = threading.Lock()
        self._known: set[tuple[int, ...]] = set()
        self._compile: Callable[..., Any] = xla_client.Client.compile_and_load

    def watch_client(self) -> None:
        """Prepare the groups of each program that JAX compiles, or loads, from now on in this process."""
        for name in _LOADING:
            method = getattr(xla_client.Client, name)
            setattr(xla_client.Client, name, self._preparing(getattr(method, "__wrapped__", method)))
            if name == "compile_and_load":
                self._compile = getattr(method, "__wrapped__", method)

    def _preparing(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(client: Any, program: Any, *args: Any, **options: Any) -> Any:
            loaded = method(client, program, *args, **options)
            devices = options["executable_devices"] if "executable_devices" in options else args[0]
            if client.platform == "cpu":
                self._prepare(client, loaded, list(devices))
            return loaded

        return call

    def _prepare(self, client: Any, program: Any, devices: Sequence[Any]) -> None:
        mine = [device.id for device in devices if device.process_index == self._rank]
        text = program.get_hlo_text()
        if not mine or not ("replica_groups=" in text or "source_target_pairs=" in text):
            return
        self._check_one_device_a_process(devices)
        by_id = {device.id: device for device in devices}
        replicas = _REPLICAS.search(text.partition("\n")[0])
        numbers = np.array([device.id for device in devices], np.int64)
        assignment = numbers.reshape(int(replicas[1]) if replicas else 1, -1)
        groups = communicating_devices(text, assignment, mine[0])
        with self._lock:
            for group in groups:
                if group and group not in self._known:
                    self._rehearse(client, [by_id[number] for number in group])
                    self._known.add(group)

    def _check_one_device_a_process(self, devices: Sequence[Any]) -> None:
        processes = [device.process_index for device in devices]
        crowded = next((process for process in processes if processes.count(process) > 1), None)
        if crowded is not None:
            raise UsageError(
                f"process {crowded} has {processes.count(crowded)} CPU devices: JAX's collectives over "
                "multiring take one device a process. Start as many processes as there are devices, and "
                "remove --xla_force_host_platform_device_count from XLA_FLAGS, or jax_num_cpu_devices"
            )

    def _rehearse(self, client: Any, members: Sequence[Any]) -> None:
        """Run a program whose only communicator is that of a group."""
        count = len(members)
        if count == 1:
            self._native.multiring_mpi_expect_alone(members[0].id)
            return
        options = xla_client.CompileOptions()
        options.num_replicas, options.num_partitions = count, 1
        numbers = np.array([device.id for device in members])
        options.device_assignment = xla_client.DeviceAssignment.create(numbers.reshape(count, 1))
        text = _PROGRAM.format(count=count, indices=list(range(count)))
        program = self._compile(
            client, text.encode(), executable_devices=list(members), compile_options=options
        )
        ranks = (ctypes.c_int * count)(*(device.process_index for device in members))
        self._native.multiring_mpi_begin_rehearsal(ranks, count, members[0].id)
        try:
            for array in program.execute_sharded([]).disassemble_into_single_device_arrays():
                for part in array:
                    part.block_until_ready()
        finally:
            is_made = self._native.multiring_mpi_end_rehearsal()
        if not is_made:
            raise InternalError(
                f"JAX has made no communicator for the devices {[device.id for device in members]}: report "
                "this, with the version of JAX; JAX_CPU_COLLECTIVES_IMPLEMENTATION=gloo runs without "
                "multiring"
            )

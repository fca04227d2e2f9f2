"""`run`: a function on every rank of a job, each rank an actor of Ray."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypedDict, Unpack

import ray
from multiring import config, errors
from multiring.commands.launcher.binding import thread_environment
from multiring.commands.launcher.hosts import HostSlots, RankSlot, assign_slots
from multiring.commands.launcher.rank_starter import placement_variables
from multiring.errors import MultiringError, UsageError
from multiring.ray.outcome import gather
from multiring.ray.worker import Location, Worker
from multiring.reductions import explain_arguments
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

__all__ = ["run"]


class ResourceKeywords(TypedDict, total=False):
    """What Ray sets aside for a rank."""

    cpus_per_worker: float
    gpus_per_worker: float


@explain_arguments
def run(
    fn: Callable[..., Any],
    num_workers: int,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    start_timeout: float = 60.0,
    **resources: Unpack[ResourceKeywords],
) -> list[Any]:
    """Calls `fn(*args, **kwargs)` on every rank of a job of `num_workers` ranks and returns what the ranks
    return, in the order of the ranks.

    Ranks are placed on as few nodes as possible, those of a node have consecutive numbers, and
    `multiring.init()` in `fn` finds its place as under `multiring run`. The ranks leave the job when `fn`
    returns. Where Ray is not initialised, it is, by `ray.init()`, and shut down in the end.

    Args:
        fn: What to call; whatever Ray can send, a function of the main script, too.
        num_workers: Number of ranks.
        args: Arguments of `fn`.
        kwargs: Arguments of `fn` by name.
        env: Environment variables of the ranks, besides the MULTIRING_ settings of this process.
        timeout: Seconds that `fn` may take; None: any.
        start_timeout: Seconds to wait for resources, and then for the processes.
        resources: What Ray sets aside for a rank: `cpus_per_worker`, processors (1), so many threads it is
            told to use; and `gpus_per_worker` (0), GPUs, it sees no others.

    Raises:
        UsageError: An argument is wrong, or Ray, started by this call, has not so many resources.
        TimeoutError: The resources or processes were not there, or `fn` did not return, in time.
        RankError: `fn` raised an exception on a rank, or the rank's process died; the others are ended.
    """
    cpus_per_worker, gpus_per_worker = (
        resources.get("cpus_per_worker", 1),
        resources.get("gpus_per_worker", 0),
    )
    own = _checked_environment(num_workers, cpus_per_worker, gpus_per_worker, env or {})
    threads = thread_environment(max(1, math.ceil(cpus_per_worker)), 1, own)
    bundle = {"CPU": cpus_per_worker, "GPU": gpus_per_worker}
    bundle = {name: count for name, count in bundle.items() if count}
    with (
        _initialised(num_workers, bundle),
        _placed(num_workers, bundle, start_timeout) as group,
        _started(group, num_workers, bundle) as actors,
    ):
        found = _ready(actors, "location", start_timeout)
        order = _by_node(found)
        workers, locations = [actors[index] for index in order], [found[index] for index in order]
        (meeting,) = _ready(workers[:1], "serve", start_timeout)
        meeting["MULTIRING_JOB_ID"] = secrets.token_hex(8)
        environments = [
            # A node is a host, also where several are on one machine.
            {
                "MULTIRING_HOST": location.node,
                **threads,
                **own,
                **meeting,
                **placement_variables(rank, num_workers, slot),
            }
            for rank, (location, slot) in enumerate(zip(locations, _slots(locations), strict=True))
        ]
        _ready(workers, "prepare", start_timeout, environments)
        # Once for all ranks.
        what = [ray.put(fn), ray.put(tuple(args)), ray.put(dict(kwargs or {}))]
        return gather([worker.run.remote(*what) for worker in workers], locations, timeout)


def _checked_environment(
    num_workers: int, cpus: float, gpus: float, env: Mapping[str, str]
) -> dict[str, str]:
    """The variables that ranks get from here.

    Raises:
        UsageError: An argument is wrong.
    """
    if num_workers < 1:
        raise UsageError(f"num_workers={num_workers}: give at least 1")
    if cpus < 0 or gpus < 0 or not (cpus or gpus):
        raise UsageError(
            f"cpus_per_worker={cpus:g}, gpus_per_worker={gpus:g}: give no negative number, and not 0 for both"
        )
    names = [variable.name for variable in config.VARIABLES if not variable.set_by_launcher]
    own = {name: os.environ[name] for name in names if name in os.environ}
    own |= env
    config.load(own)
    return own


@contextlib.contextmanager
def _initialised(num_workers: int, bundle: Mapping[str, float]) -> Iterator[None]:
    if ray.is_initialized():
        yield
        return
    try:
        ray.init(address="auto")  # what RAY_ADDRESS names, or a cluster that this machine is part of
        here = False
    except ConnectionError:
        if os.environ.get("RAY_ADDRESS"):
            raise
        ray.init(address="local", include_dashboard=False)
        here = True
    try:
        # A cluster may grow, this machine does not.
        total = ray.cluster_resources()
        if here and any(total.get(name, 0) < count * num_workers for name, count in bundle.items()):
            raise UsageError(_too_much(num_workers, bundle))
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _placed(num_workers: int, bundle: Mapping[str, float], timeout: float) -> Iterator[PlacementGroup]:
    group = placement_group([dict(bundle)] * num_workers, strategy="PACK")
    try:
        if not group.wait(math.ceil(timeout)):
            raise errors.TimeoutError(
                f"{_too_much(num_workers, bundle)}; waited {timeout:g} s (start_timeout)", elapsed=timeout
            )
        yield group
    finally:
        with contextlib.suppress(Exception):  # what went wrong before says more
            remove_placement_group(group)


def _too_much(num_workers: int, bundle: Mapping[str, float]) -> str:
    total, free = ray.cluster_resources(), ray.available_resources()
    wanted = " and ".join(f"{count:g} {name}" for name, count in bundle.items())
    there = ", ".join(f"{total.get(name, 0):g} {name}, {free.get(name, 0):g} of them free" for name in bundle)
    return (
        f"Ray has no room for {num_workers} workers of {wanted} each: the cluster has {there}. Ask for fewer "
        "workers or less for each (cpus_per_worker), or add nodes"
    )


@contextlib.contextmanager
def _started(group: PlacementGroup, num_workers: int, bundle: Mapping[str, float]) -> Iterator[list[Any]]:
    """The actors; they are killed in the end, whatever they are doing."""
    actors: list[Any] = []
    try:
        for index in range(num_workers):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            options = {"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0)}
            actors.append(ray.remote(Worker).options(**options, scheduling_strategy=strategy).remote())
        yield actors
    finally:
        for actor in actors:
            with contextlib.suppress(Exception):  # or the others would go on
                ray.kill(actor)


def _ready(
    workers: Sequence[Any], method: str, timeout: float, arguments: Sequence[Any] | None = None
) -> list[Any]:
    """What a method of the workers, each with an argument of its own, returns.

    Raises:
        TimeoutError: A worker has not started in time.
        MultiringError: A worker cannot start.
    """
    given = [()] * len(workers) if arguments is None else [(argument,) for argument in arguments]
    calls = [getattr(worker, method).remote(*own) for worker, own in zip(workers, given, strict=True)]
    _, late = ray.wait(calls, num_returns=len(calls), timeout=timeout)
    if late:
        raise errors.TimeoutError(
            f"{len(late)} of {len(calls)} workers have not started within {timeout:g} s (start_timeout): "
            "look at their output in /tmp/ray/session_latest/logs of their nodes",
            elapsed=timeout,
        )
    try:
        return list(ray.get(calls))
    except RayError as error:
        last = (str(error).strip().splitlines() or ["no message"])[-1].strip()
        raise MultiringError(
            f"a worker cannot start: {last}. multiring has to be installed on every node, in the same version"
        ) from error


def _by_node(locations: Sequence[Location]) -> list[int]:
    """Indices of locations, those on the same node next to each other."""
    nodes = dict.fromkeys(location.node for location in locations)
    return [index for node in nodes for index, location in enumerate(locations) if location.node == node]


def _slots(locations: Sequence[Location]) -> list[RankSlot]:
    counts = Counter(location.node for location in locations)
    return assign_slots([HostSlots(node, count) for node, count in counts.items()], None)

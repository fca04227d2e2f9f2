"""`multiring tune`: measures the algorithms of allreduces across hosts, by size, and keeps the best."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import multiring
from multiring import _core as native
from multiring import config, units
from multiring.commands.argument_types import ITEM, array_sizes, wall_seconds
from multiring.commands.doctor import links
from multiring.communicator import Communicator
from multiring.errors import UsageError
from multiring.rendezvous import launch_environment
from multiring.tuning.measure import Measured, classes_of, measure
from multiring.tuning.table import AUTO, OFF, ROUNDS, Tuning, ranks_of_hosts

__all__ = ["add_arguments", "main"]

DEFAULT_SIZES = [1024 * 4**power for power in range(9)]
_MAX_PAIRS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `multiring tune`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        "It is a job itself: start it on the hosts, and with as many ranks on each, as the jobs that are to\n"
        "use what it finds. Nothing else should be running there.\n\n"
        "  multiring run -H node0:4,node1:4 -m multiring tune\n"
        "  MULTIRING_TUNING=~/.cache/multiring/tuning-2x4.json multiring run -H node0:4,node1:4 train.py"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="what to write, on the host of rank 0 [~/.cache/multiring/tuning-HOSTSxRANKS.json]",
    )
    parser.add_argument(
        "--sizes",
        type=array_sizes,
        default=DEFAULT_SIZES,
        metavar="LIST",
        help="bytes to reduce, as 4K,1M,64M [1K to 64M in powers of four]",
    )
    parser.add_argument(
        "--seconds",
        type=wall_seconds,
        default=60.0,
        metavar="S",
        help="time for all sizes together, about; of slow networks the largest sizes are left out [60]",
    )


def main(args: argparse.Namespace) -> int:
    """Measures, prints and writes, as a rank of a job.

    Raises:
        UsageError: This is no job on several hosts, a mode is forced, or the file cannot be written.
    """
    if launch_environment.detect().launcher == "none":
        raise UsageError(
            "`multiring tune` measures as a job on the hosts it is for: "
            "multiring run -H node0:4,node1:4 -m multiring tune"
        )
    if mode := config.load().mode:
        raise UsageError(f"MULTIRING_MODE={mode} leaves nothing to choose: unset it for `multiring tune`")
    if (links := config.load().host_links) != "switch":
        raise UsageError(f"MULTIRING_HOST_LINKS={links} leaves nothing to choose: see docs/tuning.md")
    # The file that is to be replaced may be of another cluster, and need not be there.
    os.environ["MULTIRING_TUNING"] = OFF
    comm = multiring.init()
    try:
        if comm.cross_size == 1:
            raise UsageError(
                f"all {comm.size} ranks are on one host, where no plan is used: "
                "multiring run -H node0:4,node1:4 -m multiring tune"
            )
        _tune(comm, args)
        return 0
    finally:
        multiring.shutdown()


def _tune(comm: Communicator, args: argparse.Namespace) -> None:
    ranks = ranks_of_hosts(comm._core.hosts)
    path = (args.output or _default_path(Tuning(ranks, ()))).absolute()
    _require_writable(comm, path)
    say = _say if comm.rank == 0 else _be_silent
    rate, latency = _measure_link(comm)
    say(f"{Tuning(ranks, ()).layout} (hosts x ranks): {units.rate_text(rate)}, {units.seconds_text(latency)}")
    measured = measure(comm, sorted(args.sizes), args.seconds, say)
    if comm.rank == 0:
        tuning = Tuning(ranks, classes_of(measured, comm.size))
        predicted = [_predict(comm._core.hosts, ranks, rate, latency, each) for each in measured]
        print(_table(measured, predicted, tuning))
        _write(path, tuning, measured, predicted)
        print(f"\nwritten: {path}\nto use it, on every host: export MULTIRING_TUNING={path}", flush=True)
    comm.barrier()


def _default_path(tuning: Tuning) -> Path:
    return Path.home() / ".cache" / "multiring" / f"tuning-{tuning.layout}.json"


def _require_writable(comm: Communicator, path: Path) -> None:
    """All ranks raise what rank 0 finds, before anything is measured."""
    wrong = ""
    if comm.rank == 0:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                wrong = "it is a directory"
            elif not os.access(path.parent, os.W_OK | os.X_OK):
                wrong = f"{path.parent} cannot be written to"
        except OSError as error:
            wrong = str(error)
    if wrong := comm.broadcast_object(wrong):
        raise UsageError(f"{path} cannot be written on the host of rank 0: {wrong}; name another --output")


def _measure_link(comm: Communicator) -> tuple[float, float]:
    """Bytes per second and latency of the slowest pair of neighbouring hosts."""
    hosts = comm._core.hosts
    first = [hosts.index(host) for host in dict.fromkeys(hosts)]
    own: list[tuple[float, float]] = []
    for sender, receiver in list(pairwise(first))[:_MAX_PAIRS]:
        if comm.rank == sender:
            own.append(links.probe(comm, receiver))
        elif comm.rank == receiver:
            links.answer(comm, sender)
        comm.barrier()
    pairs = [pair for found in comm.allgather_object(own) for pair in found]
    return min(rate for rate, _ in pairs), max(latency for _, latency in pairs)


def _predict(
    hosts: Sequence[int], ranks: Sequence[int], rate: float, latency: float, measured: Measured
) -> float | None:
    """Seconds by the cost model; None: it knows nothing of rounds."""
    if measured.algorithm.mode == ROUNDS:
        return None
    dealt = len(hosts) > len(ranks) and hosts[1] != hosts[0]
    cluster = native.Cluster(list(ranks), [native.Interface(rate, latency)], round_robin=dealt)
    request, model = native.PlanRequest(), native.CostModel()
    request.count, request.segment = measured.nbytes // ITEM, measured.algorithm.segment // ITEM
    request.mode = "" if measured.algorithm.mode == AUTO else measured.algorithm.mode
    plan = native.Plan(cluster, request)
    if len(set(ranks)) == 1:  # all algorithms are given, so that only the segment is chosen
        request.mode = plan.mode
        plan = native.choose_plan(cluster, request, model)
    return native.predict_plan(plan, model)


def _table(measured: Sequence[Measured], predicted: Sequence[float | None], tuning: Tuning) -> str:
    lines = [f"{'size':>10}  {'algorithm':<16}  {'predicted':>10}  {'measured':>10}"]
    size = 0
    for one, expected in zip(measured, predicted, strict=True):
        if one.nbytes != size:
            lines.append("")
        size = one.nbytes
        chosen = next((each for each in tuning.classes if size <= each.up_to), tuning.classes[-1])
        seconds = "-" if expected is None else units.seconds_text(expected)
        lines.append(
            f"{units.size_text(size):>10}  {one.algorithm!s:<16}  {seconds:>10}  "
            f"{units.seconds_text(one.seconds):>10}"
            + ("  chosen" if one.algorithm == chosen.algorithm else "")
        )
    return "\n".join(lines)


def _write(
    path: Path, tuning: Tuning, measured: Sequence[Measured], predicted: Sequence[float | None]
) -> None:
    """The file is there whole or not at all: jobs may be starting."""
    rows: list[dict[str, Any]] = [
        {**asdict(one), "algorithm": str(one.algorithm), "predicted_seconds": expected}
        for one, expected in zip(measured, predicted, strict=True)
    ]
    found = {**tuning.as_json(), "multiring": multiring.__version__, "measured": rows}
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as draft:
        draft.write(json.dumps(found, indent=2) + "\n")
    try:
        Path(draft.name).chmod(0o644)
        Path(draft.name).replace(path)
    except OSError:
        Path(draft.name).unlink()
        raise


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _be_silent(text: str) -> None:
    """Every rank but the first."""

"""`multiring caffe`: the commands `train`, `test` and `time` of Caffe, on the Caffe-style solver.

multiring caffe train --solver solver.prototxt -np 2
multiring caffe test --model train_val.prototxt --weights snapshot.caffemodel --iterations 10
"""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import torch

import multiring.caffe
from multiring import Communicator
from multiring.derived import derived
from multiring.errors import MultiringError, UsageError
from multiring.models.caffe.device import find_device, is_set, set_device, set_mode_gpu, wait_for_device
from multiring.models.caffe.net import Net
from multiring.models.caffe.requests import ACTIONS, Requests
from multiring.models.caffe.schema import TEST, TRAIN
from multiring.models.caffe.solver import LOG, Solver
from multiring.models.ranks import has_to_start, run_rank, start_ranks

__all__ = ["add_arguments", "main"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the commands."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="train|test|time")
    train = commands.add_parser("train", help="train a net, as `caffe train` does", allow_abbrev=False)
    train.add_argument("--solver", required=True, metavar="FILE", help="the solver's prototxt")
    train.add_argument("--snapshot", metavar="FILE", help="a .solverstate to continue from")
    train.add_argument(
        "--weights", metavar="FILES", help=".caffemodel files to start from, separated by commas"
    )
    train.add_argument("-np", "--np", type=int, metavar="N", help="start N ranks (default: one process)")
    for name, default in (("sigint", "stop"), ("sighup", "snapshot")):
        train.add_argument(
            *(f"--{name}_effect", f"--{name}-effect"),
            choices=ACTIONS,
            default=default,
            help=f"what {name.upper()} does; stop takes a snapshot first (default: {default})",
        )
    train.add_argument(
        "--sync-batch-norm", action="store_true", help="normalise over the batches of all ranks"
    )
    train.add_argument(
        "--no-overlap",
        action="store_true",
        help="reduce gradients after the backward pass, not during it (on a GPU always)",
    )
    test = commands.add_parser("test", help="score a trained net", allow_abbrev=False)
    test.add_argument("--weights", required=True, metavar="FILE", help="a .caffemodel")
    timing = commands.add_parser("time", help="time the layers of a net", allow_abbrev=False)
    for command in (test, timing):
        command.add_argument("--model", required=True, metavar="FILE", help="the net's prototxt")
        command.add_argument("--iterations", type=int, default=50, metavar="N", help="(default: 50)")
    for command in (train, test, timing):
        command.add_argument(
            "--gpu",
            metavar="IDS",
            help="compute on this GPU; `train` takes several (0,1) or all, one rank for each",
        )
        command.add_argument(
            "--threads", type=int, metavar="N", help="threads of each process (default: Torch's own)"
        )


def main(args: argparse.Namespace) -> int:
    """Run a command.

    Args:
        args: What a parser with `add_arguments` gives.

    Returns:
        Exit code: 0; 1 for an error and 2 for a wrong option or prototxt, which are reported on stderr; 130
        after a second Ctrl-C. A training that Ctrl-C stopped has taken a snapshot and ends with 0.
    """
    try:
        gpus = _gpus(args)
        if args.threads is not None:
            if args.threads < 1:
                raise UsageError(f"--threads must be at least 1, not {args.threads}")
            torch.set_num_threads(args.threads)
        if args.action == "train":
            return _train_job(args, gpus)
        if args.iterations < 1:
            raise UsageError(f"--iterations must be at least 1, not {args.iterations}")
        _choose(gpus)
        with _logging():
            (_test if args.action == "test" else _time)(args)
    except UsageError as error:
        print(f"multiring caffe: {error}", file=sys.stderr)
        return 2
    except (MultiringError, OSError) as error:
        print(f"multiring caffe: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def _gpus(args: argparse.Namespace) -> list[int]:
    """The numbers of `--gpu`; none: the prototxt decides."""
    if args.gpu is None:
        return []
    words = args.gpu.split(",")
    if args.gpu == "all":
        find_device(0)  # or an error: there is none
        words = list(map(str, range(torch.cuda.device_count())))
    if not all(word.isdecimal() for word in words):
        raise UsageError(f"--gpu {args.gpu}: give numbers of GPUs, as in 0,1, or all")
    if args.action != "train" and len(words) > 1:
        raise UsageError(f"--gpu {args.gpu}: only train uses several GPUs")
    return list(map(int, words))


def _name_of(gpu: int) -> str:
    """What `multiring run --devices` calls a GPU of this process, which may not see all."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return seen[gpu].strip() if seen != [""] and gpu < len(seen) else str(gpu)


def _choose(gpus: list[int]) -> None:
    if gpus:
        set_device(gpus[0])
        set_mode_gpu()


def _train_job(args: argparse.Namespace, gpus: list[int]) -> int:
    if args.snapshot and args.weights:
        raise UsageError("give --snapshot to continue or --weights to start from, not both")
    if args.np is not None and args.np < 1:
        raise UsageError(f"-np must be at least 1, not {args.np}")
    if gpus and args.np not in (None, len(gpus)):
        raise UsageError(
            f"--gpu {args.gpu} names {len(gpus)} for -np {args.np}: name one for each rank, as in --gpu 0,0"
        )
    if len(gpus) > 1:
        args.np = len(gpus)
    if has_to_start(args.np):
        _start(args, gpus)
    if len(gpus) > 1:
        raise UsageError(
            f"--gpu {args.gpu} inside of a job: let `multiring run --devices` give each rank one"
        )
    _choose(gpus)

    def run(comm: Communicator) -> int:
        with _logging():
            _train(args, comm)
        return 0

    return run_rank("multiring caffe", args.np, run)


def _start(args: argparse.Namespace, gpus: list[int]) -> NoReturn:
    # Untagged: rank 0 alone logs, and what reads Caffe's logs (parse_log.py) takes no "[0]" before the time.
    words = ["--no-tag-output", "-m", "multiring", "caffe", "train", "--solver", args.solver]
    if gpus:  # each rank sees one, by the number 0
        words = ["--devices", ",".join(map(_name_of, gpus)), *words, "--gpu", "0"]
    for name in ("snapshot", "weights", "threads", "sigint_effect", "sighup_effect"):
        if (value := getattr(args, name)) is not None:
            words += [f"--{name}", str(value)]
    flags = {"--sync-batch-norm": args.sync_batch_norm, "--no-overlap": args.no_overlap}
    start_ranks(args.np, *words, *(flag for flag, given in flags.items() if given))


def _train(args: argparse.Namespace, comm: Communicator) -> None:
    """Train as one of the ranks; called by all."""
    # Ranks of a host, where the prototxt says GPU and nobody which one.
    if comm.local_size > 1 and not is_set() and torch.cuda.device_count() > 1:
        set_device(comm.local_rank % torch.cuda.device_count())
    solver = Solver(
        args.solver,
        shard=(comm.rank, comm.size),
        seed=comm.broadcast_object(secrets.randbits(31)),
        sync_batch_norm_comm=comm if args.sync_batch_norm else None,
    )
    if not solver.param.max_iter:
        raise UsageError(f"{args.solver}: max_iter is missing: how long is the training to be?")
    if args.snapshot:
        solver.restore(args.snapshot)
    for path in (args.weights or "").split(","):
        if path:
            solver.net.copy_from(path)
    callback, is_on_gpu = None, solver.net.gpu_stream is not None
    if comm.size > 1:
        callback = multiring.caffe.SolverCallback(
            solver,
            comm,
            overlap=not (args.no_overlap or is_on_gpu),
            on_device=is_on_gpu,
            iter_size=solver.param.iter_size,
            frozen=solver.net.frozen_layers(),
        )
        solver.add_callback(*callback)
    signals = {signal.SIGINT: args.sigint_effect, signal.SIGHUP: args.sighup_effect}
    with Requests(signals, derived(comm, "requests")) as requests:
        solver.action = requests.agreed
        if solver.is_root:
            LOG.info("Starting Optimization")
        solver.solve()
    if callback is not None:
        callback.close()


def _test(args: argparse.Namespace) -> None:
    net = Net(args.model, TEST, args.weights)
    LOG.info("Running for %d iterations.", args.iterations)
    sums = dict.fromkeys(net.outputs, 0.0)
    loss = 0.0
    for iteration in range(args.iterations):
        loss += net.forward_from_to(0, len(net.layers) - 1)
        for name in net.outputs:
            value = float(net.blobs[name].data.mean())
            sums[name] += value
            LOG.info("Batch %d, %s = %g", iteration, name, value)
    LOG.info("Loss: %g", loss / args.iterations)
    for name, total in sums.items():
        LOG.info("%s = %g", name, total / args.iterations)


def _time(args: argparse.Namespace) -> None:
    net = Net(args.model, TRAIN)
    last = len(net.layers) - 1
    begun = 0.0
    spent = {"forward": [0.0] * (last + 1), "backward": [0.0] * (last + 1)}

    def begin(index: int) -> None:
        nonlocal begun
        wait_for_device(net.device)
        begun = time.perf_counter()

    def end(which: str, index: int) -> None:
        wait_for_device(net.device)
        spent[which][index] += time.perf_counter() - begun

    LOG.info("Performing Forward")
    net.forward_from_to(0, last)
    net.backward_from_to(last, 0)
    net.before_forward(begin)
    net.before_backward(begin)
    net.after_forward(lambda index: end("forward", index))
    net.after_backward(lambda index: end("backward", index))
    LOG.info("*** Benchmark begins ***")
    LOG.info("Testing for %d iterations.", args.iterations)
    for _ in range(args.iterations):
        net.forward_from_to(0, last)
        net.backward_from_to(last, 0)
    LOG.info("Average time per layer: ")
    for index, layer in enumerate(net.layers):
        for which in ("forward", "backward"):
            LOG.info("%10s\t%s: %g ms.", layer.name, which, spent[which][index] * 1e3 / args.iterations)
    for which, times in spent.items():
        LOG.info("Average %s pass: %g ms.", which.capitalize(), sum(times) * 1e3 / args.iterations)
    LOG.info("*** Benchmark ends ***")


class _Format(logging.Formatter):
    """Lines as Caffe's, so that what reads its logs reads these."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%m%d %H:%M:%S", time.localtime(record.created))
        micro = int(record.created % 1 * 1e6)
        location = f"{Path(record.pathname).name}:{record.lineno}"
        return f"I{moment}.{micro:06d} {record.process:5d} {location}] {record.getMessage()}"


@contextmanager
def _logging() -> Iterator[None]:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Format())
    level = LOG.level
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    try:
        yield
    finally:
        LOG.removeHandler(handler)
        LOG.setLevel(level)

"""The command line of `multiring run`."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from multiring.commands.argument_types import number_of, wall_seconds
from multiring.commands.launcher.engine_job import run_by_engine
from multiring.commands.launcher.engines import CHOICES, Engine, choose
from multiring.commands.launcher.foreign_variables import (
    gloo_variables,
    horovod_environment,
    jax_variables,
)
from multiring.commands.launcher.hosts import (
    HostSlots,
    RankSlot,
    assign_slots,
    is_here,
    parse_hostfile,
    parse_hosts,
)
from multiring.commands.launcher.job import run_job
from multiring.commands.launcher.rank_starter import JobOptions, ProgramError
from multiring.commands.launcher.remote_ranks import SSH
from multiring.errors import UsageError
from multiring.rendezvous import slurm

__all__ = ["add_arguments", "add_host_arguments", "chosen_hosts", "main", "split_ssh"]

_EXAMPLES = """\
examples:
  multiring run -np 4 train.py --epochs 10
  multiring run -np 2 -m my_package.train --epochs 10
  multiring run -H node0:4,node1:4 train.py
  multiring run -np 2 --timeout 3600 --output-dir logs -- ./my_program -v

A program whose name ends in ".py" is run by this Python. What comes after the program belongs to the program.

exit code:
  0    every rank ended with 0
  N    the code of the rank that failed first; 128 + signal if a signal ended it
  124  --timeout has passed
  126  the program cannot be executed; 127 there is no such program
  130  Ctrl-C; likewise 128 + signal for SIGTERM (143) and SIGHUP (129)
  2    the command line or an environment variable of multiring is wrong
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `multiring run`."""
    parser.epilog = _EXAMPLES
    parser.usage = "multiring run -np N [options] program [arguments ...]\n       "
    parser.usage += "multiring run -np N [options] -m module [arguments ...]"
    parser.add_argument(
        "-np",
        "-n",
        dest="ranks",
        action=_Once,
        type=number_of("ranks"),
        metavar="N",
        help="number of ranks to start (with -H, --hostfile or several hosts of Slurm's: default all slots)",
    )
    parser.add_argument(
        "--timeout",
        type=wall_seconds,
        metavar="S",
        help="end the job, with exit code 124, after so many seconds",
    )
    parser.add_argument(
        "--output-dir",
        type=Path,
        metavar="D",
        help="write each rank's output to D/rank.K.stdout and D/rank.K.stderr as well",
    )
    parser.add_argument(
        "--tag-output",
        action=argparse.BooleanOptionalAction,
        default=None,
        help='begin each line with its "[rank]" (default: if there are several ranks)',
    )
    parser.add_argument(
        "--env",
        action="append",
        type=_assignment,
        default=[],
        metavar="K=V",
        help="set a variable for the ranks; may be repeated",
    )
    parser.add_argument(
        "--devices",
        metavar="LIST",
        help="GPU that each rank of a host sees, as its first and only one: auto, or as 0,1,3, as "
        "CUDA_VISIBLE_DEVICES, which it replaces, names them; 0,0 lets two share one [all ranks see all]",
    )
    parser.add_argument(
        "--horovod",
        action="store_true",
        help="`import horovod.torch` gives multiring.horovod.torch, and HOROVOD_RANK and others are set "
        "(docs/horovod.md)",
    )
    parser.add_argument(
        "--jax",
        action="store_true",
        help="JAX's own collectives on CPUs (shardings, shard_map) go over multiring, and "
        "jax.distributed.initialize() needs no arguments (docs/jax-sharding.md)",
    )
    parser.add_argument(
        "--as-gloo",
        action="store_true",
        help='torch.distributed\'s backend "gloo" is multiring: sets MULTIRING_AS_GLOO '
        "(docs/torch-distributed.md)",
    )
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, metavar="module ...", help="run a Python module"
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="program ...", help="what to run")
    hosts = parser.add_argument_group("several hosts")
    add_host_arguments(hosts)
    hosts.add_argument(
        "--engine",
        choices=CHOICES,
        default="auto",
        help="what starts ranks on other hosts; auto: srun where Slurm has allocated all of them, ssh "
        "elsewhere [auto]",
    )
    hosts.add_argument(
        "--interfaces",
        metavar="LIST",
        help="network interfaces between hosts, as eth0,10.0.0.0/8 or ^docker0 [all that are up]",
    )
    expert = parser.add_argument_group("expert")
    expert.add_argument(
        "--bind",
        choices=("core", "none"),
        help="core: give each rank an equal share of the processors; none: leave that to the kernel "
        "(default: core if there is a processor for each rank)",
    )
    expert.add_argument(
        "--mode",
        metavar="M",
        help="how allreduces run: across hosts as 4x8 or 4tx8d, on one direct, staged or rounds "
        "[chosen by their size]",
    )
    expert.add_argument(
        "--order",
        type=str.lower,  # as the variable that it sets
        choices=("canonical", "any"),
        help="in which order allreduces across hosts add; any: rings may run, and bits depend on where ranks "
        "are [canonical]",
    )
    expert.add_argument(
        "--nccl",
        type=str.lower,
        choices=("off", "host", "hierarchical", "all"),
        help="where arrays on GPUs pass by NCCL in any order (--order any): nowhere, within one host, within "
        "each of several, among all ranks [host]",
    )
    expert.add_argument(
        "--host-links",
        type=str.lower,
        choices=("switch", "ring", "line"),
        help="which hosts reach which: each each, or its neighbours in the order of -H alone [switch]",
    )


def add_host_arguments(parser: argparse._ActionsContainer) -> None:
    """Adds the options that say which hosts there are and how they are reached."""
    hosts = parser.add_mutually_exclusive_group()
    hosts.add_argument(
        "-H",
        "--hosts",
        metavar="HOST:SLOTS,...",
        help="hosts, with one slot for ranks on each by default [run: Slurm's, or this one]",
    )
    hosts.add_argument(
        "--hostfile", type=Path, metavar="FILE", help='the same from a file with lines "host slots=4"'
    )
    parser.add_argument(
        "--ssh", default=SSH, metavar="COMMAND", help=f"what runs a command on another host [{SSH}]"
    )
    parser.add_argument(
        "--remote-python", default="", metavar="PATH", help="Python on other hosts [at the place of this one]"
    )
    parser.add_argument(
        "--address",
        default="",
        metavar="A",
        help="address of this host that ranks on others reach [that of the way to the first]",
    )


def chosen_hosts(args: argparse.Namespace) -> list[HostSlots] | None:
    """The hosts of -H or --hostfile; None: neither was given.

    Raises:
        UsageError: They cannot be understood.
    """
    if args.hosts is not None:
        return parse_hosts(args.hosts)
    return None if args.hostfile is None else parse_hostfile(args.hostfile)


def main(args: argparse.Namespace) -> int:
    """Runs the job that `args` describes; returns the exit code.

    Raises:
        UsageError: No program is named, or a variable of multiring has a value that is not accepted.
    """
    program: list[str] = args.program
    module: str | None = None
    if args.module is not None:
        module, *program = args.module or [""]
    elif program[:1] == ["--"]:
        program = program[1:]
    if not (module or program):
        raise UsageError("name the program that the ranks run, as in: multiring run -np 2 train.py")
    assigned, engine = _places(args)
    given = {**(jax_variables() if args.jax else {}), **dict(args.env), **_variables(args)}
    if args.as_gloo:
        given |= gloo_variables(given)
    options = JobOptions(
        ranks=len(assigned),
        program=program,
        module=module,
        bind=args.bind,
        devices=args.devices,
        timeout=args.timeout,
        output_dir=args.output_dir,
        tag_output=args.tag_output,
        environment=horovod_environment(given) if args.horovod else given,
        rank_slots=assigned,
        ssh=split_ssh(args.ssh),
        python=args.remote_python,
        address=args.address,
    )
    try:
        return run_job(options) if engine is None else run_by_engine(options, engine)
    except ProgramError as error:
        print(f"multiring: {error}", file=sys.stderr)
        return error.code


def _variables(args: argparse.Namespace) -> dict[str, str]:
    """What options say in the place of variables."""
    given = {
        "MULTIRING_MODE": args.mode,
        "MULTIRING_ORDER": args.order,
        "MULTIRING_INTERFACES": args.interfaces,
        "MULTIRING_HOST_LINKS": args.host_links,
        "MULTIRING_NCCL": args.nccl,
    }
    return {name: value for name, value in given.items() if value}


def _places(args: argparse.Namespace) -> tuple[list[RankSlot], Engine | None]:
    """Where each rank runs, and what starts them."""
    hosts = chosen_hosts(args)
    allocation = None
    if hosts is None or args.engine in ("auto", "srun"):
        try:
            allocation = slurm.allocated_hosts(os.environ)
        except UsageError:
            if hosts is None or args.engine == "srun":
                raise  # or else ssh finds those that are named
    if hosts is None and allocation is not None:
        allocated = [
            HostSlots("" if is_here(name) or slurm.is_own(name, os.environ) else name, tasks)
            for name, tasks in allocation
        ]
        # An allocation of this host alone says what to do without -np, and -np may say otherwise.
        if args.ranks is None or args.engine == "srun" or any(host.name for host in allocated):
            hosts = allocated
    if hosts is None:
        if args.ranks is None:
            raise UsageError("say how many ranks to start, as in: multiring run -np 2 train.py")
        hosts = [HostSlots("", args.ranks)]
    assigned = assign_slots(hosts, args.ranks)
    counts: dict[str, int] = {}
    for slot in assigned:
        counts[slot.host] = counts.get(slot.host, 0) + 1
    engine = choose(args.engine, [HostSlots(*host) for host in counts.items()], allocation)
    return assigned, engine


def split_ssh(command: str) -> list[str]:
    """The words of --ssh.

    Raises:
        UsageError: There are none.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"--ssh {command}: {error}") from error
    if not words:
        raise UsageError("--ssh needs a command, such as 'ssh -p 2222'")
    return words


class _Once(argparse.Action):
    """An option that is given once, or each time with the same value."""

    def __call__(self, parser: Any, namespace: Any, value: Any, option: str | None = None) -> None:
        given = getattr(namespace, self.dest)
        if given not in (None, value):
            parser.error(f"{option} {value} contradicts {given}, which was given before")
        setattr(namespace, self.dest, value)


def _assignment(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not (name and separator):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value

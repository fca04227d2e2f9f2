"""The options of Horovod's command `horovodrun`, and what they are for `multiring run`."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from typing import Any

from multiring.commands.launcher.remote_ranks import SSH
from multiring.errors import UsageError
from multiring.horovod.runner.config_file import add_config
from multiring.horovod.runner.functions import ELASTIC

__all__ = ["add_arguments", "run_arguments"]

# Levels of Horovod's log, by those of ours.
_LEVELS = {"TRACE": "debug", "DEBUG": "debug", "INFO": "info", "WARNING": "warning", "ERROR": "error"}
_LEVELS |= {"FATAL": "error"}

# What has no effect here, by the number of its values. The timeout of Gloo bounds what it does once all ranks
# have come, and MULTIRING_TIMEOUT how late they may come, as --stall-check-shutdown-time-seconds does.
_WITHOUT_EFFECT = {
    0: (
        "--disable-cache",
        "--hierarchical-allgather",
        "--no-hierarchical-allgather",
        "--torus-allreduce",
        "--no-torus-allreduce",
        "--autotune",
        "--no-autotune",
        "--mpi-threads-disable",
        "--no-mpi-threads-disable",
        "--tcp",
        "--log-with-timestamp",
        "--log-without-timestamp",
        "--log-hide-timestamp",
        "--no-log-hide-timestamp",
        "--prefix-output-with-timestamp",
        "-prefix-timestamp",
        "--gloo",
        "--mpi",
        "--jsrun",
    ),
    1: (
        "--start-timeout",
        "--slots-per-host",
        "--elastic-timeout",
        "--reset-limit",
        "--fusion-threshold-mb",
        "--cycle-time-ms",
        "--cache-capacity",
        "--autotune-log-file",
        "--autotune-warmup-samples",
        "--autotune-steps-per-sample",
        "--autotune-bayes-opt-max-samples",
        "--autotune-gaussian-process-noise",
        "--mpi-args",
        "--binding-args",
        "--num-nccl-streams",
        "--thread-affinity",
        "--gloo-timeout-seconds",
    ),
    2: ("--blacklist-cooldown-range",),
}
_REFUSED = {
    ELASTIC: (
        "--min-np",
        "--min-num-proc",
        "--max-np",
        "--max-num-proc",
        "--host-discovery-script",
    ),
}


class _WithoutEffect(argparse.Action):
    """Notes that an option is there."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        namespace.without_effect = [*namespace.without_effect, option_string]


class _Refused(argparse.Action):
    """Says why an option is not possible."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        raise UsageError(f"horovodrun {option_string}: {self.const}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.usage = "multiring horovodrun -np N [options of horovodrun] program [arguments ...]"
    parser.set_defaults(without_effect=[])
    add = parser.add_argument
    add("-v", "--version", action="store_true", help="show the version of Horovod's API")
    add("-np", "--num-proc", type=int, metavar="N", help="number of ranks")
    add("-cb", "--check-build", action="store_true", help="show which frameworks there are")
    hosts = parser.add_mutually_exclusive_group()
    hosts.add_argument("-H", "--hosts", metavar="HOST:SLOTS,...", help="hosts and their slots")
    hosts.add_argument("-hostfile", "--hostfile", metavar="FILE", help='lines "host slots=4"')
    add("-p", "--ssh-port", type=int, metavar="PORT", help="port of ssh on other hosts")
    add("-i", "--ssh-identity-file", metavar="FILE", help="file with the key for ssh")
    add(
        "--network-interfaces",
        "--network-interface",
        action="append",
        default=[],
        metavar="LIST",
        help="network interfaces between hosts, with commas",
    )
    add(
        "--output-filename",
        metavar="D",
        help="write each rank's output to D/rank.K.stdout and D/rank.K.stderr",
    )
    add("--verbose", action="store_true", default=None, help="as --log-level INFO")
    add("--config-file", metavar="FILE", help="YAML with more of these options, in Horovod's sections")
    add("--log-level", choices=_LEVELS, help="least serious message that is written to stderr")
    add("--stall-check", action="store_true", help="report ranks that are late, as without this option")
    add("--no-stall-check", action="store_true", default=None, help="report no ranks that are late")
    add(
        "--stall-check-warning-time-seconds", type=int, metavar="S", help="when to report ranks that are late"
    )
    add("--stall-check-shutdown-time-seconds", type=int, metavar="S", help="when late ranks are an error")
    add("--timeline-filename", metavar="FILE", help="write a timeline of the operations")
    switch = argparse.BooleanOptionalAction
    add("--timeline-mark-cycles", action=switch, help="mark negotiations in it")
    add("--hierarchical-allreduce", action=switch, help="NCCL within each of several hosts, where it is used")
    not_kept: dict[str, Any] = {"dest": "_", "default": argparse.SUPPRESS}
    for count, names in _WITHOUT_EFFECT.items():
        for name in names:
            number = count if count != 1 else None
            add(name, action=_WithoutEffect, nargs=number, help="no effect", **not_kept)
    for why, names in _REFUSED.items():
        for name in names:
            add(name, action=_Refused, const=why, help=f"an error: {why}", **not_kept)
    add("command", nargs=argparse.REMAINDER, metavar="program ...", help="what to run")


def run_arguments(args: argparse.Namespace) -> list[str]:
    """The arguments of `multiring run` that do the same.

    Raises:
        UsageError: No program is named, or the file of options cannot be read.
    """
    command: Sequence[str] = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise UsageError(
            "name the program that the ranks run, as in: multiring horovodrun -np 2 python train.py"
        )
    if args.config_file is not None:
        add_config(args, args.config_file)
    options: dict[str, Any] = {
        "-np": args.num_proc,
        "--hosts": args.hosts,
        "--hostfile": args.hostfile,
        "--ssh": _ssh(args),
        "--interfaces": ",".join(args.network_interfaces) or None,
        "--output-dir": args.output_filename,
    }
    words = ["--horovod"]
    for name, value in options.items():
        if value is not None:
            words += [name, str(value)]
    for name, value in _variables(args).items():
        words += ["--env", f"{name}={value}"]
    return [*words, "--", *command]


def _ssh(args: argparse.Namespace) -> str | None:
    more = [] if args.ssh_port is None else ["-p", str(args.ssh_port)]
    more += [] if args.ssh_identity_file is None else ["-i", args.ssh_identity_file]
    return f"{SSH} {shlex.join(more)}" if more else None


def _variables(args: argparse.Namespace) -> dict[str, Any]:
    """What is said by variables."""
    level = args.log_level or ("INFO" if args.verbose else None)
    warning = 0 if args.no_stall_check else args.stall_check_warning_time_seconds
    found = {
        "HOROVOD_TIMELINE": args.timeline_filename,
        "HOROVOD_TIMELINE_MARK_CYCLES": 1 if args.timeline_mark_cycles else None,
        "HOROVOD_HIERARCHICAL_ALLREDUCE": 0 if args.hierarchical_allreduce is False else None,
        "MULTIRING_NCCL": "hierarchical" if args.hierarchical_allreduce else None,
        "MULTIRING_LOG_LEVEL": None if level is None else _LEVELS.get(str(level).upper(), level),
        "MULTIRING_STALL_WARNING": warning,
        "MULTIRING_TIMEOUT": args.stall_check_shutdown_time_seconds
        or None,  # 0: never, and Horovod's default
    }
    return {name: value for name, value in found.items() if value is not None}

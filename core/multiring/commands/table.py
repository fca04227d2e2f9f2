"""The table of the subcommands of `multiring`."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["COMMANDS", "Command"]


@dataclass(frozen=True)
class Command:
    """A subcommand.

    Attributes:
        module: Holds `add_arguments(parser)` and `main(args) -> int`; imported only when the command is used.
        help: One line.
        extras: The extras of the package that it needs besides the base install.
    """

    module: str
    help: str
    extras: str = ""


COMMANDS = {
    "run": Command(
        "multiring.commands.launcher.options", "start a program as several ranks, on this host or on several"
    ),
    "horovodrun": Command(
        "multiring.horovod.runner.command",
        "start a program as several ranks, with the options of Horovod's horovodrun",
    ),
    "train": Command("multiring.models.train", "train a ResNet on real images", extras="torch,train"),
    "caffe": Command(
        "multiring.models.caffe.command", "train a net from Caffe's prototxt files", extras="caffe"
    ),
    "bench": Command(
        "multiring.benchmarks.command",
        "measure collectives and training beside other libraries",
        extras="bench",
    ),
    "regress": Command(
        "multiring.models.regress.command",
        "check that all frameworks train alike, on one rank and on several",
        extras="train",
    ),
    "build": Command("multiring.commands.build", "compile what lets MPI carry the bytes between hosts"),
    "plan": Command(
        "multiring.commands.plan.command", "show how an allreduce over several hosts would be divided"
    ),
    "tune": Command(
        "multiring.commands.tune", "measure which algorithms of allreduce are fastest across hosts, by size"
    ),
    "env": Command("multiring.commands.env", "print versions, machine, launcher and settings"),
    "doctor": Command(
        "multiring.commands.doctor.doctor", "check that this machine, or several hosts, can run a job"
    ),
    "completion": Command(
        "multiring.commands.completion", "print what makes bash, zsh or fish complete this command line"
    ),
}

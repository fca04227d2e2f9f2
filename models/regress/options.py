"""The options of `multiring regress`."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from multiring.commands.argument_types import number_of, wall_seconds
from multiring.errors import UsageError
from multiring.models.nets.resnet_spec import DEPTHS
from multiring.models.regress.baseline import DEFAULT, MARGIN
from multiring.models.regress.checks import CHECKS, SMALL, Setup

__all__ = ["Options", "add_arguments", "parse"]

NO_BASELINE = Path("none")
SMALL_CHECKS = ("agreement", "following", "bits")


@dataclass(frozen=True)
class Options:
    """What the command line says.

    Attributes:
        frameworks: Names; ("all",) for all, each of which has to be there; None for those that are installed.
        ranks: Numbers of ranks.
        checks: Names out of `CHECKS`.
        setup: The setting.
        time_limit: Seconds that one task may take.
        report: Directory for HTML and JUnit XML.
        baseline: What to compare with; None: nothing.
        write_baseline: Write it instead.
        shown_as: The command line.
    """

    frameworks: tuple[str, ...] | None
    ranks: tuple[int, ...]
    checks: tuple[str, ...]
    setup: Setup
    time_limit: float
    report: Path | None
    baseline: Path | None
    write_baseline: bool
    shown_as: str


_EPILOG = f"""\
checks:
{chr(10).join(f"  {check.name:<10} {check.question}" for check in CHECKS.values())}

Ratios of speed may fall to {MARGIN:.0%} of the baseline; below that they are measured again before it counts.

exit code:
  0    every check passed
  1    a check failed or could not be made, or something is worse than in the baseline
  2    the command line is wrong
  130  Ctrl-C (143: SIGTERM); what there is is reported

examples:
  multiring regress --report report
  multiring regress --frameworks torch,jax --ranks 1,2,3 --checks agreement,following
  multiring regress --small
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options, and say what the checks are."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "--frameworks",
        type=_names,
        metavar="LIST",
        help="such as torch,jax; or all, each of which then has to be there [those that are installed]",
    )
    parser.add_argument(
        "--ranks", type=_ranks, default=(1, 2), metavar="LIST", help="numbers of ranks, such as 1,2,3 [1,2]"
    )
    parser.add_argument(
        "--checks", type=_names, metavar="LIST", help=f"some of {', '.join(CHECKS)} [all of them]"
    )
    parser.add_argument(
        "--depth", type=int, choices=DEPTHS, default=8, help="depth of the ResNet that is compared [8]"
    )
    parser.add_argument(
        "--speed-depth", type=int, choices=DEPTHS, default=20, help="depth of the one that is timed [20]"
    )
    parser.add_argument(
        "--steps",
        type=number_of("steps"),
        metavar="N",
        help="steps of the trainings that are compared [30; small: 5]",
    )
    parser.add_argument(
        "--epochs",
        type=number_of("epochs"),
        default=Setup.epochs,
        metavar="N",
        help="of the training on digits [6]",
    )
    parser.add_argument(
        "--small",
        action="store_true",
        help="a minute's worth: agreement, following and bits over a few steps",
    )
    parser.add_argument("--report", type=Path, metavar="DIR", help="write index.html and junit.xml there")
    parser.add_argument(
        "--baseline",
        type=Path,
        default=DEFAULT,
        metavar="PATH",
        help="compare with it; none: with nothing [the committed one]",
    )
    parser.add_argument(
        "--write-baseline", action="store_true", help="write the baseline anew instead of comparing with it"
    )
    parser.add_argument(
        "--time-limit",
        type=wall_seconds,
        default=240.0,
        metavar="S",
        help="seconds that one task of a job may take before it is ended [240]",
    )


def parse(args: argparse.Namespace) -> Options:
    """Make sense of parsed arguments.

    Raises:
        UsageError: A check is unknown, or the options leave nothing to do.
    """
    checks = args.checks or (SMALL_CHECKS if args.small else tuple(CHECKS))
    if unknown := [name for name in checks if name not in CHECKS]:
        raise UsageError(f"unknown check {unknown[0]!r}; choose among {', '.join(CHECKS)}")
    checks = tuple(name for name in CHECKS if name in checks)
    if args.write_baseline and args.baseline == NO_BASELINE:
        raise UsageError("--write-baseline needs a file: give --baseline another name than none")
    if args.ranks == (1,) and not {"agreement", "accuracy"} & set(checks):
        raise UsageError(f"{' and '.join(checks)} is about several ranks: add some to --ranks")
    base = SMALL if args.small else Setup()
    setup = replace(base, depth=args.depth, speed_depth=args.speed_depth, epochs=args.epochs)
    if args.steps is not None:
        setup = replace(setup, steps=args.steps)
    return Options(
        frameworks=args.frameworks,
        ranks=args.ranks,
        checks=checks,
        setup=setup,
        time_limit=args.time_limit,
        report=args.report,
        baseline=None if args.baseline == NO_BASELINE else args.baseline,
        write_baseline=args.write_baseline,
        shown_as=shlex.join(["multiring", "regress", *sys.argv[2:]]),
    )


def _names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing")
    return names


def _ranks(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) >= 1 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers of ranks, such as 1,2,3")
    return tuple(sorted({int(part) for part in parts}))

"""`multiring bench`: measures collectives and training beside other libraries.

Every benchmark is a module with `add_arguments` and `run`, imported only when it is asked for. What all of
them share is here: the options about ranks and results, the start of the ranks, errors, and showing and
writing what came out.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import shlex
import shutil
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol, cast

import multiring
from multiring import Communicator, cli
from multiring.benchmarks import launch, progress
from multiring.benchmarks.collectives import on_devices
from multiring.benchmarks.emulation import start as emulated_start
from multiring.benchmarks.emulation.capacity import require_capacity
from multiring.benchmarks.emulation.start import Emulation
from multiring.benchmarks.mpich import find_mpich
from multiring.benchmarks.results import Results
from multiring.commands.argument_types import number_of
from multiring.commands.command_parser import CommandParser
from multiring.errors import MultiringError, UsageError
from multiring.rendezvous import launch_environment
from multiring.rendezvous.launch_environment import Placement

__all__ = ["BENCHMARKS", "Benchmark", "add_arguments", "main", "write_whole"]

# Exit code of a command that Ctrl-C ended, as shells have it.
INTERRUPTED = 130

DEFAULT_RANKS = 2
STYLES = ("rich", "markdown", "compact")
_PLAIN_OPTIONS = ("ranks", "framework", "sizes", "quick", "json", "plot")  # that --help shows


@dataclass(frozen=True)
class _Entry:
    module: str
    help: str
    extras: str


BENCHMARKS = {
    "allreduce": _Entry(
        "multiring.benchmarks.collectives.allreduce", "latency and bandwidth of allreduce over sizes", "bench"
    ),
    "collectives": _Entry(
        "multiring.benchmarks.collectives.other_collectives",
        "latency and bandwidth of the other collectives",
        "bench",
    ),
    "named": _Entry(
        "multiring.benchmarks.named",
        "small allreduces by name, through Horovod's API and below it",
        "bench,torch",
    ),
    "sharding": _Entry(
        "multiring.benchmarks.sharding", "JAX programs that shard, beside JAX's own collectives", "bench,jax"
    ),
    "gradients": _Entry(
        "multiring.benchmarks.gradients.benchmark", "training steps with averaged gradients", "bench"
    ),
}


class Benchmark(Protocol):
    """What a benchmark's module holds."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds the benchmark's own options, and a text that explains what is printed.

        It may set `peers`, a list of names of `contenders.PEERS`, or None for those that are installed, by an
        option or as a default: they are checked before the ranks start, and MPI's own launcher starts the
        ranks if "mpi" is among them. With `device` they are those of `on_devices`.
        """

    def run(self, comm: Communicator, args: argparse.Namespace) -> Results:
        """Measures; called on all ranks, each already on its processor; the same results on all.

        Args:
            comm: All ranks.
            args: The options, and besides: `peers`, a list; `cores`, how many processors the ranks have
                together; `shown_as`, the command line; `launcher`, as `Placement.launcher`.
        """


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `multiring bench`."""
    width = max(map(len, BENCHMARKS))
    lines = [f"  {name:<{width}}  {entry.help}" for name, entry in BENCHMARKS.items()]
    parser.usage = "multiring bench benchmark [options]"
    parser.epilog = "benchmarks:\n" + "\n".join(lines)
    parser.epilog += "\n\n`multiring bench benchmark --help` tells more about one."
    parser.add_argument("benchmark", choices=BENCHMARKS, help="what to measure")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its options")


def main(args: argparse.Namespace) -> int:
    """Runs a benchmark: as a rank inside a job, otherwise it starts the ranks and sees them through.

    Returns:
        Exit code: 0; 1 for an error and 2 for a wrong option, which are reported on stderr; 130 after Ctrl-C.

    Raises:
        UsageError: An option is wrong, or something that it needs is not installed.
    """
    name: str = args.benchmark
    words: list[str] = args.arguments
    benchmark = _load(name)
    options = _parse(name, benchmark, words)
    _check_outputs(options)
    placement = launch_environment.detect()
    if options.emulation is not None and placement.launcher == "none":
        require_capacity(options.emulation, options)  # before anything starts
    # A rank chooses for itself what the process that started it has chosen: MPI only where mpirun did it.
    if options.device is None:
        options.peers = launch.choose_peers(options.peers, placement.launcher)
    else:
        options.peers = on_devices.choose_peers(options)
    if options.mpich is not None and placement.launcher == "none":
        find_mpich(options.mpich)  # said before anything starts
    if placement.launcher == "none":
        arguments, mpi = [name, *words, *_seen_by_ranks(options)], "mpi" in options.peers
        if options.emulation is not None:
            return emulated_start.start(options.emulation, arguments, mpi=mpi)
        ranks = DEFAULT_RANKS if options.ranks is None else options.ranks
        return launch.start(arguments, ranks, mpi=mpi)
    if options.emulation is not None and emulated_start.HOSTS not in os.environ:
        raise UsageError(f"--emulate starts its own ranks: leave {placement.launcher} out")
    options.launcher = placement.launcher
    return _run_rank(name, benchmark, options, placement)


def _load(name: str) -> Benchmark:
    entry = BENCHMARKS[name]
    try:
        return cast(Benchmark, importlib.import_module(entry.module))
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "multiring":
            raise
        raise UsageError(
            f"`multiring bench {name}` needs {error.name}, which is not installed: run "
            f"pip install 'multiring[{entry.extras}]'"
        ) from error


def _parse(name: str, benchmark: Benchmark, words: list[str]) -> argparse.Namespace:
    prog = f"multiring bench {name}"
    parser = CommandParser(
        prog=prog,
        description=f"Measures {BENCHMARKS[name].help}.",
        allow_abbrev=False,
    )
    _add_shared_arguments(parser)
    parser.set_defaults(peers=[], mpich=None, device=None, shown_as=shlex.join([*prog.split(), *words]))
    benchmark.add_arguments(parser)
    parser.shorten_help(_PLAIN_OPTIONS, "all options, and how it is measured")
    options = parser.parse_args(words)
    if options.quick:
        for key, value in options.quick_values.items():
            if getattr(options, key) == parser.get_default(key):  # not chosen by the user
                setattr(options, key, value)
    try:
        options.emulation = _emulation(options)
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    return options


def _emulation(options: argparse.Namespace) -> Emulation | None:
    """The hosts to emulate, if any.

    Raises:
        argparse.ArgumentTypeError: An option is wrong.
    """
    if options.emulate is None:
        for name in ("rate", "cables", "switch_queue", "tcp_streams"):
            if getattr(options, name, None):
                option = name.replace("_", "-")
                raise argparse.ArgumentTypeError(f"--{option} is of emulated hosts: give --emulate as well")
        return None
    if options.device is not None:
        raise argparse.ArgumentTypeError("--device and --emulate do not go together: leave one out")
    if options.cables and options.switch_queue:
        raise argparse.ArgumentTypeError("--switch-queue is of a switch, and with --cables there is none")
    network = f" --cables {options.cables}" if options.cables else ""
    if options.switch_queue:
        network += f" --switch-queue {options.switch_queue}"
    emulation = Emulation.parse(options.emulate, (options.rate or "1gbit") + network)
    if options.ranks not in (None, emulation.size):
        raise argparse.ArgumentTypeError(
            f"-np {options.ranks} and --emulate {options.emulate} do not go together: leave -np out"
        )
    return emulation


def _add_shared_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-np",
        "-n",
        dest="ranks",
        type=number_of("ranks"),
        metavar="N",
        help=f"ranks to start on this host [{DEFAULT_RANKS}]",
    )
    parser.add_argument("--quick", action="store_true", help="measure less, in under a minute")
    parser.add_argument(
        "--format",
        choices=STYLES,
        default=STYLES[0],
        help="how the results are printed: a table for terminals; the same in Markdown; a short one in "
        f"Markdown with one line per size [{STYLES[0]}]",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the results into a picture")
    parser.add_argument(
        "--emulate",
        metavar="HOSTSxRANKS",
        help="on so many emulated hosts of so many ranks each, as 2x4; needs root",
    )
    parser.add_argument(
        "--rate",
        metavar="RATE",
        help="of an emulated host's link, or of each of its links, as 500mbit,500mbit [1gbit]",
    )
    parser.add_argument(
        "--cables",
        choices=("ring", "line"),
        help="emulated hosts have no switch, but cables of --rate to the next host and the one before",
    )
    parser.add_argument(
        "--switch-queue",
        metavar="SIZE",
        help="what the switch keeps for each emulated host, as 64kb; what comes when that is "
        "full is lost [as much as is sent in 50 ms]",
    )
    # What the process that starts the ranks tells them about itself.
    parser.add_argument("--shown-as", help=argparse.SUPPRESS)
    parser.add_argument("--columns", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--terminal", help=argparse.SUPPRESS)


def _check_outputs(options: argparse.Namespace) -> None:
    """Says before the measuring what would go wrong after it."""
    needed = {"rich": options.format == "rich", "matplotlib": options.plot is not None}
    lacking = [package for package, wanted in needed.items() if wanted and find_spec(package) is None]
    if lacking:
        raise UsageError(
            f"the results need {' and '.join(lacking)}: run pip install 'multiring[bench]', or choose "
            "--format markdown and no --plot"
        )
    if options.plot is not None and options.plot.suffix.lower() != ".png":
        raise UsageError(f"--plot writes a PNG, so its name has to end in .png: {options.plot}")
    for flag, path in (("--json", options.json), ("--plot", options.plot)):
        if path is None:
            continue
        if path.is_dir() or not path.name:
            raise UsageError(f"{flag} {path} is a directory: name a file")
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise UsageError(f"{flag} {path}: {path.parent} is no directory that can be written to")


def _seen_by_ranks(options: argparse.Namespace) -> list[str]:
    """Options that tell the ranks, whose output is a pipe, what the user sees."""
    words = [f"--shown-as={options.shown_as}"]
    if sys.stdout.isatty():
        words.append(f"--columns={shutil.get_terminal_size().columns}")
    if sys.stderr.isatty():
        words.append(f"--terminal={os.ttyname(sys.stderr.fileno())}")
    return words


def _run_rank(name: str, benchmark: Benchmark, options: argparse.Namespace, placement: Placement) -> int:
    # Before anything starts threads, which then stay on this processor, too.
    before = launch.pin(placement, emulated=options.emulation is not None)
    comm = multiring.init()
    code = 0
    try:
        if options.ranks not in (None, comm.size):
            raise UsageError(f"-np {options.ranks} was given inside a job of {comm.size} ranks; leave it out")
        options.cores = launch.count_cores(comm, before)
        if comm.rank == 0:
            progress.show(f"multiring bench {name}", options.terminal)
        found = benchmark.run(comm, options)
        if comm.rank == 0:
            _publish(found, options)
    except (MultiringError, OSError) as error:
        if comm.rank == 0 or not isinstance(error, multiring.AbortedError):
            what = f"rank {comm.rank}: {type(error).__name__}: {error}"
            print(f"multiring bench {name}: {what}", file=sys.stderr, flush=True)
        # The others may be waiting in a collective that this rank will not join.
        comm.abort(f"rank {comm.rank}: {error}")
        code = 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        comm.abort(f"rank {comm.rank}: interrupted")
        code = INTERRUPTED
    except BaseException as error:
        comm.abort(f"rank {comm.rank}: {type(error).__name__}: {error}")
        traceback.print_exc()
        code = 1
    finally:
        multiring.shutdown()
    if code != 0:
        launch.abort_mpi(code)
    return code


def _publish(found: Results, options: argparse.Namespace) -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # rules between lines are not in every encoding
    # Printed first: whatever happens to the files, this is not lost. Whether our own stdout is a
    # terminal says nothing: Open MPI gives its ranks one even where its output goes to a file.
    print(found.render(options.format, options.columns), flush=True)
    if options.json is not None:
        write_whole(options.json, lambda path: path.write_text(found.to_json() + "\n", encoding="utf-8"))
    if options.plot is not None:
        write_whole(options.plot, found.draw)


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Has `write` write a file beside `path` that then takes its place, so that none is seen half-written.

    Raises:
        OSError: It cannot be written; then `path` is as it was.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(beside)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(cli.main(["bench", *sys.argv[1:]]))

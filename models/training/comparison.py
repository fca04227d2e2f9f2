"""`multiring train --compare`: how fast the ranks are beside one with the same share of the host, and beside
as many that do not synchronise."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from multiring import machine
from multiring.commands.launcher import binding
from multiring.errors import UsageError
from multiring.models.training import outputs
from multiring.models.training.options import TrainOptions

__all__ = ["comparison", "measure_alone"]

_STEPS = 20
# Fewer steps than these seconds take are too few to tell a speed from noise.
_SECONDS = 8.0
_MAX_STEPS = 2000


def measure_alone(options: TrainOptions) -> tuple[float, float]:
    """Trains for at least 20 steps, or as many as take 8 s, on one rank, with what each rank of the job has:
    cores, threads and batch; then as many ranks as the job has at the same time, each without the others.

    Returns:
        Images per second of the one rank, and of all that do not synchronise together.

    Raises:
        UsageError: A short training fails; its own message is on stderr.
    """
    ranks = options.np or 1
    print(
        f"comparing: short trainings on one rank and on {ranks} that do not wait for one another, then the "
        "job",
        flush=True,
    )
    load, cores = os.getloadavg()[0], len(machine.allowed_cpus())
    if load > 2 * cores:
        print(
            f"comparing: other work runs on this machine (load {load:.0f} on {cores} cores), so that speeds "
            "say little; repeat it when there is none",
            flush=True,
        )
    (found,) = _train_alone(options, _STEPS, [0])
    is_cut = found["steps"] == _STEPS  # or the training has no more of them
    steps = _STEPS
    if is_cut and 0 < found["train_seconds"] < _SECONDS:
        steps = min(math.ceil(_SECONDS / found["train_seconds"] * found["steps"]), _MAX_STEPS)
        (found,) = _train_alone(options, steps, [0])
    together = _train_alone(options, steps, range(ranks))
    speed = "steady_images_per_second"
    return float(found[speed]), float(sum(each[speed] for each in together))


def _train_alone(options: TrainOptions, steps: int, places: Sequence[int]) -> list[dict[str, Any]]:
    """What `summary.json` says of so many steps at each of the places, all of them at the same time."""
    ranks, batch = options.np or 1, options.global_batch
    with ExitStack() as stack:
        started = []
        for place in places:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="multiring-compare-"))
            short = replace(
                options,
                np=None,
                compare=False,
                resume=None,
                extend=False,
                overwrite=False,
                report=False,
                eval_every=0,
                checkpoint_every=0,
                limit_steps=steps,
                output_dir=directory,
                global_batch=None if batch is None else max(1, batch // ranks),
            )
            words = [sys.executable, "-m", "multiring", "run", "-np", "1", "--bind", "none"]
            process = subprocess.Popen(
                [*words, "-m", "multiring.models.train", *short.to_arguments()],
                env={**os.environ, **_share_of_threads(ranks), "MULTIRING_QUIET": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                preexec_fn=partial(_take_share, ranks, place),
            )
            stack.callback(_end, process)
            started.append((process, Path(directory)))
        if any(process.wait() for process, _ in started):
            raise UsageError(
                "--compare: the short training on one rank failed (see above); leave --compare out to train"
            )
        return [
            json.loads((directory / outputs.SUMMARY).read_text(encoding="utf-8")) for _, directory in started
        ]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends what an error, or Ctrl-C, has left running."""
    process.terminate()
    process.wait()


def comparison(speed: float, alone: tuple[float, float], ranks: int) -> dict[str, float]:
    """Speed-up and efficiency of a job with that speed, as summary.json has them.

    Args:
        speed: Images per second of the job.
        alone: As `measure_alone` returns it.
        ranks: Of the job.
    """
    one_rank, unsynchronised = alone
    speed_up = speed / one_rank
    return {
        "one_rank_images_per_second": one_rank,
        "unsynchronised_images_per_second": unsynchronised,
        "speed_up": speed_up,
        "efficiency": speed_up / ranks,
        "efficiency_beside_unsynchronised": speed / unsynchronised,
    }


def _share_of_threads(ranks: int) -> dict[str, str]:
    return binding.thread_environment(machine.core_allowance(), ranks, os.environ)


def _take_share(ranks: int, place: int) -> None:
    shares = binding.shares(machine.allowed_cpus(), ranks, None)
    if shares is not None:
        os.sched_setaffinity(0, shares[place])

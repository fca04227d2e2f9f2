"""`multiring train --compare`: how much faster all ranks are than one with the same share of the host."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from multiring import machine
from multiring.commands.launcher import binding
from multiring.errors import UsageError
from multiring.models.training import outputs
from multiring.models.training.options import TrainOptions

__all__ = ["comparison", "measure_one_rank"]

_STEPS = 20
# Fewer steps than these seconds take are too few to tell a speed from noise.
_SECONDS = 8.0
_MAX_STEPS = 2000


def measure_one_rank(options: TrainOptions) -> float:
    """Trains for at least 20 steps, or as many as take 8 s, on one rank, with what each rank of the job has:
    cores, threads and batch.

    Returns:
        Images per second.

    Raises:
        UsageError: The short training fails; its own message is on stderr.
    """
    print("comparing: a short training on one rank, then the job", flush=True)
    load, cores = os.getloadavg()[0], len(machine.allowed_cpus())
    if load > 2 * cores:
        print(
            f"comparing: other work runs on this machine (load {load:.0f} on {cores} cores), so that speeds "
            "say little; repeat it when there is none",
            flush=True,
        )
    found = _train_one_rank(options, _STEPS)
    is_cut = found["steps"] == _STEPS  # or the training has no more of them
    if is_cut and 0 < found["train_seconds"] < _SECONDS:
        steps = math.ceil(_SECONDS / found["train_seconds"] * found["steps"])
        found = _train_one_rank(options, min(steps, _MAX_STEPS))
    return float(found["steady_images_per_second"])


def _train_one_rank(options: TrainOptions, steps: int) -> dict[str, Any]:
    """What `summary.json` says of so many steps."""
    assert options.np is not None
    batch = options.global_batch
    with tempfile.TemporaryDirectory(prefix="multiring-compare-") as directory:
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
            global_batch=None if batch is None else max(1, batch // options.np),
        )
        words = [sys.executable, "-m", "multiring", "run", "-np", "1", "--bind", "none"]
        done = subprocess.run(
            [*words, "-m", "multiring.models.train", *short.to_arguments()],
            env={**os.environ, **_share_of_threads(options.np), "MULTIRING_QUIET": "1"},
            stdout=subprocess.DEVNULL,
            preexec_fn=lambda: _take_share(options.np or 1),
            check=False,
        )
        if done.returncode:
            raise UsageError(
                "--compare: the short training on one rank failed (see above); leave --compare out to train"
            )
        found: dict[str, Any] = json.loads((Path(directory) / outputs.SUMMARY).read_text(encoding="utf-8"))
        return found


def comparison(speed: float, one_rank: float, ranks: int) -> dict[str, Any]:
    """Speed-up and efficiency of a job with that speed, as summary.json has them."""
    speed_up = speed / one_rank
    return {
        "one_rank_images_per_second": one_rank,
        "speed_up": speed_up,
        "efficiency": speed_up / ranks,
    }


def _share_of_threads(ranks: int) -> dict[str, str]:
    return binding.thread_environment(machine.core_allowance(), ranks, os.environ)


def _take_share(ranks: int) -> None:
    shares = binding.shares(machine.allowed_cpus(), ranks, None)
    if shares is not None:
        os.sched_setaffinity(0, shares[0])

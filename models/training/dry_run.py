"""`multiring train --dry-run`: could this training be done like this, and how long would it take?

Nothing is trained and nothing is written. Every rank decodes a sample of the images and runs a few steps on
real ones at two small batch sizes; a line through the two times gives the time of a step at the real batch.
"""

from __future__ import annotations

import math
import resource
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Literal

import numpy as np

from multiring import machine
from multiring.models.data import Split
from multiring.models.data.loader import Batch
from multiring.models.errors import DataError
from multiring.models.nets.resnet_spec import INPUT, ResNetSpec
from multiring.models.trainers.trainer import Trainer
from multiring.models.training.driver import Job
from multiring.models.training.recipes import RECIPES

__all__ = ["Finding", "check", "memory_needed", "render"]

# Images of each part that a rank decodes, and samples per rank of the two batches that are timed.
SAMPLE = 32
TIMED_BATCHES = (2, 6)
TIMED_STEPS = 3
# A forward pass without a backward one, by operations.
EVALUATION_SHARE = 1 / 3
# Beyond its arrays a framework has itself, its kernels' scratch memory and its threads.
BASE_BYTES = 512 * 2**20

MARKS = {"ok": "ok  ", "warn": "note", "fail": "FAIL"}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        status: "ok"; "warn" where the training could be done, but not as meant; "fail" where it could not.
        what: What was looked at.
        text: What was found, and what to do.
    """

    status: Literal["ok", "warn", "fail"]
    what: str
    text: str


@dataclass(frozen=True)
class _Loading:
    """Outcome of decoding a sample on one rank: seconds per image, or what is wrong."""

    seconds: float
    error: str | None


def check(job: Job, make_trainer: Callable[[], Trainer]) -> list[Finding]:
    """Look at data, memory and time. Collective; the same result on every rank.

    Args:
        job: The training.
        make_trainer: Makes this rank's network and optimizer.
    """
    findings = _check_recipe(job)
    loadings: list[_Loading] = job.comm.allgather_object(_load_sample(job))
    findings.append(_describe_loading(job, loadings))
    findings.append(_check_memory(job))
    if findings[-2].status != "fail":
        loading = max(one.seconds for one in loadings)
        findings.append(_estimate_time(job, make_trainer, loading))
    return findings


def render(findings: list[Finding]) -> str:
    """A line for each finding and a verdict."""
    lines = [f"  {MARKS[finding.status]}  {finding.what:<9}{finding.text}" for finding in findings]
    failed = any(finding.status == "fail" for finding in findings)
    verdict = "this training cannot be done like this" if failed else "nothing stands in its way"
    return "\n".join([*lines, verdict])


def memory_needed(spec: ResNetSpec, image_size: int, batch: int, itemsize: int) -> int:
    """Bytes that a training step of `batch` images takes on a rank, estimated from the specification.

    Weights, gradients and momentum, and every layer's result for the backward pass, which frameworks that
    compute in place or recompute keep less of; and half a gigabyte for the framework itself.
    """
    shapes = spec.shapes(image_size)
    activations = sum(math.prod(shape) for name, shape in shapes.items() if name != INPUT)
    images = math.prod(shapes[INPUT])
    return BASE_BYTES + itemsize * (3 * spec.count_parameters() + batch * (activations + images))


def _check_recipe(job: Job) -> list[Finding]:
    if job.options.recipe is None:
        return []
    recipe, data = RECIPES[job.options.recipe], job.dataset
    found = f"{data.classes:,} classes, {data.count('train'):,} training images"
    meant = f"{recipe.classes:,} classes, {recipe.train_images:,} training images"
    same = data.classes == recipe.classes and data.count("train") == recipe.train_images
    text = found if same else f"the data has {found}; the recipe is meant for {meant}"
    return [Finding("ok" if same else "warn", "recipe", text)]


def _load_sample(job: Job) -> _Loading:
    """Decode this rank's share of evenly spaced images of both parts."""
    took, images = 0.0, 0
    splits: tuple[Split, ...] = ("train", "test")
    for split in splits:
        count, ranks = job.dataset.count(split), job.comm.size
        every = np.linspace(0, count - 1, min(count, SAMPLE * ranks)).astype(np.int64)
        indices = every[job.comm.rank :: ranks]
        begin = time.perf_counter()
        try:
            job.dataset.load(split, indices, seed=job.options.seed, epoch=0)
        except DataError as error:
            return _Loading(0.0, str(error))
        took, images = took + time.perf_counter() - begin, images + len(indices)
    return _Loading(took / max(1, images), None)


def _describe_loading(job: Job, loadings: list[_Loading]) -> Finding:
    for rank, loading in enumerate(loadings):
        if loading.error is not None:
            return Finding("fail", "data", f"rank {rank}: {loading.error}")
    slowest = max(loading.seconds for loading in loadings)
    count = sum(min(job.dataset.count(split), SAMPLE * job.comm.size) for split in ("train", "test"))
    rate = f"{1 / slowest:.0f} images/s a rank" if slowest else "at once"
    return Finding("ok", "data", f"a sample of {count} images was read, {rate}")


def _check_memory(job: Job) -> Finding:
    itemsize = np.dtype(job.options.dtype).itemsize
    needed = memory_needed(job.spec, job.dataset.image_size, job.rank_batch, itemsize)
    total = machine.memory_limit() or machine.memory_total()
    if total is None:
        return Finding("warn", "memory", f"about {_gib(needed)} a rank; what there is could not be found out")
    share = total // job.comm.local_size
    text = f"about {_gib(needed)} a rank at batch {job.rank_batch}, of {_gib(share)}"
    # The same on every rank, also where hosts differ.
    enough = int(job.comm.allreduce(np.array(needed <= share, np.int64), op="min")[()])
    if enough:
        return Finding("ok", "memory", text)
    one = memory_needed(job.spec, job.dataset.image_size, 1, itemsize)
    none = memory_needed(job.spec, job.dataset.image_size, 0, itemsize)
    fits = (share - none) // (one - none)
    more = f"start at least {-(-job.global_batch // fits)} ranks with as much, or " if fits >= 1 else ""
    return Finding("fail", "memory", f"{text}: {more}take a smaller --global-batch or --image-size")


def _estimate_time(job: Job, make_trainer: Callable[[], Trainer], loading: float) -> Finding:
    sizes = sorted({min(size, job.rank_batch) for size in TIMED_BATCHES})
    with closing(make_trainer()) as trainer:
        # The slowest rank is what all wait for.
        own = np.array([_time_steps(job, trainer, size) for size in sizes])
    times = job.comm.allreduce(own, op="max")
    fixed, each = 0.0, float(times[-1]) / sizes[-1]
    if len(sizes) == 2 and times[1] > times[0]:
        each = float(times[1] - times[0]) / (sizes[1] - sizes[0])
        fixed = max(0.0, float(times[0]) - sizes[0] * each)
    step = max(fixed + each * job.rank_batch, loading * job.rank_batch)
    evaluations = -(-job.resolved.epochs // job.options.eval_every) if job.options.eval_every else 0
    tested = -(-job.dataset.count("test") // job.comm.size) * max(each * EVALUATION_SHARE, loading)
    seconds = job.last_step * step + evaluations * tested
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    measured = " and ".join(f"{1e3 * t:.0f} ms at batch {n}" for t, n in zip(times, sizes, strict=True))
    slow = ", bound by reading images" if loading > each + fixed / job.rank_batch else ""
    return Finding(
        "ok",
        "time",
        f"about {_duration(seconds)} for {job.last_step:,} steps of {_duration(step)}{slow}; from steps of "
        f"{measured} a rank on {job.comm.size} rank{'s' if job.comm.size > 1 else ''} as they run now "
        f"(medians of {TIMED_STEPS}, on a line through them; {_gib(peak)} of memory at most)",
    )


def _time_steps(job: Job, trainer: Trainer, samples: int) -> float:
    """Median seconds of a step on `samples` images; the learning rate is 0, so that nothing is learned."""
    indices = np.arange(job.comm.rank * samples, (job.comm.rank + 1) * samples) % job.dataset.count("train")
    images, labels = job.dataset.load("train", indices, seed=job.options.seed, epoch=0)
    batch = Batch(images, labels, samples * job.comm.size)
    trainer.step(batch, 0.0)
    times = []
    for _ in range(TIMED_STEPS):
        begin = time.perf_counter()
        trainer.step(batch, 0.0)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"


def _duration(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1e3 * seconds:.0f} ms"

"""`multiring train`: trains a ResNet on real images over all ranks of the job.

Runs under any launcher (`multiring run -np 2 multiring train`), and starts its own ranks when asked to
(`multiring train -np 2`).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import NoReturn

from multiring import Communicator
from multiring.commands.command_parser import CommandParser
from multiring.errors import UsageError
from multiring.models.data import open_dataset
from multiring.models.data.sharding import steps_per_epoch
from multiring.models.errors import CheckpointError
from multiring.models.frameworks import find_framework, load_trainer, require_installed
from multiring.models.nets.resnet_spec import resnet
from multiring.models.ranks import has_to_start, run_rank, start_ranks
from multiring.models.trainers.recipe import Recipe
from multiring.models.trainers.trainer import Trainer
from multiring.models.training import checkpoint, outputs
from multiring.models.training.checkpoint import Checkpoint
from multiring.models.training.comparison import measure_alone
from multiring.models.training.driver import Driver, Job, Result
from multiring.models.training.dry_run import check, render
from multiring.models.training.options import TrainOptions, add_arguments
from multiring.models.training.outputs import DirectoryOutputs, NoOutputs, Outputs
from multiring.models.training.progress import Progress, SilentProgress, open_progress
from multiring.models.training.summary import describe, summarise

__all__ = ["add_arguments", "main", "train"]


def main(args: argparse.Namespace) -> int:
    """Run the command.

    Args:
        args: What a parser with `add_arguments` gives.

    Returns:
        Exit code: 0; 1 for an error and 2 for a wrong option, which are reported on stderr; 130 after Ctrl-C.
        Every code but 0 makes the launcher end the other ranks.
    """
    started = time.perf_counter()
    try:
        options = TrainOptions.from_namespace(args)
        require_installed(find_framework(options.framework))
        if has_to_start(options.np):
            _start(options)
        if options.compare:
            raise UsageError("--compare starts its ranks itself: give -np, and no launcher")
    except UsageError as error:
        print(f"multiring train: {error}", file=sys.stderr)
        return 2

    def run(comm: Communicator) -> int:
        if options.dry_run:
            return dry_run(options, comm)
        train(options, comm, started=started)
        return 0

    return run_rank("multiring train", options.np, run)


def _start(options: TrainOptions) -> NoReturn:
    # The launcher reads the ranks' output through a pipe; rank 0 draws its bar on the terminal itself.
    terminal = os.ttyname(sys.stdout.fileno()) if sys.stdout.isatty() else None
    inner = replace(options, np=None, compare=False, progress_terminal=terminal)
    if options.compare:
        # Before the comparison takes its time. A run without a directory gets a new one.
        if options.output_dir is not None and options.resume is None and not options.overwrite:
            outputs.refuse_earlier_results(Path(options.output_dir))
        one_rank, unsynchronised = measure_alone(options)
        inner = replace(inner, one_rank_speed=one_rank, unsynchronised_speed=unsynchronised)
    assert options.np is not None
    start_ranks(options.np, "-m", "multiring.models.train", *inner.to_arguments())


def train(options: TrainOptions, comm: Communicator, *, started: float | None = None) -> Result:
    """Train, evaluate and report; called by all ranks of `comm` with the same options.

    Args:
        options: What to train and how.
        comm: The ranks.
        started: `time.perf_counter()` when the command began, for the total time in the summary.

    Returns:
        The result, equal on all ranks but for the path of the checkpoint.

    Raises:
        UsageError: Options contradict each other or the state of the output directory.
        DataError: The images cannot be read.
        CheckpointError: The checkpoint to resume from, or one to write, is unusable.
        DivergenceError: The loss is not finite, or ranks hold different bits.
    """
    started = time.perf_counter() if started is None else started
    job = _make_job(options, comm)
    state = _read_checkpoint(job)
    driver_outputs: Outputs = NoOutputs()
    with ExitStack() as stack:
        progress: Progress = SilentProgress()
        if comm.rank == 0:
            resume_step = None if state is None else state.step
            config = {"options": asdict(options), "resolved": asdict(job.resolved), "ranks": comm.size}
            outputs.prepare_directory(
                job.output_dir,
                resume_step=resume_step,
                resumes=options.resume is not None,
                overwrite=options.overwrite,
                config=config,
            )
            shown = open_progress(job.last_step, resume_step or 0, job.rank_batch, options.progress_terminal)
            progress = stack.enter_context(shown)
            written = DirectoryOutputs(
                job.output_dir, progress, resume_step=resume_step, report=options.report
            )
            stack.callback(written.close)
            progress.line(describe(job))
            driver_outputs = written
        trainer = stack.enter_context(closing(_make_trainer(job)))
        driver = Driver(job, trainer, driver_outputs)
        if state is not None:
            driver.resume(state)
        result = driver.run()
    if comm.rank == 0:
        print(summarise(job, result, time.perf_counter() - started, written), flush=True)
    return result


def dry_run(options: TrainOptions, comm: Communicator) -> int:
    """Check data and memory, and estimate the time; called by all ranks. Rank 0 prints.

    Returns:
        Exit code: 0, or 1 where the training could not be done like this.
    """
    job = _make_job(options, comm)
    findings = check(job, lambda: _make_trainer(job))
    if comm.rank == 0:
        print(f"dry run of {describe(job)}\n{render(findings)}", flush=True)
    return 1 if any(finding.status == "fail" for finding in findings) else 0


def _make_job(options: TrainOptions, comm: Communicator) -> Job:
    resolved = options.resolve()
    dataset = open_dataset(
        options.data, image_size=resolved.image_size, classes=resolved.classes, workers=options.workers
    )
    spec = resnet(resolved.depth, classes=dataset.classes, in_channels=dataset.channels, stem=resolved.stem)
    spec.shapes(dataset.image_size)
    global_batch, images = resolved.samples_per_step(comm.size), dataset.count("train")
    if global_batch > images:
        plural = "s" if comm.size > 1 else ""
        raise UsageError(
            f"a step takes {global_batch} images (on {comm.size} rank{plural}; --batch-size is that of each, "
            f"--global-batch that of all), and there are {images} training images; give a smaller batch"
        )
    per_epoch = steps_per_epoch(images, global_batch)
    recipe = Recipe(
        base_lr=resolved.lr,
        global_batch=global_batch,
        total_steps=per_epoch * resolved.epochs,
        warmup_steps=round(per_epoch * resolved.warmup_epochs),
        decay=resolved.decay,
        momentum=options.momentum,
        nesterov=resolved.nesterov,
        weight_decay=resolved.weight_decay,
    )
    # Rank 0 alone looks at the clock and the disk, or ranks could disagree.
    chosen = comm.broadcast_object(_output_dir(options, resolved.depth) if comm.rank == 0 else None, root=0)
    return Job(options, resolved, dataset, spec, recipe, comm, Path(chosen))


def _output_dir(options: TrainOptions, depth: int) -> str:
    if options.output_dir is not None:
        return options.output_dir
    if options.resume == "auto":
        raise UsageError("--resume without a path looks for checkpoints in --output-dir; give one of the two")
    if options.resume is not None:
        folder = checkpoint.locate(options.resume).resolve().parent
        return str(folder.parent if folder.name == outputs.CHECKPOINTS else folder)
    data = options.data if options.data in ("digits", "synthetic") else Path(options.data).resolve().name
    return f"runs/{data}-resnet{depth}-{datetime.now():%Y%m%d-%H%M%S}"


def _read_checkpoint(job: Job) -> Checkpoint | None:
    """Rank 0 reads, since other hosts need not see its disk; all ranks raise what it met."""
    if job.options.resume is None:
        return None
    found: Checkpoint | CheckpointError | None = None
    if job.comm.rank == 0:
        try:
            if job.options.resume == "auto":
                path = checkpoint.latest(job.checkpoints)
            else:
                path = checkpoint.locate(job.options.resume)
            found = None if path is None else checkpoint.read(path)
        except CheckpointError as error:
            found = error
    found = job.comm.broadcast_object(found, root=0)
    if isinstance(found, CheckpointError):
        raise found
    return found


@contextmanager
def _said_by_rank_0_alone(rank: int) -> Iterator[None]:
    """What a framework says when it is loaded is the same on all ranks."""
    with warnings.catch_warnings():
        if rank > 0:
            warnings.simplefilter("ignore")
            os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow's and JAX's native code
        yield


def _make_trainer(job: Job) -> Trainer:
    with _said_by_rank_0_alone(job.comm.rank):
        trainer = load_trainer(find_framework(job.options.framework))
    if job.options.threads is not None:
        trainer.set_threads(job.options.threads)
    return trainer(
        job.spec,
        job.recipe,
        job.comm,
        seed=job.options.seed,
        dtype=job.options.dtype,
        sync_bn=job.options.sync_bn,
        zero_residual=job.resolved.zero_residual,
    )


if __name__ == "__main__":
    command = CommandParser(prog="python -m multiring.models.train", allow_abbrev=False)
    add_arguments(command)
    sys.exit(main(command.parse_args()))

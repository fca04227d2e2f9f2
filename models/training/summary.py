"""The end of a training: what was done, with what result, and where it lies."""

from __future__ import annotations

import json
from typing import Any

from multiring.models.training import outputs
from multiring.models.training.comparison import comparison
from multiring.models.training.driver import Job, Result
from multiring.models.training.options import WARM_UP_STEPS
from multiring.models.training.outputs import DirectoryOutputs

__all__ = ["describe", "summarise"]


def describe(job: Job) -> str:
    """One paragraph on what is about to be trained, for the start."""
    lines = _description(job)
    end = f"{job.last_step} steps, {job.last_step / job.per_epoch:.4g} epochs"
    return f"training {lines['network']}\n  on {lines['data']}\n  with {lines['ranks']}, {end}"


def summarise(job: Job, result: Result, seconds: float, written: DirectoryOutputs) -> str:
    """Draw the curve, write `summary.json` and describe the training; called by rank 0.

    Args:
        job: The training.
        result: What came out.
        seconds: Wall time of the command so far.
        written: The outputs of rank 0.

    Returns:
        The description, several lines.
    """
    speed = result.trained_images / result.seconds if result.seconds else 0.0
    lines = _description(job) | {
        "training": f"{result.steps / job.per_epoch:.4g} epochs, {result.steps} steps, "
        f"{result.seconds:.1f} s at {speed:.0f} images/s; {seconds:.1f} s in all",
        "test": _tested(result),
    }
    one_rank, unsynchronised = job.options.one_rank_speed, job.options.unsynchronised_speed
    compared: dict[str, float] = {}
    gain = in_step = ""
    if one_rank is not None and not (one_rank and unsynchronised and result.steady_speed):
        lines["speed-up"] = f"not measured: fewer than {WARM_UP_STEPS + 1} steps"
    elif one_rank is not None and unsynchronised is not None:
        compared = comparison(result.steady_speed, (one_rank, unsynchronised), job.comm.size)
        gain = f"{compared['speed_up']:.2f} times one rank"
        lines["speed-up"] = (
            f"{gain} with the same share of this host ({one_rank:.0f} images/s), efficiency "
            f"{100 * compared['efficiency']:.0f} %"
        )
        in_step = f"{100 * compared['efficiency_beside_unsynchronised']:.0f} %"
        in_step += f" of the speed of {job.comm.size} ranks that do not wait for one another"
        lines["in step"] = f"{in_step} ({unsynchronised:.0f} images/s)"
    if job.options.report:
        title = f"ResNet-{job.spec.depth}, {job.dataset.description}, {_ranks(job)}"
        if compared:
            title += f"\n{gain}; {in_step}"
        lines["curve"] = str(written.draw(title, one_rank or None, unsynchronised or None))
        lines["log"] = f"tensorboard --logdir {job.output_dir / outputs.TENSORBOARD}"
    lines["metrics"] = str(job.output_dir / outputs.METRICS)
    lines["checkpoint"] = str(result.checkpoint) if result.checkpoint else "none was due"
    values: dict[str, Any] = {
        "ranks": job.comm.size,
        "global_batch": job.global_batch,
        "steps": result.steps,
        "train_seconds": result.seconds,
        "total_seconds": seconds,
        "images_per_second": speed,
        "steady_images_per_second": result.steady_speed,
        **compared,
        "test_accuracy": result.test.accuracy if result.test.count else None,
        "test_loss": result.test.mean_loss if result.test.count else None,
        "fingerprint": result.fingerprint,
    }
    (job.output_dir / outputs.SUMMARY).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return "\n".join(["trained", *(f"  {name:<11}{text}" for name, text in lines.items())])


def _description(job: Job) -> dict[str, str]:
    data, spec = job.dataset, job.spec
    normalised = "over the global batch" if job.options.sync_bn else "per rank"
    return {
        "data": f"{data.description}: {data.count('train')} training and {data.count('test')} test images, "
        f"{data.classes} classes, {data.channels}x{data.image_size}x{data.image_size}",
        "network": f"ResNet-{spec.depth} ({spec.stem} stem), {spec.count_parameters():,} parameters, "
        f"{job.options.dtype}, normalised {normalised}",
        "ranks": _ranks(job),
    }


def _tested(result: Result) -> str:
    test = result.test
    if not test.count:
        return "not evaluated"
    share = f"{100 * test.accuracy:.2f} % ({test.correct} of {test.count})"
    return f"accuracy {share}, loss {test.mean_loss:.4f}"


def _ranks(job: Job) -> str:
    plural = "s" if job.comm.size > 1 else ""
    return f"{job.comm.size} rank{plural} of batch {job.rank_batch} (global batch {job.global_batch})"

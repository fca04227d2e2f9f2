"""What allreduces of such times make of a training step: compute, and communication that overlaps with it."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from multiring.gradients.bucketing import ParameterSpec, plan_buckets
from multiring.models.nets.resnet_spec import resnet

__all__ = ["Profile", "buckets", "interpolate", "measure_profile", "step_seconds"]

# Published for one P100 at 32 images a step; a GPU twice or ten times as fast shows less overlap.
IMAGES_PER_SECOND = 220.0
BATCH = 32


@dataclass(frozen=True)
class Profile:
    """When gradients of ResNet-50 are ready, as fractions of a step's compute time.

    Attributes:
        ready: For each parameter in the model's order.
        device: Where it was measured.
    """

    ready: list[float]
    device: str


def parameters() -> list[ParameterSpec]:
    """The parameters of ResNet-50."""
    return [
        ParameterSpec(parameter.name, parameter.shape, "float32")
        for parameter in resnet(50, classes=1000).parameters()
    ]


def measure_profile(batch: int = 4, steps: int = 5) -> Profile:
    """Measures when gradients are ready in a step of ResNet-50 on 224 x 224 images, on this machine's
    processor. Needs torch."""
    import torch

    from multiring.models.nets.resnet_torch import TorchResNet

    model = TorchResNet(resnet(50, classes=1000))
    specs = parameters()
    names = {name: index for index, (name, _) in enumerate(model.named_parameters())}
    assert len(names) == len(specs)
    stamps = [0.0] * len(specs)

    def stamp(index: int) -> None:
        stamps[index] = time.perf_counter()

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, index=names[name]: stamp(index))
    images, labels = torch.randn(batch, 3, 224, 224), torch.randint(0, 1000, (batch,))
    runs: list[list[float]] = []
    for _ in range(steps + 1):
        model.zero_grad(set_to_none=True)
        start = time.perf_counter()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        whole = time.perf_counter() - start
        runs.append([(each - start) / whole for each in stamps])
    measured = runs[1:]  # the first one allocates
    ready = [statistics.median(run[index] for run in measured) for index in range(len(specs))]
    return Profile(ready, f"ResNet-50 in Torch, batch {batch}, median of {steps} steps on the CPU")


def buckets(profile: Profile) -> list[tuple[int, float]]:
    """Bytes of each bucket, and when its last gradient is ready, in the order in which they leave."""
    specs = parameters()
    order = sorted(range(len(specs)), key=lambda index: profile.ready[index])
    plan = plan_buckets(specs, order, size=256)
    return [
        (bucket.nbytes, max(profile.ready[slot.index] for slot in bucket.slots)) for bucket in plan.buckets
    ]


def interpolate(times: Mapping[int, float], nbytes: int) -> float:
    """Seconds for `nbytes` between the sizes that are known; beyond them as the nearest two say."""
    sizes = sorted(times)
    low, high = next(
        (pair for pair in itertools.pairwise(sizes) if nbytes <= pair[1]), (sizes[-2], sizes[-1])
    )
    slope = (times[high] - times[low]) / (high - low)
    return max(0.0, times[low] + slope * (nbytes - low))


def step_seconds(compute: float, left: Sequence[tuple[int, float]], seconds_of: Mapping[int, float]) -> float:
    """Seconds of a step: each bucket's allreduce begins when its gradients are ready and the one before has
    ended; the step ends when both computing and the last of them have.

    Args:
        compute: Seconds of forward and backward pass.
        left: Bytes of each bucket and when it is ready, as a fraction of `compute`.
        seconds_of: Seconds of an allreduce by its bytes.
    """
    end = 0.0
    for nbytes, ready in left:
        end = max(end, ready * compute) + seconds_of[nbytes]
    return max(compute, end)

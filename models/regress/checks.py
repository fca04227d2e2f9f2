"""What is checked: names, limits, and the setting in which all frameworks are compared."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ACCURACY", "CHECKS", "LIMITS", "SMALL", "SPEED_BATCH", "Check", "Setup"]

LIMITS = {"float32": 1e-4, "float64": 1e-9}
"""Largest relative difference in each arithmetic."""

ACCURACY = 0.97
"""Least share of right answers on the test images."""

SPEED_BATCH = 32
"""Images of a rank in a step whose time is taken."""


@dataclass(frozen=True)
class Check:
    """One kind of check.

    Attributes:
        name: As in `--checks`.
        title: As in the table.
        question: What it answers.
    """

    name: str
    title: str
    question: str


CHECKS = {
    check.name: check
    for check in (
        Check("agreement", "like other frameworks", "does a framework compute what the others compute?"),
        Check("following", "N ranks like one", "do N ranks of batch B train like one rank of batch N*B?"),
        Check("bits", "same bits on all ranks", "do all ranks hold the same bits after every training?"),
        Check(
            "accuracy", "test accuracy", f"are {ACCURACY:.0%} of the test images of the digits read right?"
        ),
        Check(
            "speed", "scaling efficiency", "what does keeping in step cost, beside the framework's own way?"
        ),
    )
}


@dataclass(frozen=True)
class Setup:
    """The setting, equal for all frameworks and ranks.

    Seed, batch and learning rate of the trainings that are compared are chosen: at depth 8, over 30 steps, no
    input of a ReLU comes closer to 0 than 5e-6 (a test sees to that). Where one did, rounding would decide on
    which side it falls; the gradient jumps there, and two correct float32 trainings drift apart by per cents.
    At other depths and beyond those steps float32 is therefore shown and not judged. Without such an accident
    float32 agrees to about 1e-6.

    Attributes:
        depth: Of the ResNet of all checks but speed.
        steps: Of the trainings that are compared.
        epochs: Of the training on digits.
        speed_depth: Of the ResNet whose steps are timed.
        speed_seconds: Time for the steps of one contender.
        seed: Of weights and order.
        batch: Global batch of the trainings that are compared: 1, 2 and 3 ranks share it evenly.
        uneven: Global batch that 2 and 3 ranks cannot share evenly.
        lr: Learning rate of the trainings that are compared.
        image_size: Of their images, which are digits.
        trainings: Which trainings are compared.
        probes: In which arithmetic scores and gradients are.
    """

    depth: int = 8
    steps: int = 30
    epochs: int = 6
    speed_depth: int = 20
    speed_seconds: float = 6.0
    seed: int = 32
    batch: int = 12
    uneven: int = 11
    lr: float = 0.02
    image_size: int = 8
    trainings: tuple[str, ...] = ("float32", "float64", "uneven")
    probes: tuple[str, ...] = ("float32", "float64")

    @property
    def judges_float32(self) -> bool:
        """Whether rounding alone cannot drive float32 trainings apart."""
        return self.depth == 8 and self.steps <= 30

    def global_batches(self, training: str) -> list[int]:
        """Samples of each step of a training."""
        if training != "uneven":
            return [self.batch] * self.steps
        single = min(2, self.steps // 2)
        return [self.uneven] * (self.steps - single) + [1] * single


SMALL = Setup(steps=5, trainings=("float32", "uneven"))
"""For `--small`."""

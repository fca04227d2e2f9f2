"""Whole trainings by name: those of the original system, as far as they were published."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from multiring.models.nets.resnet_spec import Stem
from multiring.models.trainers.recipe import Decay

__all__ = ["RECIPES", "NamedRecipe"]


@dataclass(frozen=True)
class NamedRecipe:
    """A network, its data and how it is trained; every choice can be overridden by its own option.

    Attributes:
        title: What it is, with its source.
        depth: Depth of the ResNet.
        classes: Classes of the data it is meant for.
        train_images: Training images of the data it is meant for.
        epochs: Passes over them.
        global_batch: Samples per step over all ranks.
        lr: Learning rate for a global batch of 256; the rate is linear in the batch.
        warmup_epochs: Epochs over which the rate rises.
        decay: How it falls.
        weight_decay: L2 penalty.
        stem: First layers.
        image_size: Pixels.
        nesterov: Whether momentum looks ahead.
        zero_residual: Whether residual branches start at zero.
    """

    title: str
    depth: int
    classes: int
    train_images: int
    epochs: int
    global_batch: int
    lr: float
    warmup_epochs: float
    decay: Decay
    weight_decay: float
    stem: Stem = "imagenet"
    image_size: int = 224
    nesterov: bool = False
    zero_residual: bool = True

    def preset(self) -> dict[str, Any]:
        """The choices that stand in for options that were not given."""
        names = ("depth", "stem", "image_size", "epochs", "lr", "warmup_epochs", "decay", "nesterov")
        more = ("weight_decay", "zero_residual", "global_batch")
        return {name: getattr(self, name) for name in names + more}


RECIPES = {
    "resnet50-imagenet1k": NamedRecipe(
        title="ResNet-50 on ImageNet-1K, 90 epochs of global batch 8,192 (PowerAI DDL, 2017; learning rate "
        "and warm-up as in Goyal et al., 2017)",
        depth=50,
        classes=1000,
        train_images=1_281_167,
        epochs=90,
        global_batch=8192,
        lr=0.1,
        warmup_epochs=5,
        decay="step",
        weight_decay=1e-4,
    ),
    # How the original trained this one beyond batch and network is not published in full: the rest is that of
    # the first recipe, with the cosine that needs no milestones.
    "resnet101-imagenet22k": NamedRecipe(
        title="ResNet-101 on ImageNet-22K, global batch 5,120 (PowerAI DDL, 2017); epochs and learning rate "
        "are ours",
        depth=101,
        classes=21_841,
        train_images=7_500_000,
        epochs=40,
        global_batch=5120,
        lr=0.1,
        warmup_epochs=2,
        decay="cosine",
        weight_decay=1e-4,
    ),
}

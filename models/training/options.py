"""The options of `multiring train`: one table for the command line, the record of a run and a relaunch."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from typing import Any

from multiring.commands.frameworks import FRAMEWORKS
from multiring.errors import UsageError
from multiring.models.nets.resnet_spec import DEPTHS, Stem
from multiring.models.trainers.recipe import Decay
from multiring.models.training.recipes import RECIPES

__all__ = ["WARM_UP_STEPS", "ResolvedOptions", "TrainOptions", "add_arguments"]


POSITIVE = (
    *("np", "image_size", "classes", "epochs", "batch_size", "global_batch", "limit_steps", "threads"),
    *("log_every", "keep"),
)
NOT_NEGATIVE = (
    *("seed", "eval_every", "checkpoint_every", "verify_every", "workers", "warmup_epochs", "lr", "momentum"),
    "weight_decay",
)


WARM_UP_STEPS = 5
"""First steps, which are not measured: they compile, and fill caches."""

# The options as --help shows them.
GROUPS = {
    "what is trained": ("recipe", "framework", "depth", "stem", "data", "image_size", "classes"),
    "ranks and machine": ("np", "threads", "workers", "dtype", "sync_bn"),
    "how long, and how many images at once": ("epochs", "limit_steps", "batch_size", "global_batch"),
    "learning rate": ("lr", "warmup_epochs", "decay"),
    "optimizer and weights": ("momentum", "nesterov", "weight_decay", "zero_residual", "seed"),
    "results": ("output_dir", "overwrite", "report", "log_every", "eval_every", "verify_every"),
    "before the training": ("dry_run", "compare"),
    "checkpoints": ("checkpoint_every", "keep", "resume", "extend"),
}
_EXAMPLES = """\
What stands in [brackets] holds where an option is left out.

examples:
  multiring train -np 2                                          # digits, two ranks on this host
  multiring train -np 2 --framework jax --depth 20 --epochs 40 --output-dir runs/jax
  multiring train -np 2 --resume runs/jax --epochs 60 --extend   # go on for longer than planned
  multiring run -H node0:4,node1:4 multiring train --recipe resnet50-imagenet1k --data /data/imagenet
"""


def _option(default: Any, text: str, **how: Any) -> Any:
    return dataclasses.field(default=default, metadata={"help": text, "how": how})


def _switch(default: bool | None, text: str) -> Any:
    return _option(default, text, action=argparse.BooleanOptionalAction)


@dataclass(frozen=True)
class TrainOptions:
    """What the command line says; None stands for "as suits the data"."""

    np: int | None = _option(
        None, "start this many ranks on this host [under a launcher: its ranks, else 1]", type=int
    )
    recipe: str | None = _option(
        None,
        "a whole training by name; other options override its choices (docs/recipes.md) [none]",
        choices=list(RECIPES),
    )
    dry_run: bool = _option(
        False,
        "train nothing: check data and memory, and estimate the time from measured steps",
        action="store_true",
    )
    framework: str = _option("torch", "framework that trains", choices=list(FRAMEWORKS))
    depth: int | None = _option(
        None, "depth of the ResNet [digits, synthetic: 8, folder: 50]", type=int, choices=DEPTHS
    )
    stem: Stem | None = _option(  # noqa: RUF009  (a dataclass field)
        None, "first layers [by depth]", choices=["cifar", "imagenet"]
    )
    data: str = _option(
        None,
        "digits, synthetic, or a folder with train/<class>/ and val/<class>/ [digits; a recipe needs one]",
        metavar="DATA",
    )
    image_size: int | None = _option(None, "pixels [digits: 16, folder: 224, synthetic: by stem]", type=int)
    classes: int | None = _option(
        None, "classes of synthetic data [10 or, for depths 50 and 101, 1000]", type=int
    )
    epochs: int | None = _option(None, "passes over the training data [digits: 20, folder: 90]", type=int)
    batch_size: int | None = _option(None, "samples per rank and step [32]", type=int)
    global_batch: int | None = _option(
        None,
        "samples per step over all ranks, in place of --batch-size [its number of each rank]",
        type=int,
    )
    lr: float | None = _option(
        None, "learning rate for a global batch of 256 [digits: 0.4, else: 0.1]", type=float
    )
    warmup_epochs: float | None = _option(
        None, "epochs of rising learning rate [digits: 2, folder: 5]", type=float
    )
    decay: Decay | None = _option(  # noqa: RUF009  (a dataclass field)
        None,
        "fall of the learning rate [digits: cosine, folder: step]",
        choices=["cosine", "step", "constant"],
    )
    momentum: float = _option(0.9, "momentum", type=float)
    nesterov: bool | None = _switch(None, "momentum that looks ahead [digits: yes, folder: no]")
    weight_decay: float | None = _option(None, "L2 penalty [digits: 5e-4, folder: 1e-4]", type=float)
    zero_residual: bool | None = _switch(None, "start residual branches at zero [depths 50 and 101: yes]")
    seed: int = _option(0, "seed of weights, order and augmentation", type=int)
    sync_bn: bool = _switch(
        True, "normalise over the global batch, so that results do not depend on the ranks"
    )
    dtype: str = _option("float32", "arithmetic", choices=["float32", "float64"])
    output_dir: str | None = _option(None, "where results go [runs/<what>-<when>]", metavar="DIR")
    resume: str | None = _option(
        None,
        "go on from a checkpoint, a directory of them or a run; auto (or nothing): from --output-dir if "
        "it has one [start afresh]",
        nargs="?",
        const="auto",
        metavar="PATH",
    )
    extend: bool = _option(
        False,
        "with --resume: go on although --epochs is a larger number than before; the learning rates of the "
        "new number hold from here on",
        action="store_true",
    )
    overwrite: bool = _switch(False, "replace the results of an earlier run in --output-dir")
    limit_steps: int | None = _option(None, "stop after this many steps in all [those of --epochs]", type=int)
    log_every: int = _option(10, "steps between records of the training loss", type=int)
    eval_every: int = _option(1, "epochs between evaluations, with one at the end; 0: never", type=int)
    checkpoint_every: int = _option(5, "epochs between checkpoints, with one at the end; 0: never", type=int)
    keep: int = _option(3, "checkpoints to keep", type=int)
    verify_every: int = _option(
        0, "steps between checks that all ranks hold identical bits; 0: never", type=int
    )
    threads: int | None = _option(None, "threads of the framework per rank [as the launcher sets]", type=int)
    workers: int = _option(2, "threads per rank that decode image files", type=int)
    report: bool = _switch(True, "write a TensorBoard log and the curve as PNG")
    compare: bool = _option(
        False,
        "with -np: train for a few steps on one rank first, and on all without synchronisation, and tell how "
        "much faster the job is",
        action="store_true",
    )
    one_rank_speed: float | None = _option(None, argparse.SUPPRESS, type=float)
    unsynchronised_speed: float | None = _option(None, argparse.SUPPRESS, type=float)
    progress_terminal: str | None = _option(None, argparse.SUPPRESS)

    def __post_init__(self) -> None:
        for name in POSITIVE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{_flag(name)} must be at least 1, not {value}")
        for name in NOT_NEGATIVE:
            value = getattr(self, name)
            if value is not None and value < 0:
                raise UsageError(f"{_flag(name)} must not be negative, but is {value}")
        if self.batch_size is not None and self.global_batch is not None:
            raise UsageError("--batch-size (per rank) and --global-batch (over all ranks) exclude each other")
        self._check_compare()
        if self.extend and self.resume is None:
            raise UsageError("--extend goes on with an earlier training; say which one by --resume")
        if self.data is None:
            if self.recipe is not None:
                raise UsageError(
                    f"--recipe {self.recipe} needs the data that it is for: give --data and a folder with "
                    "train/<class>/ and val/<class>/, or --data digits for a trial"
                )
            object.__setattr__(self, "data", "digits")

    def _check_compare(self) -> None:
        if not self.compare:
            return
        if self.dry_run:
            raise UsageError(
                "--compare measures a training, and --dry-run trains nothing: give one of the two"
            )
        if self.limit_steps is not None and self.limit_steps <= WARM_UP_STEPS:
            raise UsageError(
                f"--compare leaves the first {WARM_UP_STEPS} steps out: --limit-steps must be more, not "
                f"{self.limit_steps}"
            )

    @classmethod
    def from_namespace(cls, namespace: argparse.Namespace) -> TrainOptions:
        """Pick the options out of parsed arguments; raises UsageError where a number is out of range."""
        return cls(**{field.name: getattr(namespace, field.name) for field in dataclasses.fields(cls)})

    def to_arguments(self) -> list[str]:
        """Command line that parses to these options; defaults are left out."""
        arguments: list[str] = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value == field.default:
                continue
            if field.name in ("dry_run", "extend", "compare"):
                arguments.append(_flag(field.name))
            elif isinstance(value, bool):
                arguments.append(_flag(field.name) if value else _flag(field.name).replace("--", "--no-", 1))
            else:
                # One word, so that a value that begins with a dash is not taken for an option.
                arguments.append(f"{_flag(field.name)}={value}")
        return arguments

    def resolve(self) -> ResolvedOptions:
        """Fill in what depends on the data."""
        return ResolvedOptions.of(self)


@dataclass(frozen=True)
class ResolvedOptions:
    """The choices that the options leave to the data, made."""

    depth: int
    stem: Stem
    image_size: int
    classes: int
    epochs: int
    lr: float
    warmup_epochs: float
    decay: Decay
    nesterov: bool
    weight_decay: float
    zero_residual: bool
    batch_size: int
    global_batch: int | None

    @classmethod
    def of(cls, options: TrainOptions) -> ResolvedOptions:
        """Choose by the recipe or the kind of data, then by depth and stem."""
        kind = options.data if options.data in PRESETS else "folder"
        preset = PRESETS[kind] if options.recipe is None else RECIPES[options.recipe].preset()

        def chosen(name: str, otherwise: Any) -> Any:
            given = getattr(options, name)
            return preset.get(name, otherwise) if given is None else given

        depth = chosen("depth", 8)
        deep = depth >= 50
        stem = chosen("stem", "imagenet" if deep else "cifar")
        return cls(
            depth=depth,
            stem=stem,
            image_size=chosen("image_size", 224 if stem == "imagenet" else 32),
            classes=chosen("classes", 1000 if deep else 10),
            epochs=chosen("epochs", 1),
            lr=chosen("lr", 0.1),
            warmup_epochs=chosen("warmup_epochs", 0),
            decay=chosen("decay", "cosine"),
            nesterov=chosen("nesterov", False),
            weight_decay=chosen("weight_decay", 1e-4),
            zero_residual=chosen("zero_residual", deep),
            batch_size=chosen("batch_size", 32),
            global_batch=chosen("global_batch", None) if options.batch_size is None else None,
        )

    def samples_per_step(self, ranks: int) -> int:
        """Samples of a step over `ranks` ranks."""
        return self.global_batch or self.batch_size * ranks


# Image folders follow the usual recipe of ResNet-50 on ImageNet. Digits were tried with three seeds, on one
# rank and on two: the test accuracy ended at 99.2 to 99.5 %.
PRESETS: dict[str, dict[str, Any]] = {
    "digits": {
        "image_size": 16,
        "epochs": 20,
        "lr": 0.4,
        "warmup_epochs": 2,
        "nesterov": True,
        "weight_decay": 5e-4,
    },
    "synthetic": {},
    "folder": {"depth": 50, "image_size": 224, "epochs": 90, "warmup_epochs": 5, "decay": "step"},
}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `multiring train` to a parser.

    Args:
        parser: The parser of the command; its namespace goes to `multiring.models.train.main`.
    """
    parser.epilog = _EXAMPLES
    parser.usage = "multiring train [-np N] [options]"
    groups: dict[str, argparse._ArgumentGroup] = {}
    for title, names in GROUPS.items():
        groups |= dict.fromkeys(names, parser.add_argument_group(title))
    for field in dataclasses.fields(TrainOptions):
        flags = ["-np", "--np"] if field.name == "np" else [_flag(field.name)]
        action = groups.get(field.name, parser).add_argument(
            *flags, dest=field.name, default=field.default, **field.metadata["how"]
        )
        action.help = _help(field)


def _help(field: dataclasses.Field[Any]) -> str:
    """What an option is for, with what holds where it is left out."""
    text: str = field.metadata["help"]
    if field.default is None or "[" in text or text == argparse.SUPPRESS:
        return text
    default = {True: "yes", False: "no"}[field.default] if isinstance(field.default, bool) else field.default
    return f"{text} [{default}]"

"""Recipes by name and `--dry-run`, on small image folders."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from multiring import Communicator, machine
from multiring.errors import UsageError
from multiring.models import ranks, train
from multiring.models.nets.resnet_spec import resnet
from multiring.models.training.dry_run import BASE_BYTES, Finding, memory_needed, render
from multiring.models.training.options import TrainOptions, add_arguments
from multiring.models.training.recipes import RECIPES
from multiring.rendezvous.joined import TOLD_KEY
from tests.support import parsed

RECIPE = "--recipe=resnet50-imagenet1k"
# The network of the recipe costs seconds a step; its other choices do not depend on it.
QUICK = ["--depth=8", "--stem=cifar", "--image-size=16", "--threads=1"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    for split, count in (("train", 5), ("val", 2)):
        for name in ("cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(0, 255, (20, 24, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / split / name / f"{number}.png")
    return tmp_path


def parse(*arguments: str) -> TrainOptions:
    return TrainOptions.from_namespace(parsed(add_arguments, *arguments))


@pytest.mark.parametrize(
    ("name", "depth", "batch", "epochs"),
    [("resnet50-imagenet1k", 50, 8192, 90), ("resnet101-imagenet22k", 101, 5120, 40)],
)
def test_recipes_are_those_of_the_original(name: str, depth: int, batch: int, epochs: int) -> None:
    resolved = parse(f"--recipe={name}", "--data=x").resolve()
    assert (resolved.depth, resolved.stem, resolved.image_size) == (depth, "imagenet", 224)
    assert (resolved.global_batch, resolved.epochs, resolved.zero_residual) == (batch, epochs, True)
    assert resolved.samples_per_step(256) == batch
    resolved = parse(f"--recipe={name}", "--data=x", "--batch-size=16", "--no-zero-residual").resolve()
    assert (resolved.global_batch, resolved.batch_size, resolved.zero_residual) == (None, 16, False)
    assert RECIPES[name].warmup_epochs > 0


def test_a_recipe_trains_on_no_other_data_without_being_told() -> None:
    with pytest.raises(UsageError, match="resnet50-imagenet1k needs the data .*--data digits for a trial"):
        parse(RECIPE)
    assert parse(RECIPE, "--data=digits").data == "digits"
    assert parse().data == "digits"
    assert parse(*parse(RECIPE, "--data=digits").to_arguments()).data == "digits"


def test_batch_per_rank_and_global_batch_exclude_each_other() -> None:
    with pytest.raises(UsageError, match="exclude each other"):
        parse("--batch-size=2", "--global-batch=8")


def test_memory_is_counted_from_the_specification() -> None:
    spec = resnet(8, classes=10, in_channels=1)
    shapes = spec.shapes(16)
    each = sum(math.prod(shape) for shape in shapes.values())
    assert memory_needed(spec, 16, 0, 8) == BASE_BYTES + 8 * 3 * spec.count_parameters()
    assert memory_needed(spec, 16, 5, 8) - memory_needed(spec, 16, 0, 8) == 8 * 5 * each
    # The first block alone: 16 channels of 16 x 16 after convolution, normalisation and ReLU.
    assert each > 3 * 16 * 16 * 16


def test_a_small_folder_can_be_trained_on(
    folder: Path, comm: Communicator, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = parse(RECIPE, *QUICK, f"--data={folder}", "--global-batch=4", "--dry-run")
    before = sorted(tmp_path.rglob("*"))
    assert train.dry_run(options, comm) == 0
    printed = capsys.readouterr().out
    assert "the data has 2 classes, 10 training images; the recipe is meant for 1,000 classes" in printed
    assert "a sample of 14 images was read" in printed
    # 10 images in batches of 4 are 3 steps an epoch.
    assert "for 270 steps of" in printed
    assert "at batch 2 and " in printed
    assert printed.endswith("nothing stands in its way\n")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_damaged_image_is_found(
    folder: Path, comm: Communicator, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "val" / "dog" / "1.png").write_bytes(b"no image")
    assert train.dry_run(parse(RECIPE, *QUICK, f"--data={folder}", "--dry-run"), comm) == 1
    printed = capsys.readouterr().out
    assert "FAIL  data     rank 0: cannot read image" in printed
    assert "dog/1.png" in printed


@pytest.mark.parametrize(("mebibytes", "advice"), [(700, "start at least"), (300, "take a smaller")])
def test_too_little_memory_is_told(
    comm: Communicator,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    mebibytes: int,
    advice: str,
) -> None:
    monkeypatch.setattr(machine, "memory_limit", lambda: mebibytes * 2**20)
    options = parse("--data=synthetic", "--depth=8", "--threads=1", "--global-batch=4096", "--dry-run")
    assert train.dry_run(options, comm) == 1
    printed = capsys.readouterr().out
    assert "FAIL  memory" in printed
    assert advice in printed


def test_the_launcher_adds_nothing_to_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(ranks, "tell_launcher", lambda settings, key: told.append(key))
    options = parsed(add_arguments, "--dry-run", "--data=synthetic")
    for code in (0, 1):
        monkeypatch.setattr(train, "dry_run", lambda options, comm, code=code: code)
        assert train.main(options) == code
        assert told == [TOLD_KEY] * code


def test_a_verdict_needs_a_failure() -> None:
    assert "cannot be done" not in render([Finding("warn", "recipe", "text")])
    assert "cannot be done" in render([Finding("ok", "data", "text"), Finding("fail", "memory", "text")])

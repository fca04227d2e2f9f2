"""Recipes by name and `--dry-run`, on small image folders."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from multiring import Communicator, machine
from multiring.errors import UsageError
from multiring.models import ranks, train
from multiring.models.nets.resnet_spec import resnet
from multiring.models.training.dry_run import BASE_BYTES, memory_needed
from multiring.models.training.options import add_arguments
from multiring.rendezvous.joined import EXPLAINED_KEY
from tests.python.models.images import write_images
from tests.python.models.test_models_train import parse
from tests.support import parsed

RECIPE, LARGE = "--recipe=resnet50-imagenet1k", "--recipe=resnet101-imagenet22k"
# The network of the recipe costs seconds a step; its other choices do not depend on it.
QUICK = ["--depth=8", "--stem=cifar", "--image-size=16", "--threads=1"]


IMAGENET = {"stem": "imagenet", "image_size": 224}
DIGITS = {"depth": 8, "stem": "cifar", "image_size": 16, "epochs": 20, "lr": 0.4, "nesterov": True}
FOLDER = {"depth": 50, "epochs": 90, "lr": 0.1, "warmup_epochs": 5, "nesterov": False, "weight_decay": 1e-4}
CHOSEN = "--depth=8 --lr=3 --nesterov --no-zero-residual --batch-size=16"
CHOICES = {"lr": 3.0, "nesterov": True, "zero_residual": False, "global_batch": None, "batch_size": 16}
RESOLVED = {
    "--data=synthetic": {"image_size": 32, "classes": 10},
    "--data=synthetic --depth=50": {"image_size": 224, "classes": 1000},
    "--data=digits": DIGITS | {"decay": "cosine"},
    "--data=x": FOLDER | IMAGENET | {"decay": "step", "zero_residual": True},
    f"--data=x {CHOSEN}": CHOICES | {"depth": 8},
    f"{RECIPE} --data=x": {"depth": 50, "global_batch": 8192, "epochs": 90, "zero_residual": True} | IMAGENET,
    f"{RECIPE} --data=x {CHOSEN}": CHOICES,
    f"{LARGE} --data=x": {"depth": 101, "global_batch": 5120, "epochs": 40, "zero_residual": True} | IMAGENET,
}


@pytest.mark.parametrize("words", RESOLVED)
def test_recipes(words: str) -> None:
    resolved = parse(*words.split()).resolve()
    expected = RESOLVED[words]
    assert {name: getattr(resolved, name) for name in expected} == expected
    if resolved.global_batch is not None:
        assert resolved.samples_per_step(256) == resolved.global_batch


def test_a_recipe_trains_on_no_other_data_without_being_told() -> None:
    with pytest.raises(UsageError, match="resnet50-imagenet1k needs the data .*--data digits for a trial"):
        parse(RECIPE)
    chosen = parse(RECIPE, "--data=digits")
    assert chosen.data == parse().data == parse(*chosen.to_arguments()).data == "digits"


def test_memory_is_counted_from_the_specification() -> None:
    spec = resnet(8, classes=10, in_channels=1)
    shapes = spec.shapes(16)
    each = sum(math.prod(shape) for shape in shapes.values())
    assert memory_needed(spec, 16, 0, 8) == BASE_BYTES + 8 * 3 * spec.count_parameters()
    assert memory_needed(spec, 16, 5, 8) - memory_needed(spec, 16, 0, 8) == 8 * 5 * each
    # The first block alone: 16 channels of 16 x 16 after convolution, normalisation and ReLU.
    assert each > 3 * 16 * 16 * 16


def test_a_small_folder_can_be_trained_on(
    comm: Communicator, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_images(tmp_path, "cat dog", 5, 2)
    before = sorted(tmp_path.rglob("*"))
    options = parse(RECIPE, *QUICK, f"--data={tmp_path}", "--global-batch=4", "--dry-run")
    assert train.dry_run(options, comm) == 0
    printed = capsys.readouterr().out
    assert "the data has 2 classes, 10 training images; the recipe is meant for 1,000 classes" in printed
    assert "a sample of 14 images was read" in printed
    assert "for 270 steps of" in printed  # 10 images in batches of 4 are 3 steps an epoch
    assert printed.endswith("nothing stands in its way\n")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_damaged_image_is_found(
    comm: Communicator, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bad = write_images(tmp_path, "cat dog", 5, 2) / "val" / "dog" / "1.png"
    bad.write_bytes(b"no image")
    assert (
        train.dry_run(parse(RECIPE, *QUICK, f"--data={tmp_path}", "--global-batch=4", "--dry-run"), comm) == 1
    )
    printed = capsys.readouterr().out
    assert f"FAIL  data     rank 0: cannot read image {bad}" in printed
    assert printed.endswith("cannot be done like this\n")


def test_too_little_memory_is_told(
    comm: Communicator, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = parse("--data=synthetic", "--depth=8", "--threads=1", "--global-batch=4096", "--dry-run")
    for mebibytes, advice in ((700, "start at least"), (300, "take a smaller")):
        monkeypatch.setattr(machine, "memory_limit", lambda bound=mebibytes: bound * 2**20)
        assert train.dry_run(options, comm) == 1
        assert re.search(f"FAIL  memory.*{advice}", capsys.readouterr().out)


def test_the_launcher_adds_nothing_to_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(ranks, "tell_launcher", lambda settings, key: told.append(key))
    options = parsed(add_arguments, "--dry-run", "--data=synthetic")
    for code in (0, 1):
        monkeypatch.setattr(train, "dry_run", lambda options, comm, code=code: code)
        assert train.main(options) == code
        assert told == [EXPLAINED_KEY] * code

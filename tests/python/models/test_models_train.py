"""`multiring train` with one rank: options, the loop, resuming, and what goes wrong."""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from multiring import Communicator
from multiring.errors import UsageError
from multiring.models import train
from multiring.models.errors import CheckpointError, DivergenceError
from multiring.models.training import checkpoint
from multiring.models.training.checkpoint import Checkpoint
from multiring.models.training.driver import Result, check_identity
from multiring.models.training.options import GROUPS, TrainOptions, add_arguments
from multiring.models.training.report import read_metrics
from tests.support import parsed

SMALL = ["--image-size=8", "--threads=1", "--no-report", "--batch-size=64"]


def parse(*arguments: str) -> TrainOptions:
    return TrainOptions.from_namespace(parsed(add_arguments, *arguments))


def run(comm: Communicator, directory: Path, *arguments: str) -> Result:
    return train.train(parse(*SMALL, f"--output-dir={directory}", *arguments), comm)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"np": 3, "data": "-odd path", "depth": 20, "lr": 0.1, "nesterov": True, "sync_bn": False},
        {"nesterov": False, "resume": "some where", "limit_steps": 9, "progress_terminal": "/dev/pts/0"},
        {"resume": "auto", "extend": True},
        {"np": 2, "compare": True, "one_rank_speed": 12.5},
        {"recipe": "resnet50-imagenet1k", "dry_run": True, "data": "x", "global_batch": 64},
    ],
)
def test_a_relaunch_passes_on_every_option(changes: dict[str, Any]) -> None:
    options = TrainOptions(**changes)
    assert parse(*options.to_arguments()) == options


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        ("--extend", 2, "--extend goes on with an earlier training"),
        ("--compare --np=2 --dry-run", 2, "--compare measures a training, and --dry-run trains nothing"),
        ("--compare --np=2 --limit-steps=5", 2, "--limit-steps must be more, not 5"),
        ("--epochs=0", 2, "--epochs must be at least 1, not 0"),
        ("--seed=-1", 2, "--seed must not be negative, but is -1"),
        ("--lr=-1", 2, "--lr must not be negative, but is -1"),
        ("--batch-size=2 --global-batch=8", 2, "exclude each other"),
        ("--batch-size=2000", 2, "a step takes 2000 images (on 1 rank; --batch-size is that of each"),
        ("--resume", 2, "--resume without a path"),
        ("--data=/nowhere", 1, "there is no folder"),
    ],
)
def test_what_is_wrong_is_told(words: str, code: int, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(parsed(add_arguments, *words.split())) == code
    assert told in capsys.readouterr().err


def test_a_run_that_was_stopped_before_its_first_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    assert train.main(parsed(add_arguments, f"--output-dir={tmp_path}", "--resume")) == 2
    assert f"{tmp_path} has no checkpoint to go on from" in capsys.readouterr().err


def test_a_short_training_leaves_everything_it_says(
    comm: Communicator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    result = run(comm, out, "--epochs=2", "--report", "--log-every=4", "--checkpoint-every=1")
    assert (result.steps, result.trained_images, result.test.count) == (46, 2 * 1433, 364)
    said = capsys.readouterr().out
    for told in ("1433 training and 364 test images", f"({result.test.correct} of 364)"):
        assert told in said
    for name in ("checkpoints/step-000000046.npz", "curve.png", "metrics.jsonl", "tensorboard"):
        assert (out / name).exists()
        assert str(out / name) in said
    records = read_metrics(out / "metrics.jsonl")
    assert [record["step"] for record in records if record["kind"] == "step"] == list(range(4, 47, 4))
    epochs = [record for record in records if record["kind"] == "epoch"]
    assert [record["position"] for record in epochs] == [1.0, 2.0]
    assert epochs[1]["train_loss"] < epochs[0]["train_loss"]
    assert epochs[1]["test_accuracy"] == result.test.accuracy
    assert json.loads((out / "summary.json").read_text())["fingerprint"] == result.fingerprint
    assert json.loads((out / "config.json").read_text())["ranks"] == 1


def test_a_resumed_training_is_the_uninterrupted_one_bit_for_bit(comm: Communicator, tmp_path: Path) -> None:
    whole = run(comm, tmp_path / "whole", "--epochs=2", "--log-every=1")
    # Stops within an epoch, then at its end.
    run(comm, tmp_path / "parts", "--epochs=2", "--log-every=1", "--limit-steps=9")
    run(comm, tmp_path / "parts", "--epochs=2", "--log-every=1", "--limit-steps=23", "--resume")
    last = run(comm, tmp_path / "parts", "--epochs=2", "--log-every=1", "--resume", str(tmp_path / "parts"))
    assert last.fingerprint == whole.fingerprint
    assert last.test == whole.test
    records = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "parts")]
    steps = [[(r["step"], r["loss"]) for r in found if r["kind"] == "step"] for found in records]
    assert steps[0] == steps[1]
    final = [found[-1] for found in records]
    assert all(final[0][key] == final[1][key] for key in ("train_loss", "train_accuracy", "test_loss"))


def test_a_return_to_an_earlier_checkpoint_drops_what_came_after(comm: Communicator, tmp_path: Path) -> None:
    arguments = ("--epochs=2", "--checkpoint-every=1", "--log-every=10")
    whole = run(comm, tmp_path, *arguments)
    first = tmp_path / "checkpoints" / "step-000000023.npz"
    stopped = run(comm, tmp_path, *arguments, f"--resume={first}", "--limit-steps=30")
    assert stopped.steps == 30
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == ["step-000000023.npz", "step-000000030.npz"]
    assert max(record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")) == 30
    assert run(comm, tmp_path, *arguments, "--resume").fingerprint == whole.fingerprint


def test_where_results_are_a_training_goes_on_or_replaces_them(comm: Communicator, tmp_path: Path) -> None:
    first = run(comm, tmp_path, "--limit-steps=2", "--resume")  # where nothing is: it starts afresh
    again = run(comm, tmp_path, "--limit-steps=2", "--resume")
    assert (again.fingerprint, again.test, again.trained_images) == (first.fingerprint, first.test, 0)
    told = r"depth is 20, the checkpoint has 8.*seed is 3, the checkpoint has 0"
    with pytest.raises(CheckpointError, match=told):
        run(comm, tmp_path, "--resume", "--depth=20", "--seed=3")
    with pytest.raises(UsageError, match="holds the results of an earlier training; give --resume"):
        run(comm, tmp_path, "--limit-steps=1")
    (tmp_path / "mine.txt").touch()
    run(comm, tmp_path, "--limit-steps=1", "--overwrite")
    assert checkpoint.read(checkpoint.locate(tmp_path)).step == 1
    assert (tmp_path / "mine.txt").exists()


def test_a_loss_that_is_not_finite_stops_the_training(comm: Communicator, tmp_path: Path) -> None:
    with pytest.raises(DivergenceError, match=r"loss is (nan|inf) at step \d+ .*lower --lr"):
        run(comm, tmp_path, "--lr=1e30", "--warmup-epochs=0", "--log-every=1")


def test_evaluation_and_checkpoints_can_be_left_out(comm: Communicator, tmp_path: Path) -> None:
    result = run(comm, tmp_path, "--limit-steps=1", "--eval-every=0", "--checkpoint-every=0")
    assert (result.test.count, result.checkpoint) == (0, None)
    assert json.loads((tmp_path / "summary.json").read_text())["test_accuracy"] is None
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize(
    "arguments", [["--dtype=float64", "--no-sync-bn"], ["--depth=20", "--data=synthetic"]]
)
def test_variants_train(comm: Communicator, tmp_path: Path, arguments: list[str]) -> None:
    result = run(comm, tmp_path, "--limit-steps=2", "--verify-every=1", *arguments)
    assert result.steps == 2
    state = checkpoint.read(checkpoint.locate(tmp_path))
    dtypes = {str(value.dtype) for name, value in state.arrays.items() if name.startswith("model/")}
    assert dtypes == {"float64" if "--dtype=float64" in arguments else "float32"}


def test_a_training_goes_on_for_longer_where_that_is_asked_for(comm: Communicator, tmp_path: Path) -> None:
    """Or where its learning rates do not depend on how long it is."""
    run(comm, tmp_path / "cosine", "--epochs=2", "--limit-steps=2")
    longer = ("--epochs=3", "--limit-steps=3", "--resume")
    told = "only the number of epochs differs: the checkpoint is of a training of .* steps, and .*--extend"
    with pytest.raises(CheckpointError, match=told):
        run(comm, tmp_path / "cosine", *longer)
    assert run(comm, tmp_path / "cosine", *longer, "--extend").steps == 3
    with pytest.raises(CheckpointError, match="belongs to another training: seed"):
        run(comm, tmp_path / "cosine", *longer, "--extend", "--seed=1")
    run(comm, tmp_path / "constant", "--epochs=2", "--limit-steps=2", "--decay=constant")
    assert run(comm, tmp_path / "constant", *longer, "--decay=constant").steps == 3


@pytest.mark.parametrize(
    ("steps", "extend", "told"),
    [
        (40, False, "--epochs makes the training one of 40 steps, and the checkpoint is of step 46"),
        (40, True, "--epochs makes the training one of 40 steps, and the checkpoint is of step 46"),
        (50, True, "--extend asks for a longer training, .* had 60 before"),
        (50, False, ""),
        (70, True, ""),
        (70, False, ""),
    ],
)
def test_a_training_does_not_end_before_its_checkpoint(steps: int, extend: bool, told: str) -> None:
    def config(total_steps: int) -> dict[str, Any]:
        return {"seed": 0, "recipe": {"total_steps": total_steps, "decay": "constant"}}

    state = Checkpoint(46, 2, config(60), {}, progress={})
    with pytest.raises(CheckpointError, match=told) if told else contextlib.nullcontext():
        check_identity(config(steps), state, extend=extend)


def test_a_speed_that_is_not_measured_is_told(
    comm: Communicator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(comm, tmp_path, "--limit-steps=5", "--one-rank-speed=9", "--eval-every=0", "--checkpoint-every=0")
    assert "speed-up   not measured: fewer than 6 steps\n" in capsys.readouterr().out
    assert "speed_up" not in json.loads((tmp_path / "summary.json").read_text())


def test_help_has_each_option_in_one_group_and_what_holds_without_it() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    grouped = [name for names in GROUPS.values() for name in names]
    shown = {action.dest for action in parser._actions if action.help != argparse.SUPPRESS}
    assert sorted(grouped) == sorted(shown - {"help"})
    for action in parser._actions[1:]:
        assert action.help == argparse.SUPPRESS or "[" in str(action.help), action.dest
    assert parser.format_help().count("what is trained:") == 1

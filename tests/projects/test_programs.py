"""Programs as the documentation of other projects has them, over multiring and over their own back end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.projects.support import (
    AS_GLOO,
    HOROVOD,
    NO_HOROVOD,
    PROGRAMS,
    by_torchrun,
    done,
    launched,
    needs_projects,
    python,
    record,
)
from tests.support import REPOSITORY

pytestmark = needs_projects


def _last_json(text: str) -> Any:
    """Return what the last line that is JSON says, whatever tag the launcher has put before it."""
    lines = [line.partition("] ")[2] if line.startswith("[") else line for line in text.splitlines()]
    return json.loads(next(line for line in reversed(lines) if line.startswith("{")))


def test_netket_samples_as_one_process() -> None:
    """Two processes of one device each have the energies of one process of two devices."""
    program = PROGRAMS / "netket_ising.py"
    together = _last_json(done(launched(2, "--jax", program)).stdout)
    two_devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    alone = _last_json(done(python(program, "alone"), two_devices).stdout)
    assert together["devices"] == alone["devices"] == 2
    np.testing.assert_allclose(together["energies"], alone["energies"], rtol=1e-6)
    assert together["energies"][-1] < -14.5  # the ground state has -15.32
    what = "ground state of an Ising chain, 30 steps"
    record("NetKet", "`--jax`", what, "the energies of one process with 2 devices, to 1e-6", "not run")


@pytest.fixture(scope="module")
def water(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("water")
    done(python(PROGRAMS / "deepmd_water.py", folder))
    return folder


def test_deepmd_trains_by_tensorflow(water: Path) -> None:
    """By sessions and Horovod's optimizer."""
    said = done(launched(2, "--horovod", "dp", "--tf", "train", water / "input.json", "--skip-neighbor-stat"))
    curve = np.loadtxt(water / "lcurve.out")
    assert curve[-1, 1] < curve[0, 1] / 2
    assert "receive global variables from task#0" in said.stderr + said.stdout
    what = "`dp --tf train` on molecules like water, 40 steps"
    record("deepmd-kit", "`--horovod`", what, f"error {curve[0, 1]:.2f} to {curve[-1, 1]:.2f}", NO_HOROVOD)


def _told_by_ranks(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def test_torchmd_trains_as_over_gloo(tmp_path: Path) -> None:
    """By Lightning, which asks for "gloo"."""
    done(python(PROGRAMS / "torchmd_data.py", tmp_path))
    files = {f"--{name}-files": tmp_path / f"{name}.npy" for name in ("coord", "embed", "energy", "force")}
    options = (
        "--dataset Custom --model tensornet --embedding-dimension 8 --num-layers 1 --num-rbf 8 "
        "--max-num-neighbors 16 --max-z 10 --derivative true --num-epochs 2 --save-interval 1 --batch-size 8 "
        "--train-size 32 --val-size 16 --test-size 16 --num-workers 0 --ngpus 2"
    )
    words = [*options.split(), *(str(word) for pair in files.items() for word in pair)]
    found = {}
    for name, launcher_options in {"gloo": [], "multiring": ["--as-gloo"]}.items():
        folder = tmp_path / name
        done(launched(2, *launcher_options, "torchmd-train", *words, "--log-dir", folder))
        found[name] = (folder / "metrics.csv").read_text()
    assert len(found["gloo"].splitlines()) >= 3
    assert found["multiring"] == found["gloo"]
    record("torchmd-net", "`--as-gloo`", "`torchmd-train`, 2 epochs", "the digits of Gloo", "trains")


def test_returnn_trains_as_over_gloo(tmp_path: Path) -> None:
    found = {}
    for name, environment in {"gloo": {}, "multiring": AS_GLOO}.items():
        folder = tmp_path / name
        folder.mkdir()
        backend = {"RETURNN_OUT": str(folder), "RETURNN_BACKEND": "gloo" if name == "gloo" else ""}
        command = by_torchrun(2, "-m", "returnn", PROGRAMS / "returnn_config.py")
        done(command, {**environment, **backend})
        scores = (folder / "scores").read_text()
        found[name] = [line for line in scores.splitlines() if "loss" in line]
    assert found["multiring"] == found["gloo"]
    what = "a recurrent network, 2 epochs"
    theirs = "its default is refused by a torch for CPUs; trains with its option for Gloo"
    record("returnn", "`MULTIRING_AS_GLOO=1`", what, "the scores of Gloo", theirs)


def test_ray_trains_as_over_gloo(tmp_path: Path) -> None:
    found = {}
    for name, environment in {"gloo": {}, "multiring": AS_GLOO}.items():
        folder = tmp_path / name
        folder.mkdir()
        done(python(PROGRAMS / "ray_train.py", folder), {**environment, "RAY_USAGE_STATS_ENABLED": "0"})
        found[name] = _told_by_ranks(folder)
    assert {rank["made by"] for rank in found["multiring"]} == {"multiring.torch_distributed.group"}
    for ours, theirs in zip(found["multiring"], found["gloo"], strict=True):
        assert ours["backend"] == theirs["backend"] == "gloo"
        assert ours["weights"] == theirs["weights"]
    record("ray", "`MULTIRING_AS_GLOO=1`", "`TorchTrainer`, 3 epochs", "the bits of Gloo", "trains")


def test_optuna_tries_on_groups_of_ranks() -> None:
    said = done(launched(4, REPOSITORY / "examples" / "optuna_groups.py", "--trials", "4")).stdout
    assert said.count("accuracy") == 4
    assert "best of 4 trials on 2 groups" in said
    what = "[trials on groups of ranks](optuna.md), 4 ranks"
    record("optuna", "lines of multiring", what, "4 trials on 2 groups", "not run")


def test_horovod_is_there_for_pytest_and_python() -> None:
    found = done(python("-c", "import ignite.distributed as idist; print(idist.has_hvd_support)"), HOROVOD)
    assert found.stdout.strip() == "True"

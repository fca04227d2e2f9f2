"""Which tests `make test` leaves to `make test-rest` (tests/README.md), and which run in one process.

`make test` has every adapter's contract, every collective, kills and mismatches on one host. The files of
the others are listed here. They are marked `full`: `pytest -m full` runs them, `pytest -m "not full"` does
not, but for a few tests of them that show that each kind works at all (`SMOKE`). A test function may carry
the mark by itself.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

FULL = {
    "docs": ["test_code_blocks.py"],
    "adapters": [
        "caffe/test_caffe_state.py",
        "chainer/test_chainer_jobs.py",
        "horovod/test_horovod_drift.py",
        "horovod/test_horovod_elastic.py",
        "horovod/test_horovod_ignite.py",
        "horovod/test_horovod_missing_gradients.py",
        "horovod/test_horovod_optimizer.py",
        "horovod/test_horovod_optimizer_state.py",
        "horovod/test_horovod_tensorflow_drift.py",
        "horovod/test_horovod_tensorflow_reading.py",
        "horovod/test_horovod_tensorflow_sessions.py",
        "horovod/test_horovod_tensorflow_training.py",
        "horovod/test_horovod_tf_keras.py",
        "jax/test_jax_correctness.py",
        "jax/test_jax_state_check.py",
        "jax/test_jax_training.py",
        "jax_collectives/test_checkpoints.py",
        "jax_collectives/test_sharded_programs.py",
        "pytensor/test_pytensor_graphs.py",
        "tensorflow/test_tensorflow_callbacks.py",
        "tensorflow/test_tensorflow_keras.py",
        "tensorflow/test_tensorflow_ops.py",
        "tensorflow/test_tensorflow_order.py",
        "tensorflow/test_tensorflow_state.py",
        "test_coming_from.py",
        "test_examples.py",
        "test_exactness.py",
        "test_float_modes.py",
        "test_trainer_failures.py",
        "torch/test_torch_legal_programs.py",
        "torch/test_torch_optimizer.py",
        "torch_distributed/test_dist_launchers.py",
        "torch_distributed/test_dist_own_suite.py",
        "torch_distributed/test_dist_sharded.py",
        "torch_distributed/test_dist_strategies.py",
        "torch_distributed/test_dist_torchft.py",
        "torch_distributed/test_dist_trainers.py",
    ],
    "faults": [
        "test_containers.py",
        "test_emulated_hosts.py",
        "test_fork.py",
        "test_hosts_doctor.py",
        "test_in_time.py",
        "test_leaks.py",
        "test_many_ranks.py",
        "test_remote_launch.py",
        "test_torchrun.py",
    ],
    "projects": ["test_ignite_suite.py", "test_previous_jax.py", "test_programs.py"],
    "python": [
        "benchmarks/test_bench.py",
        "benchmarks/test_bench_collectives.py",
        "benchmarks/test_bench_emulated.py",
        "benchmarks/test_bench_gradients.py",
        "benchmarks/test_bench_launch.py",
        "benchmarks/test_scaling.py",
        "caffe/test_caffe_command.py",
        "collectives/test_several_hosts.py",
        "commands/test_tune.py",
        "launch/test_kubernetes.py",
        "launch/test_launch_engines.py",
        "launch/test_launcher_ends.py",
        "launch/test_launcher_output.py",
        "launch/test_ray.py",
        "models/test_models_caffe.py",
        "models/test_models_chainer.py",
        "models/test_models_checkpoint.py",
        "models/test_models_dry_run.py",
        "models/test_models_jax.py",
        "models/test_models_pytensor.py",
        "models/test_models_ranks.py",
        "models/test_models_report.py",
        "models/test_models_tensorflow.py",
        "models/test_models_train.py",
        "regress/test_regress.py",
        "rendezvous/test_mpi.py",
        "rendezvous/test_torchrun.py",
        "test_suggestions.py",
    ],
}
# Tests of those files that `make test` runs as well: one of each launcher, of each way to several hosts, of
# each framework's example and of each front door.
SMOKE: dict[str, list[str]] = {
    "adapters/horovod/test_horovod_drift.py": ["test_a_forgotten_broadcast"],
    "adapters/horovod/test_horovod_missing_gradients.py": ["test_gradients_of_different_variables[tape]"],
    "adapters/horovod/test_horovod_tensorflow_drift.py": ["test_a_variable_that_one_rank_changes[True]"],
    "adapters/horovod/test_horovod_tensorflow_reading.py": ["test_passes_add_up_the_same_variables"],
    "adapters/horovod/test_horovod_optimizer.py": ["test_training[two groups-3]"],
    "adapters/jax_collectives/test_sharded_programs.py": [
        "test_collectives_give_what_numpy_gives[2]",
        "test_groups_of_devices_are_told_apart",
        "test_a_killed_rank_is_named_by_the_others",
    ],
    "adapters/test_examples.py": [
        f"test_an_example_learns_the_digits[{framework}_digits.py]" for framework in ("chainer",)
    ],
    "adapters/torch/test_torch_legal_programs.py": [
        "test_two_backward_passes_over_one_graph_with_a_constant"
    ],
    "adapters/torch_distributed/test_dist_launchers.py": [
        "test_any_launcher_starts_the_ranks[torchrun-destroy]"
    ],
    "adapters/torch_distributed/test_dist_strategies.py": [
        "test_distributed_data_parallel[2]",
        "test_fully_sharded[2]",
    ],
    "faults/test_emulated_hosts.py": [
        "test_a_killed_rank_is_named_on_every_host[layout0-allreduce-3-4]",
    ],
    "faults/test_fork.py": ["test_a_child_cannot_communicate", "test_a_child_hides_no_end[True-2]"],
    "faults/test_leaks.py": ["test_killed_jobs[victims0]", "test_references_after_shutdown"],
    "faults/test_remote_launch.py": [
        "test_ranks_start_on_both_hosts_and_see_all[nsenter]",
        "test_ranks_start_on_both_hosts_and_see_all[mpirun]",
        "test_ctrl_c_reaches_all_ranks[nsenter]",
    ],
    "python/launch/test_launcher_ends.py": [
        "test_when_a_rank_fails_the_others_are_ended_and_it_is_blamed",
        "test_children_of_ranks_end_with_the_job",
    ],
    "python/rendezvous/test_mpi.py": [
        "test_every_collective[openmpi-2 on 2]",
        "test_mpirun_is_recognised_and_each_run_is_another_job[openmpi]",
    ],
}
# Marked `alone` as well: they look at what all processes of the machine leave behind, or bound how soon
# ranks notice what has happened.
ALONE = {
    "faults": ["test_emulated_hosts.py", "test_in_time.py"],
    "python": [
        "benchmarks/test_bench_emulated.py",
        "benchmarks/test_bench_launch.py",
        "rendezvous/test_mpi.py",
    ],
}
_TESTS = Path(__file__).parent


def _listed(table: dict[str, list[str]]) -> set[str]:
    return {f"{folder}/{file}" for folder, files in table.items() for file in files}


def is_left_out(path: Path, marks: str) -> bool:
    """Whether `pytest -m MARKS` runs no test of this file, which then need not be imported."""
    return marks == "not full" and path in {_TESTS / name for name in _listed(FULL) - SMOKE.keys()}


def check() -> None:
    """Sees that the files that are named above exist: one that has moved would run in the wrong tier."""
    listed = _listed(FULL) | _listed(ALONE) | SMOKE.keys()
    if gone := [name for name in sorted(listed) if not (_TESTS / name).exists()]:
        raise pytest.UsageError(f"tests/tiers.py names what does not exist: {', '.join(gone)}")


def mark(items: list[pytest.Item], *, whole: bool) -> None:
    """Marks the tests of the files above. With `whole` all tests of each file are here, and a smoke test that
    is not among them is an error: `make test` would run none in its place."""
    here: dict[str, set[str]] = {}
    for item in items:
        here.setdefault(_name(item.path), set()).update(_names(item))
    for file in SMOKE.keys() & here.keys() if whole else ():
        if gone := [test for test in SMOKE[file] if test not in here[file]]:
            raise pytest.UsageError(f"tests/tiers.py names what is not in {file}: {', '.join(gone)}")
    for name, table in (("full", FULL), ("alone", ALONE)):
        listed = _listed(table)
        for item in items:
            if _name(item.path) in listed and not _is_smoke(item):
                item.add_marker(name)


def _is_smoke(item: pytest.Item) -> bool:
    return not _names(item).isdisjoint(SMOKE.get(_name(item.path), ()))


def _names(item: pytest.Item) -> set[str]:
    """What a test may be called above: with its parameters, or without for all of them."""
    return {item.name, item.name.partition("[")[0]}


def _name(path: Path) -> str:
    return path.relative_to(_TESTS).as_posix()


# What takes minutes, as `worker_of` calls it: begun first, so that no process waits long for another one.
_LONGEST = [
    "tensorflow",
    "jax",
    "torch",
    "test_examples.py",
    "tests/python/models/test_models_jax.py",
    "tests/python/regress/test_regress.py",
    "tests/python/launch/test_ray.py",
    "tests/python/models/test_models_tensorflow.py",
    "tests/python/models/test_models_ranks.py",
]


def sort(items: list[pytest.Item]) -> None:
    """Puts the tests in the order in which processes of pytest-xdist take them: what is long, then the rest
    by the number of tests."""
    groups = [worker_of(item.nodeid) for item in items]
    counts = Counter(groups)
    order = {group: (_LONGEST.index(group) if group in _LONGEST else len(_LONGEST)) for group in counts}
    keys = {group: (order[group], -counts[group], group) for group in counts}
    items.sort(key=lambda item: keys[worker_of(item.nodeid)])


def worker_of(nodeid: str) -> str:
    """What has to run in one process of pytest-xdist: a file, or all tests that share ranks, those of a
    framework, which have imported it and cached its compiled code, and those of all operations."""
    path = nodeid.partition("::")[0]
    folder, part = path.split("/")[1:3]
    if folder == "adapters":
        return part
    return "operations" if part in ("collectives", "communicator", "gradients") else path

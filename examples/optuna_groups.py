"""Search hyperparameters with Optuna: groups of ranks try different ones at the same time.

    pip install optuna
    multiring run -np 4 python examples/optuna_groups.py --ranks-per-trial 2

The ranks of a group train one network together, as in torch_digits.py; the groups share a study, and no group
waits for another one. Without a launcher the same script tries one after the other in one process.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import optuna
import torch
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from sklearn.datasets import load_digits

import multiring
import multiring.torch

BATCH = 60  # images of one step over all ranks of a group


def train(group: multiring.Communicator, rate: float, width: int) -> float:
    """Train on the ranks of a group; return the accuracy on images that were held back, the same on all."""
    digits = load_digits()
    images = torch.tensor(digits.images / 16).float().flatten(1)
    labels = torch.tensor(digits.target)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 10))
    multiring.torch.broadcast_parameters(model, comm=group)
    hooks = multiring.torch.register_gradient_hooks(model, group)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    for _ in range(5):
        for batch in torch.randperm(1500).split(BATCH):
            batch = batch[group.rank :: group.size]  # this rank's share
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    hooks.remove()
    right = model(images[1500:]).argmax(1) == labels[1500:]
    return right.float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Search hyperparameters on groups of ranks.")
    parser.add_argument("--ranks-per-trial", type=int, default=2, metavar="N", help="ranks of one trial [2]")
    parser.add_argument("--trials", type=int, default=8, metavar="N", help="trials of all groups [8]")
    args = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    comm = multiring.init()
    group = comm.split(comm.rank // args.ranks_per_trial)
    assert group is not None
    leads = group.rank == 0  # asks the study for what to try, and tells it the outcome
    folder = comm.broadcast_object(tempfile.mkdtemp() if comm.rank == 0 else None)
    storage = JournalStorage(JournalFileBackend(str(Path(folder) / "study")))
    if comm.rank == 0:
        optuna.create_study(storage=storage, study_name="digits", direction="maximize")
    comm.barrier()
    sampler = optuna.samplers.RandomSampler(seed=comm.rank)
    study = optuna.load_study(storage=storage, study_name="digits", sampler=sampler) if leads else None
    # Trial k is for group k mod the number of groups, whose ranks know so without asking.
    groups = -(-comm.size // args.ranks_per_trial)
    for _ in range(comm.rank // args.ranks_per_trial, args.trials, groups):
        trial, chosen = None, None
        if study is not None:
            trial = study.ask()
            chosen = {
                "rate": trial.suggest_float("rate", 0.001, 0.3, log=True),
                "width": trial.suggest_int("width", 16, 128, step=16),
            }
        accuracy = train(group, **group.broadcast_object(chosen))
        if study is not None:
            study.tell(trial, accuracy)
            print(f"ranks {comm.rank} to {comm.rank + group.size - 1}: {chosen}, accuracy {accuracy:.4f}")
    comm.barrier()  # all groups have told their outcomes
    if study is not None and comm.rank == 0:
        print(f"best of {len(study.trials)} trials on {groups} groups: {study.best_value:.4f}")
        print(f"with {study.best_params}")


if __name__ == "__main__":
    main()

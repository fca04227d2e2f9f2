"""Lightning, Accelerate and Transformers, which ask for Gloo, against one process with the whole batch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support import run_job

WHOLE_BATCH = """
import csv, json, os, sys, warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from multiring.torch_distributed import ProcessGroup

SIZE, RANK = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
OUT = Path(sys.argv[1])

def network():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()

def data():
    generator = torch.Generator().manual_seed(7)
    return torch.randn(24, 3, generator=generator).double(), torch.randn(24, 1, generator=generator).double()

def loss_of(model, inputs, targets):
    return (model(inputs) - targets).square().mean()

def trained_alone(batch, epochs=2):
    model, (inputs, targets) = network(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(epochs):
        for start in range(0, len(inputs), batch):
            optimizer.zero_grad()
            loss = loss_of(model, inputs[start : start + batch], targets[start : start + batch])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return model, losses

def close(model, other):
    for one, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.detach(), theirs.detach(), rtol=1e-12, atol=1e-12)
"""

LIGHTNING = """
import lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import DistributedSampler

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = network()
    def training_step(self, batch, _):
        loss = loss_of(self.net, *batch)
        self.log("loss", loss, sync_dist=True)
        self.log("rank_sum", float(RANK + 1), sync_dist=True, reduce_fx="sum", on_step=False, on_epoch=True)
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

told = []
rank_zero_only(lambda: told.append(RANK))()
trainer = lightning.Trainer(
    accelerator="cpu", devices=SIZE, strategy="ddp", max_epochs=2,
    use_distributed_sampler=False,
    logger=CSVLogger(OUT, flush_logs_every_n_steps=1), log_every_n_steps=1, enable_progress_bar=False,
    callbacks=[ModelCheckpoint(OUT, filename="last")], enable_model_summary=False,
)
module = Module()
samples = TensorDataset(*data())
# Lightning's own sampler shuffles. Samples are dealt to ranks in turn, so together they have the whole batch.
trainer.fit(module, DataLoader(samples, 4, sampler=DistributedSampler(samples, SIZE, RANK, shuffle=False)))
alone, losses = trained_alone(4 * SIZE)
close(module.net, alone)
again = Module()
again.load_state_dict(torch.load(OUT / "last.ckpt", weights_only=False)["state_dict"])
close(again.net, alone)
assert isinstance(dist.group.WORLD, ProcessGroup)
every = trainer.strategy.all_gather(torch.tensor(RANK)).tolist()
assert every == list(range(SIZE)), every
assert trainer.strategy.broadcast(f"from {RANK}", src=1) == "from 1"
if RANK == 0:
    rows = list(csv.DictReader(next(OUT.glob("**/metrics.csv")).open()))
    print(json.dumps({
        "losses": [float(row["loss"]) for row in rows if row["loss"]],
        "expected": losses,
        "sums": [float(row["rank_sum"]) for row in rows if row["rank_sum"]],
        "files": sorted(path.name for path in OUT.glob("**/*") if path.is_file()),
        "told": told,
    }))
else:
    assert not told
"""

ACCELERATE = """
from accelerate import Accelerator

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
assert accelerator.num_processes == SIZE and isinstance(dist.group.WORLD, ProcessGroup)
model, (inputs, targets) = network(), data()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer, batches = accelerator.prepare(
    model, optimizer, DataLoader(TensorDataset(inputs, targets), 4 // SIZE)
)
for _ in range(2):
    for part in batches:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, *part))
            optimizer.step()
            optimizer.zero_grad()
close(accelerator.unwrap_model(model), trained_alone(8)[0])  # two batches of 4 over all ranks

tail = accelerator.prepare(DataLoader(TensorDataset(torch.arange(7)), 2))  # does not divide by the ranks
seen = torch.cat([accelerator.gather_for_metrics(part) for [part] in tail])
mean = accelerator.reduce(torch.tensor([float(RANK)]), "mean")
accelerator.save_state(str(OUT / "state"))
accelerator.wait_for_everyone()  # the main rank alone writes the model
before = [parameter.detach().clone() for parameter in model.parameters()]
with torch.no_grad():
    for parameter in model.parameters():
        parameter.zero_()
accelerator.load_state(str(OUT / "state"))
assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
accelerator.print(json.dumps({"seen": seen.tolist(), "mean": mean.item()}))
accelerator.end_training()
"""

TRANSFORMERS = """
import json, os, sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from multiring.torch_distributed import ProcessGroup

SIZE, RANK = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
OUT = Path(sys.argv[1])

class Sentences(Dataset):
    ids = torch.randint(0, 17, (24, 8), generator=torch.Generator().manual_seed(7))
    def __len__(self):
        return len(self.ids)
    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}

def trained(out, **options):
    set_seed(3)
    sizes = {"vocab_size": 17, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)).double()
    arguments = TrainingArguments(
        str(out), use_cpu=True, num_train_epochs=2, per_device_train_batch_size=4 // SIZE, learning_rate=1e-2,
        gradient_accumulation_steps=2, save_strategy="epoch", logging_steps=1, report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Sentences())
    trainer.train(**options)
    assert trainer.accelerator.num_processes == SIZE
    return trainer.model.state_dict(), trainer.state.log_history

weights, history = trained(OUT / "whole")
again, _ = trained(OUT / "rest", resume_from_checkpoint=str(OUT / "whole" / "checkpoint-3"))
assert all(torch.equal(weights[name], again[name]) for name in weights)
if RANK == 0:
    torch.save(weights, OUT / "weights.pt")
    print(json.dumps({"losses": [entry["loss"] for entry in history if "loss" in entry]}))
if SIZE > 1:
    assert isinstance(dist.group.WORLD, ProcessGroup)
    dist.destroy_process_group()
"""


def _told(tmp_path: Path, script: str, size: int = 2) -> dict[str, list[float]]:
    done = run_job(size, script, str(tmp_path), launcher_args=["--as-gloo"], timeout=120.0)
    assert done.returncode == 0, done.stderr
    lines = [line.removeprefix("[0] ") for line in done.stdout.splitlines()]
    [line] = [line for line in lines if line.startswith('{"')]
    told: dict[str, list[float]] = json.loads(line)
    return told


def test_lightning(tmp_path: Path) -> None:
    told = _told(tmp_path, WHOLE_BATCH + LIGHTNING)
    assert told["expected"]
    assert told["losses"] == pytest.approx(told["expected"], rel=1e-12)
    assert told["sums"] == [9.0, 9.0]  # 1 + 2 in each of three steps
    assert told["files"] == ["last.ckpt", "metrics.csv"]
    assert told["told"] == [0]


def test_accelerate(tmp_path: Path) -> None:
    assert _told(tmp_path, WHOLE_BATCH + ACCELERATE) == {"seen": list(range(7)), "mean": 0.5}


def test_transformers(tmp_path: Path) -> None:
    """A language model of few weights, with accumulation; the second training goes on from a checkpoint."""
    found = {}
    for size in (1, 2):
        out = tmp_path / str(size)
        out.mkdir()
        found[size] = _told(out, TRANSFORMERS, size)["losses"], torch.load(out / "weights.pt")
    (alone, whole), (losses, weights) = found[1], found[2]
    assert len(alone) == 6
    assert losses == pytest.approx(alone, rel=1e-5)  # as float32 in the log
    for name, weight in weights.items():
        torch.testing.assert_close(weight, whole[name], rtol=1e-12, atol=1e-12)

"""A typo, a killed rank and Ctrl-C in the middle of each trainer: told once, and nothing is left."""

from __future__ import annotations

import re
import signal

import pytest

from tests.support import start_job

COMMON = """
import os, signal, sys
from pathlib import Path
import numpy as np

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
inputs = np.random.default_rng(0).standard_normal((64, 5)).astype("float32")
targets = inputs.sum(1, keepdims=True)

def misbehave(step):
    if step == 2 and RANK == 1:
        if sys.argv[1] == "typo":
            undefined_name
        if sys.argv[1] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    if step == 3 and sys.argv[1] == "interrupt":
        Path(os.environ["TEST_DIRECTORY"], f"running{RANK}").touch()
"""
TORCH = """
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
samples = TensorDataset(torch.from_numpy(inputs), torch.from_numpy(targets))
def loss_of(model, inputs, targets):
    return (model(inputs) - targets).square().mean()
"""
# Epochs without end: a trainer that misses what has happened does not end by itself.
LIGHTNING = (
    TORCH
    + """
import lightning
from lightning.pytorch.strategies import DDPStrategy
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(5, 1)
    def training_step(self, batch, _):
        misbehave(self.global_step)
        return loss_of(self.net, *batch)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)
lightning.Trainer(
    accelerator="cpu", devices=SIZE, strategy=DDPStrategy(process_group_backend="multiring"), max_epochs=-1,
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
).fit(Module(), DataLoader(samples, 4))
"""
)
ACCELERATE = (
    TORCH
    + """
from accelerate import Accelerator
dist.init_process_group("multiring")
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(5, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(samples, 4))
step = 0
while True:
    for batch in batches:
        misbehave(step)
        optimizer.zero_grad()
        accelerator.backward(loss_of(model, *batch))
        optimizer.step()
        step += 1
"""
)
TRANSFORMERS = """
import torch, torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
class Misbehaves(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        misbehave(state.global_step)
dist.init_process_group("multiring")
ids = torch.randint(0, 17, (64, 8), generator=torch.Generator().manual_seed(0))
Trainer(
    model=GPT2LMHeadModel(GPT2Config(vocab_size=17, n_positions=8, n_embd=8, n_layer=1, n_head=2)),
    args=TrainingArguments(
        os.environ["TEST_DIRECTORY"], use_cpu=True, num_train_epochs=10**6, save_strategy="no",
        report_to="none", disable_tqdm=True,
    ),
    train_dataset=[{"input_ids": row, "labels": row} for row in ids],
    callbacks=[Misbehaves()],
).train()
"""
KERAS = """
import keras, multiring.tensorflow as mt
class Misbehaves(keras.callbacks.Callback):
    step = 0
    def on_train_batch_end(self, batch, logs=None):
        misbehave(self.step)
        self.step += 1
multiring.init()
model = keras.Sequential([keras.layers.Input((5,)), keras.layers.Dense(1)])
model.compile(mt.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
callbacks = [mt.callbacks.BroadcastInitialState(), Misbehaves()]
model.fit(inputs, targets, 4, epochs=10**6, verbose=0, callbacks=callbacks)
"""
HOROVOD = (
    TORCH
    + """
import multiring.horovod.torch as hvd
hvd.init()
model = torch.nn.Linear(5, 1)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
step = 0
while True:
    for batch in DataLoader(samples, 4):
        misbehave(step)
        optimizer.zero_grad()
        loss_of(model, *batch).backward()
        optimizer.step()
        step += 1
"""
)
TRAINERS = {
    "lightning": LIGHTNING,
    "accelerate": ACCELERATE,
    "transformers": TRANSFORMERS,
    "keras on tensorflow": "import multiring\n" + KERAS,
    "keras on jax": "import multiring\n" + KERAS,
    "keras on torch": "import multiring\n" + KERAS,
    "horovod": HOROVOD,
}


@pytest.mark.parametrize("how", ["typo", "kill", "interrupt"])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_what_ends_a_training_is_told(trainer: str, how: str) -> None:
    env = {"KERAS_BACKEND": trainer.split()[-1]} if trainer.startswith("keras") else {}
    with start_job(2, COMMON + TRAINERS[trainer], how, env=env) as job:
        if how == "interrupt":
            for rank in range(2):
                job.wait_for_file(f"running{rank}", timeout=120.0)
            job.process.send_signal(signal.SIGINT)
        done = job.ended({"typo": 1, "kill": 128 + 9, "interrupt": 130}[how], timeout=120.0)
    if how == "typo":
        # Torch's hook puts the rank before each line.
        told = r"^(multiring:.*|\[1\] )(\[rank1\]: )?NameError: name 'undefined_name' is not defined$"
        assert len(re.findall(told, done.stderr, re.MULTILINE)) == 1, done.stderr
    if how == "kill":
        assert re.search(r"multiring: rank 1 \(.*\) failed with signal SIGKILL", done.stderr), done.stderr

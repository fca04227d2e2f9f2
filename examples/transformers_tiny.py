"""Train a small language model by the Trainer of Transformers, which takes the process group that it finds.

    multiring run -np 2 python examples/transformers_tiny.py

The model is made from a configuration, so nothing is downloaded. It learns to count: each sentence is a row
of numbers of which each is one more than the one before. Without a launcher the same script trains in one
process.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

BATCH = 32  # sentences per step over all ranks
NUMBERS, LENGTH = 16, 8


class Counting(Dataset):
    """Every sentence once for each number that it may begin with; the same on every rank."""

    def __len__(self) -> int:
        return 64 * NUMBERS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """A sentence, which is its own label."""
        sentence = (torch.arange(LENGTH) + index) % NUMBERS
        return {"input_ids": sentence, "labels": sentence}


def main() -> None:
    if "WORLD_SIZE" in os.environ:  # `multiring run` and torchrun set it
        dist.init_process_group("multiring")  # before the Trainer, which then makes none
    size = dist.get_world_size() if dist.is_initialized() else 1
    set_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=NUMBERS, n_positions=LENGTH, n_embd=32, n_layer=1, n_head=2)
    )
    arguments = TrainingArguments(
        "runs/transformers-tiny",
        use_cpu=True,
        ddp_find_unused_parameters=False,
        num_train_epochs=4,
        per_device_train_batch_size=BATCH // size,
        learning_rate=3e-3,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        log_level="error",
        logging_strategy="no",
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Counting())
    trainer.train()
    if trainer.is_world_process_zero():
        sentence = torch.arange(LENGTH).unsqueeze(0)
        with torch.no_grad():
            guessed = trainer.model.eval()(sentence).logits.argmax(-1)
        right = (guessed[:, :-1] == sentence[:, 1:]).float().mean().item()
        print(f"{size} ranks, accuracy of the next number {right:.4f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

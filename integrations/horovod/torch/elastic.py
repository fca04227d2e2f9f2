"""State of PyTorch that can be committed and restored, and a sampler that goes on where it was."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator, Sequence, Sized
from typing import Any

import torch

from multiring.horovod.basics import rank, size
from multiring.horovod.elastic import HostsUpdatedInterrupt, ObjectState, State, run
from multiring.horovod.objects import allgather_object
from multiring.horovod.torch.functions import broadcast_optimizer_state, broadcast_parameters

__all__ = ["ElasticSampler", "HostsUpdatedInterrupt", "ObjectState", "State", "TorchState", "run"]


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Gives each rank a share of the samples of an epoch that no rank has processed.

    Attributes:
        epoch: The epoch.
        processed_indices: What was processed in it.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        """Of a dataset; `seed` has to be the same on all ranks."""
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = 0
        self.processed_indices: set[int] = set()
        self.indices: list[int] = []
        self.reset()

    @property
    def processed_num(self) -> int:
        """Number of samples that were processed in this epoch."""
        return len(self.processed_indices)

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch, of which nothing is processed. Call it at the end of the one before."""
        self.epoch = epoch
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """The batch of this number has been processed by this rank."""
        self.record_indices(self.get_indices(batch_idx, batch_size))

    def record_indices(self, indices: Sequence[int]) -> None:
        """These samples have been processed."""
        self.processed_indices.update(indices)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """The samples of the batch of this number on this rank."""
        return self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and what was processed in it."""
        return {"epoch": self.epoch, "processed_indices": self.processed_indices}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What `state_dict` gave."""
        self.epoch = state_dict["epoch"]
        self.processed_indices = set(state_dict["processed_indices"])
        self.reset()

    def reset(self) -> None:
        """Deals out what is left to the ranks that there are."""
        self.num_replicas, self.rank = size(), rank()
        self.remaining_indices = [k for k in range(len(self.dataset)) if k not in self.processed_indices]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        order = list(self.remaining_indices)
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        order += (order * self.num_replicas)[: self.total_size - len(order)]
        self.indices = order[self.rank : self.total_size : self.num_replicas]
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples


class _Handled:
    """One model, optimizer or sampler, and what was saved of it."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        if isinstance(self.value, torch.nn.Module):
            broadcast_parameters(self.value.state_dict(), 0)
        elif isinstance(self.value, torch.optim.Optimizer):
            broadcast_optimizer_state(self.value, 0)
        else:
            states = allgather_object(self.value.state_dict())
            processed = set().union(*(state["processed_indices"] for state in states))
            self.value.load_state_dict({"epoch": states[0]["epoch"], "processed_indices": processed})
        self.save()


class TorchState(ObjectState):
    """Models, optimizers, samplers, and objects, as attributes by their names."""

    def __init__(self, model: torch.nn.Module | None = None, optimizer: Any = None, **kwargs: Any) -> None:
        """Of a model, its optimizer, and what else is given by name."""
        given = {"model": model, "optimizer": optimizer}
        kwargs |= {name: value for name, value in given.items() if value is not None}
        kinds = torch.nn.Module, torch.optim.Optimizer, ElasticSampler
        self._handled = {name: _Handled(value) for name, value in kwargs.items() if isinstance(value, kinds)}
        super().__init__(**{name: value for name, value in kwargs.items() if name not in self._handled})

    def __getattr__(self, name: str) -> Any:
        handled = self.__dict__.get("_handled", {})
        if name not in handled:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return handled[name].value

    def __setattr__(self, name: str, value: Any) -> None:
        handled = self.__dict__.get("_handled", {})
        if name in handled:
            handled[name] = _Handled(value)
        else:
            super().__setattr__(name, value)

    def save(self) -> None:
        """Keeps all of it in memory."""
        for each in self._handled.values():
            each.save()
        super().save()

    def restore(self) -> None:
        """Goes back to what was saved."""
        for each in self._handled.values():
            each.restore()
        super().restore()

    def sync(self) -> None:
        """Gives all ranks what rank 0 has; what any rank has processed counts as processed."""
        for each in self._handled.values():
            each.sync()
        super().sync()

    def reset(self) -> None:
        """Has samplers deal out what is left."""
        for each in self._handled.values():
            if isinstance(each.value, ElasticSampler):
                each.value.reset()

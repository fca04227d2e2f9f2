"""State of PyTorch that can be committed and restored."""

from __future__ import annotations

import copy
from typing import Any

import torch

from multiring.horovod.elastic import ObjectState
from multiring.horovod.objects import allgather_object, broadcast_object
from multiring.horovod.torch.elastic.sampler import ElasticSampler
from multiring.horovod.torch.functions import broadcast_optimizer_state, broadcast_parameters

__all__ = ["TorchState"]


class _Handled:
    """A model, an optimizer, a sampler or what else has a `state_dict`, and what was saved of it."""

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
        elif isinstance(self.value, ElasticSampler):
            states = allgather_object(self.value.state_dict())
            processed = set().union(*(state["processed_indices"] for state in states))
            self.value.load_state_dict({"epoch": states[0]["epoch"], "processed_indices": processed})
        else:
            self.value.load_state_dict(broadcast_object(self.value.state_dict()))
        self.save()


class TorchState(ObjectState):
    """Models, optimizers, samplers, schedulers and what else has a `state_dict`, and objects, as attributes
    by their names."""

    def __init__(self, model: torch.nn.Module | None = None, optimizer: Any = None, **kwargs: Any) -> None:
        """Of a model, its optimizer, and what else is given by name."""
        given = {"model": model, "optimizer": optimizer}
        kwargs |= {name: value for name, value in given.items() if value is not None}
        self._handled = {name: _Handled(value) for name, value in kwargs.items() if _has_state(value)}
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


def _has_state(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")

"""State of PyTorch that can be committed and restored."""

from __future__ import annotations

import copy
from typing import Any

import torch

from multiring.horovod.elastic import ObjectState
from multiring.horovod.objects import allgather_object, broadcast_object
from multiring.horovod.torch.elastic.sampler import ElasticSampler
from multiring.horovod.torch.functions import broadcast_optimizer_state, broadcast_parameters

__all__ = [
    "ModelStateHandler",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "set_handler_registry",
]


class StateHandler:
    """Saves, restores and synchronises a value that has a `state_dict` and a `load_state_dict`.

    Attributes:
        value: The value.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self.save()

    def set_value(self, value: Any) -> None:
        """Put another value in the place of the value, and save it."""
        self.value = value
        self.save()

    def save(self) -> None:
        """Keep a copy of the state in memory."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Load the state that was saved."""
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Load the state of rank 0, and save it. Collective."""
        self._share()
        self.save()

    def _share(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))


class ModelStateHandler(StateHandler):
    """Handles a model."""

    def _share(self) -> None:
        broadcast_parameters(self.value.state_dict(), 0)


class OptimizerStateHandler(StateHandler):
    """Handles an optimizer, and the gradients that each rank has added up since its last step."""

    def save(self) -> None:
        """Keep a copy of the state in memory."""
        super().save()
        self._gradients = self._added_up()

    def restore(self) -> None:
        """Load the state that was saved."""
        super().restore()
        self._go_on_from(self._gradients)

    def _share(self) -> None:
        gradients = self._added_up()  # which loading a state forgets
        broadcast_optimizer_state(self.value, 0)
        self._go_on_from(gradients)

    def _added_up(self) -> Any:
        return self.value.partial_gradients() if hasattr(self.value, "partial_gradients") else None

    def _go_on_from(self, gradients: Any) -> None:
        if gradients is not None:
            self.value.restore_partial_gradients(gradients)


class SamplerStateHandler(StateHandler):
    """Handles an ElasticSampler: what any rank has processed counts as processed."""

    def _share(self) -> None:
        states = allgather_object(self.value.state_dict())
        processed = set().union(*(state["processed_indices"] for state in states))
        self.value.load_state_dict({"epoch": states[0]["epoch"], "processed_indices": processed})


Registry = list[tuple[type, type[StateHandler]]]

_registry: Registry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> Registry:
    """Return the types of values and their handlers; the first that fits a value handles it."""
    return _registry


def set_handler_registry(registry: Registry) -> None:
    """Have a TorchState that is made from now on handle values by these types and handlers."""
    global _registry
    _registry = registry


def _handler_of(value: Any) -> StateHandler | None:
    """Return what handles a value; None: an object without a `state_dict` of its own."""
    for kind, handler in _registry:
        if isinstance(value, kind):
            return handler(value)
    has_state = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
    return StateHandler(value) if has_state else None


class TorchState(ObjectState):
    """Models, optimizers, samplers, schedulers and what else has a `state_dict`, and objects, as attributes
    by their names."""

    def __init__(self, model: torch.nn.Module | None = None, optimizer: Any = None, **kwargs: Any) -> None:
        """Of a model, its optimizer, and what else is given by name."""
        given = {"model": model, "optimizer": optimizer}
        kwargs |= {name: value for name, value in given.items() if value is not None}
        handlers = {name: _handler_of(value) for name, value in kwargs.items()}
        self._handled = {name: handler for name, handler in handlers.items() if handler is not None}
        super().__init__(**{name: value for name, value in kwargs.items() if name not in self._handled})

    def __getattr__(self, name: str) -> Any:
        handled = self.__dict__.get("_handled", {})
        if name not in handled:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return handled[name].value

    def __setattr__(self, name: str, value: Any) -> None:
        handled = self.__dict__.get("_handled", {})
        if name in handled:
            handled[name].set_value(value)
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

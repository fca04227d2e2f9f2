"""The trainer of a framework, by its name; each is imported only when it is used."""

from __future__ import annotations

import importlib

from multiring.commands.frameworks import FRAMEWORKS, Framework
from multiring.errors import UsageError
from multiring.models.trainers.trainer import Trainer

__all__ = ["find_framework", "load_trainer", "require_installed"]


def find_framework(name: str) -> Framework:
    """The framework of that name.

    Raises:
        UsageError: There is none; names those that there are.
    """
    if name not in FRAMEWORKS:
        raise UsageError(f"unknown framework {name!r}; choose one of {', '.join(FRAMEWORKS)}")
    return FRAMEWORKS[name]


def require_installed(framework: Framework) -> None:
    """Raises UsageError where the framework is not installed; says what to install."""
    if why := framework.why_missing:
        raise UsageError(f"--framework {framework.name}: {why}")


def load_trainer(framework: Framework) -> type[Trainer]:
    """The class of the framework's trainer.

    Raises:
        UsageError: The framework is not installed; says what to install.
    """
    require_installed(framework)
    trainer: type[Trainer] = getattr(importlib.import_module(framework.module), framework.trainer)
    return trainer

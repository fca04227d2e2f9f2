"""What would go wrong without a word with hooked models of Torch, and is refused instead."""

from __future__ import annotations

import pytest
import torch

import multiring.torch
from multiring import Communicator
from multiring.errors import UsageError
from tests.adapters.torch_support import Pool, make_model, squares


def compiled_autograd(comm: Communicator, how: str) -> None:
    from torch._dynamo import compiled_autograd, config

    model = make_model()
    hooks = multiring.torch.register_gradient_hooks(model, comm)
    with pytest.raises(UsageError, match="compiled autograd"):
        if how == "config":
            with config.patch(compiled_autograd=True):
                torch.compile(lambda: torch.autograd.backward(squares(model, comm.rank)), backend="eager")()
        else:
            with compiled_autograd._enable(torch.compile(backend="eager")):
                torch.autograd.backward(squares(model, comm.rank))
    hooks.remove()


@pytest.mark.parametrize("how", ["config", "enable"])
def test_compiled_autograd(ranks: Pool, how: str) -> None:
    ranks(2).run(compiled_autograd, how)

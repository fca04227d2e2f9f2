"""A backend of torch.distributed: `init_process_group("multiring")`.

    import torch.distributed as dist

    dist.init_process_group("multiring")  # under torchrun, or with the arguments that any backend takes
    dist.init_process_group("multiring", init_method="multiring://")  # under multiring run, mpirun and srun
    dist.init_process_group("gloo")  # after as_gloo(), or with MULTIRING_AS_GLOO=1

The package's entry point registers it whenever torch is imported, so a program need not import this module;
where that is switched off (TORCH_DEVICE_BACKEND_AUTOLOAD=0), importing it does. Tensors on the CPU and on
CUDA devices. See docs/torch-distributed.md.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from multiring import config
from multiring.lazy import lazy_names as _lazy_names

if TYPE_CHECKING:
    from multiring.torch_distributed.gloo_name import as_gloo
    from multiring.torch_distributed.group import ProcessGroup

__all__ = ["BACKEND", "DEVICES", "ProcessGroup", "as_gloo", "register"]

BACKEND = "multiring"
"""What `init_process_group` and `new_group` call it."""

DEVICES = ["cpu", "cuda"]
"""Types of the devices whose tensors it takes; the CPU is one of them, so objects travel there."""

# Taken from their modules on first use: this one is imported with torch, by programs that may not need them.
__getattr__, __dir__ = _lazy_names(__name__, {"ProcessGroup": ".group", "as_gloo": ".gloo_name"})


def register() -> None:
    """Make the backend known to torch.distributed, where this Python's torch has that; under the name "gloo"
    too, if MULTIRING_AS_GLOO says so. Idempotent.

    Raises:
        UsageError: MULTIRING_AS_GLOO has a value that is not accepted, or cannot be done with this torch.
    """
    # Not at the top: where this module is imported before torch, torch's own import calls this function.
    import torch.distributed as dist

    if dist.is_available() and BACKEND.upper() not in dist.Backend._plugins:
        from torch.distributed.rendezvous import register_rendezvous_handler

        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=DEVICES)
        register_rendezvous_handler(BACKEND, _meet_as_launched)
    # Other variables are not looked at: a wrong one is no reason for `import torch` to fail.
    if config.check({config.AS_GLOO: os.environ.get(config.AS_GLOO, "")}).get("as_gloo"):
        from multiring.torch_distributed.gloo_name import as_gloo

        as_gloo()


def _create(given: Any, options: Any) -> Any:
    """Makes a process group; collective over its members, as `init_process_group` and `new_group` are."""
    from multiring.torch_distributed import functional_outputs
    from multiring.torch_distributed.group import ProcessGroup
    from multiring.torch_distributed.meeting import connect_group

    functional_outputs.install()
    return ProcessGroup(connect_group(given), given)


def _meet_as_launched(url: str, **options: Any) -> Any:
    """Lets ranks meet for `init_method="multiring://"`."""
    from multiring.torch_distributed.launched import rendezvous

    return rendezvous(url, **options)


register()

"""State of PyTorch that can be committed and restored, and a sampler that goes on where it was."""

from __future__ import annotations

from multiring.horovod.elastic import HostsUpdatedInterrupt, ObjectState, State, run
from multiring.horovod.torch.elastic.sampler import ElasticSampler
from multiring.horovod.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "HostsUpdatedInterrupt", "ObjectState", "State", "TorchState", "run"]

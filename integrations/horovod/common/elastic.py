"""State by the name of the module that it has in Horovod."""

from multiring.horovod.elastic import ObjectState, State, run_fn

__all__ = ["ObjectState", "State", "run_fn"]

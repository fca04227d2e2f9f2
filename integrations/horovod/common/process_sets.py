"""Process sets by the name of the module that they have in Horovod."""

from multiring.horovod.basics import add_process_set, process_sets, remove_process_set
from multiring.horovod.basics import process_set_of as process_set_by_id
from multiring.horovod.process_sets import ProcessSet, global_process_set

__all__ = [
    "ProcessSet",
    "add_process_set",
    "global_process_set",
    "process_set_by_id",
    "process_sets",
    "remove_process_set",
]

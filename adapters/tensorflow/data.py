"""Each rank its share of a `tf.data` pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import tensorflow as tf
from multiring.derived import resolve
from multiring.errors import UsageError

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["shard_dataset"]


def shard_dataset(
    dataset: Any,
    comm: Communicator | None = None,
    *,
    remainder: Literal["keep", "drop", "repeat"] = "drop",
) -> Any:
    """This rank's elements of a dataset: number `rank`, `rank + size`, and so on. Not collective.

    To be called before `shuffle` (whose order differs from rank to rank unless seeded), `batch` and
    `repeat`; every rank has to have the same dataset in the same order.

    Args:
        dataset: A `tf.data.Dataset`.
        comm: Ranks that train together; the world by default.
        remainder: What becomes of the last elements if their number is no multiple of the ranks'. "drop"
            leaves them out, so that all ranks have equally many; "repeat" completes them with the first
            elements of the dataset, so that none is missing and some count twice; "keep" leaves some ranks
            with one element more, which is right for an evaluation whose metrics are weighted by samples,
            while in training the ranks with fewer steps have to `join`.

    Returns:
        A `tf.data.Dataset`.

    Raises:
        UsageError: The number of elements is not known, and has to be for "drop" and "repeat".
    """
    comm = resolve(comm)
    if remainder not in ("keep", "drop", "repeat"):
        raise UsageError(f"remainder is {remainder!r}; accepted: keep, drop, repeat")
    count = int(dataset.cardinality())
    if comm.size == 1:
        return dataset
    if count == tf.data.UNKNOWN_CARDINALITY and remainder != "keep":
        raise UsageError(
            f"remainder={remainder!r} needs to know how many elements the dataset has: "
            "dataset.apply(tf.data.experimental.assert_cardinality(n)), or pass remainder='keep'"
        )
    rest = count % comm.size if count >= 0 else 0
    if rest and remainder == "drop":
        dataset = dataset.take(count - rest)
    elif rest and remainder == "repeat":
        dataset = dataset.concatenate(dataset.repeat().take(comm.size - rest))
    return dataset.shard(comm.size, comm.rank)

"""The recipes of the cookbook's pages, run on the ranks of a job: `python recipes.py PAGE FILE`.

Each recipe runs by itself, in a namespace and a folder of its own. What it has made (`RESULTS`) has to be the
same on all ranks, and is written to FILE. A job of one process is what the others are compared with.
"""

from __future__ import annotations

import os
import pickle
import re
import sys
import threading
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import multiring
from tests.support import REPOSITORY

# Names of a recipe's results: what has weights, and numbers.
RESULTS = ("model", "params", "metrics", "history")
RESUME, ACCUMULATE = "How do I write a checkpoint, and resume?", "How do I accumulate gradients?"
UNEVEN = "How do I train where ranks have different numbers of batches?"
_FIRST_THREE = "batches[:3] if comm.rank == 0 else batches[3:]"
# What is replaced for the run before, which ends early: several ranks resume what it has left.
INTERRUPTED = {
    "docs/cookbook.md": {RESUME: {"range(done, 4)": "range(done, 2)"}},
    "docs/cookbook-tensorflow.md": {RESUME: {"epochs=4": "epochs=2"}},
    "docs/cookbook-chainer.md": {RESUME: {"range(optimizer.t, 4)": "range(optimizer.t, 2)"}},
    "docs/cookbook-jax.md": {RESUME: {"range(int(done), 4)": "range(int(done), 2)"}},
}
# What one process replaces: it gets the same without what the recipe shows.
PLAIN = {
    "docs/cookbook.md": {
        ACCUMULATE: {
            ", backward_passes_per_step=4": "",
            "split(16 // comm.size)": "split(64)",
            "(loss / 4)": "loss",
        },
        UNEVEN: {_FIRST_THREE: "[torch.cat(pair) for pair in zip(batches, batches[3:6])] + [*batches[6:]]"},
    },
    "docs/cookbook-tensorflow.md": {
        ACCUMULATE: {", backward_passes_per_step=4": "", "batch(16 // comm.size)": "batch(64)"}
    },
    "docs/cookbook-chainer.md": {
        ACCUMULATE: {
            "np.split(np.arange(64)[comm.rank :: comm.size], 4)": "[np.arange(64)]",
            "y[last]) / 4": "y[last])",
        },
        UNEVEN: {_FIRST_THREE: "[np.concatenate(pair) for pair in zip(batches, batches[3:6])] + batches[6:]"},
    },
    "docs/cookbook-jax.md": {
        ACCUMULATE: {
            ", every_k=4": "",
            "np.split(np.arange(64)[comm.rank :: comm.size], 4)": "[np.arange(64)]",
            "y[part]) / 4": "y[part])",
        },
        UNEVEN: {_FIRST_THREE: "[np.concatenate(pair) for pair in zip(batches, batches[3:6])] + batches[6:]"},
    },
}


class Recipe(NamedTuple):
    """A section of a page: its heading, the Python block, and the rest."""

    question: str
    code: str
    text: str


def recipes_of(page: str) -> list[Recipe]:
    """The recipes of a page, in order."""
    _, *sections = re.split(r"^## ", (REPOSITORY / page).read_text(), flags=re.MULTILINE)
    found = []
    for section in sections:
        question, _, rest = section.partition("\n")
        before, code, after = re.split(r"```python\n|^```$", rest, flags=re.MULTILINE)
        found.append(Recipe(question, code, before + after))
    return found


def replaced(code: str, edits: Mapping[str, str]) -> str:
    """The code with these edits."""
    for before, after in edits.items():
        assert before in code, f"{before} is not in\n{code}"
        code = code.replace(before, after)
    return code


def run(recipe: Recipe, code: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, f"<{recipe.question}>", "exec"), names)
    found = {name: plain(names[name]) for name in RESULTS if name in names}
    # A writer's thread would be killed by the end of the program, with what it has not written yet.
    writers = [thread for thread in threading.enumerate() if type(thread).__name__ == "_AsyncWriterThread"]
    assert not writers, f"{recipe.question}: the writer is not closed"
    return found | {"steps": steps_for_tensorboard()}


def plain(value: Any) -> Any:
    """The numbers of a model, or of a tree of arrays, as NumPy arrays in a list."""
    if hasattr(value, "state_dict"):  # of Torch
        value = list(value.state_dict().values())
    elif hasattr(value, "get_weights"):  # of Keras
        value = value.get_weights()
    elif hasattr(value, "namedparams"):  # of Chainer
        value = [parameter.array for _, parameter in sorted(value.namedparams())]
    elif isinstance(value, Mapping):
        value = [plain(each) for _, each in sorted(value.items())]
    elif not isinstance(value, list | tuple):
        return np.asarray(value)
    return [plain(each) for each in value]


def steps_for_tensorboard() -> list[int]:
    """The steps of what is written for TensorBoard below this folder."""
    files = sorted(Path().glob("**/events.out.tfevents.*"))
    if not files:
        return []
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    return [
        event.step
        for file in files
        for event in EventFileLoader(str(file)).Load()
        if event.HasField("summary")
    ]


def main(page: str, file: str) -> None:
    # Otherwise Torch's writer for TensorBoard imports TensorFlow, which takes seconds.
    if "tensorflow" not in page:
        sys.modules["tensorboard.compat.notf"] = types.ModuleType("notf")
    comm = multiring.init()
    folder, results = Path(file).parent, {}
    for number, recipe in enumerate(recipes_of(page)):
        if "multiring.launch(" in recipe.code:
            continue  # it starts ranks itself
        print(f"# {recipe.question}", flush=True) if comm.rank == 0 else None
        here = folder / f"{comm.size}-{number}"
        here.mkdir(exist_ok=True)
        os.chdir(here)
        comm.barrier()
        if comm.size == 1:
            found = run(recipe, replaced(recipe.code, PLAIN[page].get(recipe.question, {})))
        else:
            if edits := INTERRUPTED[page].get(recipe.question):
                run(recipe, replaced(recipe.code, edits))
            found = run(recipe, recipe.code)
        steps = found.pop("steps")  # of rank 0's file, at another time on each rank
        everyone = comm.allgather_object(pickle.dumps(found))
        assert everyone == [everyone[0]] * comm.size, f"{recipe.question}: the ranks have other results"
        results[recipe.question] = found | {"steps": steps}
        if "tensorflow" in page:
            import keras

            keras.config.set_dtype_policy("float32")
    if comm.rank == 0:
        Path(file).write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])

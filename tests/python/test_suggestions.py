"""Typos in names that modules take from their parts on first use; arguments and packages that are missing."""

from __future__ import annotations

from typing import Unpack

import pytest

from multiring.errors import UsageError
from multiring.gradients.options import ReducerKeywords, ReducerOptions
from multiring.reductions import explain_arguments
from tests.support import last_words, run_python

# What is called, and what is said of it, by module.
MISTAKES = {
    "multiring": {
        "iinit": "has no attribute 'iinit'. Did you mean: 'init'?",
        "init_process_group": "has no attribute 'init_process_group': write multiring.init()",
        "allreduce": "write comm.allreduce(...) with comm = multiring.init()",
        "numpy.init": "module 'multiring.numpy' has no attribute 'init': it is the same for all frameworks, "
        "write multiring.init()",
        "horovod.init": "import multiring.horovod.torch as hvd",
    },
    "multiring.jax": {
        "distribut": "has no attribute 'distribut'. Did you mean: 'distribute'?",
        "distribute(None, comm_dtype='float16')": (
            "TypeError: distribute has no argument 'comm_dtype': set MULTIRING_COMM_DTYPE"
        ),
        "grouped_allreduce({}, check_every=10)": "unexpected keyword argument 'check_every'",
    },
    "multiring.tensorflow": {
        "DistributedOptimiser": "Did you mean: 'DistributedOptimizer'?",
        "DistributedGradientTape(None, comm_dtype='float16')": "set MULTIRING_COMM_DTYPE=bfloat16",
        "DistributedOptimizer(None, compression=1)": "set MULTIRING_COMM_DTYPE=bfloat16",
        "broadcast_variables([], root_rank=0)": "broadcast_variables has no argument 'root_rank'",
    },
    "multiring.torch": {
        "init": "has no attribute 'init': it is the same for all frameworks, write multiring.init()",
        "broadcast_parameter": "Did you mean: 'broadcast_parameters'?",
        "DistributedOptimizer(None, named_parameters=[])": "as the second argument",
    },
}


@pytest.mark.parametrize("module", MISTAKES)
def test_mistakes_are_told_with_what_was_meant(module: str) -> None:
    calls = [f"{module}.{call}" for call in MISTAKES[module]]
    code = f"""
import sys, {module}
for call in {calls}:
    try:
        eval(call)
    except (AttributeError, TypeError):
        print("called:", call, file=sys.stderr)
        sys.excepthook(*sys.exc_info())
"""
    told = run_python(code).stderr.split("called: ")[1:]
    for call, said, text in zip(calls, MISTAKES[module].values(), told, strict=True):
        assert text.startswith(call)
        assert said in text


def test_a_missing_framework_is_told_with_what_to_install() -> None:
    for name in ("torch", "ray", "jax", "pytensor"):
        words = last_words(f"import sys\nsys.modules['{name}'] = None\nimport multiring.{name}\n")
        assert f"multiring.{name} needs" in words
        assert f"pip install 'multiring[{name}]'" in words


def test_an_adapter_needs_no_import_of_its_own() -> None:
    loads_nothing = "import multiring, sys\nassert not {'torch', 'numpy'} & {*sys.modules}\n"
    assert run_python(f"{loads_nothing}multiring.numpy.GradientBuckets").returncode == 0
    missing = "import sys\nsys.modules['torch'] = None\nimport multiring\n"
    words = last_words(f"{missing}assert not hasattr(multiring, 'torch')\nmultiring.torch")
    assert "module 'multiring' has no attribute 'torch': multiring.torch needs PyTorch: pip install" in words


def test_arguments_that_a_function_has_are_its_own() -> None:
    @explain_arguments
    def reduce(x: int, *, average: bool = True) -> tuple[int, bool]:
        """Reduce."""
        return x, average

    assert reduce(1, average=False) == (1, False)
    assert reduce.__doc__ == "Reduce."
    with pytest.raises(TypeError, match="unexpected keyword argument 'frobnicate'"):
        reduce(1, frobnicate=2)  # type: ignore[call-arg]


def test_options_of_a_reduction_are_keywords_of_each_function() -> None:
    @explain_arguments
    def optimizer(passes: int = 1, **options: Unpack[ReducerKeywords]) -> ReducerOptions:
        return ReducerOptions.of(options, name=f"{passes} passes")

    assert optimizer(prescale=2) == ReducerOptions(prescale=2.0, name="1 passes")
    assert optimizer(average=False).op == "sum"
    for typo, meant in (("prescal", "prescale"), ("pases", "passes")):
        with pytest.raises(TypeError, match=rf"optimizer\(\) .* '{typo}'. Did you mean '{meant}'\?"):
            optimizer(**{typo: 1})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="has no argument 'prescale_factor': pass prescale"):
        optimizer(prescale_factor=0.5)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="op and average are given"):
        optimizer(average=True, op="average")

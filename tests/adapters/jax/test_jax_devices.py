"""What can be seen of JAX on GPUs without one: the interface to XLA, and programs compiled for CUDA."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import multiring.jax as mj
from multiring import Communicator
from multiring.errors import UsageError
from tests.on_ranks import all_raise, on_ranks
from tests.support import REPOSITORY

# Of each struct what is read or written, here and in XLA's header.
_STRUCTS = {
    "ExtensionBase Extension": "struct_size type next",
    "ApiVersion XLA_FFI_Api_Version": "struct_size major_version minor_version",
    "ErrorCreateArgs XLA_FFI_Error_Create_Args": "struct_size message code=errc",
    "StreamGetArgs XLA_FFI_Stream_Get_Args": "struct_size context=ctx stream",
    "Api XLA_FFI_Api": "struct_size version=api_version error_create=XLA_FFI_Error_Create "
    "stream_get=XLA_FFI_Stream_Get",
    "Buffer XLA_FFI_Buffer": "struct_size dtype data rank dims",
    "Values XLA_FFI_Args": "size types values=args",
    "Values XLA_FFI_Rets": "size types values=rets",
    "ByteSpan XLA_FFI_ByteSpan": "data=ptr size=len",
    "Scalar XLA_FFI_Scalar": "dtype value",
    "Array XLA_FFI_Array": "dtype size data",
    "Attributes XLA_FFI_Attrs": "size types names values=attrs",
    "CallFrame XLA_FFI_CallFrame": "struct_size extension_start api context=ctx stage arguments=args "
    "results=rets attributes=attrs",
    "Metadata XLA_FFI_Metadata": "struct_size version=api_version traits",
    "MetadataExtension XLA_FFI_Metadata_Extension": "base=extension_base metadata",
}
_VALUES = {
    "DataType::kToken": "XLA_FFI_DataType_TOKEN",
    "DataType::kFloat32": "XLA_FFI_DataType_F32",
    "DataType::kUInt64": "XLA_FFI_DataType_U64",
    "DataType::kComplex128": "XLA_FFI_DataType_C128",
    "AttributeType::kString": "XLA_FFI_AttrType_STRING",
    "Stage::kExecute": "XLA_FFI_ExecutionStage_EXECUTE",
    "Extension::kMetadata": "XLA_FFI_Extension_Metadata",
}


def _assertions() -> list[str]:
    found = []
    for names, members in _STRUCTS.items():
        ours, theirs = names.split()
        for member in members.split():
            here, _, there = member.partition("=")
            there = there or here
            found.append(f"offsetof(ours::{ours}, {here}) == offsetof({theirs}, {there})")
            found.append(f"sizeof(ours::{ours}::{here}) == sizeof({theirs}::{there})")
    return found + [f"static_cast<int>(ours::{here}) == {there}" for here, there in _VALUES.items()]


def test_the_mirror_of_xlas_header(tmp_path: Path) -> None:
    """Against the header that comes with this jaxlib."""
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no C++ compiler ({compiler})")
    source = tmp_path / "mirror.cpp"
    lines = [f"static_assert({each});" for each in _assertions()]
    head = [
        "#include <type_traits>",
        '#include "xla/ffi/api/c_api.h"',
        '#include "xla_ffi.h"',
        "namespace ours = multiring::xla;",
    ]
    # Its name differs between versions.
    head += ["using Extension = std::remove_pointer_t<decltype(XLA_FFI_CallFrame::extension_start)>;"]
    source.write_text("\n".join([*head, *lines, ""]))
    folders = ["-I", jax.ffi.include_dir(), "-I", str(REPOSITORY / "adapters" / "jax" / "native")]
    command = [compiler, "-std=c++20", "-fsyntax-only", "-Wno-invalid-offsetof", *folders, str(source)]
    compiled = subprocess.run(command, capture_output=True, text=True, check=False)
    assert compiled.returncode == 0, compiled.stderr


def _lowered(function: Any, *arguments: Any, platform: str = "cuda") -> str:
    return str(jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text())


def _calls(text: str) -> list[tuple[str, list[tuple[int, int]]]]:
    """The native calls of a program in its order, with the numbers of the operands and results that share
    memory."""
    found = []
    for line in text.splitlines():
        if (name := re.search(r"stablehlo.custom_call @(multiring_\w+)", line)) is None:
            continue
        alias = r"output_tuple_indices = \[(\d*)\],\s*operand_index = (\d+)"
        found.append((name[1], [(int(there), int(made or 0)) for made, there in re.findall(alias, line)]))
    return found


def _everything(x: Any) -> Any:
    rows = [mj.allgather(x), mj.reducescatter(x), mj.alltoall(x)]
    checked = mj.allreduce({"a": x, "b": x * 2})
    mj.check_state(checked, every=1)
    return rows, mj.broadcast(x), checked, jax.lax.cond(x[0] > 0, mj.allreduce, jnp.sin, x)


@on_ranks(2)
def test_programs_are_compiled_for_cuda(comm: Communicator) -> None:
    """With the same calls as for the CPU, whose results share memory with what is sent."""
    x = jnp.ones(4)
    calls = _calls(_lowered(_everything, x))
    assert calls == _calls(_lowered(_everything, x, platform="cpu"))
    names = [name.removeprefix("multiring_") for name, _ in calls]
    assert names.count("start") == names.count("done") == 6
    assert (names.count("check"), names.count("enter")) == (1, 1)
    aliases = {name: [each for other, each in calls if other == name] for name, _ in calls}
    # start(token, x...) -> token, ticket, x...; done(token, ticket, x...) -> token, x...
    assert aliases["multiring_start"][0] == [(1, 2)]
    assert aliases["multiring_done"][0] == [(3, 1)]  # of an allgather: token, ticket, what was sent, result
    assert [(1, 2), (2, 3)] in aliases["multiring_start"]
    assert [(2, 1), (3, 2)] in aliases["multiring_done"]
    assert calls.index(("multiring_start", [(1, 2), (2, 3)])) < calls.index(
        ("multiring_done", [(2, 1), (3, 2)])
    )


@on_ranks(2)
def test_training_steps_are_compiled_for_cuda(comm: Communicator) -> None:
    optimizer = mj.distribute(optax.adam(0.1), comm=comm, check_every=10)
    params = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
    state = optimizer.init(params)

    def step(params: Any, state: Any, x: Any) -> Any:
        gradients = jax.grad(lambda p: jnp.square(x @ p["w"] + p["b"]).sum())(params)
        updates, state = optimizer.update(gradients, state, params)
        mean = mj.batch_statistics(x, comm=comm).mean
        return optax.apply_updates(params, updates), state, mean

    calls = [name for name, _ in _calls(_lowered(step, params, state, jnp.ones((5, 3))))]
    assert calls.count("multiring_start") == calls.count("multiring_done") == 2
    assert calls.count("multiring_check") == 1


@all_raise(UsageError, r"allreduce 'x' was called on (rocm|tpu)", platform={"rocm": "rocm", "tpu": "tpu"})
def test_other_platforms_are_refused(comm: Communicator, platform: str) -> None:
    _lowered(lambda x: mj.allreduce(x, name="x"), jnp.ones(3), platform=platform)

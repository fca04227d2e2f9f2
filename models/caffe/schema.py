"""Caffe's messages, made from `caffe.proto` when this module is imported.

No protoc is needed and nothing generated can be out of date: a small reader of the .proto language turns the
file into a descriptor, from which the protobuf library makes the classes. They live in a pool of their own,
so a real Caffe's `caffe_pb2` may be imported in the same process.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

__all__ = ["TEST", "TRAIN", "LayerParameter", "NetParameter", "SolverParameter", "SolverState", "message"]

_TOKEN = re.compile(r"""//[^\n]*|"[^"]*"|'[^']*'|[\w.+-]+|[{}\[\]=;,]|\S""")
_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    name: getattr(_Field, f"TYPE_{name.upper()}")
    for name in ("bool", "bytes", "double", "float", "int32", "int64", "string", "uint32", "uint64")
}


class _Reader:
    """Reads the part of the .proto language that the file uses; anything else is an error."""

    def __init__(self, text: str, name: str) -> None:
        tokens = (match.group() for match in _TOKEN.finditer(text))
        self._tokens: Iterator[str] = (token for token in tokens if not token.startswith("//"))
        self.file = descriptor_pb2.FileDescriptorProto(name=name)
        self._unresolved: list[Any] = []
        self._enums: set[str] = set()

    def read(self) -> Any:
        """The descriptor of the file."""
        for token in self._tokens:
            if token == "syntax":
                self._expect("=")
                self.file.syntax = self._next().strip("\"'")
                self._expect(";")
            elif token == "package":
                self.file.package = self._next()
                self._expect(";")
            elif token == "message":
                self._message(self.file.message_type.add())
            elif token == "enum":
                self._enum(self.file.enum_type.add())
            else:
                raise ValueError(f"{self.file.name}: {token!r} is not understood")
        for field in self._unresolved:
            field.type = _Field.TYPE_ENUM if field.type_name in self._enums else _Field.TYPE_MESSAGE
        return self.file

    def _next(self) -> str:
        return next(self._tokens)

    def _expect(self, wanted: str) -> None:
        found = self._next()
        if found != wanted:
            raise ValueError(f"{self.file.name}: {wanted!r} is expected, not {found!r}")

    def _message(self, target: Any) -> None:
        target.name = self._next()
        self._expect("{")
        while (token := self._next()) != "}":
            if token == "message":
                self._message(target.nested_type.add())
            elif token == "enum":
                self._enum(target.enum_type.add())
            else:
                self._field(target.field.add(), token)

    def _enum(self, target: Any) -> None:
        target.name = self._next()
        self._enums.add(target.name)
        self._expect("{")
        while (token := self._next()) != "}":
            self._expect("=")
            target.value.add(name=token, number=int(self._next()))
            self._expect(";")

    def _field(self, field: Any, label: str) -> None:
        field.label = {"optional": _Field.LABEL_OPTIONAL, "repeated": _Field.LABEL_REPEATED}[label]
        kind = self._next()
        if kind in _SCALARS:
            field.type = _SCALARS[kind]
        else:
            field.type_name = kind
            self._unresolved.append(field)
        field.name = self._next()
        self._expect("=")
        field.number = int(self._next())
        if (token := self._next()) == "[":
            option = self._next()
            self._expect("=")
            value = self._next()
            if option == "packed":
                field.options.packed = value == "true"
            elif option == "default":
                field.default_value = value.strip("\"'")
            else:
                raise ValueError(f"{self.file.name}: option {option!r} is not understood")
            self._expect("]")
            token = self._next()
        if token != ";":
            raise ValueError(f"{self.file.name}: field {field.name} has no end")


def _load() -> Any:
    path = Path(__file__).with_name("caffe.proto")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(_Reader(path.read_text(encoding="utf-8"), path.name).read())
    return pool


_POOL = _load()


def message(name: str) -> Any:
    """The class of a message, "LayerParameter" for example."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"caffe.{name}"))


LayerParameter: Any = message("LayerParameter")
NetParameter: Any = message("NetParameter")
SolverParameter: Any = message("SolverParameter")
SolverState: Any = message("SolverState")

TRAIN, TEST = 0, 1  # values of the enum Phase

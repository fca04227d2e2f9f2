#include "binding/errors.h"

#include <exception>
#include <string>

#include "base/error.h"

namespace py = pybind11;

namespace multiring::binding {
namespace {

const char* class_name(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kUsage:
      return "UsageError";
    case ErrorKind::kMismatch:
      return "MismatchError";
    case ErrorKind::kTimeout:
      return "TimeoutError";
    case ErrorKind::kPeerLost:
      return "PeerLostError";
    case ErrorKind::kAborted:
      return "AbortedError";
    case ErrorKind::kInternal:
      break;
  }
  return "InternalError";
}

template <class Value>
py::object known(bool is_known, const Value& value) {
  return is_known ? py::cast(value) : py::none();
}

void raise(const Error& error) {
  const ErrorContext& context = error.context();
  py::dict attributes;
  attributes["rank"] = known(context.rank >= 0, context.rank);
  attributes["peer"] = known(context.peer >= 0, context.peer);
  attributes["host"] = known(!context.host.empty(), context.host);
  attributes["operation"] = known(!context.operation.empty(), context.operation);
  attributes["tensor"] = known(!context.tensor.empty(), context.tensor);
  attributes["nbytes"] = known(context.bytes >= 0, context.bytes);
  attributes["elapsed"] = known(context.elapsed >= 0, context.elapsed);
  const py::object type = py::module_::import("multiring.errors").attr(class_name(error.kind()));
  const py::object exception = type(std::string(error.what()), **attributes);
  PyErr_SetObject(type.ptr(), exception.ptr());
}

}  // namespace

void register_errors() {
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const Error& error) {
      raise(error);
    }
  });
}

}  // namespace multiring::binding

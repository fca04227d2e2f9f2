#include "binding/errors.h"

#include <exception>
#include <string>

namespace py = pybind11;

namespace multiring::binding {
namespace {

/// A name that was cut to its room in a descriptor may end inside a character.
py::object text(const std::string& bytes) {
  PyObject* decoded = PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "replace");
  if (decoded == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(decoded);
}

template <class Value>
py::object known(bool is_known, const Value& value) {
  return is_known ? py::cast(value) : py::none();
}

}  // namespace

py::object exception_of(const Error& error) {
  const ErrorContext& context = error.context();
  py::dict attributes;
  attributes["rank"] = known(context.rank >= 0, context.rank);
  attributes["peer"] = known(context.peer >= 0, context.peer);
  attributes["host"] = context.host.empty() ? py::none() : text(context.host);
  attributes["operation"] = context.operation.empty() ? py::none() : text(context.operation);
  attributes["tensor"] = context.tensor.empty() ? py::none() : text(context.tensor);
  attributes["nbytes"] = known(context.bytes >= 0, context.bytes);
  attributes["elapsed"] = known(context.elapsed >= 0, context.elapsed);
  return py::module_::import("multiring.errors")
      .attr(error_class_name(error.kind()))(text(error.what()), **attributes);
}

void register_errors() {
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const Error& error) {
      const py::object exception = exception_of(error);
      PyErr_SetObject(py::type::handle_of(exception).ptr(), exception.ptr());
    }
  });
}

}  // namespace multiring::binding

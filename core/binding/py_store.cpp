#include "binding/py_store.h"

#include <cmath>
#include <exception>
#include <functional>
#include <utility>

#include "base/error.h"
#include "binding/gil.h"

namespace py = pybind11;

namespace multiring::binding {

namespace {

/// The store's errors as the native code knows them, with what they say and without where they were raised;
/// what else it raises (Ctrl-C) stays what it is.
[[noreturn]] void translate(py::error_already_set& error) {
  const bool is_timeout = error.matches(PyExc_TimeoutError);
  const bool is_lost = error.matches(py::module_::import("multiring.errors").attr("PeerLostError"));
  if (!is_timeout && !is_lost) throw error;
  ErrorContext context;
  context.operation = "init";
  for (const auto& [name, value] : {std::pair{"rank", &context.rank}, std::pair{"peer", &context.peer}}) {
    const py::object known = py::getattr(error.value(), name, py::none());
    if (py::isinstance<py::int_>(known)) *value = known.cast<int>();
  }
  throw Error(is_timeout ? ErrorKind::kTimeout : ErrorKind::kPeerLost, py::str(error.value()), context);
}

/// Calls the store with a function that it calls while it waits. What that throws ends the call, and comes
/// out of it as it is.
py::object ask(const WaitOptions& waiting, const std::function<py::object(const py::object&)>& call) {
  std::exception_ptr interrupted;
  const py::cpp_function interrupt([&] {
    try {
      const GilRelease release;
      waiting.check_interrupt();
    } catch (...) {
      interrupted = std::current_exception();
      throw std::runtime_error("interrupted");
    }
  });
  try {
    return call(interrupt);
  } catch (py::error_already_set& error) {
    if (interrupted) std::rethrow_exception(interrupted);
    translate(error);
  }
}

}  // namespace

void PyStore::set(const std::string& key, const std::string& value, const WaitOptions& waiting) {
  const GilAcquire gil;
  ask(waiting,
      [&](const py::object& interrupt) { return store_.attr("set")(key, py::bytes(value), interrupt); });
}

std::string PyStore::get(const std::string& key, double seconds, const WaitOptions& waiting) {
  constexpr double kLongest = 1e9;  // Python's timers take no infinity
  const GilAcquire gil;
  return ask(waiting,
             [&](const py::object& interrupt) {
               return store_.attr("get")(key, std::fmin(seconds, kLongest), interrupt);
             })
      .cast<std::string>();
}

}  // namespace multiring::binding

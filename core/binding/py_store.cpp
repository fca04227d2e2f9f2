#include "binding/py_store.h"

#include <cmath>
#include <exception>
#include <functional>

#include "base/error.h"
#include "binding/gil.h"

namespace py = pybind11;

namespace multiring::binding {

namespace {

/// The store's errors as the native code knows them; what else it raises (Ctrl-C) stays what it is.
[[noreturn]] void translate(py::error_already_set& error) {
  if (error.matches(PyExc_TimeoutError)) throw Error(ErrorKind::kTimeout, error.what());
  if (error.matches(py::module_::import("multiring.errors").attr("PeerLostError")))
    throw Error(ErrorKind::kPeerLost, error.what());
  throw error;
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

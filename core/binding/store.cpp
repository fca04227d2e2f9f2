#include "binding/store.h"

#include <cmath>

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

}  // namespace

void PyStore::set(const std::string& key, const std::string& value) {
  const GilAcquire gil;
  try {
    store_.attr("set")(key, py::bytes(value));
  } catch (py::error_already_set& error) {
    translate(error);
  }
}

std::string PyStore::get(const std::string& key, double seconds) {
  constexpr double kLongest = 1e9;  // Python's timers take no infinity
  const GilAcquire gil;
  try {
    return store_.attr("get")(key, std::fmin(seconds, kLongest)).cast<std::string>();
  } catch (py::error_already_set& error) {
    translate(error);
  }
}

}  // namespace multiring::binding

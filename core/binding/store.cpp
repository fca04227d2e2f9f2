#include "binding/store.h"

#include <cmath>

#include "base/error.h"

namespace py = pybind11;

namespace multiring::binding {

void PyStore::set(const std::string& key, const std::string& value) {
  const py::gil_scoped_acquire gil;
  store_.attr("set")(key, py::bytes(value));
}

std::string PyStore::get(const std::string& key, double seconds) {
  constexpr double kLongest = 1e9;  // Python's timers take no infinity
  const py::gil_scoped_acquire gil;
  try {
    return store_.attr("get")(key, std::fmin(seconds, kLongest)).cast<std::string>();
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_TimeoutError)) throw;
    throw Error(ErrorKind::kTimeout, error.what());
  }
}

}  // namespace multiring::binding

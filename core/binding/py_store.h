#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <utility>

#include "transport/store.h"

namespace multiring::binding {

/// A store implemented in Python (multiring.store). Called without the GIL.
class PyStore final : public Store {
 public:
  explicit PyStore(pybind11::object store) : store_(std::move(store)) {}
  void set(const std::string& key, const std::string& value, const WaitOptions& waiting) override;
  std::string get(const std::string& key, double seconds, const WaitOptions& waiting) override;

 private:
  pybind11::object store_;  // created and destroyed with the GIL held, by the caller of connect
};

}  // namespace multiring::binding

#pragma once

#include <string>
#include <utility>

#include "transport/world/connect_world.h"

namespace multiring {

/// Says once whom this rank waits for in init. Of all ranks that have come, the lowest says it.
class InitWarning {
 public:
  /// `prefix`: begins the key that a rank sets first, and its number ends it.
  InitWarning(Store& store, const WorldAddress& address, std::string prefix)
      : store_(store), address_(address), prefix_(std::move(prefix)) {}

  /// `waited`: seconds since init began.
  void check(double waited);

 private:
  bool has_come(int rank, const WaitOptions& waiting) const;

  Store& store_;
  const WorldAddress& address_;
  std::string prefix_;
  bool checked_ = false;
};

}  // namespace multiring

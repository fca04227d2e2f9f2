#pragma once

#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/export.h"

namespace multiring {

/// A library for devices, as `multiring env` and `multiring doctor` show it.
struct DeviceLibrary {
  std::string name;     ///< "CUDA driver", "NCCL", "NVRTC", "HIP", "RCCL"
  std::string path;     ///< empty: none can be used
  std::string origin;   ///< SharedLibrary::origin
  std::string version;  ///< "13.0"
  std::string why;      ///< why none can be used, a reason for each place where it was looked for
  int devices = -1;     ///< that the driver sees; negative: not asked
  /// Pairs of them that cannot have each other's memory, in one direction or in both, the lower number first;
  /// none: not asked.
  std::optional<std::vector<std::pair<int, int>>> pairs_without_access;
};

/// Looks for all of them and opens those that are there. `sites`: folders that wheels are installed in.
MULTIRING_API std::vector<DeviceLibrary> find_device_libraries(std::span<const std::string> sites);

}  // namespace multiring

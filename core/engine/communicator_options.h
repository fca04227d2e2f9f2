#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "base/job_settings.h"

namespace multiring {

/// How one blocking call waits.
struct CallOptions {
  /// Seconds; negative: the communicator's default.
  double timeout = -1.0;
  /// Called from time to time in the calling thread; may throw. May be null.
  const std::function<void()>* interrupt = nullptr;
};

/// Of the settings, groups that are split off choose `mode` and `tuning` themselves.
struct CommunicatorOptions : JobSettings {
  explicit CommunicatorOptions(const JobSettings& settings = {}) : JobSettings(settings) {}

  std::string name = "world";
  std::size_t fuse_below = 64 * 1024;            ///< asynchronous allreduces of fewer bytes are fused,
  std::size_t fuse_at_most = 0;                  ///< up to so many bytes; 0: what fits the staging memory
  std::function<void(const std::string&)> warn;  ///< takes warnings, from any thread
  bool may_stay_on_devices = true;               ///< arrays, where `mode` is empty; groups take it over
  /// The same in all communicators that descend from one; null: the communicator is the first.
  std::shared_ptr<const char> world;
};

}  // namespace multiring

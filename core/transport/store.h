#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "base/error.h"
#include "base/export.h"
#include "transport/waiting.h"

namespace multiring {

/// Key-value rendezvous: where the ranks of a job learn each other's addresses. While it does not answer, the
/// interrupt of `waiting` is called and may end the wait.
class MULTIRING_API Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::string& value, const WaitOptions& waiting) = 0;
  /// The value of `key`; waits up to `seconds` for it, then raises a timeout error.
  virtual std::string get(const std::string& key, double seconds, const WaitOptions& waiting) = 0;
};

/// A store for ranks that are threads of one process.
class MULTIRING_API InprocStore final : public Store {
 public:
  void set(const std::string& key, const std::string& value, const WaitOptions& /*waiting*/) override {
    const std::lock_guard lock(mutex_);
    values_[key] = value;
    changed_.notify_all();
  }
  std::string get(const std::string& key, double seconds, const WaitOptions& /*waiting*/) override {
    std::unique_lock lock(mutex_);
    const auto limit = std::chrono::duration<double>(seconds);
    if (!changed_.wait_for(lock, limit, [&] { return values_.contains(key); }))
      throw Error(ErrorKind::kTimeout, "no rank has set '" + key + "' in the store");
    return values_.at(key);
  }

 private:
  std::mutex mutex_;  // guards values_; never held while another lock is taken
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
};

}  // namespace multiring

#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "base/immovable.h"
#include "device/devices.h"

namespace multiring::testing {

/// Stands in for the driver of two devices, stricter than hardware. What streams are given to do is done as
/// late as their order allows: when an event is waited for, or found complete, only what comes before it in
/// that order is done, and nothing that no event asks for. The host cannot touch device memory. Whatever
/// needs a context, of the stream's own device, fails without it.
///
/// One at a time; it counts as the process's driver while it lives.
class FakeGpu : Immovable {
 public:
  static constexpr int kDevices = 2;

  FakeGpu();
  ~FakeGpu();

  const cuda::Driver& driver() const { return driver_; }

  /// Device memory, which a test reads and writes through `view`.
  std::byte* allocate(int device, std::size_t bytes);
  std::byte* view(const void* device_memory) const {
    return memory_ + (static_cast<const std::byte*>(device_memory) - addresses_);
  }
  /// A stream of the program's own.
  std::uintptr_t make_stream(int device);
  /// Gives a stream work. False: it never ends, nor what comes after.
  void launch(std::uintptr_t stream, std::function<void()> kernel, bool ends = true);
  /// Lets a stream finish all that it was given.
  void synchronize(std::uintptr_t stream);
  void set_capturing(std::uintptr_t stream, bool capturing);

  /// The next call of a function, by its name in `Driver`, fails.
  void fail_next(const std::string& function, cuda::Result result);
  /// How often an event is found incomplete before its work is done.
  void set_lateness(int queries) { lateness_ = queries; }
  /// Calls of a function so far.
  int calls(const std::string& function);
  /// Pinned blocks and device memory that are not freed.
  std::size_t pinned() const { return pinned_.size(); }
  std::size_t device_blocks() const { return blocks_.size(); }

 private:
  friend struct FakeDriver;

  struct StreamState;
  /// Done when the work before it is; `late` counts queries.
  struct Point {
    StreamState* stream = nullptr;
    bool done = false;
    int late = 0;
  };
  struct Step {
    std::function<void()> work;  // one of these
    std::shared_ptr<Point> waits_for;
    std::shared_ptr<Point> reaches;
    bool ends = true;
  };
  struct StreamState {
    int device = 0;
    bool capturing = false;
    std::deque<Step> steps;
  };
  struct EventState {
    int device = 0;
    std::shared_ptr<Point> point;  // of the last record
  };

  /// Does what comes before a point; false: something there never ends.
  bool reach(const std::shared_ptr<Point>& point);
  StreamState& stream_of(std::uintptr_t handle);
  cuda::Result enter(const char* function);
  void enqueue(cuda::Stream stream, Step step);

  cuda::Driver driver_{};
  int file_ = -1;
  std::byte* addresses_ = nullptr;  // which cannot be touched
  std::byte* memory_ = nullptr;     // the same memory
  std::recursive_mutex mutex_;      // guards all below
  std::size_t used_[kDevices] = {};
  std::set<std::byte*> blocks_;
  std::set<void*> pinned_;
  std::map<std::uintptr_t, std::unique_ptr<StreamState>> streams_;
  std::vector<std::unique_ptr<EventState>> events_;
  std::map<std::string, cuda::Result> failures_;
  std::map<std::string, int> calls_;
  int lateness_ = 2;
};

}  // namespace multiring::testing

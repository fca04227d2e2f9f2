#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "device/devices.h"
#include "fake_cuda/machine.h"

namespace multiring::testing {

/// A FakeMachine of its own for one test, which works on its memory and streams without a context. As long as
/// it lives, it is the machine of the process.
class FakeGpu : Immovable {
 public:
  static constexpr int kDevices = FakeMachine::kDevices;

  FakeGpu();
  /// Notes a failure of the test if streams have done what is undefined, unless something was ignored.
  ~FakeGpu();

  const cuda::Driver& driver() const { return driver_; }

  /// Device memory, which a test reads and writes through `view`.
  std::byte* allocate(int device, std::size_t bytes);
  std::byte* view(const void* device_memory) { return machine_.view(device_memory); }
  /// A stream of the program's own.
  std::uintptr_t make_stream(int device);
  /// Gives a stream work. False: it never ends, nor what comes after.
  void launch(std::uintptr_t stream, std::function<void()> kernel, bool ends = true);
  /// Lets a stream finish all that it was given.
  void synchronize(std::uintptr_t stream);
  void set_capturing(std::uintptr_t stream, bool capturing);

  void set_progress(Progress progress, std::uint64_t seed = 0);
  /// Leaves out what orders: one wait for an event, or one record, counted from now on; -1: none.
  void ignore(Ordering ordering, int number);
  /// The same of the records of the calling thread, whose events are found complete late besides.
  void ignore_own_record(int number);
  /// Those of them so far.
  int orderings(Ordering ordering);
  /// The next call of a function, by its name in `Driver`, fails, or the one after so many more.
  void fail_next(const std::string& function, cuda::Result result, int after = 0);
  /// How often an event is found incomplete before its work is done.
  void set_lateness(int queries);
  /// Calls of a function so far.
  int calls(const std::string& function);
  /// Pinned blocks and device memory that are not freed.
  std::size_t pinned();
  std::size_t device_blocks();

 private:
  FakeMachine machine_;
  cuda::Driver driver_{};
  bool ignores_ = false;
};

}  // namespace multiring::testing

#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/export.h"
#include "base/immovable.h"
#include "device/buffer.h"
#include "device/driver.h"

namespace multiring::testing {

/// When streams do what they are given, where events leave that open. A stream does one step after the other.
enum class Progress {
  kLate,     ///< as late as possible: what comes before an event that is waited for, or queried, and no more
  kSeeded,   ///< some steps of random streams at every call of the driver, the same ones for one seed
  kThreads,  ///< each stream has a thread, which pauses for a random time before each step
};

/// What orders streams, or the host, with other streams: a wait for an event (cuStreamWaitEvent and
/// cuEventSynchronize), and the record of one, which queries and waits see.
enum class Ordering { kWait, kRecord };

/// The devices behind the driver of driver_functions.cpp, stricter than hardware: the host cannot touch
/// device memory, copies have to lie within one allocation, and pinned memory that a copy still uses must not
/// be freed.
///
/// All members but `mutex`, `view` and those that say so are to be called with the lock held.
class MULTIRING_API FakeMachine : Immovable {
 public:
  static constexpr int kDevices = 2;
  static constexpr std::size_t kDeviceBytes = std::size_t{1} << 30;
  static constexpr std::size_t kPage = 4096;

  struct Stream;
  /// Done when the steps before it are; `late` counts queries that do not see it.
  struct Point {
    Stream* stream = nullptr;
    bool done = false;
    int late = 0;
  };
  struct Step {
    std::function<void()> work = {};         // one of these
    std::function<bool()> is_possible = {};  ///< empty: it always is
    std::shared_ptr<Point> waits_for = {};
    std::shared_ptr<Point> reaches = {};
    bool ends = true;
    double seconds = 0;  // that it takes from when it is first looked at
    std::chrono::steady_clock::time_point begun{};
  };
  struct Stream {
    int device = 0;
    bool capturing = false;
    double speed = 1;  // the probability that a step runs that was drawn
    std::deque<Step> steps;
    std::thread thread;
  };
  struct Event {
    int device = 0;
    std::shared_ptr<Point> point;  // of the last record
  };
  /// An allocation; of device memory the host sees `view`.
  struct Block {
    std::size_t bytes = 0;
    MemoryKind kind = MemoryKind::kHost;
    int device = 0;
    std::byte* view = nullptr;
  };
  /// What another process needs to map a block: CUipcMemHandle.
  struct IpcHandle {
    int process;
    int file;
    int device;
    std::uint64_t offset;
    std::uint64_t bytes;
    char unused[32];
  };
  static_assert(sizeof(IpcHandle) == 64, "as CUipcMemHandle");

  FakeMachine();
  ~FakeMachine();

  /// That of the process: the last one that was made and lives, or one that is made now and never ends, with
  /// the options that the variable FAKE_CUDA holds.
  static FakeMachine& current();
  std::recursive_mutex& mutex() { return mutex_; }

  /// "progress=late|seeded|threads", "seed=N", "ignore=wait|record:K" (the K-th from now on; -1: none),
  /// "fail=FUNCTION:RESULT[:K]" (a name in cuda::Driver; of negative ones the process gets the signal),
  /// "lateness=N", "recover" (failed devices work again), "no_access=FROM:TO" (devices), several of them
  /// divided by spaces.
  void configure(const std::string& options);
  void set_progress(Progress progress, std::uint64_t seed);
  void ignore(Ordering ordering, int number);
  /// The same of the records of the calling thread alone, whose events are found complete late besides.
  void ignore_own_record(int number);
  int orderings(Ordering ordering) const { return counted_[static_cast<std::size_t>(ordering)]; }
  void fail(const std::string& function, cuda::Result result, int after = 0) {
    failures_[function] = {result, after};
  }
  void set_lateness(int queries) { lateness_ = queries; }
  int calls(const std::string& function) { return calls_[function]; }
  bool can_access(int from, int to) const { return !no_access_.contains({from, to}); }

  // Memory. Null: there is none left.
  std::byte* allocate(int device, std::size_t bytes);
  std::byte* allocate_on_host(int device, std::size_t bytes, MemoryKind kind);
  bool release(std::byte* memory);
  const Block* block_of(const void* memory) const;
  std::size_t count(MemoryKind kind) const;
  /// What the host sees of device memory; other addresses as they are. Takes the lock.
  std::byte* view(const void* memory);
  bool export_block(std::byte* memory, IpcHandle* handle) const;
  std::byte* import_block(const IpcHandle& handle);

  // Streams and events. Handles below 3 are the default stream of `device`; null: no such stream.
  Stream* find_stream(std::uintptr_t handle, int device);
  Stream& make_stream(int device);
  Event& make_event(int device);
  void enqueue(Stream& stream, Step step);
  /// False: it would reach beyond an allocation.
  bool enqueue_copy(Stream& stream, void* to, const void* from, std::size_t bytes);
  void wait(Stream& stream, const Event& event);
  void record(Stream& stream, Event& event);
  bool is_complete(const Event& event);
  /// Returns when the point is done. False: that never comes. `lock`: the only one on `mutex`.
  bool await(const std::shared_ptr<Point>& point, std::unique_lock<std::recursive_mutex>& lock);
  std::shared_ptr<Point> end_of(Stream& stream);
  bool is_ignored(Ordering ordering);

  /// To be called by every function of the driver: lets streams go on, and tells how the call fails.
  cuda::Result enter(const char* function, int device);
  /// A kernel has failed: so do all calls from now on that concern its device.
  void fail_device(int device, cuda::Result result) { failed_devices_[device] = result; }
  /// Streams do what they were given, and failed devices work again.
  void recover() {
    run_all();
    failed_devices_.clear();
  }
  /// What streams have done that is undefined: their device has failed with it.
  const std::string& misuse() const { return misuse_; }

 private:
  struct Failure {
    cuda::Result result;
    int after;
  };

  static bool is_ready(Step& step);
  void run_first(Stream& stream);
  bool reach(const std::shared_ptr<Point>& point);
  bool never_comes(const std::shared_ptr<Point>& point) const;
  bool run_random(int steps);
  void run_all();
  void run_thread(Stream& stream, std::uint64_t seed);
  void start_thread(Stream& stream);
  void draw_speed(Stream& stream);
  std::byte* find_room(int device, std::size_t bytes) const;

  int file_ = -1;
  std::byte* addresses_ = nullptr;  // which cannot be touched
  std::byte* memory_ = nullptr;     // the same memory
  std::recursive_mutex mutex_;      // guards all below
  std::map<std::byte*, Block> blocks_;
  std::condition_variable_any changed_;
  std::vector<std::unique_ptr<Stream>> streams_;  // in the order in which they were made, as seeds need it
  std::array<Stream*, kDevices> defaults_{};
  std::vector<std::unique_ptr<Event>> events_;
  Progress progress_ = Progress::kLate;
  std::mt19937_64 random_;
  bool ends_ = false;
  std::map<std::string, Failure> failures_;
  std::map<int, cuda::Result> failed_devices_;
  std::map<std::string, int> calls_;
  std::set<std::pair<int, int>> no_access_;
  std::string misuse_;
  std::array<int, 2> counted_{};
  std::array<int, 2> ignored_{-1, -1};
  std::thread::id late_thread_;
  int own_records_ = -1;  // of that thread until the one to be ignored
  int lateness_ = 2;
  FakeMachine* const previous_;
};

}  // namespace multiring::testing

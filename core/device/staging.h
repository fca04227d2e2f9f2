#pragma once

#include <algorithm>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "base/export.h"
#include "base/immovable.h"
#include "device/buffer.h"
#include "device/devices.h"

namespace multiring {

/// Pinned host memory for those arrays of one operation that lie on devices.
///
/// A copy to the host begins when the work is done that the array's stream had when the copy was asked for,
/// and runs on a stream of its own: what the program gives its stream afterwards does not wait. A copy back
/// is complete when `finish` returns, so any stream may use the array then, and the array may be freed.
///
/// Calls come one at a time, from any thread, in the order of the members.
class MULTIRING_API Staging : Immovable {
 public:
  /// Arrays of so many bytes or more are copied in parts, each of which can be waited for. With smaller ones
  /// the ranks wait longer for one another's parts than the copies take.
  static constexpr std::size_t kPartsFrom = std::size_t{8} << 20;
  static constexpr std::size_t kMaxPart = kPartsFrom / 2;
  static constexpr std::size_t kPartAlignment = std::size_t{64} << 10;
  static constexpr std::size_t kAll = ~std::size_t{0};

  static constexpr std::size_t part_bytes(std::size_t bytes) {
    return bytes < kPartsFrom ? bytes : std::min(bytes / 8 / kPartAlignment * kPartAlignment, kMaxPart);
  }

  explicit Staging(std::shared_ptr<Devices> devices) : devices_(std::move(devices)) {}
  ~Staging();

  /// Copies to the array, either way, wait for the work that its stream has now.
  void order_after(const Buffer& array);
  /// What a stream of the device is given from now on waits for that work, and for the copies to the host.
  void order_before(int device, cuda::Stream stream);
  /// When the operation has failed: what the program gives its streams from now on waits for those streams,
  /// which may still write to its arrays when they get there.
  void hold_back() noexcept;
  /// As `order_after`, and memory as large as the array, which `copy_back` may read later.
  std::byte* reserve(const Buffer& array);
  /// Asks for a copy of the array to reserved memory; it is there when `arrived` says so.
  void copy_to_host(const Buffer& array, std::byte* to);
  /// To be called when all copies have been asked for.
  void start();

  /// Whether the work that arrays wait for is done, and the first `bytes` of the copies to the host are
  /// there: then no copy back waits for the program. Raises a DeviceError if the device has failed.
  bool arrived(std::size_t bytes = kAll);
  /// Returns when all that has been asked for has arrived. `check` is called every few milliseconds, and may
  /// raise.
  void await(const std::function<void()>& check);
  /// Copies an array to any memory of the host; returns when it is there.
  void read(const Buffer& array, void* to, const std::function<void()>& check);

  /// Asks for a copy of host memory, pinned or not, to the array.
  void copy_back(const Buffer& array, const std::byte* from, std::size_t bytes);
  /// Returns when all copies back are complete.
  void finish();

 private:
  struct Recorded {
    int device;
    cuda::Stream stream;
    cuda::Event event;
    bool down_waits = false;
    bool is_complete = false;
    std::size_t end = 0;  // bytes that are there with this event
  };

  Recorded record(int device, cuda::Stream stream);
  /// Replaces the event by one of a stream of our own that comes after it. HIP, when it is asked for an
  /// event, looks at the stream that has recorded it, which the program may destroy or capture.
  void continue_on_own_stream(Recorded& before);

  const std::shared_ptr<Devices> devices_;
  std::vector<std::shared_ptr<std::byte>> memory_;
  std::vector<Recorded> before_;  // the program's work, once for each stream
  std::deque<Recorded> arrival_;  // after the parts of the copies to the host
  std::size_t asked_ = 0;         // bytes of copies to the host
  std::size_t arrived_ = 0;
  std::vector<std::pair<int, cuda::Stream>> behind_;  // by device: streams that come after `before_`
  std::vector<int> down_;  // devices with copies to the host that no event follows yet
  std::vector<int> up_;    // devices with copies back under way
};

}  // namespace multiring

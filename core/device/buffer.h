#pragma once

#include <cstddef>
#include <cstdint>

namespace multiring {

/// Where memory lies. Kernels and copies of a device reach all but plain host memory; the host reads and
/// writes all but device memory. Managed memory moves between both, and is treated as device memory.
enum class MemoryKind : std::uint8_t { kHost, kPinnedHost, kDevice, kManaged };

/// Memory of an array, and what has to be known to order with the work that uses it.
struct Buffer {
  /// The default stream that orders with all blocking streams (CU_STREAM_LEGACY).
  static constexpr std::uintptr_t kDefaultStream = 1;

  std::byte* address = nullptr;
  std::size_t bytes = 0;
  MemoryKind kind = MemoryKind::kHost;
  int device = -1;  ///< ordinal; negative: no device has the memory
  /// The stream (CUstream) whose work so far has to be complete before the memory is read or written.
  std::uintptr_t stream = kDefaultStream;

  bool on_device() const { return kind == MemoryKind::kDevice || kind == MemoryKind::kManaged; }
};

}  // namespace multiring

#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "collective/operation.h"
#include "transport/transport.h"

namespace multiring {

/// The symmetric memory of a communicator: finds the buffers in it.
class SymmetricRegistry {
 public:
  explicit SymmetricRegistry(int rank) : rank_(rank) {}

  void add(const std::shared_ptr<SymmetricRegion>& region) {
    const std::lock_guard lock(mutex_);
    std::erase_if(regions_, [](const auto& known) { return known.expired(); });
    regions_.push_back(region);
  }

  /// Records in `operation` which of its buffers are in symmetric memory, and keeps that memory alive. The
  /// descriptor says so to peers that share it.
  void locate_buffers(Operation& operation, bool shared) const {
    const std::lock_guard lock(mutex_);
    if (regions_.empty()) return;
    Descriptor& descriptor = operation.descriptor;
    operation.input_region = find(operation.input, descriptor.bytes, &descriptor.input_offset);
    descriptor.input_region = operation.input_region == nullptr ? 0 : operation.input_region->id();
    const bool in_place = operation.output == operation.input;
    operation.output_region = in_place ? operation.input_region
                                       : find(operation.output, descriptor.bytes, &descriptor.output_offset);
    if (in_place) descriptor.output_offset = descriptor.input_offset;
    descriptor.output_region = operation.output_region == nullptr ? 0 : operation.output_region->id();
    if (!shared) descriptor.input_region = descriptor.output_region = 0;
  }

  /// The region that contains `bytes` at `data`, and their offset in this rank's part; null: none.
  std::shared_ptr<SymmetricRegion> locate(const std::byte* data, std::size_t bytes,
                                          std::uint64_t* offset) const {
    const std::lock_guard lock(mutex_);
    return find(data, bytes, offset);
  }

 private:
  std::shared_ptr<SymmetricRegion> find(const std::byte* data, std::size_t bytes,
                                        std::uint64_t* offset) const {
    for (const auto& known : regions_) {
      auto region = known.lock();
      if (region == nullptr || data == nullptr) continue;
      const std::byte* begin = region->part(rank_);
      if (data < begin || data + bytes > begin + region->bytes_per_rank()) continue;
      *offset = static_cast<std::uint64_t>(data - begin);
      return region;
    }
    return nullptr;
  }

  const int rank_;
  mutable std::mutex mutex_;  // guards regions_; no other lock is taken while it is held
  std::vector<std::weak_ptr<SymmetricRegion>> regions_;
};

}  // namespace multiring

#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "support/device_array.h"

namespace multiring::testing {

/// Arrays on a device and one on the host, which are reduced as one.
class Bucket {
 public:
  Bucket(FakeGpu& gpu, int device, std::span<const std::size_t> counts, float value) : flags_(5, value) {
    for (const std::size_t count : counts)
      arrays_.push_back(std::make_unique<DeviceArray>(gpu, device, std::vector<float>(count, value)));
  }

  /// `on_host`: as many of the first elements lie there, as of a gradient that this rank does not have.
  Operation operation(const std::shared_ptr<Devices>& devices, std::size_t on_host = 0) {
    slot_.assign(on_host, flags_[0]);
    std::vector<Buffer> pieces;
    if (on_host > 0)
      pieces.push_back(
          {.address = reinterpret_cast<std::byte*>(slot_.data()), .bytes = on_host * sizeof(float)});
    std::size_t skipped = 0;
    for (const auto& array : arrays_) {
      if (skipped++ == 0 && on_host > 0) continue;
      pieces.push_back(array->buffer());
    }
    pieces.push_back(
        {.address = reinterpret_cast<std::byte*>(flags_.data()), .bytes = flags_.size() * sizeof(float)});
    Operation operation = allreduce_of_pieces(pieces, devices);
    operation.descriptor.key.order = Order::kAny;
    return operation;
  }
  void expect(float value, bool with_first = true) const {
    EXPECT_EQ(flags_, std::vector<float>(flags_.size(), value));
    for (std::size_t i = with_first ? 0 : 1; i < arrays_.size(); ++i)
      EXPECT_EQ(arrays_[i]->seen(), std::vector<float>(arrays_[i]->values().size(), value)) << i;
    EXPECT_EQ(slot_, std::vector<float>(slot_.size(), value));
  }

 private:
  std::vector<std::unique_ptr<DeviceArray>> arrays_;
  std::vector<float> slot_;
  std::vector<float> flags_;
};

}  // namespace multiring::testing

#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "support/device_array.h"

namespace multiring::testing {

/// Arrays on a device and one on the host, which are reduced as one. Each element of the former is `value`
/// times a small number of its own, so that an element at another one's place is seen.
class Bucket {
 public:
  Bucket(FakeGpu& gpu, int device, std::span<const std::size_t> counts, float value) : flags_(5, value) {
    std::size_t begin = 0;
    for (const std::size_t count : counts) {
      arrays_.push_back(std::make_unique<DeviceArray>(gpu, device, elements(begin, count, value)));
      begin += count;
    }
  }

  /// `on_host`: as many of the first elements lie there, as of a gradient that this rank does not have.
  Operation operation(const std::shared_ptr<Devices>& devices, std::size_t on_host = 0) {
    slot_ = elements(0, on_host, flags_[0]);
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
    std::size_t begin = 0;
    for (std::size_t i = 0; i < arrays_.size(); ++i) {
      const std::size_t count = arrays_[i]->values().size();
      if (i > 0 || with_first) {
        EXPECT_EQ(arrays_[i]->seen(), elements(begin, count, value)) << i;
      }
      begin += count;
    }
    EXPECT_EQ(slot_, elements(0, slot_.size(), value));
  }

 private:
  static std::vector<float> elements(std::size_t begin, std::size_t count, float value) {
    std::vector<float> made(count);
    for (std::size_t i = 0; i < count; ++i) made[i] = value * static_cast<float>(1 + (begin + i) % 31);
    return made;
  }

  std::vector<std::unique_ptr<DeviceArray>> arrays_;
  std::vector<float> slot_;
  std::vector<float> flags_;
};

}  // namespace multiring::testing

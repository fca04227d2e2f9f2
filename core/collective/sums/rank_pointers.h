#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <vector>

#include "base/immovable.h"

namespace multiring {

/// One pointer for each rank, without a heap allocation for as many ranks as a host usually has.
template <class Pointer>
class RankPointers : Immovable {
 public:
  explicit RankPointers(int size) : many_(size > kFew ? static_cast<std::size_t>(size) : 0) {
    all_ = size > kFew ? std::span(many_) : std::span(few_).first(static_cast<std::size_t>(size));
  }
  Pointer& operator[](int rank) { return all_[static_cast<std::size_t>(rank)]; }
  std::span<Pointer> all() { return all_; }

 private:
  static constexpr int kFew = 64;
  std::array<Pointer, kFew> few_;
  std::vector<Pointer> many_;
  std::span<Pointer> all_;
};

}  // namespace multiring

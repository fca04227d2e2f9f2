#pragma once

#include <algorithm>
#include <cstddef>

#include "base/cache.h"
#include "topology/chunks.h"

namespace multiring {

/// How pieces lie in the staging memory of a rank, which is divided into sections of the same length: as long
/// as the longest piece, or else as long as fit, so that pieces pass in several segments.
class Sections {
 public:
  Sections(std::size_t staging_bytes, std::size_t count, std::size_t longest)
      : most_(staging_bytes / count / kCacheLine * kCacheLine), count_(count), longest_(longest) {}

  /// Bytes of a segment; 0: there is no room.
  std::size_t most() const { return most_; }
  std::size_t segments() const { return segment_count(longest_, most_); }
  /// Where a section begins while a segment passes.
  std::size_t begin(std::size_t section, std::size_t segment) const {
    return section * round_up(segment_range(longest_, most_, segment).size(), kCacheLine);
  }
  /// Bytes up to the end of the last section, whose piece has `bytes`.
  std::size_t published(std::size_t segment, std::size_t bytes) const {
    return begin(count_ - 1, segment) + segment_range(bytes, most_, segment).size();
  }

 private:
  std::size_t most_;
  std::size_t count_;
  std::size_t longest_;
};

}  // namespace multiring

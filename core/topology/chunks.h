#pragma once

#include <algorithm>
#include <cstddef>

namespace multiring {

/// Half-open range of element (or byte) indices.
struct Range {
  std::size_t begin = 0;
  std::size_t end = 0;
  constexpr std::size_t size() const { return end - begin; }
  constexpr bool empty() const { return begin == end; }
  constexpr bool operator==(const Range&) const = default;
};

/// Block `index` of `count` items split into `parts` nearly equal blocks, the first `count % parts` one
/// longer (the rule of numpy.array_split). parts > 0, index < parts.
constexpr Range block_range(std::size_t count, std::size_t parts, std::size_t index) {
  const std::size_t base = count / parts;
  const std::size_t extra = count % parts;
  const std::size_t begin = index * base + std::min(index, extra);
  return {begin, begin + base + (index < extra ? 1 : 0)};
}

/// Like block_range, but every boundary between blocks is a multiple of `granule`, so that two ranks never
/// write the same cache line. Late blocks may be shorter or empty.
constexpr Range aligned_block_range(std::size_t count, std::size_t parts, std::size_t index,
                                    std::size_t granule) {
  const std::size_t granules = (count + granule - 1) / granule;
  const Range blocks = block_range(granules, parts, index);
  return {std::min(blocks.begin * granule, count), std::min(blocks.end * granule, count)};
}

/// Number of segments of at most `segment` items that cover `count` items; 0 for none. segment > 0.
constexpr std::size_t segment_count(std::size_t count, std::size_t segment) {
  return (count + segment - 1) / segment;
}

/// Segment `index` of `count` items; empty beyond the end.
constexpr Range segment_range(std::size_t count, std::size_t segment, std::size_t index) {
  const std::size_t begin = std::min(index * segment, count);
  return {begin, std::min(begin + segment, count)};
}

/// The part that two ranges share; empty (at `a`'s begin) if none.
constexpr Range intersect(Range a, Range b) {
  const std::size_t begin = std::max(a.begin, b.begin);
  const std::size_t end = std::min(a.end, b.end);
  return begin < end ? Range{begin, end} : Range{a.begin, a.begin};
}

}  // namespace multiring

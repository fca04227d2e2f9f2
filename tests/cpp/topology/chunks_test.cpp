#include "topology/chunks.h"

#include <gtest/gtest.h>

#include <vector>

namespace multiring {
namespace {

constexpr std::size_t kMaxItems = 130;
constexpr std::size_t kMaxParts = 40;

/// Expects that ranges, one after the other, cover [0, count) exactly.
void expect_partition(const std::vector<Range>& ranges, std::size_t count) {
  std::size_t end = 0;
  for (const Range& range : ranges) {
    ASSERT_EQ(range.begin, end);
    ASSERT_LE(range.begin, range.end);
    end = range.end;
  }
  ASSERT_EQ(end, count);
}

std::vector<Range> blocks_of(std::size_t count, std::size_t parts) {
  std::vector<Range> blocks;
  for (std::size_t index = 0; index < parts; ++index) blocks.push_back(block_range(count, parts, index));
  expect_partition(blocks, count);
  return blocks;
}

TEST(BlockRange, PartitionsEveryCountLikeArraySplit) {
  for (std::size_t count = 0; count <= kMaxItems; ++count) {
    for (std::size_t parts = 1; parts <= kMaxParts; ++parts) {
      const std::vector<Range> blocks = blocks_of(count, parts);
      for (std::size_t index = 0; index < parts; ++index)
        ASSERT_EQ(blocks[index].size(), count / parts + (index < count % parts ? 1 : 0))
            << count << " items, block " << index << " of " << parts;
    }
  }
}

TEST(BlockRange, HoldsForCountsBeyond32Bits) { blocks_of((std::size_t{1} << 40) + 5, 7); }

TEST(AlignedBlockRange, PartitionsAtMultiplesOfTheGranule) {
  for (const std::size_t granule : {1, 2, 3, 8, 16, 64}) {
    for (std::size_t count = 0; count <= kMaxItems; ++count) {
      for (std::size_t parts = 1; parts <= kMaxParts; ++parts) {
        std::vector<Range> blocks;
        for (std::size_t index = 0; index < parts; ++index)
          blocks.push_back(aligned_block_range(count, parts, index, granule));
        expect_partition(blocks, count);
        ASSERT_TRUE(granule > 1 || blocks == blocks_of(count, parts));
        const std::size_t most = ((count + granule - 1) / granule + parts - 1) / parts * granule;
        for (const Range& block : blocks) {
          ASSERT_TRUE(block.begin % granule == 0 || block.begin == count);
          ASSERT_LE(block.size(), most);
        }
      }
    }
  }
}

TEST(SegmentRange, SegmentsPartitionEveryCount) {
  for (std::size_t count = 0; count <= kMaxItems; ++count) {
    for (std::size_t segment = 1; segment <= kMaxItems + 2; ++segment) {
      const std::size_t segments = segment_count(count, segment);
      std::vector<Range> ranges;
      for (std::size_t index = 0; index < segments; ++index) {
        ranges.push_back(segment_range(count, segment, index));
        ASSERT_FALSE(ranges.back().empty());
        ASSERT_LE(ranges.back().size(), segment);
        ASSERT_TRUE(index + 1 == segments || ranges.back().size() == segment);
      }
      expect_partition(ranges, count);
      for (std::size_t beyond = segments; beyond < segments + 3; ++beyond)
        ASSERT_TRUE(segment_range(count, segment, beyond).empty());
    }
  }
}

TEST(Intersect, HoldsTheItemsThatBothHold) {
  constexpr std::size_t kEnd = 7;
  for (std::size_t a = 0; a <= kEnd; ++a)
    for (std::size_t b = a; b <= kEnd; ++b)
      for (std::size_t c = 0; c <= kEnd; ++c)
        for (std::size_t d = c; d <= kEnd; ++d) {
          const Range shared = intersect({a, b}, {c, d});
          ASSERT_LE(shared.begin, shared.end);
          for (std::size_t item = 0; item < kEnd; ++item) {
            const bool in_both = a <= item && item < b && c <= item && item < d;
            ASSERT_EQ(shared.begin <= item && item < shared.end, in_both);
          }
          ASSERT_TRUE(!shared.empty() || shared.begin == a);
        }
}

}  // namespace
}  // namespace multiring

#include "collective/staged/staged_allreduce.h"

#include <algorithm>
#include <cstring>

#include "base/cache.h"
#include "collective/device/device_arrays.h"
#include "collective/sums/rank_pointers.h"

namespace multiring {
namespace {

// What is taken out of staging memory makes room for what comes in, in pieces that stay in the first cache
// between the two. Smaller pieces break the processor's prefetching, which works by pages.
constexpr std::size_t kPiece = 4096;

}  // namespace

StagedAllreduce::StagedAllreduce(RoundExchange& exchange, const OperationCall& call,
                                 std::span<Operation* const> operations, bool whole)
    : exchange_(exchange),
      call_(call),
      first_(*operations[0]),
      pieces_(operations),
      bytes_(pieces_.bytes()),
      segment_bytes_(exchange.transport().staging_bytes() / kCacheLine * kCacheLine),
      whole_(whole) {
  const CommDtype comm_dtype = first_.descriptor.key.comm_dtype;
  if (!is_rounded(comm_dtype) || exchange.transport().shares_memory()) return;
  rounded_.emplace(rounded_dtype(comm_dtype), first_.reduction(), exchange.size());
  nodes_ = host_nodes(exchange.size(), [&](int rank) { return exchange.transport().host_number(rank); });
}

Range StagedAllreduce::slice_of(Range segment, int rank) const {
  return aligned_block_range(segment.size(), static_cast<std::size_t>(exchange_.size()),
                             static_cast<std::size_t>(rank), kCacheLine);
}

template <class Body>
void StagedAllreduce::for_each_staged(Range segment, const Body& body) const {
  // The rank's own slice is read and written where it is.
  const Range mine = slice_of(segment, exchange_.rank());
  for (const Range part : {Range{0, mine.begin}, Range{mine.end, segment.size()}})
    if (!part.empty()) body(part);
}

void StagedAllreduce::stage(std::byte* staging, Range segment, Range part) {
  pieces_.read(stage_cursor_, {segment.begin + part.begin, segment.begin + part.end}, staging + part.begin);
}

void StagedAllreduce::take(std::byte* staging, Range segment, Range part) {
  pieces_.write(take_cursor_, {segment.begin + part.begin, segment.begin + part.end}, staging + part.begin);
}

void StagedAllreduce::stage_whole(Range segment) {
  stage(exchange_.staging(exchange_.rank()), segment, {0, segment.size()});
  exchange_.staged(segment.size());
}

void StagedAllreduce::stage_first() {
  const Range first = segment(0);
  stage_cursor_ = 0;
  if (whole_) return stage_whole(first);
  std::byte* staging = exchange_.staging(exchange_.rank());
  for_each_staged(first, [&](Range part) { stage(staging, first, part); });
}

void StagedAllreduce::run() {
  if (whole_) return run_whole();
  const std::size_t segments = segment_count(bytes_, segment_bytes_);
  for (std::size_t index = 1; index <= segments; ++index) {
    exchange_.next(call_, [&] {
      take_and_stage(index);
      if (index >= 2) return_part(first_, segment(index - 2).end);
      reduce_slice(index - 1);
    });
  }
  std::byte* staging = exchange_.transport().staging(exchange_.rank(), exchange_.round() - 1);
  const Range last = segment(segments - 1);
  for_each_staged(last, [&](Range part) { take(staging, last, part); });
}

/// In the round of segment `index`: takes the sums of the segment before the last, stages this one.
void StagedAllreduce::take_and_stage(std::size_t index) {
  std::byte* staging = exchange_.staging(exchange_.rank());
  const Range in = segment(index);
  const Range out = index >= 2 ? segment(index - 2) : Range{};
  await_part(first_, in.end, exchange_, call_);
  if (in.size() != out.size()) {  // other slices as well
    for_each_staged(out, [&](Range part) { take(staging, out, part); });
    for_each_staged(in, [&](Range part) { stage(staging, in, part); });
    return;
  }
  for_each_staged(in, [&](Range part) {
    for (std::size_t begin = part.begin; begin < part.end; begin += kPiece) {
      const Range piece{begin, std::min(begin + kPiece, part.end)};
      take(staging, out, piece);
      stage(staging, in, piece);
    }
  });
}

/// Adds this rank's slice of a segment that all staged in the round before.
void StagedAllreduce::reduce_slice(std::size_t index) {
  const Range whole = segment(index);
  const Range slice = slice_of(whole, exchange_.rank());
  RankPointers<const void*> inputs(exchange_.size());
  RankPointers<void*> outputs(exchange_.size());
  const Range range{whole.begin + slice.begin, whole.begin + slice.end};
  pieces_.for_each_share(
      reduce_cursor_, range,
      [&](const Piece& piece, std::size_t offset, std::size_t range_offset, std::size_t bytes) {
        for (int rank = 0; rank < exchange_.size(); ++rank)
          inputs[rank] = outputs[rank] =
              exchange_.transport().staging(rank, exchange_.round() - 1) + slice.begin + range_offset;
        inputs[exchange_.rank()] = piece.input + offset;
        outputs[exchange_.rank()] = piece.output + offset;
        reduce_bytes(inputs.all(), outputs.all(), bytes);
      });
}

void StagedAllreduce::run_whole() {
  const std::size_t segments = segment_count(bytes_, segment_bytes_);
  for (std::size_t index = 0; index < segments; ++index) {
    reduce_whole(segment(index));
    if (index + 1 == segments) return;
    exchange_.next(call_, [&] {
      const Range next = segment(index + 1);
      await_part(first_, next.end, exchange_, call_);
      stage_whole(next);
    });
  }
}

/// Adds a segment that every rank has staged in this round.
void StagedAllreduce::reduce_whole(Range segment) {
  RankPointers<const void*> inputs(exchange_.size());
  const auto body = [&](const Piece& piece, std::size_t offset, std::size_t range_offset, std::size_t bytes) {
    for (int rank = 0; rank < exchange_.size(); ++rank) inputs[rank] = exchange_.staging(rank) + range_offset;
    void* const outputs[] = {piece.output + offset};
    reduce_bytes(inputs.all(), outputs, bytes);
  };
  pieces_.for_each_share(reduce_cursor_, segment, body);
}

void StagedAllreduce::reduce_bytes(std::span<const void* const> inputs, std::span<void* const> outputs,
                                   std::size_t bytes) {
  if (rounded_) return rounded_->reduce_whole(inputs, nodes_, outputs[0], bytes / first_.element_size());
  reduce(first_.dtype(), first_.reduction(), inputs, outputs, bytes / first_.element_size());
}

}  // namespace multiring

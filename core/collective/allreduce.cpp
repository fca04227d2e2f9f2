// Allreduce among ranks that share memory, in one of three ways. The way depends on the size and on where the
// buffers lie, as all ranks read in each other's descriptors, so all take the same; the bits of the result do
// not depend on it, for every way adds in the canonical order (base/reduction.h).
//
//   direct     all buffers in symmetric memory: rank i reduces slice i of all inputs and writes it to all
//              outputs, between two synchronisations; no byte is copied.
//   one-shot   through staging memory, one synchronisation a segment: everybody copies its segment in and
//              reduces all ranks' segments into its own output. Reads size * bytes: for few ranks or few
//              bytes.
//   two-phase  through staging memory, two synchronisations a segment: everybody copies its segment in, rank
//   i
//              reduces slice i of the segment into its own staging memory (reduce-scatter), then everybody
//              copies all slices out (all-gather).

#include <cstring>
#include <vector>

#include "collective/collectives.h"
#include "topology/chunks.h"

namespace multiring {
namespace {

// Below this, one synchronisation and a copy cost less than two synchronisations.
constexpr std::size_t kDirectFrom = 16 * 1024;
// One-shot up to this many ranks, or up to this many bytes read by each rank.
constexpr int kOneShotRanks = 4;
constexpr std::size_t kOneShotReads = 256 * 1024;
constexpr std::size_t kCacheLine = 64;

enum class Placement { kNone, kSome, kAll };

/// Whether buffers lie in symmetric memory, in the same regions on all ranks.
Placement symmetric_placement(const Exchange& exchange) {
  const Descriptor& mine = exchange.descriptor(exchange.rank());
  bool any = false;
  bool all = true;
  for (int rank = 0; rank < exchange.size(); ++rank) {
    const Descriptor& theirs = exchange.descriptor(rank);
    const bool symmetric = theirs.input_region != 0 && theirs.output_region != 0;
    any = any || symmetric;
    all = all && symmetric && theirs.input_region == mine.input_region &&
          theirs.output_region == mine.output_region;
  }
  return all ? Placement::kAll : any ? Placement::kSome : Placement::kNone;
}

void reduce_direct(Exchange& exchange, const Call& call, const Operation& operation) {
  const auto size = static_cast<std::size_t>(exchange.size());
  const std::size_t element = operation.element_size();
  const Range slice = aligned_block_range(operation.descriptor.key.count, size,
                                          static_cast<std::size_t>(exchange.rank()), kCacheLine / element);
  std::vector<const void*> inputs(size);
  std::vector<void*> outputs(size);
  for (std::size_t rank = 0; rank < size; ++rank) {
    const Descriptor& theirs = exchange.descriptor(static_cast<int>(rank));
    const int part = static_cast<int>(rank);
    inputs[rank] = operation.input_region->part(part) + theirs.input_offset + slice.begin * element;
    outputs[rank] = operation.output_region->part(part) + theirs.output_offset + slice.begin * element;
  }
  reduce(operation.descriptor.dtype, operation.reduction(), inputs, outputs, slice.size());
  exchange.begin(call.descriptor);
  exchange.synchronise(call);
}

/// Reduces the `bytes` that all ranks have staged in this round into `output`.
void reduce_staged(const Exchange& exchange, const Operation& operation, std::size_t offset,
                   std::size_t bytes, std::byte* output) {
  constexpr std::size_t kFew = 64;
  const auto size = static_cast<std::size_t>(exchange.size());
  const void* few[kFew];
  std::vector<const void*> many(size > kFew ? size : 0);
  const std::span<const void*> inputs = size > kFew ? std::span(many) : std::span(few, size);
  for (std::size_t rank = 0; rank < size; ++rank)
    inputs[rank] = exchange.staging(static_cast<int>(rank)) + offset;
  void* const outputs[] = {output};
  reduce(operation.descriptor.dtype, operation.reduction(), inputs, outputs,
         bytes / operation.element_size());
}

void reduce_alone(const Operation& operation) {
  const void* const inputs[] = {operation.input};
  void* const outputs[] = {operation.output};
  reduce(operation.descriptor.dtype, operation.reduction(), inputs, outputs, operation.descriptor.key.count);
}

class StagedAllreduce {
 public:
  StagedAllreduce(Exchange& exchange, const Call& call, const Operation& operation)
      : exchange_(exchange),
        call_(call),
        operation_(operation),
        bytes_(operation.descriptor.key.count * operation.element_size()),
        segment_bytes_(exchange.transport().staging_bytes() / kCacheLine * kCacheLine),
        one_shot_(exchange.size() <= kOneShotRanks ||
                  bytes_ * static_cast<std::size_t>(exchange.size()) <= kOneShotReads) {}

  void fill(std::size_t segment) {
    const Range range = segment_range(bytes_, segment_bytes_, segment);
    if (!range.empty())
      std::memcpy(exchange_.staging(exchange_.rank()), operation_.input + range.begin, range.size());
  }

  /// After segment 0 has been filled and synchronised: reduces it, and all further ones.
  void run() {
    const std::size_t segments = segment_count(bytes_, segment_bytes_);
    for (std::size_t segment = 0; segment < segments; ++segment) {
      const Range range = segment_range(bytes_, segment_bytes_, segment);
      if (one_shot_)
        reduce_staged(exchange_, operation_, 0, range.size(), operation_.output + range.begin);
      else
        two_phases(range);
      if (segment + 1 == segments) break;
      exchange_.begin(call_.descriptor);
      fill(segment + 1);
      exchange_.synchronise(call_);
    }
  }

 private:
  Range slice_of(Range segment, int rank) const {
    return aligned_block_range(segment.size(), static_cast<std::size_t>(exchange_.size()),
                               static_cast<std::size_t>(rank), kCacheLine);
  }

  void two_phases(Range segment) {
    const Range mine = slice_of(segment, exchange_.rank());
    // The next round's staging memory is free: its readers of the round before had finished when they arrived
    // here.
    std::byte* reduced = exchange_.transport().staging(exchange_.rank(), exchange_.round() + 1) + mine.begin;
    reduce_staged(exchange_, operation_, mine.begin, mine.size(), reduced);
    exchange_.begin(call_.descriptor);
    exchange_.synchronise(call_);
    for (int rank = 0; rank < exchange_.size(); ++rank) {
      const Range slice = slice_of(segment, rank);
      std::memcpy(operation_.output + segment.begin + slice.begin, exchange_.staging(rank) + slice.begin,
                  slice.size());
    }
  }

  Exchange& exchange_;
  const Call& call_;
  const Operation& operation_;
  std::size_t bytes_;
  std::size_t segment_bytes_;
  bool one_shot_;
};

}  // namespace

void allreduce(Exchange& exchange, const Call& call, Operation& operation) {
  if (exchange.size() == 1) return reduce_alone(operation);
  StagedAllreduce staged(exchange, call, operation);
  const bool want_direct = operation.descriptor.bytes > kDirectFrom &&
                           operation.descriptor.input_region != 0 && operation.descriptor.output_region != 0;
  exchange.begin(operation.descriptor);
  if (!want_direct) staged.fill(0);
  exchange.synchronise(call);
  exchange.require_match(call);
  if (operation.descriptor.bytes > kDirectFrom) {
    const Placement placement = symmetric_placement(exchange);
    if (placement == Placement::kAll) {
      exchange.throw_if_aborted(call);  // do not write into buffers of a peer that has given up meanwhile
      return reduce_direct(exchange, call, operation);
    }
    if (placement == Placement::kSome) {  // those with symmetric buffers have not staged anything yet
      exchange.begin(call.descriptor);
      staged.fill(0);
      exchange.synchronise(call);
    }
  }
  staged.run();
}

Descriptor fused_descriptor(std::span<Operation* const> operations) {
  Descriptor fused = operations[0]->descriptor;
  fused.key.fused = static_cast<std::uint32_t>(operations.size());
  fused.input_region = fused.output_region = 0;
  std::string names;
  std::uint64_t count = 0;
  std::uint64_t hash = 0;
  for (const Operation* operation : operations) {
    const Descriptor& one = operation->descriptor;
    names += (names.empty() ? "" : ", ") + std::string(one.name_view()) + "[" +
             std::to_string(one.key.count) + "]";
    // The sequence of each: nameless ones of the same count must not be taken for each other.
    hash =
        ((hash ^ one.key.name_hash) * 0x100000001b3ULL ^ one.key.sequence) * 0x100000001b3ULL + one.key.count;
    count += one.key.count;
  }
  fused.set_name(names);
  fused.key.name_hash = hash;
  fused.key.count = count;
  fused.bytes = count * operations[0]->element_size();
  fused.dims = 1;
  fused.shape[0] = count;
  return fused;
}

void fused_allreduce(Exchange& exchange, const Call& call, std::span<Operation* const> operations) {
  exchange.begin(call.descriptor);
  std::byte* place = exchange.staging(exchange.rank());
  for (const Operation* operation : operations) {
    if (operation->descriptor.bytes > 0) std::memcpy(place, operation->input, operation->descriptor.bytes);
    place += operation->descriptor.bytes;
  }
  exchange.synchronise(call);
  exchange.require_match(call);
  std::size_t offset = 0;
  for (const Operation* operation : operations) {
    reduce_staged(exchange, *operation, offset, operation->descriptor.bytes, operation->output);
    offset += operation->descriptor.bytes;
  }
}

}  // namespace multiring
